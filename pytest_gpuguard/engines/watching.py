"""What is looked at in threads of their own while a boot's log is read: memory, and the server's answers over HTTP.

A driver or a server that answers slowly must never hide the log from us.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .base import BootSpec, Engine, ServerFacts

if TYPE_CHECKING:
    from ..facts.kernel import KernelWatch
    from .process import ServerProcess

_MEMORY_EVERY_S: Final = 1.0
_HTTP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.03
#: Changes of memory below this share are noise, not progress.
_FLAT: Final = 0.01


class MemoryWatch:
    """Notes when memory last changed, in a thread: a driver that answers slowly must not hide the log from us."""

    def __init__(self, process: ServerProcess, used_bytes: Callable[[], int] | None, kernel: KernelWatch) -> None:
        self.changed = time.monotonic()
        self._process = process
        self._used_bytes = used_bytes
        self._kernel = kernel
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = 0
        while not self._over.wait(_MEMORY_EVERY_S):
            try:
                used = self._process.rss_bytes()
                self._kernel.note(self._process.seen())
                used += self._used_bytes() if self._used_bytes is not None else 0
            except Exception:
                continue
            if abs(used - last) > _FLAT * max(used, 1):
                last, self.changed = used, time.monotonic()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()


class Asking:
    """One round of HTTP questions in a thread, so that a server that does not answer cannot hide its log from us."""

    def __init__(self, engine: Engine, url: str, spec: BootSpec) -> None:
        self.facts: ServerFacts | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, url, spec), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, url: str, spec: BootSpec) -> None:
        try:
            self.facts = engine.ask(url, spec, _HTTP_TIMEOUT_S)
        except Exception:
            self.facts = None
        finally:
            time.sleep(_POLL_S)  # a server that refuses at once is asked again soon, not at once

    @property
    def done(self) -> bool:
        """Whether the round is over."""
        return not self._thread.is_alive()
