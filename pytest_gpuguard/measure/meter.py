"""The meter of tokens per second: a closed loop of streamed requests, and steady windows cut out of it.

The load comes from processes of its own (`meter_child`); this side only says when, and adds up. It must never raise
for what a server or a child does: that is ``Window.failed``.
"""

from __future__ import annotations

import base64
import os
import queue
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import ceil, inf
from types import TracebackType
from typing import Any, Final

from .load import Load, Spread, Window
from .meter_doubts import BUSY, doubts_of
from .meter_process import MeterProcess
from .meter_pulse import shared_memory
from .stream import Reply

#: A window holds so many rounds of the slot that bounds it: fewer would show whole rounds as noise.
ROUNDS: Final = 3
#: Slots of one process, until it is known how busy they keep it.
SLOTS_PER_PROCESS: Final = 64
#: A child says something every second; one that is silent for so long hangs.
_HANG_S: Final = 20.0
_START_S: Final = 60.0
#: A window may begin where the last one ended if it is asked for this soon.
_CONTIGUOUS_S: Final = 0.25
_POLL_S: Final = 0.1
#: A request is lost when meanwhile so many rounds of all were served, and so many seconds went by. A server that serves
#: in turns has served every request in one round.
_LOST_ROUNDS: Final = 20
_LOST_S: Final = 60.0
#: Prompts of the next generation of children begin so much later.
_FIRST_STEP: Final = 1_000_000


class _Failed(Exception):
    """No figure can come of this window; the text says why. ``ours``: it says nothing of the server."""

    def __init__(self, text: str, ours: bool = False) -> None:
        super().__init__(text)
        self.ours = ours


class Meter:
    """A closed loop of ``load.concurrency`` requests against the server at ``url``; a context manager.

    The loop starts with the first window and runs on between windows until `pause` or the end of the ``with`` block:
    only its first requests ramp up, and only its last ones drain, and no window contains either. A window is bounded
    by completions of one slot. Where all requests have the same length they finish nearly together, so a window that
    is cut at any completion would hold a broken number of rounds; between two completions of one slot the number is
    whole, and where requests are not in step that slot's completions are as good as any. ``alive`` is asked every
    0.1 s; a server that sends nothing for ``silence_s``, to none of the requests, has failed: one that waits in its
    queue may wait for longer, but not ``lost_s`` and
    20 rounds of the others. ``processes=None`` begins with one process for
    64 slots, and takes more after `warm_up` if that kept one more than half busy.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        load: Load,
        *,
        model: str | None = None,
        alive: Callable[[], bool] = lambda: True,
        silence_s: float = 60.0,
        lost_s: float = _LOST_S,
        processes: int | None = None,
    ) -> None:
        if processes is not None and processes < 1:
            raise ValueError(f"processes must be at least 1: {processes}")
        if not silence_s > 0:
            raise ValueError(f"silence_s must be above 0: {silence_s}")
        self._load, self._alive, self._lost_s = load, alive, lost_s
        self._config = {
            **{"url": url, "headers": dict(headers), "load": asdict(load), "model": model, "silence_s": silence_s},
        }
        self._fixed = processes is not None
        self._wanted = min(load.concurrency, processes or ceil(load.concurrency / SLOTS_PER_PROCESS))
        self._inbox: queue.SimpleQueue[tuple[MeterProcess, dict[str, Any] | None]] = queue.SimpleQueue()
        self._children: list[MeterProcess] = []
        self._generation = 0
        self._asked = 0
        self._running = False
        self._ended: float | None = None  # of the last window, while the loop has been running since
        self._busy = 0.0
        self._looked = 0.0  # when ``alive`` was asked
        self._done: list[tuple[int, Reply]] = []
        self._warm: dict[int, tuple[float, int]] = {}  # of a slot, when its last request ended and as which of all
        self._served, self._began = 0, 0.0  # of the loop that runs

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def processes(self) -> int:
        """How many processes generate the load."""
        return self._wanted

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that generate the load now."""
        return tuple(child.pid for child in self._children)

    @property
    def busy(self) -> float:
        """The share of one core that the busiest process used in the last window."""
        return self._busy

    def warm_up(self) -> Window:
        """A window of one round at least, to be discarded; afterwards the load has as many processes as it needs."""
        window = self.sample(1.0, rounds=1)
        spare = (os.cpu_count() or 1) - self._wanted
        if window.failed is None and self._busy >= BUSY and not self._fixed and spare > 0:
            needed = ceil(self._wanted * self._busy / (BUSY / 2))
            more = min(needed, self._wanted + spare, self._load.concurrency)
            if more > self._wanted:
                self.close()
                self._wanted = more
                window = self.sample(1.0, rounds=1)
        return window

    def sample(self, least_s: float = 1.0, *, rounds: int = ROUNDS, most_s: float = 1800.0) -> Window:
        """A window of at least ``least_s`` seconds and ``rounds`` requests per slot; fails after ``most_s`` seconds."""
        called = time.monotonic()
        try:
            return self._window(least_s, rounds, called, called + most_s)
        except _Failed as failure:
            self._drop()
            return Window.failure(str(failure), called, time.monotonic(), failure.ours)

    def pause(self) -> None:
        """Take the load off the server, in-flight requests are cut off; the next window ramps up anew."""
        if self._running:
            try:
                self._ask("stop", time.monotonic() + _HANG_S)
            except _Failed:
                self.close()
        self._drop(stop=False)

    def close(self) -> None:
        """End all children."""
        for child in self._children:
            child.kill()
        self._children = []
        self._inbox = queue.SimpleQueue()
        self._drop(stop=False)

    def _drop(self, stop: bool = True) -> None:
        """Forget the loop's state; children that may still be in a loop are ended."""
        if stop and self._children:
            self.close()
        self._running, self._ended, self._done, self._warm = False, None, [], {}

    def _window(self, least_s: float, rounds: int, called: float, deadline: float) -> Window:
        self._go(deadline)
        if self._ended is None or called - self._ended > _CONTIGUOUS_S:
            self._absorb()
            start = self._boundary(called, deadline, steady=True)
        else:
            start = self._ended
        for child in self._children:
            child.tell(op="open", start=start)
        end = start
        self._done = [(slot, reply) for slot, reply in self._done if reply.ended > start]
        for number in range(1, 1_000_000_000):
            end = self._boundary(end, deadline)
            if number >= rounds and end - start >= least_s:
                break
        counted = self._ask("count", deadline, start=start, end=end)
        self._ended = end
        replies = [reply for _, reply in self._done if start < reply.ended <= end]
        return self._sum_up(start, end, replies, counted)

    def _go(self, deadline: float) -> None:
        """Start children and the loop, where they are not running."""
        if not self._children:
            try:
                pulse = shared_memory(self._wanted)
                try:
                    for index in range(self._wanted):
                        self._children.append(self._start(index, pulse))
                finally:
                    os.close(pulse)  # the children have it
            except OSError as error:
                raise _Failed(f"the meter cannot start its processes: {error}", ours=True) from None
            self._generation += 1
            waiting = set(self._children)
            while waiting:
                child, message = self._next(min(deadline, time.monotonic() + _START_S), "the meter did not start")
                if "ready" in message:
                    waiting.discard(child)
        if not self._running:
            self._done, self._warm, self._ended, self._running = [], {}, None, True
            self._began, self._served = time.monotonic(), 0
            for child in self._children:
                child.tell(op="go")

    def _start(self, index: int, pulse: int) -> MeterProcess:
        slots = list(range(index, self._load.concurrency, self._wanted))
        first = self._generation * _FIRST_STEP * self._load.concurrency
        own = {"slots": slots, "first": first, "pulse": pulse, "place": index}
        return MeterProcess({**self._config, **own}, self._inbox)

    def _boundary(self, after: float, deadline: float, steady: bool = False) -> float:
        """When slot 0 completed a request, later than ``after``; ``steady``: and every slot has completed one."""
        looked = 0
        while True:
            for slot, reply in self._done[looked:]:
                ready = not steady or len(self._warm) == self._load.concurrency
                if slot == 0 and reply.ended > after and ready:
                    return reply.ended
            looked = len(self._done)
            self._next(deadline, "no window was complete in the time given: fewer output tokens, or more time, help")

    def _absorb(self) -> None:
        """Take in what has come meanwhile."""
        while not self._inbox.empty():
            self._next(inf, "")
        self._done = []

    def _ask(self, op: str, deadline: float, **arguments: float) -> list[dict[str, Any]]:
        """The answers of all children to a command."""
        self._asked += 1
        for child in self._children:
            child.tell(op=op, id=self._asked, **arguments)
        answers: list[dict[str, Any]] = []
        until = max(deadline, time.monotonic() + _HANG_S)  # once: what else is said meanwhile is no answer
        while len(answers) < len(self._children):
            _, message = self._next(until, "the meter did not answer")
            if message.get("id") == self._asked:
                answers.append(message)
        return answers

    def _next(self, deadline: float, late: str) -> tuple[MeterProcess, dict[str, Any]]:
        """The next message, after it was noted. Raises when there will be none that helps."""
        while True:
            try:
                child, message = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                message = {}
            now = time.monotonic()
            if message and "crashed" in message:
                raise _Failed(f"a process of the meter crashed: {message['crashed']}", ours=True)
            if message is None:
                raise _Failed(f"a process of the meter {child.fate()}", ours=True)
            if "done" in message:
                reply = Reply(**message["done"])
                if reply.failed:
                    raise _Failed(reply.failed)
                self._done.append((message["slot"], reply))
                self._served += 1
                self._warm[message["slot"]] = reply.ended, self._served
            if now > deadline:
                raise _Failed(late, ours=True)
            if now - self._looked >= _POLL_S:
                self._looked = now
                if not self._alive():
                    raise _Failed("the server is no longer alive")
                self._look_for_lost(now)
            silent = [one for one in self._children if now - one.heard > _HANG_S]
            if silent:
                raise _Failed(f"a process of the meter hangs: nothing heard of it for {_HANG_S:g} s", ours=True)
            if message:
                return child, message

    def _look_for_lost(self, now: float) -> None:
        """Raise if one request gets no end while all others do. All are of one length, so none is just long."""
        for slot in range(self._load.concurrency):
            since, number = self._warm.get(slot, (self._began, 0))
            others = self._served - number
            if now - since > self._lost_s and others > _LOST_ROUNDS * self._load.concurrency:
                waited = f"within {now - since:.0f} s, while {others} others were"
                raise _Failed(f"a request was not answered to its end {waited}")

    def _sum_up(self, start: float, end: float, replies: list[Reply], answers: list[dict[str, Any]]) -> Window:
        tokens, gaps = array("i"), array("f")
        for answer in answers:
            tokens.frombytes(base64.b64decode(answer["counted"]["tokens"]))
            gaps.frombytes(base64.b64decode(answer["counted"]["gaps"]))
        self._busy = max(answer["counted"]["busy"] for answer in answers)
        late_s = max(answer["counted"]["late_s"] for answer in answers)
        # Where the server does not count in its events, one event may carry several tokens: its sums correct that.
        known = [reply for reply in replies if reply.by_events and reply.usage is not None]
        seen = sum(reply.tokens for reply in known)
        scale = sum(reply.usage or 0 for reply in known) / seen if seen else 1.0
        output = round(sum(tokens) * scale)
        seconds = end - start
        begun = sum(1 for gap in gaps if gap < 0)
        itl = [(gap / count, count) for gap, count in zip(gaps, tokens, strict=True) if gap >= 0]
        rates = [_tokens(reply) / (reply.ended - reply.started) for reply in replies]
        return Window(
            output_toks=output / seconds,
            total_toks=(output + begun * self._load.input_len) / seconds,
            request_toks=sum(rates) / len(rates),
            ttft_s=Spread.of((reply.first - reply.started, 1) for reply in replies if reply.first is not None),
            itl_s=Spread.of(itl),
            e2e_s=Spread.of((reply.ended - reply.started, 1) for reply in replies),
            requests=len(replies),
            tokens=output,
            seconds=seconds,
            started=start,
            ended=end,
            doubts=doubts_of(self._load, replies, self._busy, late_s),
        )


def _tokens(reply: Reply) -> int:
    """Tokens of a reply; where they were counted by events, the server's sum is better."""
    return reply.usage if reply.by_events and reply.usage is not None else reply.tokens
