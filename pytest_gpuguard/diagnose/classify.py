"""Read a whole log, text or file, and say what it shows. A live log is read by ``engines.log.LogReader``."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from ..claims.observation import LogReading
from .intake import Intake
from .stream import Classifier

#: How much of a log is read at a time.
CHUNK: Final = 1 << 20


def classify_text(text: str | bytes, engine: str | None = "sglang", version: str | None = None) -> LogReading:
    """What a whole log says. ``engine=None`` asks every engine's signatures and detects the engine.

    ``fatal`` is then also True for an exception that the log ends with. A log that ends in the middle of a healthy
    boot is ``starting``.
    """
    data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
    return classify_stream(BytesIO(data), engine, version)


def classify_file(path: str | Path, engine: str | None = "sglang", version: str | None = None) -> LogReading:
    """What a log file says, in constant memory. Raises OSError when it cannot be read."""
    with Path(path).open("rb") as stream:
        return classify_stream(stream, engine, version)


def classify_stream(stream: BinaryIO, engine: str | None = "sglang", version: str | None = None) -> LogReading:
    """What a whole log says that is read from an open binary stream, in constant memory."""
    classifier = Classifier(engine, version)
    intake = Intake(classifier)
    while chunk := stream.read(CHUNK):
        intake.feed(chunk)
    intake.close()
    return classifier.reading()
