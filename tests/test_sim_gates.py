"""Hardware gates of a rehearsal: which release does what on which card, and what nobody has a rule for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuguard.claims.outcome import READY
from pytest_gpuguard.sim.effects import load_effects, without_rule
from pytest_gpuguard.sim.gates import Scene, fired
from pytest_gpuguard.sim.order import Order
from pytest_gpuguard.sim.release import load_release
from pytest_gpuguard.sim.unknown import unknown_in

from .sim_models import DENSE, boot, write_model

PCIE = "sim:rtx-pro-6000-server:"
NVLINK = "sim:h200:"
FUSION = "--enable-flashinfer-allreduce-fusion"
FUSION_NOW = ("--flashinfer-allreduce-fusion-backend", "trtllm")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", DENSE)


@pytest.mark.parametrize(
    ("release", "flags", "outcome", "line"),
    [
        ("0.5.3", (FUSION,), READY, ""),
        ("0.5.7", (FUSION,), "unsupported.arch", "No supported CUDA architectures found for major versions [9, 10]."),
        ("0.5.10", (FUSION,), READY, ""),
        ("0.5.12", (FUSION,), READY, ""),
        ("0.5.15", FUSION_NOW, "unsupported.arch", "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."),
        ("0.5.23", FUSION_NOW, "unsupported.arch", "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."),
    ],
)
def test_allreduce_fusion_on_sm120_goes_through_its_ages(
    release: str, flags: tuple[str, ...], outcome: str, line: str, model: Path, tmp_path: Path
) -> None:
    seen = boot(tmp_path, model, f"{PCIE}2", release, "--tp-size", "2", *flags)
    assert seen.reading.outcome == outcome, seen.log
    assert line in seen.line
    assert "AllReduce Fusion enabled" not in seen.log
    if release == "0.5.7":
        assert "Capture cuda graph failed: No supported CUDA" in seen.log
    if outcome != READY and release != "0.5.7":
        assert "Memory pool end." in seen.log  # late: the weights and the pool are there already
        assert "Capture target decode" not in seen.log


def test_allreduce_fusion_runs_where_it_may(model: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, model, f"{NVLINK}2", "0.5.23", "--tp-size", "2", *FUSION_NOW, majors=(9,))
    assert seen.reading.outcome == READY
    assert "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=1, " in seen.log
    assert "flashinfer_allreduce_fusion" in str(seen.reading.evidence)


def test_a_release_that_turns_fusion_on_by_itself_crashes_by_default(tmp_path: Path) -> None:
    model = write_model(tmp_path / "moe", DENSE, architectures=["Qwen3MoeForCausalLM"])
    crash = boot(tmp_path, model, f"{PCIE}2", "0.5.7", "--tp-size", "2")
    assert crash.reading.outcome == "unsupported.arch"
    assert boot(tmp_path, model, f"{PCIE}2", "0.5.10", "--tp-size", "2").reading.outcome == READY
    assert boot(tmp_path, model, f"{NVLINK}2", "0.5.7", "--tp-size", "2").reading.outcome == READY


@pytest.mark.parametrize(
    ("release", "rig", "outcome", "line"),
    [
        ("0.5.7", PCIE, "unknown", "KeyError: 12"),
        ("0.5.12", PCIE, "unknown", "KeyError: 12"),
        ("0.5.15", PCIE, READY, "Device capability 12 not supported, communicator is not available."),
        ("0.5.12", "sim:a100-80:", READY, "Device capability 8 not supported, communicator is not available."),
        ("0.5.23", "sim:h200:", READY, ""),
    ],
)
def test_torch_symmetric_memory(release: str, rig: str, outcome: str, line: str, model: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, model, f"{rig}2", release, "--tp-size", "2", "--enable-torch-symm-mem")
    assert seen.reading.outcome == outcome, seen.log
    assert line in (seen.line if outcome != READY else seen.log)


def test_custom_allreduce_falls_back_on_more_than_two_pcie_cards(model: Path, tmp_path: Path) -> None:
    said = "is disabled because it's not supported on more than two PCIe-only GPUs."
    old = boot(tmp_path, model, f"{PCIE}4", "0.5.7", "--tp-size", "4").log
    assert old.count(f"Custom allreduce {said}") == 4
    assert f"CustomAllreduce {said}" in boot(tmp_path, model, f"{PCIE}4", "0.5.10", "--tp-size", "4").log
    assert said not in boot(tmp_path, model, f"{PCIE}2", "0.5.10", "--tp-size", "2").log
    assert said not in boot(tmp_path, model, f"{NVLINK}4", "0.5.10", "--tp-size", "4").log
    off = boot(tmp_path, model, f"{PCIE}4", "0.5.10", "--tp-size", "4", "--disable-custom-all-reduce")
    assert said not in off.log


@pytest.mark.parametrize(
    ("release", "rig", "outcome", "code"),
    [
        ("0.5.3", PCIE, "unsupported.arch", 1),
        ("0.5.7", PCIE, "unsupported.arch", -9),
        ("0.5.7", "sim:b200:", READY, None),
        ("0.5.12", PCIE, "unsupported.arch", -9),
        ("0.5.12", "sim:h200:", "unsupported.arch", 1),
    ],
)
def test_trtllm_mla_is_refused_or_crashes_by_release_and_card(
    release: str, rig: str, outcome: str, code: int | None, model: Path, tmp_path: Path
) -> None:
    seen = boot(tmp_path, model, f"{rig}1", release, "--attention-backend", "trtllm_mla")
    assert (seen.reading.outcome, seen.code) == (outcome, code), seen.log


def test_mscclpp_is_a_fact_of_the_image(model: Path, tmp_path: Path) -> None:
    lacks = boot(tmp_path, model, f"{PCIE}8", "0.5.23", "--tp-size", "8", "--enable-mscclpp")
    assert lacks.reading.outcome == READY
    assert "PyMscclpp is unavailable because its dependencies failed to import: No module named 'mscclpp'" in lacks.log
    stack = "sim:sglang==0.5.23,mscclpp==0.7.0"
    has = boot(tmp_path, model, f"{PCIE}8", "0.5.23", "--tp-size", "8", "--enable-mscclpp", stack=stack)
    assert unknown_in(str(tmp_path / "server.log")) == ("--enable-mscclpp",)
    assert "PyMscclpp is unavailable" not in has.log


def test_an_a2a_backend_that_the_release_lacks_is_no_choice(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", DENSE)
    seen = boot(tmp_path, model, f"{PCIE}2", "0.5.7", "--tp-size", "2", "--moe-a2a-backend", "flashinfer")
    assert seen.code == 2
    assert "argument --moe-a2a-backend: invalid choice: 'flashinfer'" in seen.log


@pytest.mark.parametrize(
    ("flags", "env", "told"),
    [
        ((), {"NCCL_ALGO": "Tree"}, ("NCCL_ALGO=Tree",)),
        ((), {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "HF_TOKEN": "x"}, ()),
        ((), {"NCCL_MAX_NCHANNELS": "4"}, ("NCCL_MAX_NCHANNELS=4",)),
        (("--enable-torch-compile",), {}, ("--enable-torch-compile",)),
        (("--cpu-offload-gb", "60"), {}, ("--cpu-offload-gb 60",)),
        (("--log-level", "debug", "--enable-metrics"), {}, ()),
    ],
)
def test_what_has_no_rule_is_told_and_boots_as_if_it_had_none(
    flags: tuple[str, ...], env: dict[str, str], told: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    seen = boot(tmp_path, model, "sim:rtx-5090:1", "0.5.12", *flags, env=env)
    assert seen.reading.outcome == READY, seen.log
    assert unknown_in(str(tmp_path / "server.log")) == told


def test_what_the_stand_in_cannot_speak_has_no_rule_and_ends_at_once(model: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, model, "sim:rtx-5090:1", "0.5.12", "--ssl-certfile", "cert.pem")
    assert seen.code == 1
    assert unknown_in(str(tmp_path / "server.log")) == ("--ssl-certfile cert.pem",)


def test_variables_that_were_not_declared_are_not_the_servers(model: Path, tmp_path: Path) -> None:
    import os

    os.environ["NCCL_ALGO"] = "Tree"
    try:
        boot(tmp_path, model, "sim:rtx-5090:1", "0.5.12")
    finally:
        del os.environ["NCCL_ALGO"]
    assert unknown_in(str(tmp_path / "server.log")) == ()


def scene(**changes: object) -> Scene:
    values: dict[str, object] = {
        "given": {},
        "env": {},
        "model": "LlamaForCausalLM",
        "major": 12,
        "linked": False,
        "tp": 2,
        "packages": frozenset({"sglang"}),
    }
    return Scene(**(values | changes))  # type: ignore[arg-type]


def test_a_card_that_nobody_described_meets_no_gate() -> None:
    release = load_release("0.5.7")
    asked = {FUSION: "", "--enable-torch-symm-mem": ""}
    assert fired(release, scene(given=asked, major=None, tp=8)) == ()
    assert {one.rule.id for one in fired(release, scene(given=asked, tp=8))} == {
        "flashinfer_allreduce_fusion.crashes",
        "torch_symm_mem.crashes",
        "custom_allreduce.falls_back",
    }


def test_a_wrapper_and_an_unfollowed_flag_have_no_rule(tmp_path: Path) -> None:
    def told(wrapper: tuple[str, ...] = (), given: dict[str, str] | None = None, **more: object) -> list[str]:
        order = Order("sim:t4:1", "sim:sglang==0.5.7", (0,), tmp_path, tmp_path, (), wrapper=wrapper)
        return without_rule(order, given or {}, (), **more)  # type: ignore[arg-type]

    assert told(("numactl", "-N0")) == []
    assert told(("/usr/bin/prlimit", "--as=1")) == ["the wrapper /usr/bin/prlimit"]
    assert told(given={"--quantization": "fp8"}) == []
    assert told(given={"--quantization": "fp8"}, assumptions=["--quantization fp8: as in the checkpoint"]) == [
        "--quantization fp8"
    ]


def test_a_measured_fact_stands_in_for_a_rule(tmp_path: Path) -> None:
    given = {"--moe-a2a-backend": "flashinfer"}
    order = Order("sim:t4:1", "sim:sglang==0.5.10", (0,), tmp_path, tmp_path, ())
    assert without_rule(order, given, ()) == ["--moe-a2a-backend flashinfer"]
    measured = Order("sim:t4:1", "sim:sglang==0.5.10", (0,), tmp_path, tmp_path, (), measured={"weights_gib": 77.7})
    assert without_rule(measured, given, ()) == []


def test_the_table_of_effects_names_flags_that_exist() -> None:
    from pytest_gpuguard.engines.flags import load_releases

    known = set(load_releases().flags)
    table = load_effects()
    assert table.flags | set(table.values) | set(table.measured) <= known
    for release in load_releases().releases:
        for gate in load_release(release).gates:
            assert set(gate.flags) | set(gate.unless) <= known, gate.id


def test_every_gate_that_fires_has_what_it_needs() -> None:
    from pytest_gpuguard.engines.flags import load_releases

    phases = {"argparse", "args", "init", "weights", "kv_pool", "graph_capture", "warmup"}
    for release in load_releases().releases:
        for gate in load_release(release).gates:
            assert gate.phase in phases, gate.id
            assert gate.by in ("main", "first", "each"), gate.id
            assert gate.links in (None, "nvlink", "pcie"), gate.id
            assert not (gate.majors and gate.not_majors), gate.id
            assert gate.behaviour in ("rejected", "crashes", "falls_back", "adjusts", "works", "silent"), gate.id
