"""A test's own code, called with its clock running: what came of it, and the second time when a flip is confirmed.

It must never take what stops pytest for a failure of the test.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from .claims.judgement import Body
from .terms import body_of
from .timeouts import TIMER

if TYPE_CHECKING:
    from .timeouts import ItemTimer

#: Set while a test's own code runs: servers and probes are started then and at no other time.
IN_CALL: Final = pytest.StashKey[bool]()
#: Why something that the body asked for cannot be had here: what the test is then counted by.
SKIPPED: Final = pytest.StashKey[str]()
_STOPS: Final = (KeyboardInterrupt, SystemExit, pytest.exit.Exception)


@dataclass(slots=True)
class Called:
    """What became of it. ``error`` is the exception that left it."""

    body: Body = Body("not_run")  # noqa: RUF009 (frozen)
    error: BaseException | None = None

    def unless_stopped(self) -> None:
        """Raise what is to end the whole run."""
        if isinstance(self.error, _STOPS):
            raise self.error


@contextmanager
def calling(item: pytest.Function, timer: ItemTimer | None) -> Iterator[Called]:
    """Around the code of a test: its exception is kept, not passed on, and the clock stands still at the end."""
    called = Called()
    item.stash[IN_CALL] = True
    try:
        try:
            yield called
        finally:
            if timer is not None:
                timer.pause()
        called.body = Body("passed")
    except BaseException as raised:
        called.error = raised
        called.body = body_of(raised, item, item.stash.get(SKIPPED, "skip"))
    finally:
        item.stash[IN_CALL] = False
    if timer is not None:
        timer.pause()  # again: it may have struck just before the first
        if timer.expired:
            called.body = Body("timeout", timer.message)


def call_again(item: pytest.Function, timer: ItemTimer | None) -> Body:
    """Call a test's own code once more, with the fixtures that it has and a clock of its own."""
    names = inspect.signature(item.obj).parameters
    with calling(item, timer) as called:
        if timer is not None:
            item.stash[TIMER] = timer
            timer.start()
        item.obj(**{name: item.funcargs[name] for name in names if name in item.funcargs})
    called.unless_stopped()
    return called.body
