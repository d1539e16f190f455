"""How an observation stands to an expectation: the verdict table as data, and pure functions that read it.

The judge looks at recorded observations only, never at the exception that left the test and never at an exit code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from .answered import answers_decide, as_answered
from .claim import Claim
from .expect import Expectation, Fails, Fits, MaxMem, Ooms, Rated, Unsupported, Uses
from .judgement import NOT_RUN, Body, Judgement, Verdict, decisive, details, ready, with_differences, worst
from .measured import MEASURES
from .observation import NO_SERVER, PROBE, Observation
from .outcome import GPU_OOM_PHASES, HOST_FAULTS, READY, STACK_FAILURES, UNDECIDED
from .window import VersionOf

__all__ = ["TABLE", "Body", "Judgement", "Seen", "Verdict", "judge", "judge_claim", "row_of", "seen", "worst"]


class Seen(str, Enum):
    """The columns of the verdict table: what was observed, as one expectation sees it."""

    READY = "ready"
    CLAIMED = "the claimed failure"
    OTHER = "another failure of the stack"
    UNKNOWN = "unknown failure"
    HOST = "fault of host or harness"


#: Rows: ``positive`` (fits, works, max_mem, expect_toks, compare, uses), ``negative`` (ooms, unsupported, fails) and
#: ``off`` (ignores, unsupported by falling back). ``ready`` is refined by what was measured.
TABLE: Final[Mapping[tuple[str, Seen], Verdict]] = MappingProxyType(
    {
        ("positive", Seen.READY): Verdict.HOLDS,
        ("positive", Seen.OTHER): Verdict.WORSE,
        ("positive", Seen.UNKNOWN): Verdict.WORSE,
        ("positive", Seen.HOST): Verdict.INFRA,
        ("negative", Seen.READY): Verdict.BETTER,
        ("negative", Seen.CLAIMED): Verdict.HOLDS,
        ("negative", Seen.OTHER): Verdict.CHANGED,
        ("negative", Seen.UNKNOWN): Verdict.INCONCLUSIVE,
        ("negative", Seen.HOST): Verdict.INFRA,
        ("off", Seen.READY): Verdict.INCONCLUSIVE,
        ("off", Seen.OTHER): Verdict.CHANGED,
        ("off", Seen.UNKNOWN): Verdict.INCONCLUSIVE,
        ("off", Seen.HOST): Verdict.INFRA,
    }
)

#: Outcomes that a refusal, and a crash, of an unsupported feature can have.
REJECTIONS: Final = frozenset({"unsupported.arch", "unsupported.config", "unsupported.model"})
CRASHES: Final = frozenset(
    {
        "unsupported.arch",
        "jit.compile",
        "jit.smem",
        "graph.incompatible",
        "illegal_memory",
    }
)
#: Crashes that any broken installation or fabric shows too: the claim must say with ``match`` which one it means.
CRASHES_IF_MATCHED: Final = frozenset({"import.abi", "comm.p2p", "comm.deepep", "nccl.error", "nccl.shm"})


#: What a test's own code can do that says nothing about its claim: the outcome and the words for it.
_OWN_FAULTS: Final = MappingProxyType(
    {
        "error": ("infra.test", "the test itself failed"),
        "timeout": ("infra.deadline", "time-out in the test"),
    }
)


def row_of(expectation: Expectation) -> str:
    """The row of the verdict table that an expectation is in."""
    if expectation.negative:
        return "negative"
    return "off" if expectation.kind in ("ignores", "unsupported") else "positive"


def seen(expectation: Expectation, observation: Observation) -> Seen:
    """The column of the verdict table: what this observation is to this expectation."""
    outcome = observation.outcome
    if outcome == READY:
        return Seen.READY
    if outcome in HOST_FAULTS:
        return Seen.HOST
    if is_claimed(expectation, observation):
        return Seen.CLAIMED
    if outcome in UNDECIDED:
        return Seen.UNKNOWN
    if outcome in STACK_FAILURES:
        return Seen.OTHER
    return Seen.HOST  # "starting", or a name that nobody knows: nothing was decided


def is_claimed(expectation: Expectation, observation: Observation) -> bool:
    """Whether this failure is the one that the expectation names, for that reason and no other."""
    outcome = observation.outcome
    if not expectation.negative:
        return False
    if isinstance(expectation, Ooms):
        return outcome in {f"oom.{phase}" for phase in expectation.phases or GPU_OOM_PHASES}
    if isinstance(expectation, Fails):
        return outcome == expectation.outcome and _matches(expectation.match, observation)
    if isinstance(expectation, Unsupported):
        allowed = {"rejected": REJECTIONS, "crashes": CRASHES}.get(expectation.how or "", REJECTIONS | CRASHES)
        if outcome in UNDECIDED:
            # No signature knows this failure, but its author does: the decisive line must say what was claimed.
            return (
                expectation.how == "crashes"
                and expectation.match is not None
                and _matches(expectation.match, observation)
            )
        if expectation.how != "rejected" and expectation.match is not None:
            allowed |= CRASHES_IF_MATCHED
        return outcome in allowed and _matches(expectation.match, observation)
    return False


def judge(expectation: Expectation, observation: Observation, body: Body = NOT_RUN) -> Judgement:
    """One expectation against one boot. Pure: the same values give the same judgement."""
    observation = as_answered(expectation, observation)
    label, outcome = expectation.label, observation.outcome
    column = seen(expectation, observation)
    verdict = TABLE[row_of(expectation), column]
    if column is Seen.CLAIMED and not observation.was_ready and body.kind in (*_OWN_FAULTS, "assertion", "skip"):
        return _own(label, body, observation)  # the server failed before the test's code did: two things went wrong
    if column is not Seen.READY:
        fact = _failure_fact(expectation, column, observation)
        return Judgement(label, verdict, outcome, fact, details(observation))
    if body.kind in (*_OWN_FAULTS, "skip"):
        return _own(label, body, observation)
    if row_of(expectation) == "negative":
        fact = f"{ready(observation)}, against the claim that it {_claims(expectation)}"
        return Judgement(label, verdict, outcome, fact)
    if body.kind == "assertion":
        said = ready(observation) if observation.engine == PROBE else "ready"
        return Judgement(label, Verdict.WORSE, outcome, f"{said}, but {body.error}", details(observation))
    if observation.engine == PROBE and row_of(expectation) == "positive" and not answers_decide(expectation):
        fact = f"{ready(observation)}, but a probe serves nothing that {label} could be judged by: write @works"
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, fact)
    other = observation.others.get(expectation.subject)
    if other is not None and not other.ready:  # a comparison presupposes both servers
        failed = judge(Fits(), other)
        return replace(failed, expectation=label, fact=f"the other server: {failed.fact}")
    measure = MEASURES.get(type(expectation))
    judgement = measure(expectation, observation) if measure else Judgement(label, verdict, outcome, ready(observation))
    # That something runs otherwise than asked is told, and judged only where that is what is claimed.
    return replace(judgement, details=with_differences(observation, judgement.details))


def _own(label: str, body: Body, observation: Observation | None = None) -> Judgement:
    """What the test's own code did, which says nothing about the claim."""
    if body.kind == "skip":
        fact = f"skipped in the test: {body.error}" if body.reason == "skip" else str(body.error)
        return Judgement(label, Verdict.NOT_EVALUATED, "none", fact, reason=body.reason)
    outcome, said = _OWN_FAULTS.get(body.kind, _OWN_FAULTS["error"])
    evidence = details(observation) if observation is not None else ()
    return Judgement(label, Verdict.INFRA, outcome, f"{said}: {body.error}", evidence)


def judge_claim(
    claim: Claim,
    observations: Sequence[Observation],
    version_of: VersionOf,
    body: Body = NOT_RUN,
) -> tuple[Judgement, ...]:
    """Every expectation that is stated on this stack, against every boot of the claim; the worst boot counts.

    Nothing stated here makes one UNSTATED judgement. A claim that booted nothing is judged by its body alone.
    """
    stated = claim.stated(version_of)
    if not stated:
        return (_unstated(claim, observations, version_of, body),)
    judgements = [
        replace(_told(_judge_all(one, observations, body), [one], version_of), subject=one.subject) for one in stated
    ]
    return _with_uses(stated, judgements)


def _with_uses(stated: Sequence[Expectation], judgements: Sequence[Judgement]) -> tuple[Judgement, ...]:
    """A speed is that of the claimed way of running only where it really ran so: else it decides nothing."""
    unshown = next(
        (
            judgement
            for one, judgement in zip(stated, judgements, strict=True)
            if isinstance(one, Uses) and judgement.verdict is not Verdict.HOLDS
        ),
        None,
    )
    if unshown is None:
        return tuple(judgements)
    why = f"not decided, because {unshown.expectation} is {unshown.verdict}"
    return tuple(
        replace(judgement, verdict=Verdict.INCONCLUSIVE, fact=f"{judgement.fact} ({why})", warning=None)
        if isinstance(one, Rated) and judgement.verdict in _SPEEDS
        else judgement
        for one, judgement in zip(stated, judgements, strict=True)
    )


#: Verdicts on a speed that was measured.
_SPEEDS: Final = frozenset({Verdict.HOLDS, Verdict.WORSE, Verdict.BETTER})


def _told(judgement: Judgement, expectations: Sequence[Expectation], version_of: VersionOf) -> Judgement:
    """The same judgement, which also says which builds its windows compared as releases."""
    said = dict.fromkeys(text for one in expectations if one.when for text in one.when.inexact(version_of))
    return replace(judgement, fact=f"{judgement.fact} ({', '.join(said)})") if said else judgement


def _judge_all(expectation: Expectation, observations: Sequence[Observation], body: Body) -> Judgement:
    peak = isinstance(expectation, MaxMem) and expectation.of == "peak"
    seen_of = [one for one in observations if one.engine != NO_SERVER or peak]
    if any(one.engine not in (NO_SERVER, PROBE) for one in seen_of):
        # Beside a server a probe that found nothing decides nothing: the server is what is claimed.
        seen_of = [one for one in seen_of if one.engine != PROBE or not one.ready]
    if seen_of:
        return worst([judge(expectation, observation, body) for observation in seen_of])
    label = expectation.label
    if body.kind in (*_OWN_FAULTS, "skip"):
        return _own(label, body)
    if body.kind == "assertion" and not expectation.negative:
        return Judgement(label, Verdict.WORSE, "none", f"the test failed: {body.error}")
    return Judgement(
        label,
        Verdict.INFRA,
        "infra.test",
        f"the test booted no server, so nothing was observed that {label} could be judged by: "
        f"add serves(…), or call sglang_server(…) or probe(…)" + (", or take the fixture gpus" if peak else ""),
    )


def _unstated(claim: Claim, observations: Sequence[Observation], version_of: VersionOf, body: Body) -> Judgement:
    label = " / ".join(expectation.label for expectation in claim.expectations)
    last = claim.expectations[-1]
    names = sorted({name for one in claim.expectations if one.when for name, _ in one.when.terms})
    here = ", ".join(f"{name} {version_of(name) or 'absent'}" for name in names)
    observed = observations[-1] if observations else None
    outcome = observed.outcome if observed else "none"
    if observed is not None and seen(last, observed) is Seen.HOST:
        return Judgement(label, Verdict.INFRA, outcome, decisive(observed), details(observed))
    if (observed is None or observed.ready) and body.kind in (*_OWN_FAULTS, "skip"):
        return _own(label, body)
    happened = decisive(observed) if observed is not None and not observed.ready else outcome
    if body.kind == "assertion":
        happened += f", but {body.error}"
    fact = f"new on this stack ({here}): {happened}; last opinion: {last.label}, {last.when}"
    return _told(Judgement(label, Verdict.UNSTATED, outcome, fact), claim.expectations, version_of)


def _claims(expectation: Expectation) -> str:
    if isinstance(expectation, Ooms):
        return f"runs out of memory{' in ' + ' or '.join(expectation.phases) if expectation.phases else ''}"
    if isinstance(expectation, Unsupported):
        return f"does not support {expectation.what}"
    return f"fails with {getattr(expectation, 'outcome', '?')}"


def _failure_fact(expectation: Expectation, column: Seen, observation: Observation) -> str:
    fact = decisive(observation)
    if column is not Seen.OTHER or not expectation.negative:
        return fact
    if isinstance(expectation, (Fails, Unsupported)) and expectation.match:
        loose = replace(expectation, match=None)
        if is_claimed(loose, observation):
            return f"{fact} (claimed: a line with {expectation.match!r})"
    return f"{fact} (claimed: {expectation.label})"


def _matches(pattern: str | None, observation: Observation) -> bool:
    if pattern is None:
        return True
    return observation.decisive is not None and re.search(pattern, observation.decisive.text) is not None
