"""pytest-timeout and claims: its limit counts the test's own code, never the boot, and ends as a verdict.

A claim's boot has its own ``boot_timeout``. The timer is started where pytest-timeout would start its own, and stands
still while a server boots.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

TIMER: Final = pytest.StashKey["ItemTimer"]()
#: After the thread method has asked the test to end, it may take so long before the process is given up.
LAST_GRACE_S: Final = 5.0


class ClaimTimeout(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """The test's own time is up. Not an ``Exception``, so that a body's ``except Exception`` does not swallow it."""


class ItemTimer:
    """The clock of one test. ``method`` is pytest-timeout's: ``signal`` or ``thread``.

    ``on_expire`` stops the test's servers and returns what to say of them; ``uncapture`` makes stderr the terminal's
    again, for the last words of a process that is given up. Both are called from the timer's thread only.
    """

    def __init__(
        self, seconds: float, method: str, on_expire: Callable[[], str], uncapture: Callable[[], None] = lambda: None
    ) -> None:
        self.seconds = seconds
        self.expired = False
        self._method = method if method != "signal" or _in_main_thread() else "thread"
        self._on_expire = on_expire
        self._uncapture = uncapture
        self._left = seconds
        self._running_since: float | None = None
        self._thread: threading.Timer | None = None
        self._answered = threading.Event()
        self._target = threading.get_ident()
        self._lock = threading.Lock()

    def anew(self) -> ItemTimer:
        """A clock like this one that has not run yet: for the same code run again."""
        return ItemTimer(self.seconds, self._method, self._on_expire, self._uncapture)

    @property
    def message(self) -> str:
        """What is said when it is up."""
        return f"the test's time-out of {self.seconds:g} s passed (boots are not counted)"

    def start(self) -> None:
        """Let the clock run."""
        if self._running_since is not None or self.expired:
            return
        self._running_since = time.monotonic()
        left = max(self._left, 0.001)  # a boot may begin in the last moment, but cannot extend the time
        if self._method == "signal":
            signal.signal(signal.SIGALRM, self._on_signal)
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            self._thread = threading.Timer(left, self._on_thread)
            self._thread.daemon = True
            self._thread.start()

    def pause(self) -> None:
        """Stop the clock; ``start`` lets it go on where it stood. Nothing of it strikes after this has returned."""
        while True:
            try:
                return self._pause()
            except ClaimTimeout:
                continue  # it struck in here: ``expired`` says so

    #: The test is over.
    cancel = pause

    def _pause(self) -> None:
        if self._method == "signal":
            if self._running_since is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                self._stand()
            return
        with self._lock:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._target), None)
            self._answered.set()
            if self._thread is not None:
                self._thread.cancel()
            self._stand()

    def _stand(self) -> None:
        if self._running_since is not None:
            self._left -= time.monotonic() - self._running_since
            self._running_since = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if _debugging():
            return
        self.expired = True
        raise ClaimTimeout(self.message, pytrace=False)

    def _on_thread(self) -> None:
        """Ask the test to end: its server is stopped, which wakes a blocked request; then an exception in its thread.

        Code that blocks elsewhere cannot be woken from a thread. As pytest-timeout's thread method does, the process
        is then given up, with the verdict on stderr; the warden takes the server along.
        """
        with self._lock:
            if self._running_since is None or _debugging():
                return
            self.expired = True
            self._answered.clear()
        said = self._on_expire()
        with self._lock:
            if self._answered.is_set():
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._target), ctypes.py_object(_AsyncTimeout))
        if self._answered.wait(LAST_GRACE_S):
            return
        self._uncapture()
        stderr = sys.__stderr__
        if stderr is not None:
            stderr.write(f"\ngpuguard: INFRA (infra.deadline): {self.message}\n{said}\n")
            stderr.flush()
            faulthandler.dump_traceback(stderr)
        os._exit(1)


class _AsyncTimeout(ClaimTimeout):
    """ClaimTimeout without arguments, as an exception from another thread must be."""

    def __init__(self) -> None:
        super().__init__("the test's time-out passed (boots are not counted)", pytrace=False)


def _in_main_thread() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _debugging() -> bool:
    import pytest_timeout

    return bool(pytest_timeout.is_debugging())
