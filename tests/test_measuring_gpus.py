"""Measured claims on GPUs of the NVML stand-in: two servers at once, peaks of memory, and samples that do not count."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.standin.fixtures import FakeRigFactory

Run = Any
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _short_samples(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import pytest_gpuguard.measuring as m\nm.SAMPLE_S = 0.05\n")


def loaded(claims: Run, source: str, *args: str) -> pytest.RunResult:
    """Runs claims that name their load as ``**LOAD``: short requests."""
    result: pytest.RunResult = claims("LOAD = dict(input_len=8, output_len=8)\n" + dedent(source), *args)
    return result


def lines(result: pytest.RunResult, *patterns: str) -> None:
    result.stdout.fnmatch_lines(list(patterns), consecutive=False)


# ------------------------------------------------------------------------------------------------------- comparisons

COMPARED = """
    def at(rate):
        return serves("sglang", MODEL, env={"FAKE_SGLANG_TOKS": str(rate)})

    @needs_gpus(1)
    @at(400)
    @fits
    @compare(other=at(50), ratio=">1.5", **LOAD)
    def test_faster(server):
        assert server.generate("still up")

    @needs_gpus(1)
    @at(50)
    @compare(other=at(400), ratio=">0.9", **LOAD)
    def test_slower(): ...
"""


def boots(file: Path) -> list[str]:
    """The GPUs of each server that was started, in order."""
    return re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", file.read_text())


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_servers_are_compared_at_once_where_there_is_room_and_in_turns_elsewhere(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int
) -> None:
    fake_rig(n=gpus).apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(tmp_path / "boots"))
    result = loaded(claims, COMPARED, "-v")
    lines(result, "CONTRADICTED (worse) *test_slower *× the other's tok/s (*, claimed >0.9")
    lines(result, "HOLDS *test_faster*", "*HOLDS: compare(ratio>1.5, *× the other's tok/s (*, claimed >1.5")
    booted = len(boots(tmp_path / "boots"))
    # In turns it is A B A, and B A more where the machine was too busy for a clear answer.
    assert booted == 4 if gpus == 2 else booted in range(6, 15, 2)
    assert len(set(boots(tmp_path / "boots"))) == gpus
    how = "both up at once" if gpus == 2 else "one after the other on the same GPUs"
    lines(result, f"*the two servers: {how}*")


def test_a_comparison_that_must_be_alone_is_made_in_turns(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(tmp_path / "boots"))
    result = loaded(
        claims,
        """
        def at(rate):
            return serves("sglang", MODEL, env={"FAKE_SGLANG_TOKS": str(rate)})

        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio=">1.5", together=False, **LOAD)
        def test_alone(): ...
        """,
    )
    lines(result, "HOLDS *test_alone *")
    assert len(boots(tmp_path / "boots")) in (3, 5, 7)


def test_a_comparison_with_a_server_that_fails_or_is_not_here(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @compare(other=serves("sglang", MODEL, env={"FAKE_SGLANG": "weights_oom"}), ratio=">2", **LOAD)
        def test_fails(): ...

        @needs_gpus(1)
        @serves("sglang", MODEL)
        @fits
        @compare(other=serves("sglang", "no-such-model"), ratio=">2", **LOAD)
        def test_absent(): ...
        """,
    )
    lines(result, "CONTRADICTED (worse) *test_fails *the other server: oom.weights: *")
    lines(result, "NOT_EVALUATED *test_absent *the other server cannot be booted here: *no-such-model*")
    lines(result, "*HOLDS: fits: ready*")


# ------------------------------------------------------------------------------------------------------------- peaks


def test_a_peak_limits_what_a_test_without_a_server_uses(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(
        """
        import os, time
        from pathlib import Path
        from tests.standin import standin

        def use(gpus, gib):
            card = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[gpus[0].index]
            card.leaked = gib << 30
            time.sleep(0.5)
            card.leaked = 0

        @needs_gpus(1)
        @max_mem("20GiB", of="peak")
        def test_within(gpus): use(gpus, 12)

        @needs_gpus(1)
        @max_mem("20GiB", of="peak")
        def test_beyond(gpus): use(gpus, 21)

        @needs_gpus(1)
        @max_mem("20GiB", of="peak")
        @fits
        def test_no_server(gpus): ...

        @needs_gpus(1)
        @max_mem("20GiB", of="peak")
        def test_no_gpus(): ...
        """
    )
    lines(
        result,
        "CONTRADICTED (worse) *test_beyond *peak memory 21.00 GiB (sampled every *at least), claimed at most 20*",
    )
    lines(result, "HOLDS *test_within *peak memory 12.00 GiB (sampled every 20 ms*")
    lines(result, "INFRA *test_no_gpus *take the fixture gpus")
    lines(
        result,
        "INFRA *test_no_server *",
        "*HOLDS: max_mem(20GiB, of=peak)*",
        "*INFRA: fits: the test booted no server*",
    )


def test_the_peak_of_a_server_is_judged_with_a_warning_and_the_margin_is_what_is_left(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    result = claims(
        """
        full = serves("sglang", MODEL, env={"FAKE_SGLANG_MEMORY": "80"})

        @needs_gpus(1)
        @full
        @max_mem("81GiB", of="peak")
        @fits(margin="10GiB")
        def test_holds(): ...

        @needs_gpus(1)
        @full
        @fits(margin="20GiB")
        def test_margin(): ...
        """
    )
    lines(result, "CONTRADICTED (worse) *test_margin *ready with 14.97 GiB free, claimed a margin of 20 GiB")
    lines(result, "HOLDS *test_holds *", "*HOLDS: max_mem(81GiB, of=peak): peak memory 80.00 GiB (sampled*")
    lines(result, "*warning: a server's KV pool always fills up to the fraction*")


# ---------------------------------------------------------------------------------------------- samples and references


def test_samples_that_do_not_count_are_told_with_the_reason(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("import pytest_gpuguard.measuring as m\nm.SAMPLE_S = 0.6\n")  # clocks: two looks a second
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.busy(0, 1200, reasons=0x40)  # nvml.h: nvmlClocksEventReasonHwThermalSlowdown
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @expect_toks(min=1, **LOAD)
        def test_hot(): ...
        """,
    )
    lines(result, "INCONCLUSIVE *test_hot *too few samples of tok/s count (0 samples); 10 rejected: *thermal*")


def test_eager_decoding_is_not_the_speed_that_is_claimed(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @serves("sglang", MODEL, env={"FAKE_SGLANG_EAGER": "1"})
        @expect_toks(min=1, **LOAD)
        def test_eager(): ...

        @needs_gpus(1)
        @serves("sglang", MODEL, "--disable-cuda-graph", env={"FAKE_SGLANG_EAGER": "1"})
        @expect_toks(min=1, **LOAD)
        def test_as_asked(): ...
        """,
    )
    lines(result, "INCONCLUSIVE *test_eager *10 rejected: decode steps ran without CUDA graphs*")
    lines(result, "HOLDS *test_as_asked *")


def test_a_reference_is_that_of_the_card_and_none_is_not_evaluated_before_any_boot(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(tmp_path / "boots"))
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @expect_toks(min={"h200": 1}, **LOAD)
        def test_another_card(): ...

        @needs_gpus(1)
        @serves("sglang", MODEL, "--context-length 9")
        @expect_toks(min={"rtx-pro-6000-server": 1, "h200": 10_000_000}, **LOAD)
        def test_this_card(): ...
        """,
    )
    lines(result, "NOT_EVALUATED *test_another_card *no reference for rtx-pro-6000-server: it is stated for h200")
    lines(result, "HOLDS *test_this_card *claimed at least 1")
    assert len(boots(tmp_path / "boots")) == 1
