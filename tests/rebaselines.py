"""Records of runs as the ledger has them, made by the real judge and the real payload, for tests of ``rebaseline``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpuguard.claims.claim import Claim, build_claim
from pytest_gpuguard.claims.expect import Expectation
from pytest_gpuguard.claims.observation import Decisive, MemoryTable, Observation
from pytest_gpuguard.claims.series import Baseline, Series
from pytest_gpuguard.claims.verdict import Body, Judgement, judge_claim, worst
from pytest_gpuguard.ledger.changes import Change
from pytest_gpuguard.ledger.flips import Flip, Sort
from pytest_gpuguard.ledger.record import Record
from pytest_gpuguard.ledger.suspects import Suspect
from pytest_gpuguard.rebaseline import Proposal, Refused, patch, propose
from pytest_gpuguard.rebaseline.marks import Scope, claimed
from pytest_gpuguard.rebaseline.source import find, parse, place_of
from pytest_gpuguard.rebaseline.windows import version_in
from pytest_gpuguard.report.payload import payload

FILE = "tests/test_a.py"
OLD: Mapping[str, str | None] = {"sglang": "0.5.8", "torch": "2.9.1", "torch_cuda": "12.8", "driver": "570.86"}
NEW: Mapping[str, str | None] = {**OLD, "sglang": "0.5.9"}


def ready(**more: Any) -> Observation:
    """A server that came up."""
    return Observation("sglang", "ready", "ready", elapsed_s=42.0, **more)


def failed(outcome: str, line: str = "torch.OutOfMemoryError: CUDA out of memory", **more: Any) -> Observation:
    """A server that did not."""
    return Observation("sglang", outcome, "weights", decisive=Decisive(7, line), **more)


def rates(text: str, samples: Sequence[float], baseline: float | None = None, **more: Any) -> Observation:
    """A server whose speed was measured under the load of this expectation."""
    (one,) = claim_in(f"from pytest_gpuguard import *\n@{text}\ndef test_it(): ...\n").expectations
    known = Baseline(baseline, 1.7e9) if baseline is not None else None
    return ready(series={one.subject: Series(tuple(samples), baseline=known)}, **more)


def memory(**gib: Any) -> Observation:
    """A server that said these sizes."""
    return ready(memory=MemoryTable(**gib))


def claim_in(text: str, test: str = "test_it") -> Claim:
    """The claim that a file states, read by the real parsers."""
    source = parse(FILE, text)
    function, classes = find(source, place_of(f"{FILE}::{test}", ""))
    claim = build_claim(*claimed(Scope(source).marks_on(function, classes)))
    assert claim is not None
    return claim


def judged(
    text: str,
    observation: Observation,
    components: Mapping[str, str | None] = NEW,
    *,
    test: str = "test_it",
    parameters: str = "",
    stack: str = "new",
    run: str = "r2",
    body: Body | None = None,
    expectations: Sequence[Expectation] = (),
) -> list[Record]:
    """What the ledger would hold of a claim after this observation, by the real judge."""
    claim = claim_in(text, test) if not expectations else Claim(claim_in(text, test).needs, None, tuple(expectations))
    found = judge_claim(claim, [observation], version_in(components), body or Body())
    return recorded(claim, found, observation, components, f"{FILE}::{test}{parameters}", stack, run)


def recorded(
    claim: Claim,
    judgements: Sequence[Judgement],
    observation: Observation,
    components: Mapping[str, str | None],
    nodeid: str,
    stack: str,
    run: str,
) -> list[Record]:
    """Judgements as the ledger's records."""
    evidence = payload(nodeid, claim, stack, judgements, [observation])
    decides = worst(judgements)
    return [
        Record(
            run,
            nodeid,
            stack,
            one.expectation,
            one.verdict.value,
            one.outcome,
            one.fact,
            2.0 if run == "r2" else 1.0,
            "verified",
            nodeid,
            one.reason,
            one is decides,
            cards=observation.cards,
            components=components,
            evidence=evidence,
        )
        for one in judgements
    ]


def flip(
    before: Sequence[Record], now: Sequence[Record], sort: Sort = "better", suspects: Sequence[Suspect] | None = None
) -> Flip:
    """A flip with these suspects; by default what differs, none of them separated."""
    one, other = (next(each for each in several if each.decides) for several in (before, now))
    if suspects is None:
        names = [name for name in other.components if one.components.get(name) != other.components[name]]
        suspects = [Suspect(Change(name, one.components[name], other.components[name]), 1) for name in names]
    return Flip(sort, one, other, tuple(suspects), ranked=len({each.rank for each in suspects}) > 1)


def put(root: Path, text: str | bytes, file: str = FILE) -> Path:
    """The file, in a scratch repository at ``root``."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def git(root: Path, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Git in a folder."""
    return subprocess.run(["git", *words], cwd=root, input=data, capture_output=True, timeout=60)


def apply(root: Path, proposals: Sequence[Proposal]) -> None:
    """Applies the proposals as a person would."""
    if not (root / ".git").exists():
        assert git(root, "init", "-q").returncode == 0
    done = git(root, "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-", data=patch(proposals).encode())
    assert done.returncode == 0, (done.stderr.decode(), patch(proposals))


def edited(root: Path, text: str, records: Sequence[Record], flips: Sequence[Flip] = (), **options: Any) -> str:
    """What the file reads after the one proposal was applied with git."""
    path = put(root, text)
    proposals, refused = propose(records, flips, root, **options)
    assert not refused, refused
    assert len(proposals) == 1
    assert path.read_bytes() == text.encode(), "propose touched the file"
    apply(root, proposals)
    return path.read_bytes().decode()


def refused(root: Path, text: str, records: Sequence[Record], flips: Sequence[Flip] = (), **options: Any) -> Refused:
    """The one refusal, with nothing proposed."""
    put(root, text)
    proposals, found = propose(records, flips, root, **options)
    assert proposals == []
    (one,) = found
    return one


def verdict_of(text: str, observation: Observation, components: Mapping[str, str | None] = NEW, **more: Any) -> str:
    """How the real judge sees the claim of a file after this observation."""
    return next(one.verdict for one in judged(text, observation, components, **more) if one.decides)
