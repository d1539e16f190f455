"""The probes of what GPUs do together: each answer, each kind of failure with its stage, and nothing left running."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.diagnose.classify import classify_text
from pytest_gpuguard.probes import allreduce

from . import link_stack
from .link_stack import Told, ask
from .needs import need
from .test_real_server import STACK

COMPLETE = "NCCL's init over 2 GPUs was complete, but the first all_reduce did not return within 1 s"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_stack.build(tmp_path_factory.mktemp("link-stack") / "venv")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what of the stand-in is broken."""
    monkeypatch.setenv("STANDIN_MEET", str(tmp_path))

    def say(*what: str) -> None:
        monkeypatch.setenv("STANDIN", " ".join(what))

    return say


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, broken: Any) -> Any:
    yield
    assert link_stack.left(str(tmp_path)) == []


def outcome(told: Told) -> str:
    """What the log of a script that raised is classified as."""
    assert told.defect is None
    assert told.absent is None
    return classify_text(told.text, engine=None).outcome


# ------------------------------------------------------------------------------------------------------- allreduce


@pytest.mark.parametrize(
    ("gpus", "groups"),
    [(0, []), (1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (16, [2, 4, 8, 16])],
)
def test_groups_double_up_to_all_gpus(gpus: int, groups: list[int]) -> None:
    assert allreduce.sizes(gpus) == groups


def test_an_all_reduce_is_right_over_every_group_and_its_latency_is_told(stack: Path) -> None:
    told = ask(stack, "allreduce", gpus=3)
    assert told.answer["version"] == "2.30.4"
    assert told.answer["paths"] == ["P2P/CUMEM"]
    assert list(told.answer["seconds"]) == ["2", "3"]
    assert list(told.answer["latency_us"]["3"]) == ["14336", "57344", "229376", "917504"]
    assert told.said.startswith("NCCL 2.30.4: right over 2, 3 GPUs; 14 KiB in ")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang_init", "NCCL's init over 2 GPUs did not return within 1 s"),
        ("hang_first", COMPLETE),
        ("late_init hang_init", "NCCL's init, or the first all_reduce, over 2 GPUs did not return within 1 s"),
        ("late_init hang_first", COMPLETE),
    ],
)
def test_a_hang_ends_at_its_limit_and_says_where_it_was(stack: Path, broken: Any, how: str, said: str) -> None:
    broken(how)
    began = time.monotonic()
    told = ask(stack, "allreduce", gpus=2, limit_s=1)
    assert told.defect == ("hang.timeout", said)
    assert time.monotonic() - began < 15


def test_without_p2p_the_same_all_reduce_returns(stack: Path, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken("hang_first")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    told = ask(stack, "allreduce", gpus=2, limit_s=5)
    assert told.answer["paths"] == ["SHM/direct/direct"]


def test_all_sizes_are_groups_of_one_set_of_ranks(stack: Path) -> None:
    told = ask(stack, "allreduce", gpus=4)
    assert list(told.answer["latency_us"]) == ["2", "4"]
    assert [line for line in told.text.splitlines() if "stage all_reduce" in line] == [
        "gpuguard-probe: stage all_reduce over 2, 4 GPUs"
    ]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang_first_of_2", COMPLETE),
        ("hang_init_of_2", "NCCL's init over 2 GPUs did not return within 1 s"),
        (
            "hang_first_of_3",
            "NCCL's init over 3 GPUs was complete, but the first all_reduce did not return within 1 s; "
            "2 GPUs could by themselves",
        ),
        (
            "hang_init_together",
            "NCCL's init over 2 of 3 GPUs did not return within 1 s; 2 GPUs could by themselves",
        ),
        (
            "late_init hang_first_together",
            "NCCL's init over 2 of 3 GPUs was complete, but the first all_reduce did not return within 1 s; "
            "2 GPUs could by themselves",
        ),
    ],
)
def test_a_hang_in_the_set_is_told_by_its_number_of_gpus(stack: Path, broken: Any, how: str, said: str) -> None:
    broken(how)
    began = time.monotonic()
    assert ask(stack, "allreduce", gpus=3, limit_s=1).defect == ("hang.timeout", said)
    assert time.monotonic() - began < 25


def test_a_failure_in_the_set_is_told_by_the_smallest_number_that_has_it(stack: Path, broken: Any) -> None:
    broken("wrong_sums")
    assert ask(stack, "allreduce", gpus=3).defect == (
        "numerics",
        "an all_reduce over 2 GPUs gave 1048576 wrong sums of 1048576",
    )


def test_wrong_sums_are_a_defect_of_numerics(stack: Path, broken: Any) -> None:
    broken("wrong_sums")
    assert ask(stack, "allreduce", gpus=2).defect == (
        "numerics",
        "an all_reduce over 2 GPUs gave 1048576 wrong sums of 1048576",
    )


def test_a_rank_that_raises_is_no_hang_of_the_others(stack: Path, broken: Any) -> None:
    broken("raise")
    told = ask(stack, "allreduce", gpus=2, limit_s=3)
    assert outcome(told) == "nccl.error"
    assert "rank 1 failed in 'first all_reduce': RuntimeError: NCCL error in" in told.text


def test_a_rank_that_crashes_is_told_by_its_signal(stack: Path, broken: Any) -> None:
    broken("crash")
    told = ask(stack, "allreduce", gpus=2, limit_s=3)
    assert outcome(told) == "unknown"
    assert "rank 1 failed in 'first all_reduce': it was ended by SIGSEGV" in told.text


@pytest.mark.parametrize("script", ["allreduce", "nccl_tree", "symm_mem"])
def test_one_gpu_or_none_decides_nothing(stack: Path, script: str) -> None:
    for gpus in (0, 1):
        told = ask(stack, script, gpus=gpus)
        assert told.absent is not None
        assert told.absent[0] == "gpus"


@pytest.mark.parametrize("script", ["allreduce", "nccl_tree", "symm_mem"])
def test_a_python_without_torch_decides_nothing(fake_python: Path, script: str) -> None:
    assert ask(fake_python, script, gpus=2).absent == ("package", "this stack has no torch")


def test_a_torch_without_nccl_decides_nothing(stack: Path, broken: Any) -> None:
    broken("no_nccl")
    assert ask(stack, "allreduce", gpus=2).absent == ("cuda", "this stack's torch 2.9.0+cu130 has no nccl")


# ------------------------------------------------------------------------------------------------------------- tree


@pytest.mark.parametrize("graph", [False, True])
def test_tree_reduces_and_does_not_gather(stack: Path, broken: Any, graph: bool) -> None:
    how = "captured in a CUDA graph" if graph else "eager"
    told = ask(stack, "nccl_tree", gpus=2, op="all_reduce", graph=graph)
    assert told.said == f"all_reduce over 2 GPUs, {how}, with NCCL_ALGO=Tree: right"
    told = ask(stack, "nccl_tree", gpus=2, op="all_gather", graph=graph)
    assert outcome(told) == "nccl.error"
    decisive = classify_text(told.text, engine=None).decisive
    assert decisive is not None
    assert "no algorithm/protocol available for function AllGather" in decisive.text
    broken("cured")
    assert ask(stack, "nccl_tree", gpus=2, op="all_gather", graph=graph).said.endswith("with NCCL_ALGO=Tree: right")


def test_tree_tells_wrong_values_hangs_and_a_wrong_question(stack: Path, broken: Any) -> None:
    broken("wrong_sums")
    told = ask(stack, "nccl_tree", gpus=2)
    assert told.defect == ("numerics", "65536 wrong values of 65536 under NCCL_ALGO=Tree")
    broken("hang_first")
    told = ask(stack, "nccl_tree", gpus=2, limit_s=1)
    assert told.defect is not None
    assert told.defect[0] == "hang.timeout"
    assert told.defect[1].endswith("it did not return from 'eager call'")
    assert "op is 'scatter': it must be one of all_reduce, all_gather" in ask(stack, "nccl_tree", op="scatter").text


# ------------------------------------------------------------------------------------------------- symmetric memory


@pytest.mark.parametrize("script", ["nccl_tree", "symm_mem"])
def test_a_rank_that_raises_is_no_hang_of_its_peers(stack: Path, broken: Any, script: str) -> None:
    broken("raise", "cured")
    told = ask(stack, script, gpus=2, limit_s=3, of="sglang")
    assert outcome(told) == "nccl.error"
    assert "rank 1" in told.text.strip().splitlines()[-1]


def test_symmetric_memory_that_hangs_says_where(stack: Path, broken: Any) -> None:
    broken("hang_init")
    assert ask(stack, "symm_mem", gpus=2, limit_s=1).defect == (
        "hang.timeout",
        "torch over 2 GPUs: it did not return from 'NCCL init'",
    )


def test_ranks_read_each_others_symmetric_memory(stack: Path, broken: Any) -> None:
    assert ask(stack, "symm_mem", gpus=2).said == "2 GPUs read each other's; multicast: no"
    broken("stale_peers")
    told = ask(stack, "symm_mem", gpus=2)
    assert told.defect is not None
    assert told.defect[0] == "comm.p2p"
    broken("no_p2p")
    told = ask(stack, "symm_mem", gpus=2)
    assert told.absent is not None
    assert told.absent[0] == "gpus"


def test_a_table_without_this_gpu_is_a_key_error(stack: Path, broken: Any) -> None:
    told = ask(stack, "symm_mem", gpus=2, of="sglang")
    assert outcome(told) == "unsupported.arch"
    decisive = classify_text(told.text, engine=None).decisive
    assert decisive is not None
    assert decisive.text == "KeyError: 12"
    broken("new_sglang")
    assert ask(stack, "symm_mem", gpus=2, of="sglang").defect == (
        "unsupported.arch",
        "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available.",
    )
    broken("cured")
    assert ask(stack, "symm_mem", gpus=2, of="sglang").said == "SGLang reduces over 2 GPUs in symmetric memory"


# ------------------------------------------------------------------------------------------------------------- fusion


def test_fusion_is_refused_compiled_or_loaded_as_flashinfer_has_it(stack: Path, broken: Any) -> None:
    told = ask(stack, "fusion_jit", gpus=1)
    assert outcome(told) == "unsupported.arch"
    assert "RuntimeError: No supported CUDA architectures found for major versions [9, 10]." in told.text
    broken("cured")
    told = ask(stack, "fusion_jit", gpus=1)
    assert told.answer["compiled"] is False
    assert "(not compiled: it is not in the cache, and that takes minutes; args compile true does it)" in told.said
    told = ask(stack, "fusion_jit", gpus=1, compile=True)
    assert "which was not in the cache" in told.text
    assert "(compiled just now, 0 s)" in told.said
    assert "(compiled before, 0 s)" in ask(stack, "fusion_jit", gpus=1).said
    assert ask(stack, "fusion_jit", gpus=1, compile=False).answer["compiled"] is False


def test_fusion_without_a_compiler_is_not_judged_and_a_compiler_error_is(stack: Path, broken: Any) -> None:
    broken("cured", "no_nvcc")
    told = ask(stack, "fusion_jit", gpus=1, compile=True)
    assert told.absent == ("tools", "FlashInfer cannot compile here: Could not find nvcc")
    broken("cured", "ninja")
    assert outcome(ask(stack, "fusion_jit", gpus=1, compile=True)) == "jit.compile"


def test_fusion_without_gpus_or_flashinfer_is_not_judged(stack: Path, fake_python: Path) -> None:
    told = ask(stack, "fusion_jit")
    assert told.absent is not None
    assert told.absent[0] == "gpus"
    assert ask(fake_python, "fusion_jit", gpus=1).absent == ("package", "this stack has no flashinfer")


# ------------------------------------------------------------------------------------------------------------ package


def test_a_package_is_there_or_not_or_broken(stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(stack, "package", name="flashinfer-python", module="flashinfer").answer["version"] == "0.6.9"
    assert ask(stack, "package", name="mscclpp").defect == (
        "unsupported.config",
        "mscclpp is not installed: there is no module 'mscclpp'",
    )
    assert ask(stack, "package", name="a.b").defect == (
        "unsupported.config",
        "a.b is not installed: there is no module 'a'",
    )
    (site,) = stack.parents[1].glob("lib/python*/site-packages")
    (site / "mscclbroken").mkdir(exist_ok=True)
    assert ask(stack, "package", name="mscclbroken").defect == (
        "unsupported.config",
        "mscclbroken is not installed: 'mscclbroken' is an empty folder",
    )
    (site / "mscclcrash.py").write_text("import os; os.kill(os.getpid(), 11)")
    told = ask(stack, "package", name="mscclcrash")
    assert told.defect is None
    assert "mscclcrash of no version is installed, but cannot be imported: it was ended by SIGSEGV" in told.text
    (site / "msccllacks.py").write_text("import gone")
    assert "installed, but cannot be imported: ModuleNotFoundError" in ask(stack, "package", name="msccllacks").text
    (site / "mscclslow.py").write_text("import time; time.sleep(100)")
    assert ask(stack, "package", name="mscclslow", limit_s=1).defect == (
        "hang.timeout",
        "importing mscclslow did not return",
    )


# ------------------------------------------------------------------------------------------------------ the real torch


@pytest.fixture(scope="session")
def real() -> Path:
    python = STACK / "venv" / "bin" / "python"
    need(python.exists(), f"the CPU stack is not built at {STACK}: python tools/cpu_stack.py")
    return python


@pytest.mark.real_server
@pytest.mark.timeout(180)
def test_real_ranks_reduce_and_gather_over_gloo(real: Path) -> None:
    told = ask(real, "allreduce", backend="gloo", worlds=[3, 2])
    for world in ("2", "3"):
        assert all(micros > 0 for micros in told.answer["latency_us"][world].values())
        assert told.answer["seconds"][world] > 0
    assert told.said.startswith("gloo: right over 2, 3 GPUs; 14 KiB in ")
    for operation in ("all_reduce", "all_gather"):
        told = ask(real, "nccl_tree", backend="gloo", world=2, op=operation)
        assert told.said == f"{operation} over 2 GPUs, eager, with NCCL_ALGO=Tree: right"


@pytest.mark.real_server
@pytest.mark.timeout(180)
def test_a_real_torch_without_cuda_decides_nothing(real: Path) -> None:
    for script, said in (("allreduce", "has no nccl"), ("symm_mem", "has no CUDA")):
        told = ask(real, script, gpus=2)
        assert told.absent is not None
        assert told.absent[0] == "cuda"
        assert told.absent[1].endswith(said)
