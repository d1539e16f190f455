"""When enough samples have been taken, what counts, and what a comparison makes of its blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import psutil
import pytest

from pytest_gpuguard.claims.expect import ExpectToks
from pytest_gpuguard.claims.series import Series
from pytest_gpuguard.claims.stats import LEAST, MOST
from pytest_gpuguard.loaded import Loaded
from pytest_gpuguard.measure.gather import MOST_FAILED, MOST_REJECTED, Gathering, Taken, taken
from pytest_gpuguard.measure.load import LOWER_BOUND, Spread, Window

WINDOW = Window(70.0, 200.0, 35.0, Spread(0.1, 0.1, 0.2), None, Spread(1.0, 1.0, 1.0), 3, 70, 1.0, 0.0, 1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def at(rate: float) -> Taken:
    return taken(replace(WINDOW, output_toks=rate), "total")


def filled(gathering: Gathering, *rates: float) -> Gathering:
    for rate in rates:
        gathering.add(at(rate))
    return gathering


def test_it_ends_as_soon_as_the_interval_decides() -> None:
    gathering = Gathering((60.0, None), 300.0)
    for number in range(LEAST):
        assert not gathering.over
        gathering.add(at(70.0 + number / 100))
    assert gathering.over
    assert len(gathering.result().samples) == LEAST


def test_it_ends_with_the_most_that_is_looked_at_and_with_its_time() -> None:
    clock = Clock()
    gathering = filled(Gathering((70.0, None), 300.0, clock=clock), *([69.9, 70.1] * (MOST // 2 - 1)), 70.0)
    assert not gathering.over
    assert filled(gathering, 70.0).over
    slow = filled(Gathering((70.0, None), 300.0, clock=clock), 69.9)
    clock.now = 299.0
    assert not slow.over
    clock.now = 350.0
    assert slow.over
    slow.spent(60.0)  # a boot in between
    assert not slow.over


def test_samples_of_another_claim_count_and_are_gone_on_with() -> None:
    known = filled(Gathering((10.0, None), 300.0), *[70.0, 70.1] * 4).result()
    assert Gathering((60.0, None), 300.0, known).over
    tight = Gathering((69.9, None), 300.0, known)
    assert not tight.over
    assert len(filled(tight, 70.0).result().samples) == 9


def test_what_does_not_count_is_kept_apart_with_its_reason() -> None:
    gathering = Gathering((60.0, None), 300.0)
    gathering.add(taken(WINDOW, "total", "GPU-a: thermal limit"))
    gathering.add(taken(Window.failure("HTTP 500", 0.0, 1.0), "total"))
    gathering.add(at(float("nan")))
    gathering.add(at(0.0))
    found = gathering.result()
    assert (found.samples, found.rejected) == ((), ("GPU-a: thermal limit",))
    assert found.failed == ("HTTP 500", "no token came", "no token came")
    assert gathering.over


@pytest.mark.parametrize("count", [MOST_REJECTED - 1, MOST_REJECTED])
def test_no_more_is_taken_after_so_many_rejected(count: int) -> None:
    gathering = Gathering((60.0, None), 300.0)
    for _ in range(count):
        gathering.add(taken(WINDOW, "total", "GPU-a: power limit"))
    assert gathering.over is (count == MOST_REJECTED)
    assert MOST_FAILED < MOST_REJECTED


def test_a_meter_that_fails_ends_it_at_once_and_blames_nobody() -> None:
    gathering = Gathering((60.0, None), 300.0)
    gathering.add(taken(Window.failure("a process of the meter was killed", 0.0, 1.0, ours=True), "total"))
    assert gathering.over
    assert gathering.result() == Series(ours="a process of the meter was killed")


def test_a_sample_is_the_rate_of_all_requests_or_of_one() -> None:
    assert (taken(WINDOW, "total").rate, taken(WINDOW, "request").rate) == (70.0, 35.0)


def test_latencies_are_medians_and_doubts_are_told_once() -> None:
    gathering = Gathering((60.0, None), 300.0)
    for ttft in (0.1, 0.3, 0.2):
        doubtful = replace(WINDOW, ttft_s=Spread(ttft, ttft, ttft), doubts=(f"it was busy: {LOWER_BOUND}",))
        gathering.add(taken(doubtful, "total"))
    found = gathering.result()
    assert dict(found.latencies) == {"ttft": 0.2, "e2e": 1.0}
    assert (found.doubts, found.understated) == ((f"it was busy: {LOWER_BOUND}",), True)
    assert not filled(Gathering((60.0, None), 300.0), 70.0).result().understated


def test_a_block_of_a_comparison_is_one_ratio_in_which_drift_cancels() -> None:
    gathering = Gathering((2.0, None), 300.0)
    gathering.add_block((at(100.0), at(110.0)), (at(50.0), at(55.0)))
    (ratio,) = gathering.result().samples
    assert ratio == pytest.approx(2.0, rel=0.01)


def test_a_block_with_a_sample_that_does_not_count_is_no_ratio() -> None:
    gathering = Gathering((2.0, None), 300.0)
    gathering.add_block((at(100.0), taken(WINDOW, "total", "GPU-a: power limit")), (at(50.0), at(50.0)))
    assert gathering.result().samples == ()
    assert gathering.result().rejected == ("GPU-a: power limit",)


def test_an_interrupt_while_a_server_is_warmed_up_leaves_no_load_behind() -> None:
    class Interrupting:
        url = "http://127.0.0.1:9"
        facts = None

        @property
        def alive(self) -> bool:
            raise KeyboardInterrupt

    live = SimpleNamespace(boot=Interrupting(), loads=count(1), spec=SimpleNamespace(flags=()), served="m")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        Loaded(live, ExpectToks(1.0)).__enter__()  # type: ignore[arg-type]
    left = [one for one in psutil.Process().children(recursive=True) if one not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


def test_a_sample_that_the_time_was_too_short_for_is_nobodys_fault() -> None:
    clock = Clock()
    gathering = Gathering((60.0, None), 10.0, clock=clock)
    clock.now = 11.0
    gathering.add(taken(Window.failure("no window was complete in the time given", 0.0, 1.0, ours=True), "total"))
    found = gathering.result()
    assert (found.ours, found.failed, found.samples) == (None, (), ())
    assert found.doubts == ("the time given was over before a sample was complete",)
