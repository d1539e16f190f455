"""A live server's output, read as it arrives: bytes in, events out, and at any time what the log says so far.

Constant memory, any chunking, any bytes; nothing it hands out holds a secret. It never decides how a boot ended: it
says what the log shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from ..claims.observation import LogReading
from ..diagnose.boot import Event, Progress
from ..diagnose.intake import Intake
from ..diagnose.lines import Line
from ..diagnose.redact import redact
from ..diagnose.signature import SignatureFile
from ..diagnose.stream import Classifier

__all__ = ["Event", "LogReader", "Progress"]

#: How many lines ``tail`` can give, and how much of each.
TAIL_LINES: Final = 400
TAIL_CHARS: Final = 4000
#: What a decode step says that ran without CUDA graphs (sglang/srt/managers/scheduler.py). Prefill steps say it too.
_DECODE: Final = "Decode batch"
_EAGER: Final = "cuda graph: False"


class LogReader:
    """Reads one server's merged stdout and stderr.

    A watcher feeds it chunks and looks at the events: ``phase``, ``progress``, ``ready``, ``fatal``. After a ``fatal``
    event it should wait for a moment of quiet (0.2 s) and as long as ``in_traceback``, since another rank may still
    print the cause; a later ``fatal`` event then names the better line. ``reading().fatal`` stays True from then on.

    ``engine=None`` asks every engine's signatures. ``version`` (the engine's release, if known) narrows them;
    ``majors`` are the compute capabilities' majors of the GPUs, if known; ``extra`` signature files of the user's.
    """

    def __init__(
        self,
        engine: str | None = "sglang",
        version: str | None = None,
        majors: Collection[int] = (),
        extra: tuple[SignatureFile, ...] = (),
    ) -> None:
        self._classifier = Classifier(engine, version, majors, extra)
        self._intake = Intake(self._classifier, self._keep)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._closed = False
        #: Decode steps that were told to have run without CUDA graphs.
        self.eager_decodes = 0

    def feed(self, data: bytes) -> list[Event]:
        """Take the next chunk of output; returns what happened in the lines that it completes."""
        return self._intake.feed(data)

    def closed(self) -> LogReading:
        """The output has ended (the server exited, or its pipe closed): take the last, unfinished line too.

        An exception that the log ends with is then fatal. Returns the final reading; calling it again changes nothing.
        """
        if not self._closed:
            self._closed = True
            self._intake.close()
        return self.reading()

    def reading(self) -> LogReading:
        """What the output says so far."""
        return self._classifier.reading()

    def become_ready(self) -> None:
        """Somebody asked the server, and it is ready, whether its log says so or not: what it prints now is later."""
        self._classifier.become_ready()

    @property
    def progress(self) -> Progress:
        """The phase, with the last progress bar of it (checkpoint shards, captured batch sizes) if one was drawn."""
        return self._classifier.progress

    @property
    def phase(self) -> str:
        """The phase that the boot is in, one of ``claims.outcome.PHASES``."""
        return self._classifier.phase

    @property
    def in_traceback(self) -> bool:
        """Whether a traceback has begun whose exception has not been printed yet."""
        return self._classifier.in_traceback

    def tail(self, count: int = 40) -> tuple[str, ...]:
        """The last ``count`` lines (at most 400, 4000 characters of each), without secrets."""
        if count <= 0:
            return ()
        return tuple(redact(text) for text in list(self._tail)[-count:])

    def _keep(self, line: Line) -> None:
        if line.final:
            self._tail.append(line.text[:TAIL_CHARS])
            self.eager_decodes += _DECODE in line.text and _EAGER in line.text
