"""Which lines of a log belong to which traceback, when ranks and processes print theirs at the same time.

It follows and ends them; what a traceback says is decided by whoever it is handed to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .blocks import HEADER, Block, Spoken, is_exception_line, is_frame_line
from .boot import Boot
from .lines import Peeled

#: So many tracebacks are followed at a time, and none for longer than so many lines.
MOST: Final = 64
_OLD: Final = 4096
#: A terminal may have broken a line that is at least so long.
_BREAKS_AT: Final = 60
_TEXT_LIMIT: Final = 4000
#: The traceback of a process of vLLM whose lines do not name it.
_NAMELESS: Final = "(vLLM)"


def _key_of(peeled: Peeled) -> str:
    """Whose traceback a line belongs to; "" where only the lines around it tell."""
    return peeled.source or (_NAMELESS if peeled.engine == "vllm" and peeled.logged else "")


class Tracebacks:
    """The open tracebacks of one log. ``ended`` is called with each that ends, before it is forgotten."""

    def __init__(self, boot: Boot, advice: tuple[str, ...], ended: Callable[[Block], None]) -> None:
        self._boot = boot
        self._advice = advice
        self._ended = ended
        self._open: dict[str, Block] = {}
        #: The one that lines without a prefix belong to.
        self._current: str | None = None
        #: The last exception's line and whose it was: a terminal may have broken it in two.
        self._broken: tuple[int, str] = (-1, "")

    @property
    def state(self) -> tuple[object, ...]:
        """Equal as long as nothing changed."""
        return (self._current, len(self._open))

    @property
    def any_open(self) -> bool:
        """Whether any traceback is being followed."""
        return bool(self._open) or self._current is not None

    @property
    def in_frames(self) -> bool:
        """Whether one has begun whose exception has not been printed yet."""
        return any(block.in_frames for block in self._open.values())

    def end_all(self) -> None:
        """The log is complete."""
        for key in list(self._open):
            self._close(key)

    def end_old(self, number: int) -> None:
        """End what has been open for too long; called with every line's number."""
        if self._open and not number % _OLD:
            for key in [key for key, block in self._open.items() if number - block.line > _OLD]:
                self._close(key)

    def separate(self, peeled: Peeled) -> None:
        """A logger's line ends the traceback that it does not belong to."""
        key = _key_of(peeled)
        others = peeled.engine == "sglang" or not peeled.source
        if self._current is not None and others and not (peeled.level == "error" and key == self._current):
            self._close(self._current)
        if peeled.level != "error" and peeled.engine != "sglang":
            block = self._open.get(key)
            # Several processes of vLLM 0.6 log without a name: one of them goes on while another dies.
            if block is not None and not (key == _NAMELESS and block.in_frames):
                self._close(key)

    def warned(self, peeled: Peeled) -> None:
        """What follows a warning without a prefix is of the warning, not of the traceback before it."""
        key = self._current
        if key in self._open and not (peeled.source or peeled.logged or self._open[key].in_frames):
            self._close(key)

    def begin(self, number: int, body: str, peeled: Peeled, died: bool) -> Block:
        """A traceback begins, or goes on, with this line; ``died``: it was announced as the end of the engine."""
        key = _key_of(peeled)
        current = self._open.get(self._current) if self._current is not None else None
        if current is not None and current.awaits_header and not peeled.logged and not died and not key:
            current.feed(number, body, self._advice)
            return current
        previous = self._open.get(key)
        if previous is not None and not previous.spoken and previous.died and not died:
            # "EngineCore failed to start." and its traceback, on lines of their own.
            previous.feed(number, body if HEADER in body else HEADER, self._advice)
            self._goes_on(key, peeled)
            return previous
        if previous is not None and not peeled.logged and HEADER in body:
            previous.feed(number, body, self._advice)
            self._goes_on(key, peeled)
            return previous
        if previous is not None:
            self._close(key)
        while len(self._open) >= MOST:
            self._close(next(iter(self._open)))
        memory = self._boot.store.ranks.get(peeled.source)
        pool_done = memory is not None and memory.pool_done
        phase = self._boot.phase_of(peeled.source)
        block = Block(peeled.source, died, number, body[:_TEXT_LIMIT], phase, pool_done, peeled.place)
        block.awaits_header = HEADER not in body
        self._open[key] = block
        self._goes_on(key, peeled)
        return block

    def take(self, number: int, body: str, peeled: Peeled) -> tuple[Block, list[Spoken]] | None:
        """The traceback that a line belongs to, and what it says in it; None when it belongs to none."""
        key = _key_of(peeled) or self._current
        if key is None and number == self._broken[0] + 1 and body[:1].islower():
            key = self._broken[1]
        block = self._open.get(key) if key is not None else None
        if block is None:
            if (peeled.logged and peeled.level != "error") or not (is_frame_line(body) or is_exception_line(body)):
                return None
            block = self.begin(number, body, peeled, died=False)
        spoken = block.feed(number, body, self._advice)
        if spoken and key is not None and len(body) >= _BREAKS_AT:
            self._broken = number, key
        return block, spoken

    def _goes_on(self, key: str, peeled: Peeled) -> None:
        """Lines without a prefix belong to this block from here on, unless its own lines all have one."""
        named = peeled.worker or (peeled.engine == "vllm" if peeled.logged else peeled.source)
        self._current = None if named else key

    def _close(self, key: str) -> None:
        block = self._open.pop(key, None)
        if self._current == key:
            self._current = None
        if block is not None:
            self._ended(block)
