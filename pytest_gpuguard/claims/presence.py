"""What a server that is ready shows of a feature: ``uses``, ``ignores``, ``unsupported(how="falls_back")``.

Only what the server itself said decides; silence, an argument that is handed back as it was given, and evidence that
contradicts itself, are INCONCLUSIVE.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .expect import Ignores, Unsupported, Uses
from .judgement import Judgement, Verdict, details, ready
from .observation import Observation
from .resolved import Resolved, Setting, Term, normal


@dataclass(frozen=True, slots=True)
class _Shown:
    """Quotations that show the thing on, and off; ``why`` says what keeps them from deciding, if something does."""

    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    why: str | None = None


def uses(expectation: Uses, observation: Observation) -> Judgement:
    """On: HOLDS. Off, or something else: CONTRADICTED (worse)."""
    term = observation.resolved.vocabulary.find(expectation.feature)
    if isinstance(term, str):
        return _open(expectation, observation, term)
    if term.kind == "setting" and term.value is None:
        runs = observation.resolved.setting(term.name)
        now = f"; it runs {runs.runs}" if runs.runs is not None else ""
        return _open(expectation, observation, f"{term.name} is no feature: claim a value, {term.name}=…{now}")
    shown = _shown(term, observation.resolved)
    if shown.why is not None or bool(shown.on) == bool(shown.off):
        return _undecided(expectation, observation, term, shown)
    fact = f"{ready(observation)}: {(shown.on or shown.off)[0]}"
    if shown.on:
        return Judgement(expectation.label, Verdict.HOLDS, observation.outcome, fact)
    return Judgement(expectation.label, Verdict.WORSE, observation.outcome, fact, details(observation))


def falls_back(expectation: Ignores | Unsupported, observation: Observation) -> Judgement:
    """Off although it was asked for, or is the default: HOLDS. On: CONTRADICTED (better)."""
    resolved = observation.resolved
    flag = isinstance(expectation, Ignores)
    what = expectation.flag if isinstance(expectation, Ignores) else expectation.what
    term = resolved.vocabulary.find(what)
    if isinstance(term, str):
        return _open(expectation, observation, term)
    asked = resolved.setting(term.name).asked
    wanted = None if term.kind == "setting" else "on" if term.want else "off"
    if (flag or term.kind == "setting") and (asked is None or (wanted is not None and asked != wanted)):
        return _open(expectation, observation, f"{what} was not asked of this server")
    if term.value is not None and not _same(resolved, term.name, term.value, asked):
        return _open(expectation, observation, f"{what} was not asked of this server, which was asked {asked}")
    shown = _shown(term, resolved, fall_back=True)
    if shown.why is not None or bool(shown.on) == bool(shown.off):
        return _undecided(expectation, observation, term, shown)
    if shown.on:
        fact = f"{ready(observation)}, against the claim that it runs without {what}: {shown.on[0]}"
        return Judgement(expectation.label, Verdict.BETTER, observation.outcome, fact)
    match = getattr(expectation, "match", None)
    said = shown.off if match is None else tuple(text for text in shown.off if re.search(match, text))
    if not said:
        return _open(expectation, observation, f"{shown.off[0]} (claimed: a line with {match!r})")
    return Judgement(expectation.label, Verdict.HOLDS, observation.outcome, f"{ready(observation)}: {said[0]}")


def _shown(term: Term, resolved: Resolved, fall_back: bool = False) -> _Shown:
    if term.kind == "setting":
        return _shown_setting(term, resolved.setting(term.name), resolved)
    found = resolved.evidence(term.name, term.want)
    on = tuple(one.text for one in found if not one.echo)
    # A feature that the user turned off, or never asked for, did not fall back; a flag that turns it off is another
    # matter: that it is off is what was asked.
    off = tuple(
        one.text
        for one in resolved.evidence(term.name, not term.want)
        if not (fall_back and term.want and one.requested)
    )
    echoed = found and not on and not off
    return _Shown(on, off, _only_echo(found[0].text) if echoed else None)


def _shown_setting(term: Term, setting: Setting, resolved: Resolved) -> _Shown:
    if setting.runs is None:
        return _Shown(why=f"nothing the server said shows its {term.name}")
    text = f"{setting.name}: {setting}"
    if setting.echo:
        return _Shown(why=_only_echo(text))
    if term.value is None or _same(resolved, term.name, term.value, setting.asked):
        return _Shown(off=(text,)) if setting.differs else _Shown(on=(text,))
    if _same(resolved, term.name, term.value, setting.runs):
        return _Shown(on=(text,))
    if normal(term.value) in (normal(word) for word in re.split(r"[ ,+]+", setting.runs)):
        return _Shown(why=f"it is one of several: {text}")
    return _Shown(off=(text,))


def _only_echo(text: str) -> str:
    return f"the server only repeats the argument that it was given, which is no evidence ({text})"


def _same(resolved: Resolved, name: str, one: str, other: str | None) -> bool:
    usual = resolved.vocabulary.usual
    if other is None:
        return False
    first, second = usual(name, one), usual(name, other)
    try:
        return float(first) == float(second)
    except ValueError:
        return normal(first) == normal(second)


def _undecided(
    expectation: Uses | Ignores | Unsupported, observation: Observation, term: Term, shown: _Shown
) -> Judgement:
    why = shown.why
    if why is None and shown.on:
        why = f"the evidence contradicts itself: on ({shown.on[0]}) and off ({shown.off[0]})"
    return _open(expectation, observation, why or f"nothing the server said shows {term.name} on or off")


def _open(expectation: Uses | Ignores | Unsupported, observation: Observation, why: str) -> Judgement:
    fact = f"{ready(observation)}, but {why}"
    return Judgement(expectation.label, Verdict.INCONCLUSIVE, observation.outcome, fact, details(observation))
