"""Tests as the planner sees them, and which of them go to a worker together: those that share a boot, above all.

Pure. It must never put two tests on one boot that the run's pool would not let share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..claims.gpuset import GpuChoice

#: What a test costs besides its boot, as a part of what it costs alone, when nobody knows better.
BESIDE_BOOT: Final = 0.2
#: Tests that lease nothing go to a worker together: as many of one module as take so long, and no more than so many.
PLAIN_SECONDS: Final = 20.0
PLAIN_TESTS: Final = 50
#: Of all of them each worker is sent at least so many portions, if there are as many tests.
PORTIONS: Final = 4


@dataclass(frozen=True, slots=True)
class Work:
    """One test as the worker describes it. ``seconds`` is what it takes by itself, its boot included.

    ``server`` is equal for tests that may share one boot; ``uses`` when the test's own code uses its server, so that
    nobody joins it later. ``boot_seconds`` is the part of ``seconds`` that the boot takes, None when unknown.
    Where there is a budget ``urgency`` is the class of the test's value: smaller ones are worth more.
    """

    index: int
    nodeid: str
    gpus: int
    seconds: float
    exclusive: bool = False
    cpu_server: bool = False
    server: str | None = None
    uses: bool = False
    choice: GpuChoice | None = None
    boot_seconds: float | None = None
    urgency: int = 0

    @property
    def plain(self) -> bool:
        """Whether it leases nothing."""
        return not (self.gpus or self.cpu_server or self.exclusive)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tests that run one after the other on one worker, on one boot. ``seconds`` is what they take together."""

    items: tuple[int, ...]
    gpus: int
    seconds: float
    exclusive: bool = False
    cpu_server: bool = False
    choice: GpuChoice | None = None
    urgency: int = 0

    @property
    def plain(self) -> bool:
        """Whether it leases nothing: then it needs a worker only."""
        return not (self.gpus or self.cpu_server or self.exclusive)


def units_of(works: Sequence[Work], workers: int = 1) -> list[Unit]:
    """The tests in units: those that share a boot together, those that lease nothing by module, all others alone.

    For several ``workers`` those that lease nothing go in smaller portions, so that all have some.
    Of the tests whose code uses a shared server one can end the unit; each further one boots its own. Every test is
    in one unit exactly, and the tests of a unit keep the order that they were given in.
    """
    units: list[tuple[int, Unit]] = []
    shared: dict[str, list[Work]] = {}
    plain: list[Work] = []
    most_s = PLAIN_SECONDS
    if workers > 1:
        most_s = min(most_s, sum(work.seconds for work in works if work.plain) / (PORTIONS * workers))
    for work in works:
        if work.plain:
            if plain and not _together(plain, work, most_s):
                units.append((plain[0].index, _plain_unit(plain)))
                plain = []
            plain.append(work)
        elif work.server is None:
            units.append((work.index, _unit([work])))
        else:
            shared.setdefault(work.server, []).append(work)
    if plain:
        units.append((plain[0].index, _plain_unit(plain)))
    for group in shared.values():
        users = [work for work in group if work.uses]
        first = [work for work in group if not work.uses] + users[:1]
        units.append((min(work.index for work in first), _unit(first)))
        units += [(work.index, _unit([work])) for work in users[1:]]
    return [unit for _, unit in sorted(units, key=lambda one: one[0])]


def _together(plain: Sequence[Work], work: Work, most_s: float) -> bool:
    """Whether a test that leases nothing may join these: of one module, for its fixtures, and not too much."""
    same = plain[-1].nodeid.partition("::")[0] == work.nodeid.partition("::")[0]
    same = same and plain[-1].urgency == work.urgency
    return same and len(plain) < PLAIN_TESTS and sum(one.seconds for one in plain) + work.seconds <= most_s


def _plain_unit(works: Sequence[Work]) -> Unit:
    seconds = sum(work.seconds for work in works)
    return Unit(tuple(work.index for work in works), 0, seconds, urgency=works[0].urgency)


def _unit(works: Sequence[Work]) -> Unit:
    return Unit(
        tuple(work.index for work in works),
        max(work.gpus for work in works),
        _together_seconds(works),
        any(work.exclusive for work in works),
        works[0].cpu_server,
        works[0].choice,
        min(work.urgency for work in works),
    )


def _together_seconds(works: Sequence[Work]) -> float:
    """The longest one with its boot, and of each other one what it takes besides the boot that it is spared."""
    longest = max(range(len(works)), key=lambda one: works[one].seconds)
    total = works[longest].seconds
    for position, work in enumerate(works):
        if position != longest:
            boot = work.boot_seconds
            total += work.seconds * BESIDE_BOOT if boot is None else max(work.seconds - boot, 0.0)
    return total
