"""Follow tracebacks through a log: which lines are stack frames, which is the exception, what still belongs to it.

Memory is bounded however long a traceback is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

HEADER: Final = "Traceback (most recent call last)"
_CHAINED: Final = (
    "During handling of the above exception, another exception occurred",
    "The above exception was the direct cause of the following exception",
)
_FRAME_CHARS: Final = 300
_FRAMES: Final = 60
_MORE_LINES: Final = 32
_EXCEPTION: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]{0,200})(?::(?: (?P<message>.*))?)?$", re.DOTALL)
_BARE: Final = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,8}(?:[A-Z]\w{0,60})?(?:Error|Exception|OutOfResources|OutOfMemory)(?:: |:?$)"
    r"|thread '[^'\n]{1,80}'(?: \(\d{1,9}\))? panicked at "  # Rust
    r"|\s{1,8}(?:Value|Assertion) error, "  # pydantic, within a validation error
)
#: ``File ~/x.py:49, in f(…)`` (notebooks), ``> File "…", line n, in f`` (rich).
_OTHER_FRAME: Final = re.compile(r"> File \"|File [~/][^\n:]{1,300}:\d{1,6}, in ")
_NOTEBOOK_CODE: Final = re.compile(r"(?:-{2,8}> ?)?\s{0,8}\d{1,6} ")
_UNDERLINE: Final = frozenset("^~|-+ ")


def is_exception_line(text: str) -> bool:
    """Whether a line outside any traceback has the form of one's last line (``ValueError: …``)."""
    return _BARE.match(text) is not None


def is_frame_line(text: str) -> bool:
    """Whether the line is a stack frame: ``  File "…", line n, in f``, or as notebooks and rich print it."""
    return text.lstrip()[:6] == 'File "' or _OTHER_FRAME.match(text) is not None


@dataclass(frozen=True, slots=True)
class Spoken:
    """A line of a block that says something: the exception itself, or (``more``) text that follows it."""

    line: int
    text: str
    name: str = ""
    more: bool = False
    asserted: tuple[int, str] | None = None


@dataclass(slots=True)
class Block:
    """One traceback with all that is chained to it. ``died``: it was announced as the end of the engine.

    ``awaits_header``: the next "Traceback" line belongs to it (announced on a line of its own, or chained).
    """

    source: str
    died: bool
    line: int
    header: str
    phase: str
    pool_done: bool = False
    #: The file that logged it, where the log says so.
    place: str = ""
    frames: list[str] = field(default_factory=list)
    in_frames: bool = True
    awaits_header: bool = False
    in_advice: bool = False
    wrapper_phase: str | None = None
    spoken: bool = False
    more: int = 0
    exception: Spoken | None = None
    _code: tuple[int, str] | None = None
    _flat: bool = False

    @property
    def raised(self) -> Spoken | None:
        """The ``raise`` statement that the block ended with, where its exception was not printed."""
        if self.spoken or self._code is None or not self._code[1].startswith("raise "):
            return None
        return Spoken(*self._code)

    def frames_text(self) -> str:
        """What the block was announced with, and the frames of the exception that is being printed, joined."""
        place = (f"logged by {self.place}",) if self.place else ()
        return "\n".join((*place, self.header[:_FRAME_CHARS], *self.frames))

    def feed(self, number: int, text: str, advice: tuple[str, ...]) -> list[Spoken]:
        """Take the next line of the block; returns what it says, if anything."""
        if HEADER in text:
            self.frames.clear()
            self.in_frames, self.in_advice, self.more, self.awaits_header = True, False, 0, False
            return []
        stripped = text.strip()
        if not stripped:
            return []
        if stripped.startswith(_CHAINED):
            self.in_frames, self.in_advice, self.awaits_header = True, False, True
            return []
        if self.in_advice:
            return []
        if stripped.startswith(advice):
            self.in_advice = True
            return []
        if is_frame_line(text) or text.startswith('File "'):
            self._frame(stripped)
            self._flat = text.startswith('File "')
            # Some logs print a frame after the exception: it still tells where.
            return [self.exception] if self.exception is not None and not self.in_frames else []
        if self.in_frames:
            if _NOTEBOOK_CODE.match(text):
                self._frame(stripped)
                return []
            if stripped.startswith("what():"):
                return [self._speak(number, stripped[len("what():") :].strip())]
            flat_code = self._flat and not is_exception_line(text)  # a log that lost its indentation on the way
            marks = _UNDERLINE.issuperset(stripped)
            if (text[:1].isspace() and not is_exception_line(text)) or flat_code or marks:
                self._frame(stripped)
                self._code = self._code if marks else (number, stripped)
                return []
            return [self._speak(number, text)]
        self.more += 1
        return [Spoken(number, text, more=True)] if self.more <= _MORE_LINES else []

    def _speak(self, number: int, text: str) -> Spoken:
        self.in_frames = False
        self.spoken = True
        match = _EXCEPTION.match(text)
        name = match["name"] if match is not None else ""
        bare = match is not None and not (match["message"] or "").strip()
        self.exception = Spoken(number, text, name, asserted=self._code if bare else None)
        self._code = None
        return self.exception

    def _frame(self, text: str) -> None:
        if len(self.frames) >= _FRAMES:
            del self.frames[: _FRAMES // 2]
        self.frames.append(text[:_FRAME_CHARS])
