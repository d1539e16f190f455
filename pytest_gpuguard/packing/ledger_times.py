"""How long claims took where they were last verified, out of a ledger that other machines may have written.

It must never make or change a ledger, nor keep a run from its start: what cannot be read is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..files import read_json, write_json
from .history import Seconds
from .history_file import number_of

if TYPE_CHECKING:
    from ..ledger.record import Record

#: In the folder that xdist's workers share facts through.
TIMES: Final = "times.json"
#: What a server is expected to take to stop, in seconds: the ledger knows how long boots took, and not their stop.
STOP_S: Final = 30.0
#: No claim takes so long, in seconds: what says so is not believed.
TOO_LONG_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Took:
    """What a claim took where it was last verified on this stack and these kinds of cards."""

    stack: str
    cards: tuple[str, ...]
    when: float
    seconds: Seconds


#: By the claim's name in the ledger.
Times = Mapping[str, Sequence[Took]]


def times_in(url: str | None) -> Times:
    """What the ledger at ``url`` knows; nothing where there is none (yet), where it cannot be read, or where it is of
    another version: to plan changes nothing.
    """
    from ..ledger.errors import LedgerError
    from ..ledger.file import answers, path_in

    try:
        path = path_in(url) if url is not None else None
        if url is None or (path is not None and not os.path.exists(path)):
            return {}
        with answers(url, make=False) as ledger:
            present = ledger.aliases()
            return _under_all_names(times_of(ledger.latest_with("seconds")), present)
    except LedgerError:
        return {}  # told where this run is to be kept


def times_of(records: Iterable[Record]) -> dict[str, list[Took]]:
    """Those of records that say how long they took, boots with ``STOP_S`` for their stop, which no record knows."""
    found: dict[str, list[Took]] = {}
    for one in records:
        seconds = _seconds(one.evidence.get("seconds"))
        if seconds is not None:
            found.setdefault(one.claim, []).append(Took(one.stack, one.cards, one.when, seconds))
    return found


def expected(known: Sequence[Took], stack: str, cards: Iterable[str]) -> Seconds | None:
    """What a claim is expected to take here: as last on such cards, on the stack of this name if it ran there."""
    here = set(cards)
    able = [one for one in known if here.issuperset(one.cards)]
    last = max(able, key=lambda one: (one.stack == stack, one.when), default=None)
    return last.seconds if last is not None else None


def write_times(times: Times, folder: Path) -> None:
    """The controller's side."""
    data = {
        claim: [[one.stack, list(one.cards), one.when, one.seconds.boot, one.seconds.rest] for one in found]
        for claim, found in times.items()
    }
    write_json(folder / TIMES, data)


def read_times(folder: Path) -> Times:
    """The worker's side; empty where the controller wrote nothing."""
    return {
        claim: [Took(stack, tuple(cards), when, Seconds(boot, rest)) for stack, cards, when, boot, rest in found]
        for claim, found in (read_json(folder / TIMES) or {}).items()
    }


def _under_all_names(times: dict[str, list[Took]], present: Mapping[str, str]) -> Times:
    """A claim may still run under its old name."""
    return {**{old: times[new] for old, new in present.items() if new in times}, **times}


def _seconds(data: Any) -> Seconds | None:
    """What a payload says; None for what is none: a ledger may have been imported."""
    if not isinstance(data, Mapping):
        return None
    boot = data.get("boot")
    try:
        rest = number_of(data.get("rest"), TOO_LONG_S)
        return Seconds(None if boot is None else number_of(boot, TOO_LONG_S) + STOP_S, rest)
    except ValueError:
        return None
