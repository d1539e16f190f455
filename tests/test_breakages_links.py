"""Breakages 16 and 17 through the shipped claims: NCCL's init hangs, or the first all_reduce after it; and both cured.

Neither prints an error. Two stand-in cards of SM120 on one host bridge; torch is a stand-in too, whose hang keeps the
interpreter's lock as native code may.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from . import link_stack
from .conftest import PLAIN, own_ports
from .test_probes_links import Sysfs

SUITE = link_stack.ROOT / "suites"
ALL_REDUCE = "preflight/test_collectives.py::test_a_first_all_reduce_returns"
FakeRigs = Any


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_stack.build(tmp_path_factory.mktemp("link-stack") / "venv")


@pytest.fixture(scope="session")
def new_stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_stack.build(tmp_path_factory.mktemp("link-stack") / "venv", sglang="0.5.14", flashinfer_python="0.6.17")


@pytest.fixture
def preflight(
    pytester: pytest.Pytester, fake_rig: FakeRigs, tmp_path: Path, stack: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs a shipped claim on two SM120 cards, with something of the stand-in broken; nothing may be left after."""
    rig = fake_rig(n=2, card="rtx-pro-6000-server")
    for one, other in ((0, 1), (1, 0)):
        rig.shared.topology[one][other] = 30  # PHB
    rig.apply(monkeypatch)
    monkeypatch.setenv("STANDIN_MEET", str(tmp_path))
    monkeypatch.setenv("GPUGUARD_PREFLIGHT_LIMIT_S", "2")

    def run(claims: str, *broken: str, python: Path = stack) -> pytest.RunResult:
        monkeypatch.setenv("STANDIN", " ".join(broken))
        ini = pytester.makeini(f"[pytest]\naddopts = {PLAIN}\ngpuguard_ports = {own_ports()}\n")
        chosen = [str(SUITE / claim) for claim in claims.split()]
        result = pytester.runpytest_subprocess(
            *chosen, "-c", str(ini), "--gpuguard-stack", f"link={python}", "-rA", timeout=110
        )
        assert link_stack.left(str(tmp_path)) == []
        return result

    return run


def test_16_an_init_that_hangs_is_found_within_the_limit(preflight: Any) -> None:
    began = time.monotonic()
    result = preflight(ALL_REDUCE, "hang_init")
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED (worse) *test_a_first_all_reduce_returns *hang.timeout: NCCL's init over 2 GPUs did not "
            "return within 2 s (with NCCL_P2P_DISABLE=1 too it fails (hang.timeout))*"
        ]
    )
    assert result.ret == 1
    assert time.monotonic() - began < 40


def test_17_a_first_all_reduce_that_hangs_is_found_and_so_is_its_cure(preflight: Any) -> None:
    began = time.monotonic()
    result = preflight(ALL_REDUCE, "hang_first")
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED (worse) *test_a_first_all_reduce_returns *hang.timeout: NCCL's init over 2 GPUs was "
            "complete, but the first all_reduce did not return within 2 s (with "
            "NCCL_P2P_DISABLE=1 it passes)*",
        ]
    )
    assert result.ret == 1
    assert time.monotonic() - began < 40


def test_16_and_17_cured_hold(preflight: Any) -> None:
    result = preflight(ALL_REDUCE)
    result.stdout.fnmatch_lines(["HOLDS *test_a_first_all_reduce_returns *NCCL 2.30.4: right over 2 GPUs; 14 KiB in *"])
    assert result.ret == 0


def test_p2p_that_corrupts_is_found_by_two_claims(preflight: Any) -> None:
    preflight("preflight/test_links.py", "corrupt").stdout.fnmatch_lines(
        ["CONTRADICTED (worse) *test_copies_between_gpus_arrive_whole *comm.p2p: a copy from GPU 0 to GPU 1 *"]
    )
    preflight(ALL_REDUCE, "wrong_sums").stdout.fnmatch_lines(
        ["CONTRADICTED (worse) *numerics: an all_reduce over 2 GPUs *"]
    )


def test_one_process_answers_for_the_claims_about_torch_copies_and_links(preflight: Any) -> None:
    shared = "preflight/test_driver.py::test_torch_computes_on_every_gpu preflight/test_links.py"
    claims = (
        "test_torch_computes_on_every_gpu",
        "test_copies_between_gpus_arrive_whole",
        "test_pcie_links_are_at_full*",
    )
    well = preflight(shared).stdout
    for claim in claims:
        well.fnmatch_lines([f"HOLDS *{claim} *2 GPU(s) compute with torch *P2P access in 2 of 2 directions*"])
    wrong = preflight(shared, "wrong_products").stdout
    wrong.fnmatch_lines(["CONTRADICTED (worse) *test_torch_computes_on_every_gpu *numerics: GPU 0: * elements *"])
    for claim in claims[1:]:
        wrong.fnmatch_lines([f"HOLDS *{claim} *"])


@pytest.mark.parametrize("release", ["", "nccl_2_30"])
def test_the_claims_of_tree_hold_as_they_are_stated(preflight: Any, release: str) -> None:
    result = preflight("preflight/test_collectives.py", release)
    for name in (
        "all_reduce_under_tree",
        "all_reduce_under_tree_in_a_graph",
        "all_gather_under_tree",
        "all_gather_under_tree_in_a_graph",
    ):
        result.stdout.fnmatch_lines([f"hearsay: HOLDS *test_{name} *"])
    assert result.ret == 0


def test_the_features_of_an_old_stack_are_as_the_notes_say(preflight: Any) -> None:
    result = preflight("preflight/test_features.py")
    result.stdout.fnmatch_lines(
        [
            "HOLDS *test_flashinfer_allreduce_fusion_compiles *No supported CUDA architectures found*",
            "HOLDS *test_mscclpp_is_not_installed *",
            "HOLDS *test_sglang_symmetric_memory *KeyError: 12*",
            "HOLDS *test_torch_symmetric_memory *",
        ],
        consecutive=False,
    )


def test_the_features_flip_where_support_arrives(preflight: Any, new_stack: Path) -> None:
    better = preflight("preflight/test_features.py::test_sglang_symmetric_memory", "cured")
    better.stdout.fnmatch_lines(["CONTRADICTED (better) *test_sglang_symmetric_memory *"])
    result = preflight("preflight/test_features.py", "new_sglang", python=new_stack)
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED (worse) *test_flashinfer_allreduce_fusion_compiles *No supported CUDA architectures found*",
            "HOLDS *test_sglang_symmetric_memory *Device capability 12 not supported*",
        ]
    )
    cured = preflight(
        "preflight/test_features.py::test_flashinfer_allreduce_fusion_compiles", "cured", python=new_stack
    )
    cured.stdout.fnmatch_lines(
        ["HOLDS *test_flashinfer_allreduce_fusion_compiles *flashinfer 0.6.17 generates its allreduce*"]
    )


def test_a_link_that_is_slow_under_load_is_a_fault_of_the_machine(
    preflight: Any, pytester: pytest.Pytester, tmp_path: Path, fake_rig: FakeRigs
) -> None:
    """The shipped claim asks the same of the real /sys, which the test machine does not have."""
    sysfs = Sysfs(tmp_path / "machine")
    for number, bus in ((1, "0000:16:00.0"), (2, "0000:27:00.0")):
        sysfs.put(f"0000:00:0{number}.0", bus, now="8.0 GT/s PCIe")
    args = {"check": "links", "sysfs": str(sysfs.devices), "cpuinfo": str(sysfs.root / "proc" / "cpuinfo")}
    claim = pytester.makepyfile(
        f"""
        from pytest_gpuguard import needs_gpus, works

        @needs_gpus(1)
        @works
        def test_links(probe):
            probe("p2p", args={args!r}, gpus="all")
        """
    )
    preflight(str(claim), "slow_link").stdout.fnmatch_lines(
        ["INFRA *test_links *hardware: GPU 0: PCIe gen 3 x16 under load where GPU and slot can do gen 5 x16, *"]
    )


def test_a_limit_that_is_no_number_is_refused(preflight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUGUARD_PREFLIGHT_LIMIT_S", "soon")
    result = preflight(ALL_REDUCE)
    assert "GPUGUARD_PREFLIGHT_LIMIT_S=soon: write seconds, such as 30" in result.stdout.str() + result.stderr.str()
