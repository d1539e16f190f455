"""What the samples of a rate say of ``expect_toks`` and ``compare``: the interval of the true rate against the claim.

An interval that straddles the claim, or too few samples that count, is INCONCLUSIVE. Drift is told beside a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from .expect import Compare, ExpectToks, Rated
from .judgement import Judgement, Verdict, details
from .observation import Observation
from .series import Baseline, Series
from .stats import Decision, Interval, Standing, decide

#: A rate that is surely lower than what was verified first, by more than this share, is drift (SGLang #24563: an 8 %
#: loss passed a fixed floor unnoticed).
DRIFT: Final = 0.05

_VERDICTS: Final = {
    Standing.INSIDE: Verdict.HOLDS,
    Standing.BELOW: Verdict.WORSE,
    Standing.ABOVE: Verdict.BETTER,
    Standing.OPEN: Verdict.INCONCLUSIVE,
}


def expect_toks(expectation: ExpectToks, observation: Observation) -> Judgement:
    """Output tok/s against a floor, or against a reference to both sides."""
    here = expectation.on(observation.cards)
    if here is None:
        cards = ", ".join(sorted(set(observation.cards))) or "a server without a GPU"
        fact = f"no reference for {cards}: it is stated for {', '.join(name for name, _ in expectation.cards)}"
        return Judgement(expectation.label, Verdict.NOT_EVALUATED, observation.outcome, fact, reason="card")
    if here.minimum is not None:
        claimed = f"at least {here.minimum:g}"
    else:
        low, high = here.bounds
        claimed = f"{here.about:g} ± {here.tolerance:.0%} ({low:.1f}–{high:.1f})"
    unit = "tok/s" if here.per == "total" else "tok/s per request"
    return _rated(here, expectation.label, observation, unit, claimed)


def compare(expectation: Compare, observation: Observation) -> Judgement:
    """Tok/s of this server over the other's, against the claimed bound."""
    return _rated(expectation, expectation.label, observation, "× the other's tok/s", str(expectation.ratio))


def _rated(stated: Rated, label: str, observation: Observation, unit: str, claimed: str) -> Judgement:
    outcome = observation.outcome
    series = observation.series.get(stated.subject)
    if series is None:
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, "ready, but nothing was measured")
    if series.unmet is not None:
        kind, text = series.unmet
        return Judgement(label, Verdict.NOT_EVALUATED, outcome, text, reason=kind)
    if series.ours is not None:
        return Judgement(label, Verdict.INFRA, "infra.test", f"the meter could not measure: {series.ours}")
    if series.failed:
        runs = len(series.failed) + len(series.samples) + len(series.rejected)
        fact = f"ready, but requests failed in {len(series.failed)} of {runs} runs: {series.failed[0]}"
        return Judgement(label, Verdict.WORSE, outcome, fact, details(observation))
    decision = decide(series.samples, *stated.bounds)
    verdict = _VERDICTS[decision.standing]
    fact = f"{_said(decision, series, unit)}, claimed {claimed}"
    if _undercut(series, decision.standing, *stated.bounds):
        return Judgement(label, Verdict.INCONCLUSIVE, outcome, f"{fact}: the meter was short of CPU", _more(series))
    if verdict is Verdict.INCONCLUSIVE:
        fact += ": the interval straddles it" if decision.interval is not None else ""
    more = _more(series)
    if verdict not in (Verdict.HOLDS, Verdict.INCONCLUSIVE):
        more = (*more, *details(observation))
    drift = _drift(decision.interval, series.baseline, unit) if verdict is Verdict.HOLDS else None
    return Judgement(label, verdict, outcome, fact, more, warning=drift)


def _undercut(series: Series, standing: Standing, low: float | None, high: float | None) -> bool:
    """Whether a rate that may be higher than was measured (or a ratio, either way) could stand otherwise."""
    rises, falls = series.understated, series.others_understated
    if standing is Standing.BELOW:
        return rises
    if standing is Standing.ABOVE:
        return falls
    return standing is Standing.INSIDE and ((rises and high is not None) or (falls and low is not None))


def _said(decision: Decision, series: Series, unit: str) -> str:
    found = decision.interval
    counted = f"{len(series.samples)} sample{'s' if len(series.samples) != 1 else ''}"
    if found is None:
        said = f"ready, but too few samples of {unit} count ({counted})"
    else:
        places = 1 if found.center >= 10 else 3
        low, center, high = (f"{one:.{places}f}" for one in (found.low, found.center, found.high))
        said = f"{center} {unit} ({low}–{high} at {found.confidence:.0%}, {counted})"
    if series.rejected:
        said += f"; {len(series.rejected)} rejected: {_most(series.rejected)}"
    return said


def _more(series: Series) -> tuple[str, ...]:
    """Latencies, and what there is to know about the figures."""
    lines = []
    if series.latencies:
        said = ", ".join(f"{name} {seconds * 1e3:.4g} ms" for name, seconds in series.latencies.items())
        lines.append(f"median of the samples: {said}")
    if series.how is not None:
        lines.append(f"the two servers: {series.how}")
    return (*lines, *series.doubts)


def _drift(found: Interval | None, baseline: Baseline | None, unit: str) -> str | None:
    """The words for a rate that still holds, and is surely lower than it once was."""
    if found is None or baseline is None or found.high >= baseline.rate * (1 - DRIFT):
        return None
    then = time.strftime("%Y-%m-%d", time.gmtime(baseline.when))
    less = 1 - found.center / baseline.rate
    return f"drift: {found.center:.4g} {unit} is {less:.0%} less than the {baseline.rate:.4g} verified on {then}"


def _most(reasons: Sequence[str]) -> str:
    """The reason that is there most often, the first of equals."""
    return max(dict.fromkeys(reasons), key=reasons.count)
