"""The process that generates a load: keeps its slots busy, notes arrivals, answers its parent in JSON lines.

A process of its own, so that neither the parent's GIL nor an event loop of the user's delays a token. It must never
outlive its parent, and never print anything but answers.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TextIO

from .load import APIS, Bodies, Load
from .meter_pulse import Pulse
from .stream import Arrivals, stream

if TYPE_CHECKING:
    import httpx

#: How often the process looks at its own clocks, and says that it lives.
TICK_S: Final = 0.05
BEAT_S: Final = 1.0
#: Arrivals are kept so long while no window is open: the parent opens one a little after it began.
_KEEP_S: Final = 10.0


class Child:
    """The slots of this process, and what they have seen."""

    def __init__(self, config: dict[str, Any], answers: TextIO) -> None:
        self.load = Load(**config["load"])
        self.url: str = config["url"]
        self.headers: dict[str, str] = config["headers"]
        self.model: str | None = config["model"]
        self.silence_s: float = config["silence_s"]
        self.pulse = Pulse(config.get("pulse"), config.get("place", 0))
        self.next = {slot: config["first"] + slot for slot in config["slots"]}
        self.answers = answers
        self.arrivals = Arrivals()
        self.opened: float | None = None
        self.running: list[asyncio.Task[None]] = []
        #: Slots look at it too: a task that is cancelled just as its answer comes may not notice (wait_for, bpo-42130).
        self.stopping = False
        #: (time, CPU seconds of this process, seconds that the tick came late)
        self.ticks: deque[tuple[float, float, float]] = deque()

    def say(self, **message: Any) -> None:
        """One answer."""
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()

    async def serve(self, commands: asyncio.Queue[dict[str, Any]]) -> None:
        """Obey commands, for ever."""
        import httpx

        from .meter_transport import Transport

        async with httpx.AsyncClient(
            base_url=self.url,
            headers={"content-type": "application/json", **self.headers, "accept-encoding": "identity"},
            timeout=None,  # the transport's affair
            transport=Transport(self.silence_s, self.pulse),
            trust_env=False,
        ) as client:
            self.model = await self._model(client)
            bodies = Bodies(self.load, self.model)
            ticker = asyncio.create_task(self._tick())
            ticker.add_done_callback(self._look)
            gc.collect()
            gc.freeze()  # the collector need not walk what was imported, between two tokens
            self.say(ready=os.getpid())
            while True:
                command = await commands.get()
                if command["op"] == "go":
                    self.stopping = False
                    self.running = [asyncio.create_task(self._slot(client, bodies, slot)) for slot in self.next]
                    for task in self.running:
                        task.add_done_callback(self._look)
                elif command["op"] == "open":
                    self.opened = command["start"]
                elif command["op"] == "count":
                    self.say(counted=self._count(command["start"], command["end"]), id=command["id"])
                elif command["op"] == "stop":
                    self.stopping = True
                    for task in self.running:
                        task.cancel()
                    await asyncio.gather(*self.running, return_exceptions=True)
                    self.opened = None
                    self.say(stopped=True, id=command["id"])

    def _look(self, task: asyncio.Task[None]) -> None:
        """End with what ended ``task``: a slot that is missing would show as a slower server."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.say(crashed=f"{type(error).__name__}: {error}")
            os._exit(1)

    async def _slot(self, client: httpx.AsyncClient, bodies: Bodies, slot: int) -> None:
        """One request after the other; ends with the first that fails."""
        path = APIS[self.load.api]
        body = bodies.body(self.next[slot])
        while not self.stopping:
            self.next[slot] += self.load.concurrency
            asked = asyncio.create_task(stream(client, path, body, self.arrivals))
            try:
                await asyncio.sleep(0)
                body = bodies.body(self.next[slot])  # while the server works on this one
                reply = await asked
            finally:
                asked.cancel()
            self.say(done=asdict(reply), slot=slot)
            if reply.failed:
                return

    def _count(self, start: float, end: float) -> dict[str, Any]:
        tokens, gaps = self.arrivals.between(start, end)
        self.arrivals.forget(end)
        self.opened = None
        within = [tick for tick in self.ticks if start <= tick[0] <= end]
        cpu = within[-1][1] - within[0][1] if len(within) > 1 else 0.0
        wall = within[-1][0] - within[0][0] if len(within) > 1 else 0.0
        return {
            "tokens": base64.b64encode(tokens.tobytes()).decode(),
            "gaps": base64.b64encode(gaps.tobytes()).decode(),
            "busy": cpu / wall if wall else 0.0,
            "late_s": sum(tick[2] for tick in within) / len(within) if within else 0.0,
        }

    async def _tick(self) -> None:
        said = time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.ticks.append((now, time.process_time(), now - before - TICK_S))
            keep = now - _KEEP_S if self.opened is None else min(self.opened, now - _KEEP_S)
            while self.ticks[0][0] < keep:
                self.ticks.popleft()
            if self.opened is None:
                self.arrivals.forget(keep)
            if now - said >= BEAT_S:
                said = now
                self.say(beat=now)

    async def _model(self, client: httpx.AsyncClient) -> str | None:
        """The name of the served model, which an OpenAI server may insist on."""
        import httpx

        if self.model or self.load.api == "generate":
            return self.model
        try:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError, TypeError):
            return None  # the first request will tell
        return str(name)


def die_with(parent: int) -> None:
    """End this process once its parent is gone, even if somebody else inherited our stdin's other end."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Read the configuration, then commands, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's affair
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not garble the answers
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    config = json.loads(sys.stdin.readline())
    child = Child(config, answers)

    async def run() -> None:
        loop, commands = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await child.serve(commands)

    asyncio.run(run())
