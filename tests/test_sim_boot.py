"""The stand-in boots as each family of releases does, and the ordinary classifier reads it as what was meant."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pytest_gpuguard.claims.outcome import READY
from pytest_gpuguard.predict import Box, predict

from .sim_models import DENSE, LATENT, boot, write_model

#: One of every family: what a log line looks like changes between these.
FAMILIES = ("0.4.6", "0.5.3", "0.5.6", "0.5.7", "0.5.10", "0.5.12", "0.5.15", "0.5.20", "0.5.23")
SMALL = "sim:rtx-5090:2"
BIG = "sim:rtx-pro-6000-server:8"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_model(tmp_path / "dense", DENSE)


@pytest.fixture
def latent(tmp_path: Path) -> Path:
    return write_model(tmp_path / "latent", LATENT)


@pytest.mark.parametrize("release", FAMILIES)
def test_a_boot_that_fits_is_read_as_ready_with_the_predicted_numbers(
    release: str, dense: Path, tmp_path: Path
) -> None:
    seen = boot(tmp_path, dense, SMALL, release, "--tp-size", "2", "--context-length", "8192")
    assert seen.reading.ready_line, seen.log
    assert seen.reading.outcome == READY
    flags = ("--tp-size", "2", "--context-length", "8192")
    wanted = predict(dense, Box("x", 2, 32607, 494, "120"), "sglang", release, flags)
    memory = seen.reading.memory
    assert memory.kv_tokens == wanted.kv_tokens
    assert memory.weights_gib == pytest.approx(wanted.weights_gib, abs=0.01)
    assert memory.avail_before_gib == pytest.approx(wanted.avail_before_gib, abs=0.01)
    assert memory.graph_gib == pytest.approx(wanted.graph_gib, abs=0.01)
    assert memory.free_gib == pytest.approx(wanted.margin_gib, abs=0.02)
    assert len(seen.reading.ranks) == 2
    assert seen.code is None


@pytest.mark.parametrize("release", FAMILIES)
def test_weights_that_do_not_fit_end_it_while_they_are_loaded(release: str, dense: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, dense, "sim:t4:1", release)
    assert (seen.reading.outcome, seen.reading.phase) == ("oom.weights", "weights"), seen.log
    assert seen.line.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    assert "Load weight begin" in seen.log
    assert "Load weight end" not in seen.log
    assert "Received sigquit from a child process" in seen.log
    assert seen.code == -9


NO_POOL = {
    "0.4.6": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "0.5.3": "Current value: self.server_args.mem_fraction_static=0.7",
    "0.5.7": "Current value: self.server_args.mem_fraction_static=0.7",
    "0.5.10": "Current value: mem_fraction_static=0.7",
    "0.5.12": "Current value: mem_fraction_static=0.7",
    "0.5.15": "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7.",
    "0.5.20": "(minimum viable = 1 - available/pre = ",
    "0.5.23": "If using speculative decoding, draft weights are now counted.",
}


@pytest.mark.parametrize("release", NO_POOL)
def test_a_pool_without_room_is_told_in_the_words_of_the_release(release: str, latent: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, latent, BIG, release, "--tp-size", "8", "--mem-fraction-static", "0.7")
    assert seen.reading.outcome == "oom.kv_pool", seen.log
    assert NO_POOL[release] in seen.line
    assert seen.reading.memory.rest_gib is not None
    assert seen.reading.memory.rest_gib < 0
    assert seen.code == -9


@pytest.mark.parametrize("release", ["0.5.7", "0.5.23"])
def test_graphs_without_room_fail_in_their_capture(release: str, dense: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, dense, "sim:rtx-5090:1", release, "--mem-fraction-static", "0.999", "--cuda-graph-bs", "512")
    if release == "0.5.23":
        assert seen.reading.outcome == "bad.args"  # that release took this flag away, and argparse says so
        assert seen.code == 2
    else:
        assert seen.reading.outcome == "oom.graph_capture", seen.log
        assert "Capture cuda graph failed: CUDA out of memory" in seen.log


def test_what_argparse_refuses_ends_with_its_status(dense: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, dense, SMALL, "0.5.23", "--no-such-flag", "3")
    assert seen.code == 2
    assert "launch_server.py: error: unrecognized arguments: --no-such-flag 3" in seen.log
    assert "argument --port: invalid int value: 'x'" in boot(tmp_path, dense, SMALL, "0.5.23", "--port", "x").log
    assert boot(tmp_path, dense, SMALL, "0.5.23", "--host", "::1").reading.ready_line
    abbreviated = boot(tmp_path, dense, SMALL, "0.5.7", "--mem-frac", "0.8")
    assert abbreviated.reading.outcome == READY


@pytest.mark.parametrize(
    ("flags", "said", "outcome"),
    [
        (["--tp-size", "4", "--ep-size", "3"], "tp_size 4 must be divisible by ep_size 3", "unsupported.config"),
        (
            ["--tp-size", "4", "--ep-size", "2", "--moe-runner-backend", "flashinfer_cutlass"],
            "The expert parallel size must be 1 or the same as the tensor parallel size",
            "unsupported.config",
        ),
    ],
)
def test_arguments_are_refused_before_anything_is_loaded(
    flags: list[str], said: str, outcome: str, latent: Path, tmp_path: Path
) -> None:
    seen = boot(tmp_path, latent, BIG, "0.5.7", *flags)
    assert seen.code == 1, seen.log
    assert said in seen.line
    assert seen.reading.outcome == outcome
    assert "Load weight begin" not in seen.log


def test_layouts_name_their_ranks_as_the_release_does(latent: Path, tmp_path: Path) -> None:
    words = "--tp-size 8 --dp-size 4 --enable-dp-attention --ep-size 8 --mem-fraction-static 0.7"
    flags = words.split()
    late = boot(tmp_path, latent, BIG, "0.5.12", *flags).log
    assert " DP3 TP7 EP7] Load weight begin." in late
    early = boot(tmp_path, latent, BIG, "0.5.3", *flags).log
    assert " DP3 TP7 EP7] Load weight begin." in early
    oldest = boot(tmp_path, latent, "sim:t4:1", "0.4.6").log
    assert " TP0] Load weight begin." in oldest
    alone = boot(tmp_path, latent, "sim:t4:1", "0.5.7").log
    assert "] Load weight begin." in alone
    assert " TP0]" not in alone


def test_stages_of_a_pipeline_have_their_own_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "deep", DENSE, num_hidden_layers=33)
    seen = boot(tmp_path, model, "sim:rtx-5090:2", "0.5.12", "--pp-size", "2", "--disable-cuda-graph")
    assert seen.reading.outcome == READY, seen.log
    ranks = dict(seen.reading.ranks)
    assert set(ranks) == {"PP0", "PP1"}
    first, second = ranks["PP0"].weights_gib, ranks["PP1"].weights_gib
    assert first is not None
    assert second is not None
    assert second > first


def test_more_tokens_than_fit_are_clipped_as_the_release_says_it(dense: Path, tmp_path: Path) -> None:
    seen = boot(tmp_path, dense, "sim:rtx-5090:1", "0.5.12", "--max-total-tokens", "90000000")
    assert seen.reading.outcome == READY, seen.log
    assert seen.reading.clipped is not None
    assert seen.reading.clipped[0] == 90_000_000
    assert seen.reading.clipped[1] == seen.reading.memory.kv_tokens


def test_a_measured_fact_takes_the_place_of_a_rule(dense: Path, tmp_path: Path) -> None:
    own = ("--measured", "weights_gib=40.5")
    seen = boot(tmp_path, dense, "sim:rtx-5090:1", "0.5.12", own=own)
    assert seen.reading.outcome == "oom.weights"


def test_a_configuration_that_cannot_be_read_has_no_rule_and_no_traceback(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("[]")
    seen = boot(tmp_path, model, SMALL, "0.5.23")
    assert seen.code == 1
    assert seen.log.splitlines()[1].startswith("gpuguard-sim: no rule for this boot: ")
    assert "Traceback" not in seen.log


def test_the_memory_of_a_boot_is_noted_and_is_free_when_it_is_gone(dense: Path, tmp_path: Path) -> None:
    from pytest_gpuguard.facts.simulated import simulated_rig
    from pytest_gpuguard.sim.memory import SimulatedGpus

    rig = simulated_rig(SMALL)
    gpus = SimulatedGpus(rig, tmp_path / "memory")
    uuids = [gpu.uuid for gpu in rig.gpus]
    seen = boot(tmp_path, dense, SMALL, "0.5.12", "--context-length", "8192")
    (file,) = (tmp_path / "memory").glob("*.json")
    noted = json.loads(file.read_text())["used"]
    assert set(noted) == {uuids[0]}
    assert noted[uuids[0]] > 20 << 30
    assert seen.reading.outcome == READY
    assert [one.used for one in gpus.memory(uuids).values()] == [0, 0]
    assert gpus.processes(uuids) == {uuid: [] for uuid in uuids}


def test_a_simulated_gpu_in_use_names_who_has_it(tmp_path: Path) -> None:
    from pytest_gpuguard.facts.holders import describe_dirty
    from pytest_gpuguard.facts.simulated import simulated_rig
    from pytest_gpuguard.sim.memory import SimulatedGpus, note

    rig = simulated_rig(SMALL)
    gpus = SimulatedGpus(rig, tmp_path)
    first, second = (gpu.uuid for gpu in rig.gpus)
    note(tmp_path, {first: 5 << 30})
    note(tmp_path, {first: 3 << 30})
    memory = gpus.memory([first, second])
    assert (memory[first].used, memory[second].used) == (3 << 30, 0)
    assert memory[first].free == (memory[first].total or 0) - (memory[first].reserved or 0) - (3 << 30)
    assert gpus.processes([first, second]) == {first: [(os.getpid(), 3 << 30)], second: []}
    said = describe_dirty(first, memory[first].used, gpus.processes([first])[first])
    assert f"has 3.00 GiB in use: pid {os.getpid()}" in said


def test_every_line_of_a_release_is_one_that_the_reader_knows() -> None:
    """The table that is said from and the table that is read by are two halves of one."""
    from pytest_gpuguard.diagnose.spellings import load_spellings
    from pytest_gpuguard.sim.release import load_release

    spellings = load_spellings()
    silent = {"attention", "kv.dtype", "kv.clipped", "graph.sizes", "graph.advice", "no_pool", "out_of_memory"}
    silent |= {"sigquit", "sigterm", "http.up"}
    values: dict[str, object] = {name: 1.5 for name in "avail usage elapsed half size f_min suggested".split()}  # noqa: SIM905
    for release in FAMILIES:
        lines = load_release(release).lines
        assert len(lines) >= 20, release
        for name, line in lines.items():
            if name in silent:
                continue
            blank = _Blank(values | {"dict": "{'model_path': 'm'}"})
            assert spellings.rule_for(line.text.format_map(blank)) is not None, (release, name)


class _Blank(dict[str, object]):
    def __missing__(self, key: str) -> object:
        return "1"
