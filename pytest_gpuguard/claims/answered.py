"""What a server's answers say of ``works`` and ``fits``, and when a ready server counts as one that failed.

A bad answer is a failure of the stack like any other, with the outcome that the probe gave it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .answers import Answers
from .expect import Expectation, Works
from .judgement import Judgement, Verdict, details, ready
from .observation import PROBE, Decisive, Observation
from .outcome import READY

#: Kinds of expectations that presuppose, or deny, that it works, and so want the short probe.
PROBED: Final = frozenset({"fits", "works", "ooms", "unsupported", "fails", "expect_toks", "compare"})


#: What is said of answers that mean nothing.
DUMMY: Final = "dummy weights: what it answers is not judged"


def probed(expectation: Expectation) -> bool:
    """Whether the server is asked a few questions before this is judged."""
    return expectation.kind in PROBED and (expectation.kind != "unsupported" or expectation.negative)


def answers_decide(expectation: Expectation) -> bool:
    """Whether the answer of a probe alone decides it: ``works`` without anything more."""
    return isinstance(expectation, Works) and expectation == Works(when=expectation.when)


def as_answered(expectation: Expectation, observation: Observation) -> Observation:
    """The observation as this expectation must see it: ready, and answering badly, is not ready."""
    bad = observation.answers.first_bad if observation.answers is not None else None
    if observation.outcome != READY or bad is None or not probed(expectation):
        return observation
    said = f"{bad.name}: {bad.fact}"
    return replace(observation, outcome=bad.outcome, phase="serving", decisive=Decisive(0, said), was_ready=True)


def answering(observation: Observation) -> str:
    """``ready in 42 s, and answers``."""
    answers = observation.answers
    if answers is None:
        return ready(observation)
    if not any(one.ok for one in answers.checks):
        return f"{ready(observation)}, answers not checked ({_why(answers)})"
    return f"{ready(observation)}, and answers" + ("" if answers.judged else f" ({DUMMY})")


def works(expectation: Works, observation: Observation) -> Judgement:
    """Every question that could be asked was answered sensibly; with a floor, so many of the questions rightly.

    A probe that has answered is one that works.
    """
    label, outcome, answers = expectation.label, observation.outcome, observation.answers
    if observation.engine == PROBE and answers_decide(expectation):
        return Judgement(label, Verdict.HOLDS, outcome, ready(observation))
    if answers is None or (expectation.level == "full" and answers.level != "full"):
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but its answers were not checked")
    said = "; ".join(f"{one.name}: {one.fact}" for one in answers.checks if one.ok)
    unasked = tuple(f"{one.name}: not checked: {one.fact}" for one in answers.checks if one.ok is None)
    if not answers.judged:
        fact = "ready, but dummy weights give no answers worth judging"
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, fact, unasked)
    if not said:
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, answering(observation), unasked)
    if expectation.accuracy is None:
        return Judgement(label, Verdict.HOLDS, outcome, f"{answering(observation)}: {said}", unasked)
    share, interval = answers.accuracy, answers.accuracy_interval
    if share is None or interval is None:
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but its accuracy was not measured", unasked)
    told = (*(f"{one.name}: {one.fact}" for one in answers.checks if one.ok and one.name == "accuracy"), *unasked)
    bound, (low, high) = expectation.accuracy, interval
    fact = f"accuracy {share:.3f} ({low:.3f}–{high:.3f} at 95 %, {answers.total} questions), claimed {bound}"
    if bound.holds(low) and bound.holds(high):
        return Judgement(label, Verdict.HOLDS, outcome, fact, told)
    if low <= bound.value <= high:
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, f"{fact}: the interval straddles it", told)
    verdict = Verdict.WORSE if high < bound.value else Verdict.BETTER
    return Judgement(label, verdict, outcome, fact, (*told, *details(observation)))


def _why(answers: Answers) -> str:
    return answers.first_open.fact if answers.first_open is not None else "nothing could be asked"
