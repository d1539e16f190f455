"""The production unit that normally owns the GPUs: stopped while a run needs them, started again after the last run.

It must never let the unit stay down because of how a run ended, and never start it while another run needs the GPUs:
both are the work of the keeper (``keeper.py``), which outlives us.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..facts.lease import require_linux
from . import keeper
from .dirs import ENV, LockDirError
from .flocks import HeldLocks, LeaseTimeout, Locks, OnWait, lock_soon, wait_for
from .keeper import open_lock, same_file
from .stay import ProductionError, Stay

__all__ = ["Production", "ProductionError"]

_MARGIN_S: Final = 60.0


class Production:
    """The production unit, as one process of a run sees it.

    ``vacate`` and ``restore`` are the words of two commands, which are run without a shell in ``cwd`` (default: the
    present folder), each for at most ``timeout_s`` seconds; what they print is appended to ``log`` (mode 0600).
    ``directory`` is the lock folder (default: the host's); ``test`` says in messages who uses the unit's GPUs.
    """

    def __init__(
        self,
        vacate: Sequence[str],
        restore: Sequence[str],
        log: Path,
        *,
        timeout_s: float,
        directory: Path | None = None,
        test: str = "",
        cwd: Path | None = None,
    ) -> None:
        if not vacate or not restore:
            raise ValueError("a production unit needs both commands, the one that stops it and the one that starts it")
        self._vacate = list(vacate)
        self._restore = list(restore)
        self._log = log.absolute()
        self._timeout_s = timeout_s
        self._directory = directory
        self._test = test
        self._cwd = os.fspath(cwd) if cwd is not None else _here()
        self._stay: Stay | None = None
        self._ending: list[Stay] = []
        self._failed: str | None = None
        self._problem: str | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors for every warden of this run (``pass_fds``): the unit stays vacated while one is open anywhere.

        Empty before ``vacate`` and after ``restore``.
        """
        return self._stay.fds if self._stay is not None else ()

    def vacate(self, on_wait: OnWait | None = None) -> None:
        """Return once the unit is vacated, by us or by another run that still holds it. May be called again.

        Waits for another run that vacates or restores it just now; ``on_wait`` as in ``lease_gpus``. A command that has
        failed is not run a second time by the same object: each try stops and starts the unit. Interrupted anywhere,
        the unit is restored. Raises ProductionError, LockDirError, UnsupportedPlatform.
        """
        require_linux("vacating a production unit")
        if self._failed is not None:
            raise ProductionError(self._failed)
        if self._stay is not None:
            self._stay.mend()
            return
        self._settle(time.monotonic())  # what an interrupted one has left
        self._problem = None
        stay = self._enter(on_wait)
        try:
            stay.start()
            stay.wait_vacated(3 * self._timeout_s + _MARGIN_S)
            if stay.failed is not None:
                self._failed = self._told(stay.failed)
                raise ProductionError(self._failed)
        except BaseException:
            stay.let_go()
            self._ending.append(stay)
            raise
        self._stay = stay

    def restore(self, wait_s: float) -> str | None:
        """Let go, and wait at most ``wait_s`` seconds until the keeper has ended; a problem in words, or None.

        The unit is restored when nothing of this run is left, unless another run holds it vacated: then whoever is
        the last restores it, which is no problem. After the time is over the keeper goes on. May be called again.
        """
        if self._stay is not None:
            self._ending.append(self._stay)
            self._stay = None
        for stay in self._ending:
            stay.let_go()
        problems = self._settle(time.monotonic() + wait_s)
        if not problems and self._problem is not None:
            return self._problem
        return "\n".join(problems) or None

    def _settle(self, deadline: float) -> list[str]:
        """Hear what became of the times that are over; problems in words, also of those that are not over yet."""
        problems = []
        for stay in list(self._ending):
            problem = stay.finish(deadline)
            if problem is not None:
                problems.append(self._clean(problem))
            if stay.done:
                self._ending.remove(stay)
                self._problem = problems[-1] if problem is not None else self._problem
        return problems

    def _enter(self, on_wait: OnWait | None) -> Stay:
        """Get through the door: alone, or beside others that hold the unit vacated."""
        locks = Locks(self._test, self._directory)
        path = locks.directory / f"{keeper.LOCK}.lock"

        def attempt() -> Stay | None:
            fd = locks.attempt(keeper.DOOR)
            if fd is None:
                return None
            door, lock = HeldLocks([fd]), HeldLocks()
            try:
                lock.add(_open(path))
                alone = lock_soon(lock.fds[0])
                if (alone or keeper.flock(lock.fds[0], shared=True)) and same_file(lock.fds[0], path):
                    return Stay(self._order(locks.directory, alone), door, lock)
            except BaseException:
                door.release()
                lock.release()
                raise
            # Somebody holds it alone without being in the door: a run whose keeper was killed.
            door.release()
            lock.release()
            return None

        wait_s = 3 * self._timeout_s + _MARGIN_S
        try:
            return wait_for(attempt, "The production unit", lambda: locks.holders([keeper.DOOR]), wait_s, on_wait)
        except LeaseTimeout as error:
            who = "".join(f"\n  {holder}" for holder in error.holders)
            raise ProductionError(
                f"The production unit was not vacated: another run has been stopping or starting it for "
                f"{error.waited_s:.0f} s.{who}\nWait until it has ended, or see what its command waits for."
            ) from None

    def _order(self, folder: Path, alone: bool) -> dict[str, Any]:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass  # without a log the unit is vacated and restored all the same
        return {
            "alone": alone,
            "folder": os.fspath(folder.absolute()),
            "vacate": self._vacate,
            "restore": self._restore,
            "timeout_s": self._timeout_s,
            "log": os.fspath(self._log),
            "cwd": self._cwd,
            "who": f"pid {os.getpid()}" + (f", {self._test}" if self._test else ""),
        }

    def _told(self, failed: dict[str, Any]) -> str:
        if failed["restored"]:
            then = "The unit was started again"
        elif failed["problem"] is not None:
            then = f"IT MAY BE DOWN: starting it again failed too: {failed['problem']}\nNothing was booted"
        else:
            then = "The unit is started again when nobody uses its GPUs any more"
        return self._clean(
            f"The production unit could not be vacated: {failed['message']}\n{then}. Try the command by hand: it gets "
            f"no terminal (sudo must not ask for a password), and no shell. Correct gpuguard_vacate, or give it more "
            f"time with gpuguard_hook_timeout. All that it printed: {self._log}"
        )

    @staticmethod
    def _clean(text: str) -> str:
        from ..diagnose.redact import redact

        return redact(text)


def _open(path: Path) -> int:
    try:
        return open_lock(path)
    except OSError as error:
        raise LockDirError(
            f"The lock file {path} cannot be opened: {error.strerror}. Only this plugin should make files there: "
            f"remove it when nobody uses it, or set {ENV} to another folder."
        ) from None


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"
