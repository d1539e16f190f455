"""Bytes of a log → a classifier, fast: what a serving engine repeats by the million is passed over, all else is judged.

It must never change what a log means: feeding every line to the classifier by hand gives the same reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .boot import Event
from .lines import Line, LineSplitter
from .stream import Classifier

#: How far a passed-over stretch is looked at for its last lines.
_TAIL_BYTES: Final = 1 << 16


class Intake:
    """Takes the bytes of one log, in chunks of any size.

    ``on_line`` sees every line that is judged, and the last ones of every stretch that is passed over.
    """

    def __init__(self, classifier: Classifier, on_line: Callable[[Line], None] | None = None) -> None:
        self._classifier = classifier
        self._splitter = LineSplitter()
        self._on_line = on_line

    def feed(self, data: bytes) -> list[Event]:
        """Take the next chunk; returns what happened in the lines that it completes."""
        events: list[Event] = []
        position, size = 0, len(data)
        while position < size:
            whole = self._splitter.at_start
            if whole:
                end, count = self._classifier.skim(data, position)
                if count:
                    self._passed(data, position, end, count)
                    position = end
                    continue
            end = data.find(b"\n", position) + 1 or size
            raw = data[position:end]
            for line in self._splitter.feed(raw):
                events += self._take(line)
            # The rest of a line whose beginning came before looks like a line of its own.
            self._classifier.judged(raw if whole else b"")
            position = end
        return events

    def close(self) -> list[Event]:
        """The log is complete: take the last, unfinished line too, and what was printed last and not survived."""
        events = [event for line in self._splitter.close() for event in self._take(line)]
        return events + self._classifier.close()

    def _take(self, line: Line) -> list[Event]:
        if self._on_line is not None:
            self._on_line(line)
        return self._classifier.feed(line)

    def _passed(self, data: bytes, start: int, end: int, count: int) -> None:
        first = self._splitter.number
        self._splitter.skip(count)
        self._classifier.passed(first + count - 1)
        if self._on_line is not None:
            last = data[max(start, end - _TAIL_BYTES) : end].splitlines()
            last = last[1:] if end - start > _TAIL_BYTES else last
            for offset, raw in enumerate(last, start=first + count - len(last)):
                self._on_line(Line(offset, raw.decode("utf-8", errors="replace")))
