"""What the ledger holds, as frozen values: runs, and their judgements. It must never import a database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

Kind = Literal["verified", "rehearsed", "replayed"]

KINDS: Final[tuple[Kind, ...]] = ("verified", "rehearsed", "replayed")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest. Times are epoch seconds; ``ended`` is None while it runs, and for ever if it was killed.

    ``id`` sorts by time (``20260130-130455-3f2a``). ``rig`` is a line for a person, ``suite`` the git revision of the
    claims ("a7c0944", "a7c0944+" with uncommitted changes; None outside git), ``tool`` our own version, ``stacks`` the
    stacks' names in the order given: the first is what the others are compared with.
    """

    id: str
    started: float
    host: str
    kind: Kind
    rig: str
    tool: str
    suite: str | None = None
    stacks: tuple[str, ...] = ()
    ended: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``."""
        return {**asdict(self), "stacks": list(self.stacks)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Run:
        """Raises KeyError, TypeError, ValueError for what ``to_dict`` did not write."""
        if data["kind"] not in KINDS:
            raise ValueError(f"{data['kind']!r} is no kind of run")
        ended = None if data["ended"] is None else float(data["ended"])
        suite = None if data["suite"] is None else str(data["suite"])
        texts = (str(data[name]) for name in ("id", "host", "rig", "tool"))
        id_, host, rig, tool = texts
        return Run(
            id_, float(data["started"]), host, data["kind"], rig, tool, suite, tuple(map(str, data["stacks"])), ended
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One judgement on one expectation of one claim, on one stack, in one run.

    ``claim`` is its explicit id, else its node id without the stack's; ``stack`` the user's name for it;
    ``expectation`` as it was written (``fits(margin=2GiB)``). ``decides``: it is the worst of its claim, so that the
    claim came out so.
    ``when`` is epoch seconds. ``cards`` are the kinds of cards that were used, sorted (none: no GPU). ``components``
    are the flat fingerprint: name → value, None for what is known to be absent; a missing name is not known.
    ``evidence`` is the report's payload, the same for all judgements of a claim; empty where it was not asked for.
    """

    run: str
    claim: str
    stack: str
    expectation: str
    verdict: str
    outcome: str
    fact: str
    when: float
    kind: Kind
    nodeid: str
    reason: str | None = None
    decides: bool = True
    hearsay: bool = False
    cards: tuple[str, ...] = ()
    components: Mapping[str, str | None] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            **plain,
            "cards": list(self.cards),
            "components": dict(self.components),
            "evidence": dict(self.evidence),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Record:
        """Raises KeyError, TypeError, ValueError for what ``to_dict`` did not write."""
        if data["kind"] not in KINDS:
            raise ValueError(f"{data['kind']!r} is no kind of run")
        texts = {
            name: str(data[name])
            for name in ("run", "claim", "stack", "expectation", "verdict", "outcome", "fact", "nodeid")
        }
        components = {str(name): None if one is None else str(one) for name, one in data["components"].items()}
        return Record(
            **texts,
            when=float(data["when"]),
            kind=data["kind"],
            reason=None if data["reason"] is None else str(data["reason"]),
            decides=bool(data["decides"]),
            hearsay=bool(data["hearsay"]),
            cards=tuple(map(str, data["cards"])),
            components=components,
            evidence=dict(data["evidence"]),
        )
