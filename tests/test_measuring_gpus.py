"""Measured claims on GPUs of the NVML stand-in: peaks of memory, samples that do not count, references by card."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.measured import QUICK, Boots, Run, gpus_of, lines, loaded
from tests.standin.fixtures import FakeRigFactory


@pytest.fixture(autouse=True)
def _short_samples(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(QUICK)


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


REPORTS = """
import json
from pathlib import Path

def pytest_runtest_logreport(report):
    if hasattr(report, "gpuguard"):
        with Path("reports.jsonl").open("a") as file:
            print(json.dumps(report.gpuguard), file=file)
"""


def test_the_peak_of_a_server_is_judged_with_a_warning_and_the_margin_is_what_is_left(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(QUICK + REPORTS)
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
    reports = [json.loads(line) for line in Path("reports.jsonl").read_text().splitlines()]
    [data] = [one for one in reports if one["claim"].endswith("test_holds")]
    assert data["peak_gib"] == 80
    phases = list(data["peak_phases"].items())
    assert phases[0] == ("start", 0)
    assert phases[-1] == ("ready", 80)


def test_what_a_stranger_used_meanwhile_is_not_held_against_a_test(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    result = claims(
        """
        import os, subprocess, time
        from pathlib import Path
        from tests.standin import standin

        @needs_gpus(1)
        @max_mem("20GiB", of="peak")
        def test_small(gpus):
            started = subprocess.run(
                ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True
            )
            pid = int(started.stdout)
            slot = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0].process[3]
            slot.start, slot.sticky, slot.bytes, slot.pid = standin.start_time(pid), 0, 30 << 30, pid
            time.sleep(2.5)
            os.kill(pid, 9)
            time.sleep(0.3)
        """
    )
    lines(result, "INFRA *test_small *peak memory 30.00 GiB *: others used these GPUs meanwhile: *pid *with 30.00 GiB")


# ---------------------------------------------------------------------------------------------- samples and references


def test_samples_that_do_not_count_are_told_with_the_reason(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("import pytest_gpuguard.loaded as l\nl.SAMPLE_S = 0.6\n")  # clocks: two looks a second
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
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, boots: Boots
) -> None:
    fake_rig(n=1).apply(monkeypatch)
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
    assert len(gpus_of(boots())) == 1


def test_gpus_that_do_not_answer_meanwhile_give_no_sample(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    pytester.makeconftest(
        QUICK
        + dedent(
            """
            from pytest_gpuguard.measure.sampler import Sampler
            from pytest_gpuguard.claims.measurement import Conditions
            silent = Conditions(silent=("GPU-x: NVML did not answer within 5 s",))
            Sampler.conditions = lambda self, since, until: silent
            """
        )
    )
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @expect_toks(min=1, **LOAD)
        def test_hung(): ...
        """,
    )
    lines(result, "INCONCLUSIVE *test_hung *10 rejected: GPU-x: NVML did not answer within 5 s*")


def test_a_rate_is_remembered_by_the_card_that_it_was_measured_on(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    rig.shared.gpu[1].name = b"NVIDIA H200"
    loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @expect_toks(min=1, **LOAD)
        def test_one_card(): ...
        """,
    )
    (entry,) = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"].values()
    assert list(entry["rates"]) == ["expect_toks(1, 8, 8, total) on rtx-pro-6000-server"]
