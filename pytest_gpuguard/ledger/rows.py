"""Records as rows of the ledger's tables and back. Pure; it must never lose what a record says.

Text is stored as every database can hold it: a NUL or half a surrogate pair becomes U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from .errors import LedgerError
from .record import Record, Run
from .suspects import COUNTING

#: Of the tables that this version reads and writes.
VERSION: Final = 2

#: Names in one IN list: older SQLite takes 999.
CHUNK: Final = 500

#: Of a run's id, in characters: the index of PostgreSQL takes no long ones.
LONGEST_ID = 200


def clean(text: str) -> str:
    """``text`` with U+FFFD for what not every database can hold."""
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return "".join("\ufffd" if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in text)


def chunks(names: Iterable[str]) -> Iterable[list[str]]:
    """``names`` once each, sorted, in lists that a database takes."""
    ordered = sorted(set(names))
    return (ordered[first : first + CHUNK] for first in range(0, len(ordered), CHUNK))


def digest(*parts: str) -> str:
    """A key of fixed length for names of any length."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def check(name: str, when: float | None) -> None:
    """Raises LedgerError for the id of a run, or a time, that could not be found again."""
    if not name or len(name) > LONGEST_ID:
        raise LedgerError(f"a run's id must have 1 to {LONGEST_ID} characters: {name[:40]!r} has {len(name)}")
    if when is not None and not math.isfinite(when):
        raise LedgerError(f"a time in run {name} is not a number ({when}): give epoch seconds")


def compact(value: Any) -> str:
    """JSON in ASCII; numbers that JSON does not have become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def pack(evidence: Mapping[str, Any]) -> bytes:
    """JSON, compressed where that is shorter. ``unpack`` knows which by the first byte."""
    plain = compact(dict(evidence)).encode()
    packed = zlib.compress(plain)
    return packed if len(packed) < len(plain) else plain


def unpack(data: bytes) -> dict[str, Any]:
    """What ``pack`` was given. Raises LedgerError for what it did not write."""
    with intact("evidence"):
        return dict(json.loads(data if data[:1] == b"{" else zlib.decompress(data)))


def unpacked(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a row has as text. Raises LedgerError."""
    with intact(what):
        return dict(json.loads(text))


@contextmanager
def intact(what: str) -> Iterator[None]:
    """What cannot be read of rows becomes a LedgerError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError, zlib.error) as error:
        raise damaged(f"{what} cannot be read ({type(error).__name__}: {str(error)[:200]})") from None


def damaged(what: str) -> LedgerError:
    """The error for rows that do not fit each other."""
    return LedgerError(f"the ledger is damaged: {what}. Restore it from a copy, or import an export into a new one")


def run_row(run: Run) -> dict[str, Any]:
    """Raises LedgerError for an id or a time that cannot be kept."""
    check(run.id, run.started)
    check(run.id, run.ended)
    row = {name: clean(one) if isinstance(one, str) else one for name, one in run.to_dict().items()}
    return {**row, "stacks": json.dumps([clean(one) for one in run.stacks])}


def run_of(row: Mapping[str, Any]) -> Run:
    """What ``run_row`` was given. Raises LedgerError for what it did not write."""
    with intact("a run"):
        return Run.from_dict({**row, "stacks": json.loads(row["stacks"])})


@dataclass(frozen=True, slots=True)
class Payload:
    """The evidence of a claim on a stack in a run. ``when`` is that of the latest judgement which came with it."""

    run: str
    claim: str
    stack: str
    when: float
    evidence: Mapping[str, Any]

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Payload:
        """Raises KeyError, TypeError, ValueError for what is none."""
        texts = (str(data[name]) for name in ("run", "claim", "stack"))
        run, claim, stack = texts
        return Payload(run, claim, stack, float(data["when"]), dict(data["evidence"]))


def payloads_of(records: Iterable[Record]) -> list[Payload]:
    """The evidence of records, once per run, claim and stack, from the latest that has any."""
    found: dict[tuple[str, str, str], Payload] = {}
    for one in records:
        name = (one.run, one.claim, one.stack)
        if one.evidence and (name not in found or found[name].when <= one.when):
            found[name] = Payload(*name, one.when, one.evidence)
    return list(found.values())


def case_of(about: Record | Payload) -> str:
    """The key of what the judgements of one claim on one stack share in a run."""
    return digest(clean(about.claim), clean(about.stack))


def key_of(record: Record) -> str:
    """The key of a judgement within its run."""
    return digest(clean(record.claim), clean(record.stack), clean(record.expectation))


def subject_row(record: Record) -> dict[str, Any]:
    """What the judgement is about, without its number."""
    cards = json.dumps([clean(one) for one in record.cards])
    parts = (clean(record.claim), clean(record.stack), record.kind, cards)
    return {"digest": digest(*parts), **dict(zip(("claim", "stack", "kind", "cards"), parts, strict=True))}


def fingerprint_row(record: Record) -> dict[str, str]:
    """The components, by the digest of their JSON."""
    components = json.dumps(dict(sorted(record.components.items())), separators=(",", ":"))
    return {"digest": digest(components), "components": components}


def judgement_row(record: Record, subject: int, began: float) -> dict[str, Any]:
    """Raises LedgerError for a time that is no number."""
    check(record.run, record.when)
    texts = {name: clean(getattr(record, name)) for name in ("expectation", "verdict", "outcome", "fact", "nodeid")}
    return {
        **texts,
        "run": clean(record.run),
        "key": key_of(record),
        "subject": subject,
        "counts": int(record.decides and record.verdict in COUNTING),
        "began": began,
        "judged": record.when,
        "reason": None if record.reason is None else clean(record.reason),
        "decides": record.decides,
        "hearsay": record.hearsay,
        "fingerprint": fingerprint_row(record)["digest"],
    }
