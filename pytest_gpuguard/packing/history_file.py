"""The file that holds the history of runs under one root folder: read by every process, written by one at the end.

It must never lose what another run wrote, nor what it cannot read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any, Final

from ..claims.drift import on_cards, raised
from ..claims.judgement import Verdict
from ..claims.series import Baseline
from ..files import make_own_folder
from ..xdist import STOPPED
from .history import Attempts, Seconds, Seen, key_of

#: Verdicts that say something about the claim. All others leave open whether it holds.
VERIFIED: Final = frozenset(one.value for one in (Verdict.HOLDS, Verdict.WORSE, Verdict.CHANGED, Verdict.BETTER))
#: Verdicts after which nothing is known of how long the claim takes.
_UNTIMED: Final = frozenset({Verdict.INFRA.value, Verdict.NOT_EVALUATED.value})

SCHEMA: Final = 1
#: Of so many runs the median is what a claim is expected to take.
SAMPLES: Final = 5
#: What nobody has run for so long is forgotten, in seconds.
_FORGET_S: Final = 400 * 86400.0
_LOCK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Entry:
    seen: Seen | None = None
    attempts: Attempts = field(default_factory=Attempts)
    boot_s: tuple[float, ...] = ()
    rest_s: tuple[float, ...] = ()
    rates: Mapping[str, Baseline] = field(default_factory=dict)

    @property
    def latest(self) -> float:
        return max(self.attempts.when, self.seen.when if self.seen is not None else 0.0)

    def to_dict(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "verdict": seen.verdict if seen is not None else None,
            "when": seen.when if seen is not None else None,
            "parts": dict(seen.parts) if seen is not None else {},
            "unverified": {"runs": self.attempts.number, "when": self.attempts.when},
            "boot_s": list(self.boot_s),
            "rest_s": list(self.rest_s),
            "rates": {name: {"rate": one.rate, "when": one.when} for name, one in sorted(self.rates.items())},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> _Entry:
        """Raises ValueError, TypeError, KeyError, AttributeError, OverflowError for what this version did not write."""
        seen = None
        if data["verdict"] is not None:
            parts = {str(name): None if one is None else str(one) for name, one in data["parts"].items()}
            if data["verdict"] not in VERIFIED:
                raise ValueError(f"{data['verdict']!r} is no verdict that counts")
            seen = Seen(data["verdict"], number_of(data["when"]), parts)
        attempts = Attempts(_count(data["unverified"]["runs"]), number_of(data["unverified"]["when"]))
        rates = {
            str(name): Baseline(number_of(one["rate"]), number_of(one["when"]))
            for name, one in data.get("rates", {}).items()
        }
        boot_s, rest_s = (tuple(map(number_of, data[name])) for name in ("boot_s", "rest_s"))
        return _Entry(seen, attempts, boot_s, rest_s, rates)


def number_of(value: Any, below: float = sys.float_info.max) -> float:
    """A time or a rate, out of what others may have written. Raises ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        raise ValueError("what should be a time or a rate is none")  # not shown: it may have any length
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of runs")
    return value


class HistoryTooNew(ValueError):
    """A file that a newer version wrote."""


@dataclass(frozen=True, slots=True)
class LocalHistory:
    """The history that ``read_history`` found. ``problem`` says in one line why there is none to be had."""

    entries: Mapping[str, _Entry] = field(default_factory=dict)
    problem: str | None = None

    def last(self, claim_id: str) -> Seen | None:
        """See ``History``."""
        return self._entry(claim_id).seen

    def attempts(self, claim_id: str) -> Attempts:
        """See ``History``."""
        return self._entry(claim_id).attempts

    def expected_seconds(self, claim_id: str) -> Seconds | None:
        """See ``History``."""
        entry = self._entry(claim_id)
        if not entry.rest_s:
            return None
        return Seconds(median(entry.boot_s) if entry.boot_s else None, median(entry.rest_s))

    def baseline(self, claim_id: str, subject: str, cards: Sequence[str]) -> Baseline | None:
        """See ``History``."""
        return self._entry(claim_id).rates.get(on_cards(subject, cards))

    def _entry(self, claim_id: str) -> _Entry:
        return self.entries.get(claim_id, _Entry())


def history_file(root: Path) -> Path:
    """Where the history of the runs under pytest's root folder is."""
    return root / ".gpuguard" / "history.json"


def read_history(file: Path) -> LocalHistory:
    """The history in a file. Never raises: what is wrong with it is its ``problem``, and nothing is known then."""
    try:
        return LocalHistory(_read(file))
    except (OSError, ValueError) as error:
        return LocalHistory(problem=f"nothing is known of earlier runs: {_why(file, error)}")


def write_history(
    file: Path,
    results: Iterable[Mapping[str, Any]],
    stops: Mapping[str, float],
    now: float,
    tests: Mapping[str, float | None] | None = None,
    chosen: Collection[str] = (),
) -> str | None:
    """Add one run: its payloads, how long each test's teardown took (by node id, seconds), and its end (epoch).

    ``tests`` are others that ran, which have no verdict: how long each took in all, None for one that skipped itself.
    ``chosen`` are those that a budget chose: also a skip of theirs is an attempt, else it would take every budget.
    What another run has written meanwhile is kept. Returns what was wrong, in one line; never raises for that.
    """
    updates = [one for one in sorted(results, key=lambda one: str(one["nodeid"])) if _counts(one, chosen)]
    if not updates and not tests:
        return None
    from filelock import FileLock

    aside = None
    try:
        make_own_folder(file.parent)
        with FileLock(f"{file}.lock", timeout=_LOCK_S):
            try:
                entries = _read(file)
            except HistoryTooNew:
                raise
            except ValueError as error:
                aside, entries = _put_aside(file, error), {}
            for data in updates:
                key = key_of(data["claim"], data["nodeid"])
                entries[key] = _updated(entries.get(key, _Entry()), data, stops.get(data["nodeid"], 0.0), now)
            for nodeid, seconds in (tests or {}).items():
                known = entries.get(nodeid, _Entry()).rest_s
                rest = known if seconds is None else (*known, round(seconds, 2))[-SAMPLES:]
                entries[nodeid] = _Entry(attempts=Attempts(0, now), rest_s=rest)
            _write(file, {key: one for key, one in entries.items() if one.latest > now - _FORGET_S})
    except (OSError, HistoryTooNew) as error:
        return f"this run is not remembered: {_why(file, error)}"
    return aside


def _counts(data: Mapping[str, Any], chosen: Collection[str]) -> bool:
    """Whether a verdict is to be noted: never a rehearsed one, nor one for which nothing was tried."""
    if data.get("label") is not None:
        return False
    skipped = data.get("reason") == "skip" and not str(data.get("fact")).endswith(STOPPED)
    booted = (data.get("seconds") or {}).get("boot") is not None
    return data["verdict"] != Verdict.NOT_EVALUATED.value or booted or (skipped and data["nodeid"] in chosen)


def _updated(entry: _Entry, data: Mapping[str, Any], stop_s: float, now: float) -> _Entry:
    verdict, seconds = data["verdict"], data.get("seconds")
    if verdict in VERIFIED:
        parts = dict(data.get("parts") or {})
        rates = raised(entry.rates, data.get("rates") or {}, data.get("cards") or (), now)
        entry = replace(entry, seen=Seen(verdict, now, parts), attempts=Attempts(), rates=rates)
    else:
        entry = replace(entry, attempts=Attempts(entry.attempts.number + 1, now))
    if verdict in _UNTIMED or seconds is None:
        return entry
    boot, rest = seconds["boot"], seconds["rest"]
    if boot is None:
        return replace(entry, boot_s=(), rest_s=(*entry.rest_s, rest + stop_s)[-SAMPLES:])
    return replace(
        entry,
        boot_s=(*entry.boot_s, round(boot + stop_s, 2))[-SAMPLES:],
        rest_s=(*entry.rest_s, rest)[-SAMPLES:],
    )


def _read(file: Path) -> dict[str, _Entry]:
    """Raises OSError when it cannot be read, ValueError when it is no history, HistoryTooNew."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        data = json.loads(text)
        schema = data["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise HistoryTooNew(f"a newer version wrote it (schema {schema}, this one knows {SCHEMA})")
        return {str(key): _Entry.from_dict(one) for key, one in data["claims"].items()}
    except HistoryTooNew:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"it is no history ({type(error).__name__}: {error})") from None


def _write(file: Path, entries: Mapping[str, _Entry]) -> None:
    """A reader sees the old file or the new one, also when this process is killed. The lock must be held."""
    data = {"schema": SCHEMA, "claims": {key: entries[key].to_dict() for key in sorted(entries)}}
    scratch = file.with_name(f"{file.name}.tmp")
    with scratch.open("w", encoding="utf-8") as out:
        out.write(json.dumps(data, indent=1))
        out.flush()
        os.fsync(out.fileno())
    scratch.replace(file)


def _put_aside(file: Path, error: Exception) -> str:
    """The lock must be held. One that was put aside before stays: it may be all that is left of many runs."""
    names = chain([f"{file.name}.broken"], (f"{file.name}.broken-{number}" for number in count(2)))
    broken = next(one for one in map(file.with_name, names) if not os.path.lexists(one))
    file.replace(broken)
    return f"a new history was begun: {_why(file, error)}; it is kept as {broken.name}"


def _why(file: Path, error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"{file}: {error}"
    said = "another run holds its lock" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return f"{file}: {said}"
