"""The meter against a stand-in server of known speed, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuguard.measure import meter as meter_module
from pytest_gpuguard.measure.load import Load, Prompts, Window
from pytest_gpuguard.measure.meter import Meter
from tests.stream_server import stand_in

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as running:
        yield lambda *options: running.enter_context(stand_in(*options))


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def one_window(url: str, load: Load, *, headers: dict[str, str] | None = None, least_s: float = 0.3) -> Window:
    with Meter(url, headers or {}, load, silence_s=1.0) as meter:
        return meter.sample(least_s)


@pytest.mark.parametrize("api", ["generate", "completions"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_rate_is_the_servers(serve: Serve, api: str, concurrency: int) -> None:
    url = serve("--ttft", "0.1", "--itl", "0.02", "--noise", "0.1")
    window = one_window(url, Load(concurrency, output_len=16, api=api))
    assert window.failed is None
    true_s = 0.1 + 15 * 0.02
    assert window.output_toks == pytest.approx(concurrency * 16 / true_s, rel=0.15)
    assert window.total_toks == pytest.approx(concurrency * (16 + 128) / true_s, rel=0.25)
    assert window.request_toks == pytest.approx(16 / true_s, rel=0.15)
    assert window.ttft_s is not None
    assert window.itl_s is not None
    assert window.e2e_s is not None
    assert window.ttft_s.median == pytest.approx(0.1, rel=0.3)
    assert window.itl_s.mean == pytest.approx(0.02, rel=0.15)
    assert window.e2e_s.mean == pytest.approx(true_s, rel=0.15)
    assert window.requests >= 3 * concurrency - concurrency
    assert window.seconds == pytest.approx(window.ended - window.started)
    assert window.seconds >= 0.9
    assert window.output_toks == pytest.approx(window.tokens / window.seconds)


def test_the_tokens_of_a_window_are_those_that_the_server_sent_in_it(serve: Serve) -> None:
    url = serve("--ttft", "0.03", "--itl", "0.01", "--noise", "0.5")
    with Meter(url, {}, Load(6, output_len=13), processes=2) as meter:
        assert meter.warm_up().failed is None
        assert len(meter.pids) == meter.processes == 2
        first, second = meter.sample(0.8), meter.sample(0.8)
    for window in (first, second):
        sent = ask(f"{url}/truth?{window.started}&{window.ended}")
        assert window.tokens == pytest.approx(sent, abs=12)
    assert second.started == first.ended  # nothing is lost between two samples in a row
    asked = ask(f"{url}/asked")
    assert len({tuple(body["input_ids"]) for body in asked}) == len(asked)  # two processes, and no prompt twice


def test_queues_of_the_server_do_not_count_as_speed(serve: Serve) -> None:
    url = serve("--itl", "0.02", "--ttft", "0.02", "--slots", "2")
    window = one_window(url, Load(6, output_len=10))
    assert window.output_toks == pytest.approx(2 * 10 / 0.2, rel=0.15)
    assert window.request_toks < 30


def test_several_tokens_in_one_event(serve: Serve) -> None:
    url = serve("--itl", "0.01", "--ttft", "0.01", "--per-event", "4", "--crlf")
    window = one_window(url, Load(2, output_len=32))
    assert window.doubts == ()
    assert window.output_toks == pytest.approx(2 * 32 / 0.3, rel=0.2)
    assert window.itl_s is not None
    assert window.itl_s.mean == pytest.approx(0.01, rel=0.2)


def test_several_tokens_in_one_event_without_a_count_are_put_right_by_the_sum(serve: Serve) -> None:
    url = serve("--itl", "0.01", "--ttft", "0.01", "--per-event", "4", "--no-continuous-usage")
    window = one_window(url, Load(2, output_len=32, api="completions"))
    assert window.output_toks == pytest.approx(2 * 32 / 0.3, rel=0.2)
    assert any("counted tokens differ from the server's usage" in doubt for doubt in window.doubts)


def test_the_prefix_cache_is_used_or_defeated_as_asked(serve: Serve) -> None:
    url = serve("--itl", "0.01")
    assert one_window(url, Load(2, output_len=4)).doubts == ()
    again = one_window(url, Load(2, output_len=4))
    assert any("prefix cache gave" in doubt for doubt in again.doubts)
    assert one_window(url, Load(2, output_len=4, seed=1)).doubts == ()
    shared = one_window(url, Load(2, output_len=4, seed=2, cached=True))
    assert shared.doubts == ()


def test_prompts_are_sent_in_their_order(serve: Serve) -> None:
    url = serve("--itl", "0.01")
    load = Load(input_len=9, output_len=4, seed=5)
    one_window(url, load)
    asked = [body["input_ids"] for body in ask(f"{url}/asked")]
    assert asked == [Prompts(load).ids(number) for number in range(len(asked))]


def test_the_served_models_name_is_asked_for_where_none_is_given(serve: Serve) -> None:
    url = serve("--itl", "0.005")
    assert one_window(url, Load(output_len=4, api="completions")).failed is None
    with Meter(url, {}, Load(output_len=4, api="completions"), model="mine") as meter:
        assert meter.sample(0.1).failed is None
    asked = ask(f"{url}/asked")
    assert [asked[0]["model"], asked[-1]["model"]] == ["stand-in", "mine"]


@pytest.mark.parametrize("api", ["generate", "completions"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("404", "HTTP 404 from .*Not Found"),
        ("422", 'HTTP 422 from .*"msg": "Field required"'),
        ("500", "HTTP 500 from .*scheduler.*is gone"),
        ("mid", "broken in mid-stream after 9 tokens: "),
        ("truncated", "the stream ended in mid-stream after 9 tokens within an event: data: {"),
        ("malformed", 'malformed event: {"text": "abc", oops'),
        ("error-event", "the server reported an error in the stream: .*out of KV cache"),
        ("silent", r"time-out \(ReadTimeout\) before the first token: nothing came for 1 s"),
        ("silent-mid", r"time-out \(ReadTimeout\) in mid-stream after 9 tokens: nothing came for 1 s"),
        ("no-done", r"the stream ended in mid-stream after 20 tokens without \[DONE\]"),
        ("falling", "the server's token count fell from 9 to 1"),
        ("html", 'HTTP 200 from .*but no events of a stream: "<html>hello'),
    ],
)
def test_a_request_that_fails_is_the_windows_failure(serve: Serve, api: str, fault: str, says: str) -> None:
    url = serve("--itl", "0.005", "--fault", fault, "--fault-after", "2")
    called = time.monotonic()
    window = one_window(url, Load(2, output_len=20, api=api))
    assert time.monotonic() - called < 15
    assert window.failed is not None
    assert re.search(says, window.failed), window.failed
    assert "\n" not in window.failed
    assert math.isnan(window.output_toks)
    assert window.ttft_s is None


@pytest.mark.parametrize("processes", [1, 3])
def test_a_request_may_wait_in_a_queue_for_longer_than_a_server_may_be_silent(serve: Serve, processes: int) -> None:
    url = serve("--slots", "1", "--ttft", "0.02", "--itl", "0.02")
    with Meter(url, {}, Load(3, output_len=41), silence_s=1.0, processes=processes) as meter:
        window = meter.sample(0.1, rounds=1)
    assert window.failed is None
    assert window.ttft_s is not None
    assert window.ttft_s.median > 1.2
    assert window.output_toks == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize("fault", ["silent", "silent-mid"])
def test_a_server_that_is_silent_to_all_processes_has_failed(serve: Serve, fault: str) -> None:
    url = serve("--itl", "0.005", "--fault", fault, "--fault-after", "2")
    called = time.monotonic()
    with Meter(url, {}, Load(2, output_len=20), silence_s=1.0, processes=2) as meter:
        window = meter.sample(0.3)
    assert time.monotonic() - called < 15
    assert window.failed is not None
    assert window.failed.endswith(": nothing came for 1 s")
    assert not window.ours


@pytest.mark.parametrize("after", [0, 7])
def test_a_request_that_is_lost_while_others_are_served_is_a_failure_of_the_server(serve: Serve, after: int) -> None:
    url = serve("--itl", "0.002", "--fault", "silent", "--fault-once", "--fault-after", str(after))
    called = time.monotonic()
    with Meter(url, {}, Load(4, output_len=20), silence_s=60.0, lost_s=1.0) as meter:
        window = meter.sample(60.0)
    assert time.monotonic() - called < 40
    assert window.failed is not None
    assert re.match(r"a request was not answered to its end within \d+ s, while \d+ others were", window.failed)
    assert not window.ours


def test_an_aborted_request_has_failed(serve: Serve) -> None:
    window = one_window(serve("--fault", "abort"), Load())
    assert window.failed == "the server aborted the request: KV cache full"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    window = one_window(f"http://127.0.0.1:{port}", Load())
    assert window.failed is not None
    assert f"no connection to http://127.0.0.1:{port}" in window.failed


def test_what_is_no_url() -> None:
    assert one_window("nonsense", Load()).failed is not None


def test_the_key_is_sent_and_a_wrong_one_is_told(serve: Serve) -> None:
    url = serve("--api-key", "right", "--itl", "0.005")
    wrong = one_window(url, Load(output_len=4), headers={"Authorization": "Bearer wrong"})
    assert wrong.failed is not None
    assert wrong.failed.startswith("HTTP 401 from /generate: ")
    assert one_window(url, Load(output_len=4), headers={"Authorization": "Bearer right"}).failed is None


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_usage_missing_is_doubted(serve: Serve, api: str) -> None:
    url = serve("--itl", "0.01", "--ttft", "0.01", "--fault", "no-usage")
    window = one_window(url, Load(2, output_len=16, api=api))
    assert window.failed is None
    assert window.output_toks == pytest.approx(2 / 0.01, rel=0.2)
    assert any(doubt.startswith("usage missing in ") for doubt in window.doubts)


def test_fewer_tokens_than_asked_are_doubted(serve: Serve) -> None:
    url = serve("--itl", "0.01", "--ttft", "0.01", "--fault", "fewer")
    window = one_window(url, Load(output_len=16))
    assert window.output_toks == pytest.approx(1 / 0.01, rel=0.2)
    assert any("another number of tokens than asked: 11, not 16" in doubt for doubt in window.doubts)


def test_the_run_goes_on_after_a_failure(serve: Serve) -> None:
    good, bad = serve("--itl", "0.005"), serve("--fault", "500")
    with Meter(bad, {}, Load(output_len=4)) as meter:
        assert meter.sample(0.1).failed
        assert meter.sample(0.1).failed
    assert one_window(good, Load(output_len=4)).failed is None


def test_a_pause_takes_the_load_away(serve: Serve) -> None:
    url = serve("--itl", "0.01")
    with Meter(url, {}, Load(3, output_len=8)) as meter:
        before = meter.sample(0.2)
        meter.pause()
        time.sleep(0.2)
        start = time.monotonic()
        time.sleep(0.3)
        assert ask(f"{url}/truth?{start}&{time.monotonic()}") == 0
        after = meter.sample(0.2)
    assert before.failed is None
    assert after.failed is None
    assert after.started > start


def test_a_dead_server_ends_the_wait(serve: Serve) -> None:
    url = serve("--fault", "silent")
    alive = iter([True, True])
    with Meter(url, {}, Load(), alive=lambda: next(alive, False)) as meter:
        window = meter.sample()
    assert window.failed == "the server is no longer alive"


def test_a_window_that_does_not_come_ends(serve: Serve) -> None:
    url = serve("--itl", "0.05")
    called = time.monotonic()
    with Meter(url, {}, Load(output_len=1000)) as meter:
        window = meter.sample(most_s=1.5)
    assert window.failed is not None
    assert window.failed.startswith("no window was complete in the time given")
    assert time.monotonic() - called < 8


def test_within_an_event_loop(serve: Serve) -> None:
    url = serve("--itl", "0.005")

    async def measure() -> Window:
        return one_window(url, Load(output_len=4))

    assert asyncio.run(measure()).failed is None


def test_a_pause_ends_the_load_of_a_server_that_answers_at_once(serve: Serve) -> None:
    """Again and again, for an answer may come in the very moment in which its request is cancelled."""
    url = serve("--ttft", "0", "--itl", "0")
    with Meter(url, {}, Load(4, output_len=2)) as meter:
        for _ in range(40):
            began = time.monotonic()
            assert meter.sample(0.01, rounds=1).failed is None
            meter.pause()
            assert time.monotonic() - began < 15


def test_what_is_said_meanwhile_does_not_put_an_answer_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "_HANG_S", 0.3)
    meter = Meter("http://127.0.0.1:9", {}, Load())
    child = SimpleNamespace(tell=lambda **words: None, heard=math.inf, kill=lambda: None)
    meter._children = [child]  # type: ignore[list-item]

    def talk() -> None:
        for _ in range(300):
            meter._inbox.put((child, {"beat": 1.0}))  # type: ignore[arg-type]
            time.sleep(0.01)

    threading.Thread(target=talk, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(meter_module._Failed, match="did not answer"):
        meter._ask("stop", 0.0)
    assert time.monotonic() - began < 2.5
