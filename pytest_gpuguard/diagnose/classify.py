"""Read a whole log, text or file, and say what it shows. A live log is read by ``engines.log.LogReader``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..claims.observation import LogReading
from .lines import LineSplitter
from .stream import Classifier


def _classify(feed: Callable[[Classifier], None], engine: str | None, version: str | None = None) -> LogReading:
    """Run one classifier over a whole log that ``feed`` hands to it."""
    classifier = Classifier(engine, version)
    feed(classifier)
    classifier.close()
    return classifier.reading()


def classify_text(text: str | bytes, engine: str | None = "sglang", version: str | None = None) -> LogReading:
    """What a whole log says. ``engine=None`` asks every engine's signatures and detects the engine.

    ``fatal`` is then also True for an exception that the log ends with. A log that ends in the middle of a healthy
    boot is ``starting``.
    """
    data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text

    def feed(classifier: Classifier) -> None:
        splitter = LineSplitter()
        for line in splitter.feed(data) + splitter.close():
            classifier.feed(line)

    return _classify(feed, engine, version)


def classify_file(path: str | Path, engine: str | None = "sglang", version: str | None = None) -> LogReading:
    """What a log file says, in constant memory. Raises OSError when it cannot be read."""

    def feed(classifier: Classifier) -> None:
        splitter = LineSplitter()
        with Path(path).open("rb") as stream:
            while chunk := stream.read(1 << 20):
                for line in splitter.feed(chunk):
                    classifier.feed(line)
        for line in splitter.close():
            classifier.feed(line)

    return _classify(feed, engine, version)
