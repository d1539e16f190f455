"""The sampler through the real pynvml on the NVML stand-in: peaks, conditions, and a driver that is ill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gpuguard.claims.measurement import POWER_LIMIT, Conditions, Peak
from pytest_gpuguard.facts import nvml
from pytest_gpuguard.measure import trace
from pytest_gpuguard.measure.sampler import Sampler
from pytest_gpuguard.measure.trace import Clocks, Trace
from tests.standin.fixtures import FakeRig, FakeRigFactory
from tests.test_facts_nvml import gone

GIB = 1 << 30
MIB = 1 << 20
ROOT = Path(__file__).parent.parent


@contextmanager
def sampling(rig: FakeRig, *gpus: int, **options: object) -> Iterator[Sampler]:
    sampler = Sampler([rig.uuid(gpu) for gpu in gpus], env=rig.environ(), **options)  # type: ignore[arg-type]
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def until(true: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def peak_of(sampler: Sampler) -> Peak:
    peak = sampler.peak()
    assert peak is not None
    return peak


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's pids are those that we see."""
    monkeypatch.setattr(trace, "host_pids", lambda: True)  # the tests may run in a container


# --- peaks ----------------------------------------------------------------------------------------------------------


def test_a_peak_is_above_the_baseline_on_the_gpu_where_it_was_highest(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(4)
    rig.leak(1, 900 * MIB)  # a clean GPU may have some
    with sampling(rig, 0, 1) as sampler:
        rig.shared.gpu[0].leaked = 5 * GIB
        rig.shared.gpu[1].leaked = 900 * MIB + 6 * GIB
        rig.shared.gpu[3].leaked = 50 * GIB  # not ours
        time.sleep(0.2)
        rig.shared.gpu[0].leaked = rig.shared.gpu[1].leaked = 0
        time.sleep(0.1)
        during = peak_of(sampler)
    after = peak_of(sampler)
    assert (during.gib, during.uuid, during.source, during.missing) == (6.0, rig.uuid(1), "sampled", ())
    assert (after.gib, after.uuid, after.interval_s) == (6.0, rig.uuid(1), 0.02)
    assert after.samples >= 10
    assert str(during).startswith("6.00 GiB (sampled every 20 ms")
    assert str(during).endswith("at least)")


def test_memory_before_r510_counts_the_reserve_which_the_baseline_takes_off(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.shared.no_memory_v2 = 1
    with sampling(rig, 0) as sampler:
        rig.leak(0, 3 * GIB)
        time.sleep(0.1)
    assert peak_of(sampler).gib == 3.0


def test_spikes_of_20_ms_are_seen(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(8)
    moments = random.Random(6)
    seen = 0
    with sampling(rig, *range(8)) as sampler:
        for number in range(20):
            sampler.mark(f"spike {number}")
            time.sleep(moments.uniform(0.03, 0.06))
            rig.leak(number % 8, 2 * GIB)
            time.sleep(0.02)
            rig.leak(number % 8, 0)
            time.sleep(0.03)
        sampler.mark("after")
        seen = sum(gib == 2.0 for phase, gib in peak_of(sampler).phases if phase.startswith("spike"))
    assert seen >= 16  # benchmarks/sampler.py measures it: tests share their cores


def test_every_phase_has_its_own_peak_also_when_it_comes_again(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    with sampling(rig, 0) as sampler:
        time.sleep(0.1)
        for phase, gib in (("weights", 40), ("kv_pool", 80), ("ready", 81), ("weights", 44), ("ready", 70)):
            sampler.mark(phase)
            time.sleep(0.05)
            rig.leak(0, gib * GIB)
            time.sleep(0.1)
            rig.leak(0, 0)
            time.sleep(0.05)
    assert peak_of(sampler).phases == (("start", 0.0), ("weights", 44.0), ("kv_pool", 80.0), ("ready", 81.0))


def test_phases_without_end_do_not_fill_memory(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    with sampling(rig, 0, interval_s=0.001) as sampler:
        for number in range(100):
            sampler.mark(f"line {number}" + "x" * 10_000)
            time.sleep(0.004)
        rig.leak(0, GIB)
        time.sleep(0.1)
        assert peak_of(sampler).gib == 1.0
        assert len(peak_of(sampler).phases) <= 70


def test_accounting_gives_the_exact_peak_of_a_single_process_of_ours(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    rig.shared.gpu[1].accounting = 1
    rig.account(0, 4242, 1)  # switches the mode on
    with sampling(rig, 0, 1, ours=lambda: (4242,)) as sampler:
        rig.leak(0, 40 * GIB)
        time.sleep(0.1)
        rig.account(0, 4242, 41 * GIB)
        peak = peak_of(sampler)
    assert (peak.gib, peak.source, str(peak)) == (41.0, "accounting", "41.00 GiB (driver accounting)")
    assert peak_of(sampler).source == "accounting"  # after the end too


@pytest.mark.parametrize("why", ["off on one GPU", "two processes", "older than the sampler", "memory beside it"])
def test_accounting_that_is_not_the_whole_truth_leaves_the_peak_a_sampled_one(
    fake_rig: FakeRigFactory, why: str
) -> None:
    rig = fake_rig(2)
    rig.shared.gpu[1].accounting = 0 if why == "off on one GPU" else 1
    rig.account(0, 4242, 41 * GIB, time.time() - 60 if why == "older than the sampler" else time.time() + 5)
    if why == "two processes":
        rig.account(0, 4243, 30 * GIB, time.time() + 5)
    with sampling(rig, 0, 1, ours=lambda: (4242, 4243)) as sampler:
        rig.leak(0, 42 * GIB if why == "memory beside it" else 40 * GIB)
        time.sleep(0.1)
        peak = peak_of(sampler)
    expected = {"older than the sampler": 40.0, "memory beside it": 42.0}.get(why, 41.0)
    assert (peak.gib, peak.source) == (expected, "sampled")


def test_a_process_of_others_is_not_accounted(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.account(0, 4242, 41 * GIB, time.time() + 5)
    with sampling(rig, 0, ours=lambda: (1,)) as sampler:
        assert peak_of(sampler).gib == 0.0


def test_unified_memory_has_no_peak(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1, "gb10")
    start = time.monotonic()
    with sampling(rig, 0) as sampler:
        assert sampler.peak() is None
        conditions = sampler.conditions(start, time.monotonic())
    assert any("does not tell its memory (unified)" in line for line in conditions.unknown)


@pytest.mark.parametrize(
    ("peak", "text"),
    [
        (Peak(41.2, "GPU-a"), "41.20 GiB (sampled every 20 ms, at least)"),
        (Peak(41.2, "GPU-a", gaps=2), "41.20 GiB (sampled every 20 ms with 2 gaps, at least)"),
        (Peak(41.2, "GPU-a", "accounting", gaps=2), "41.20 GiB (driver accounting)"),
        (Peak(1, "GPU-a", missing=("GPU-b",)), "1.00 GiB (sampled every 20 ms, at least; without GPU-b)"),
    ],
)
def test_a_peak_says_what_it_was_measured_with(peak: Peak, text: str) -> None:
    assert str(peak) == text


# --- conditions -------------------------------------------------------------------------------------------------------


def test_limits_that_slow_a_busy_gpu_are_named(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(4)
    rig.busy(0, 2400, reasons=0x4)
    rig.busy(1, 2400, reasons=0x8 | 0x40)
    rig.busy(2, 2400, reasons=0x2 | 0x10 | 0x100)  # set clocks, sync boost, display: chosen, no limits
    rig.busy(3, 180, reasons=0x1 | 0x4, utilization=0)
    with sampling(rig, 0, 1, 2, 3) as sampler:
        since = time.monotonic()
        time.sleep(1.2)
        found = sampler.conditions(since, time.monotonic())
    power, thermal = found.slowed
    assert power.startswith(f"{rig.uuid(0)}: {POWER_LIMIT} (software power cap) at ")
    assert thermal.startswith(f"{rig.uuid(1)}: thermal limit (hardware) at ")
    assert (thermal in found.slowed, found.unknown) == (True, ())


@pytest.mark.parametrize("older", [False, True])
def test_clocks_that_fell_are_told_with_both_numbers(fake_rig: FakeRigFactory, older: bool) -> None:
    rig = fake_rig(2)
    rig.shared.no_event_reasons = older
    rig.busy(0, 2400)
    rig.busy(1, 2400)
    with sampling(rig, 0, 1) as sampler:
        before = time.monotonic()
        time.sleep(1.3)
        rig.busy(0, 1800)
        rig.busy(1, 2300)  # 4 %
        time.sleep(0.1)
        since = time.monotonic()
        time.sleep(1.2)
        now = time.monotonic()
        assert sampler.conditions(since, now).slowed == (f"{rig.uuid(0)}: clocks fell from 2400 to 1800 MHz",)
        assert sampler.conditions(before, since - 0.2) == Conditions()


def looks(*mhz: int, reasons: int = 0, percent: int | None = 98) -> Trace:
    made = Trace(["GPU-a"], 0.02)
    for number, clock in enumerate(mhz):
        made.hear_clocks(0, Clocks(float(number), clock, reasons, percent))
    made.processes_at[0] = 1e9
    return made


def test_an_idle_gpus_clock_and_a_short_boost_say_nothing() -> None:
    assert looks(2400, 2400, 1800, percent=98).conditions(2, 9, ()).slowed
    assert not looks(2400, 2400, 1800, percent=10).conditions(2, 9, ()).slowed
    assert not looks(2400, 2400, 1800, reasons=0x1).conditions(2, 9, ()).slowed
    assert not looks(2800, 1800, 1800, 1800).conditions(2, 9, ()).slowed  # one look only
    assert looks(2400, 2400, 1800, percent=None).conditions(2, 9, ()).slowed  # a device without utilization


def test_a_fall_at_the_power_limit_says_so() -> None:
    found = looks(2400, 2400, 1800, reasons=0x4).conditions(2, 9, ())
    assert found.slowed[1] == "GPU-a: clocks fell from 2400 to 1800 MHz (at the power limit)"


def test_looks_at_clocks_are_bounded_and_the_high_is_remembered() -> None:
    made = looks(*[2400] * 3, *[1800] * 10_000)
    assert len(made.clocks[0]) == trace.MAX_LOOKS
    assert made.conditions(9000, 9100, ()).slowed == ("GPU-a: clocks fell from 2400 to 1800 MHz",)
    assert made.conditions(5, 9, ()).unknown == ("GPU-a: its clocks were not looked at in this time",)


@pytest.mark.usefixtures("host")
def test_a_foreign_process_is_named_with_its_memory_and_ours_is_not(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    ours: set[int] = set()
    with sampling(rig, 0, 1, ours=lambda: ours) as sampler:
        start = time.monotonic()
        time.sleep(1.2)
        quiet = time.monotonic()
        assert sampler.conditions(start, quiet).foreign == ()
        ours.add(rig.hold(0, 20 * GIB).pid)
        other = rig.hold(1, 3 * GIB)
        time.sleep(0.1)
        (line,) = sampler.conditions(quiet, time.monotonic()).foreign  # though no look was due yet
        assert line.startswith(f"{rig.uuid(1)}: pid {other.pid} ({sys.executable}")
        assert line.endswith("with 3.00 GiB")
        other.kill()
        other.wait()
        time.sleep(1.3)
        since = time.monotonic()
        time.sleep(0.1)
        assert sampler.conditions(since, time.monotonic()).foreign == ()
        assert len(sampler.conditions(quiet, since).foreign) == 1  # it was there


@pytest.mark.usefixtures("host")
def test_a_foreign_process_whose_size_is_not_told_is_named_all_the_same(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.shared.hide_sizes = 1
    other = rig.hold(0, GIB)
    with sampling(rig, 0) as sampler:
        since = time.monotonic()
        (line,) = sampler.conditions(since, time.monotonic()).foreign
    assert f"pid {other.pid} " in line
    assert line.endswith("with an unknown amount")


@pytest.mark.usefixtures("host")
def test_a_display_server_computes_nothing(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.hold(0, 15 << 20)
    with sampling(rig, 0) as sampler:
        since = time.monotonic()
        assert sampler.conditions(since, time.monotonic()).foreign == ()


def test_processes_that_the_driver_does_not_list_are_unknown_and_memory_is_sampled_all_the_same(
    fake_rig: FakeRigFactory,
) -> None:
    rig = fake_rig(1)
    rig.shared.processes_v2 = 2
    with sampling(rig, 0) as sampler:
        since = time.monotonic()
        rig.leak(0, GIB)
        time.sleep(0.1)
        assert f"{rig.uuid(0)}: NVML does not list its processes" in sampler.conditions(since, since + 0.1).unknown
        assert (peak_of(sampler).gib, peak_of(sampler).missing) == (1.0, ())


@pytest.mark.usefixtures("host")
def test_a_short_lived_helper_of_ours_stays_ours(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    ours: set[int] = set()
    with sampling(rig, 0, ours=lambda: set(ours)) as sampler:
        since = time.monotonic()
        helper = rig.hold(0, GIB)
        ours.add(helper.pid)
        time.sleep(1.3)
        helper.kill()
        helper.wait()
        ours.clear()
        found = sampler.conditions(since, time.monotonic())
    assert (found.foreign, [line for line in found.unknown if "pid" in line]) == ((), [])


def test_pids_of_another_namespace_are_unknown_and_never_foreign(
    fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "host_pids", lambda: False)
    rig = fake_rig(1)
    with sampling(rig, 0) as sampler:
        since = time.monotonic()
        other = rig.hold(0, 3 * GIB)
        found = sampler.conditions(since, time.monotonic())
    assert found.foreign == ()
    assert f"{rig.uuid(0)}: pid {other.pid} from another pid namespace" in "\n".join(found.unknown)


@pytest.mark.usefixtures("host")
def test_a_pid_that_nobody_has_and_memory_without_a_process_are_unknown(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    with sampling(rig, 0, 1) as sampler:
        since = time.monotonic()
        rig.shared.gpu[0].process[0].pid, rig.shared.gpu[0].process[0].sticky = 2**22 + 1, 1
        rig.leak(1, GIB)
        time.sleep(0.1)
        found = sampler.conditions(since, time.monotonic())
    assert found.foreign == ()
    assert any(f"pid {2**22 + 1} (not visible" in line for line in found.unknown)
    assert any("NVML names no process with 1.00 GiB" in line for line in found.unknown)


# --- a driver that is ill ---------------------------------------------------------------------------------------------


def test_a_gpu_that_hangs_never_blocks_us_and_the_others_go_on(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    with sampling(rig, 0, 1, deadline_s=1.0) as sampler:
        first = sampler.pid
        assert first is not None
        rig.leak(0, GIB)
        time.sleep(0.5)
        rig.hang(1)
        start = time.monotonic()
        sampler.mark("ready")
        sampler.peak()
        sampler.conditions(start, start + 0.1)
        assert time.monotonic() - start < 3
        assert gone(first)
        until(lambda: sampler.pid not in (None, first))
        rig.leak(0, 2 * GIB)
        until(lambda: peak_of(sampler).gib == 2.0)  # without the one that hung twice
        peak = peak_of(sampler)
        assert (peak.uuid, peak.missing, peak.phases[-1]) == (rig.uuid(0), (rig.uuid(1),), ("ready", 2.0))
        assert peak.gaps >= 2
        unknown = sampler.conditions(start, time.monotonic()).unknown
        assert f"{rig.uuid(1)}: NVML did not answer within 1 s (memory)" in unknown


def test_a_hang_that_passes_is_only_a_gap(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    with sampling(rig, 0, 1, deadline_s=1.0) as sampler:
        rig.hang(1)
        first = sampler.pid
        until(lambda: sampler.pid != first)
        rig.heal()
        rig.leak(1, GIB)
        until(lambda: peak_of(sampler).gib == 1.0)
        assert (peak_of(sampler).missing, peak_of(sampler).gaps >= 1) == ((), True)


def test_slow_answers_only_widen_the_interval(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(2)
    with sampling(rig, 0, 1) as sampler:
        rig.shared.delay_us = 50_000
        time.sleep(2.5)
        peak = peak_of(sampler)
        assert peak.interval_s > 0.05
        assert peak.gaps > 0
        assert sampler.pid is not None


def test_stop_while_nvml_hangs_is_bounded_and_leaves_nothing(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    threads = set(threading.enumerate())
    with sampling(rig, 0, deadline_s=30) as sampler:
        time.sleep(0.4)
        rig.hang(0)
        time.sleep(0.1)
        pid = sampler.pid
        start = time.monotonic()
        sampler.stop()
        assert time.monotonic() - start < 3
    assert pid is not None
    assert gone(pid)
    assert set(threading.enumerate()) <= threads
    assert peak_of(sampler).gaps >= 1


def test_a_hanging_init_does_not_hold_the_start(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.shared.init_hang = 1
    sampler = Sampler([rig.uuid(0)], env=rig.environ())
    start = time.monotonic()
    sampler.start(0.3)
    assert time.monotonic() - start < 2
    assert sampler.peak() is None
    rig.heal()
    rig.leak(0, GIB)
    until(lambda: "baseline" in " ".join(sampler.conditions(0, 1).unknown))
    assert sampler.peak() is None  # what it was at the start nobody knows
    sampler.stop()


def test_a_lost_gpu_is_told_and_the_others_go_on(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(3)
    rig.lose(2)
    with sampling(rig, 0, 1, 2) as sampler:
        rig.leak(1, 3 * GIB)
        time.sleep(0.2)
        rig.lose(1)
        time.sleep(0.1)
        rig.leak(0, GIB)
        time.sleep(0.2)
        peak = peak_of(sampler)
        unknown = "\n".join(sampler.conditions(0, 1).unknown)
        now = time.monotonic()
        silent = [line.partition(":")[0] for line in sampler.conditions(now, now).silent]
    assert silent == [rig.uuid(1), rig.uuid(2)]
    assert (peak.gib, peak.uuid, peak.missing) == (3.0, rig.uuid(1), (rig.uuid(1), rig.uuid(2)))
    assert peak.phases == (("start", 3.0),)
    assert f"{rig.uuid(1)}: it could not be sampled: NVMLError_GpuIsLost" in unknown
    assert f"{rig.uuid(2)}: it could not be sampled: NVMLError_GpuIsLost" in unknown


def test_a_gpu_that_comes_back_is_sampled_again_and_the_gap_counts(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    with sampling(rig, 0) as sampler:
        before = peak_of(sampler).gaps
        rig.lose(0)
        until(lambda: peak_of(sampler).missing)
        rig.heal()
        rig.leak(0, 2 * GIB)
        until(lambda: not peak_of(sampler).missing)
        until(lambda: peak_of(sampler).gib == 2.0)
        assert peak_of(sampler).gaps > before


def test_a_child_that_is_killed_is_replaced_and_what_it_saw_is_kept(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    with sampling(rig, 0) as sampler:
        rig.leak(0, 5 * GIB)
        time.sleep(0.5)
        samples = peak_of(sampler).samples
        first = sampler.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        rig.leak(0, GIB)
        until(lambda: sampler.pid not in (None, first))
        until(lambda: peak_of(sampler).samples > samples)
        peak = peak_of(sampler)
        assert (peak.gib, peak.gaps >= 1, peak.missing) == (5.0, True, ())  # and the baseline is that of the start


def test_a_stopped_child_does_not_block_marks(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    with sampling(rig, 0) as sampler:
        assert sampler.pid is not None
        os.kill(sampler.pid, signal.SIGSTOP)
        start = time.monotonic()
        for number in range(3000):  # more than a pipe holds
            sampler.mark(f"{number % 7} a phase with a name that is long")
        sampler.peak()
        assert time.monotonic() - start < 3
    assert time.monotonic() - start < 6


def test_no_driver_and_no_binding_are_told_and_nothing_is_sampled(
    fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(1)
    rig.mismatch()
    with sampling(rig, 0) as sampler:
        assert sampler.peak() is None
        assert "driver.mismatch" in sampler.conditions(0, 1).unknown[0]
    monkeypatch.setattr(nvml, "binding_folder", lambda: None)
    with sampling(rig, 0) as sampler:
        assert sampler.peak() is None
        assert "nvidia-ml-py is missing" in sampler.conditions(0, 1).unknown[0]


def test_a_library_that_prints_does_not_garble_reports(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    rig.shared.chatty = 1
    with sampling(rig, 0) as sampler:
        rig.leak(0, GIB)
        time.sleep(0.1)
        assert peak_of(sampler).gib == 1.0


# --- what is left, what it costs --------------------------------------------------------------------------------------


def test_stop_ends_child_and_thread_and_can_be_called_again(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(1)
    threads = set(threading.enumerate())
    sampler = Sampler([rig.uuid(0)], env=rig.environ())
    sampler.stop()  # never started
    sampler.start()
    pid = sampler.pid
    assert pid is not None
    rig.leak(0, 7 * GIB)
    time.sleep(0.05)
    sampler.stop()
    sampler.stop()
    assert not Path(f"/proc/{pid}").exists()  # reaped
    assert set(threading.enumerate()) <= threads
    assert sampler.pid is None
    assert peak_of(sampler).gib == 7.0  # the last report came with the end


@pytest.mark.parametrize("hang", [False, True])
def test_the_child_dies_with_its_parent(fake_rig: FakeRigFactory, hang: bool) -> None:
    rig = fake_rig(1)
    code = """
        import os, sys, time
        from pytest_gpuguard.measure.sampler import Sampler
        sampler = Sampler([sys.argv[1]])
        sampler.start()
        print(sampler.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), rig.uuid(0)],
        env=rig.environ(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        if hang:
            rig.hang(0)
            time.sleep(0.2)
        parent.kill()
        parent.wait()
    assert gone(pid)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_sampling_eight_gpus_costs_little(fake_rig: FakeRigFactory) -> None:
    rig = fake_rig(8)
    with sampling(rig, *range(8)) as sampler:
        assert sampler.pid is not None
        time.sleep(0.3)
        before, ours, start = cpu_s(sampler.pid), time.process_time(), time.monotonic()
        time.sleep(4)
        elapsed = time.monotonic() - start
        spent = cpu_s(sampler.pid) - before + time.process_time() - ours
    assert spent / elapsed < 0.1  # 1 % on a quiet machine: benchmarks/sampler.py


def test_nonsense_intervals_are_refused() -> None:
    for interval in (0, -1, 11, float("nan")):
        with pytest.raises(ValueError, match="interval_s must be from"):
            Sampler([], interval_s=interval)
