"""Whether a claim flips, and if so whether it does so again on fresh boots, before it is reported.

It must never make a verdict better or worse: where fresh boots disagree, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .claims.judgement import Judgement, Verdict, worst
from .claims.series import Baseline
from .files import read_json, write_json
from .ledger.flips import Index, baseline, flip_of, index
from .ledger.record import Kind, Record, Run

if TYPE_CHECKING:
    from .ledger.store import Store

#: In the folder that xdist's workers share facts through: what was verified before.
BEFORE: Final = "before.json"
RATES: Final = "rates.json"


def known_before(store: Store, run: str | None, kind: Kind) -> list[Record]:
    """What was verified before a run, under every name that its claims have or had. Raises LedgerError."""
    old: dict[str, list[str]] = {}
    for name, present in store.aliases().items():
        old.setdefault(present, []).append(name)
    known = [one for one in store.latest(kind) if one.run != run]
    return [*known, *(replace(one, claim=name) for one in known for name in old.get(one.claim, ()))]


def write_before(store: Store, run: str | None, kind: Kind, folder: Path) -> None:
    """The controller's side: what workers compare with. Raises LedgerError, OSError."""
    known = known_before(store, run, kind)
    write_json(folder / BEFORE, {"records": [replace(one, components={}).to_dict() for one in known]})


def read_before(folder: Path) -> Index:
    """The worker's side; empty where the controller wrote nothing."""
    data = read_json(folder / BEFORE) or {"records": []}
    return index(Record.from_dict(one) for one in data["records"])


def write_rates(rates: Mapping[str, Mapping[str, Baseline]], folder: Path) -> None:
    """The controller's side: what speeds workers see a decay against."""
    write_json(
        folder / RATES, {name: {load: asdict(one) for load, one in found.items()} for name, found in rates.items()}
    )


def read_rates(folder: Path, claim: str) -> dict[str, Baseline]:
    """The worker's side; empty where the controller wrote nothing."""
    found = (read_json(folder / RATES) or {}).get(claim, {})
    return {load: Baseline(**one) for load, one in found.items()}


class Confirmation:
    """Of one pytest process. ``before()`` is asked once, at the first claim that could have flipped."""

    def __init__(self, boots: int, kind: Kind, stacks: Sequence[str], before: Callable[[], Index]) -> None:
        self.boots = boots
        self._first = stacks[0] if stacks else None
        self._run = Run("now", 0.0, "", kind, "", "", None, tuple(stacks))
        self._ask = before
        self._before: Index | None = None
        self._seen: list[Record] = []

    def flips(self, data: Mapping[str, Any]) -> bool:
        """Whether a payload's verdict differs from what the claim was last verified as."""
        from .ledger.writer import records_of

        now = next(one for one in records_of(data, self._run, 0.0) if one.decides)
        if self._before is None:
            self._before = self._ask()
        against = baseline(now, self._before, index(self._seen), self._first)
        self._seen.append(now)
        return flip_of(against, now) is not None

    def again(
        self, judgements: Sequence[Judgement], evaluate: Callable[[], Sequence[Judgement]]
    ) -> tuple[tuple[Judgement, ...], dict[str, Any]]:
        """Evaluate on fresh boots. Returns the judgements, and what to tell of it: ``boots``, ``agreed``, ``verdicts``.

        The first boot counts as one of them: it agrees with itself. One that says nothing about the claim (a fault of
        the host, a skip) neither agrees nor disagrees, and is no boot.
        """
        decides = worst(judgements)
        tried = [decides, *(worst(evaluate()) for _ in range(self.boots))]
        found = [one for one in tried if one.verdict not in (Verdict.INFRA, Verdict.NOT_EVALUATED)]
        agreed = sum(_alike(one, decides) for one in found)
        told = {"boots": len(found), "agreed": agreed, "verdicts": [one.verdict.value for one in tried]}
        if agreed == len(found):
            return tuple(judgements), told
        names = [_named(one) for one in found]
        words = ", ".join(f"{names.count(one)} × {one}" for one in dict.fromkeys(names))
        flaky = replace(
            decides,
            verdict=Verdict.INCONCLUSIVE,
            fact=f"flaky: {len(found)} boots came out as {words}; the first: {decides.fact}",
        )
        return tuple(flaky if one is decides else one for one in judgements), told


def _alike(one: Judgement, other: Judgement) -> bool:
    if one.verdict is not other.verdict:
        return False
    return one.verdict is Verdict.HOLDS or one.outcome == other.outcome


def _named(one: Judgement) -> str:
    return one.verdict.value if one.verdict is Verdict.HOLDS else f"{one.verdict.value} ({one.outcome})"
