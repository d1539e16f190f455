"""The output of a probe, read as it comes, and how its run ended.

Only an answer with this run's own number counts; the first one, whatever is printed after it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .claims.outcome import OUTCOMES, READY, STARTING, UNKNOWN

if TYPE_CHECKING:
    from .engines.log import LogReader
    from .engines.process import ServerProcess

#: A probe that prints more than this (bytes) is ended.
MOST_PRINTED: Final = 16 * 1024 * 1024
_POLL_S: Final = 0.02
_MARK: Final = b"gpuguard-probe"
#: Who may take long over a kernel that nobody has compiled here yet.
_COMPILERS: Final = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "ninja", "fatbinary", "nvlink", "cc1"})


class Watched:
    """One run. ``answer`` is what the script said at its end, None when it never came to that."""

    def __init__(self, log: Path, nonce: str, reader: LogReader) -> None:
        self.reader = reader
        self.answer: dict[str, Any] | None = None
        self.answered_at = 0
        self.stage = "start"
        self.killed = False
        self._log = log
        self._mark = _MARK + b"-" + nonce.encode() + b": "
        self._rest = b""
        self._lines = 0

    def wait(self, process: ServerProcess, until: float, limit_s: float) -> tuple[str, str | None]:
        """Outcome and note once it has answered, ended, printed too much, or its time is over."""
        with self._log.open("rb") as file:
            while True:
                ended = process.poll()
                flooded = os.fstat(file.fileno()).st_size > MOST_PRINTED
                data = file.read(1 << 20)
                self._take(data)
                if self.answer is not None:
                    return self._answered()
                if flooded:
                    return UNKNOWN, f"it printed more than {MOST_PRINTED >> 20} MiB, and was ended{self._where()}"
                late = time.monotonic() >= until
                if data and not late:
                    continue
                if ended is not None and not data:
                    self._take(b"\n")  # the last line may have no end
                    return self._answered() if self.answer is not None else self._died(ended.code, ended.lost)
                if late:
                    return self._late(process, limit_s)
                time.sleep(_POLL_S)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._lines += 1
            # Something may have been printed before it without an end of line, such as a progress bar.
            at = line.find(self._mark)
            told = _told(line[at + len(self._mark) :]) if at >= 0 and self.answer is None else None
            if told is not None:
                self.answer, self.answered_at = told, self._lines
            stage = line.find(_MARK + b": stage ")
            if stage >= 0:
                self.stage = line[stage + len(_MARK + b": stage ") :].decode("utf-8", "replace")[:200]
            shown = min((one for one in (at, stage) if one >= 0), default=len(line))
            self.reader.feed(line[:shown] + b"\n")  # an empty line too, so that line numbers are the log's

    def _answered(self) -> tuple[str, str | None]:
        assert self.answer is not None
        defect = self.answer.get("defect")
        if defect is None:
            return READY, None
        outcome = str(defect[0])
        return (outcome, None) if outcome in OUTCOMES - {READY, STARTING} else (UNKNOWN, f"{outcome}: {defect[1]}")

    def _died(self, code: int | None, lost: bool) -> tuple[str, str | None]:
        if lost:
            return "infra.lost", "the probe's warden was killed, and took it along"
        self.killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        how = f"was ended by {_signal(-code)}" if code is not None and code < 0 else f"ended with status {code}"
        said = f"it {how} without an answer{self._where()}"
        reading = self.reader.closed()
        known = reading.outcome not in (READY, STARTING, UNKNOWN)
        return (reading.outcome, None) if known else (UNKNOWN, said)

    def _late(self, process: ServerProcess, limit_s: float) -> tuple[str, str | None]:
        unheard = process.unheard()
        if unheard is not None:
            return unheard
        compilers = _compilers_of(process)
        said = f"it did not end within {limit_s:g} s{self._where()}"
        if compilers:
            return "infra.deadline", f"{said}: {', '.join(compilers)} still at work, so the kernel caches were cold"
        return "hang.timeout", said

    def _where(self) -> str:
        return f", in stage {self.stage!r}"


def _told(text: bytes) -> dict[str, Any] | None:
    """An answer's JSON; None for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    pairs = [found.get(one) for one in ("defect", "absent")] if isinstance(found, dict) else [()]
    fine = all(one is None or (isinstance(one, list) and len(one) == 2) for one in pairs)
    return found if isinstance(found, dict) and fine and isinstance(found.get("answer"), dict) else None


def _compilers_of(process: ServerProcess) -> list[str]:
    found = set()
    for pid in process.pids():
        try:
            found.add(Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue  # gone meanwhile
    return sorted(found & _COMPILERS)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
