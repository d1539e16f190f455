"""The ``explain`` and ``judge`` commands without click: logs in, explanations and judgements out.

No server is booted and no GPU is asked.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .claims.account import short
from .claims.errors import ClaimError
from .claims.expect import Expectation
from .claims.judgement import Judgement, Verdict
from .claims.observation import LogReading, Observation
from .claims.resolved import Resolved
from .diagnose.evidence import GUESSES
from .diagnose.memory import from_server_info, merge_tables
from .diagnose.remedies import remedies, setup_of
from .diagnose.resolved import resolve
from .report.explained import Explained


@dataclass(frozen=True, slots=True)
class Beside:
    """What is known of a boot beside its log: its flags, its ``/server_info``, and how many GPUs it could have used."""

    flags: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gpus: int = 0


def beside(flags: str, server_info: str | None, gpus: int) -> Beside:
    """From the command line's texts. Raises ValueError that names what is wrong."""
    try:
        words = tuple(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"--flags: {error}") from None
    if server_info is None:
        return Beside(words, gpus=gpus)
    try:
        info = json.loads(Path(server_info).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--server-info: {server_info}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--server-info: {server_info} is not JSON: {error}") from None
    if not isinstance(info, dict):
        raise ValueError(f"--server-info: {server_info} holds no object")
    return Beside(words, info, gpus)


def explain(log: str, reading: LogReading, known: Beside) -> Explained:
    """A log's reading with what follows from it."""
    resolved = resolve(reading.engine, known.flags, reading.evidence, known.info) if reading.engine else Resolved()
    if known.info:
        table, _ = from_server_info(known.info)
        reading = replace(reading, memory=merge_tables(reading.memory, table))
    found = remedies(reading, setup_of(resolved, reading, known.gpus))
    return Explained(log, reading, resolved, found, _GUESSED if reading.signature in GUESSES else None)


_GUESSED: Final = "a guess from the exit code: only the kernel's log can say whether its OOM killer ended the rank"
_KILLED: Final = "a rank was killed by SIGKILL; only the kernel's log can say whether the OOM killer did it"


def expectation(text: str) -> Expectation:
    """An expectation as people write it, ``ooms("weights")`` or ``fits``, without evaluating anything.

    Raises ClaimError.
    """
    from .claims.markers import MARKERS

    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = ast.Constant(None)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ClaimError(f'{short(text)!r} is not written like an expectation, such as ooms("weights")')
    name = call.func.id
    names = [one.arg for one in call.keywords]
    twice = [one for one in names if names.count(one) > 1]
    if twice:
        raise ClaimError(f"{short(text)!r}: {twice[0] or '**'} is given twice")
    try:
        positional = [ast.literal_eval(one) for one in call.args]
        named = {one.arg or "**": ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        named = {"**": None}
    if "**" in named:
        raise ClaimError(f"{short(text)!r}: arguments are plain values: texts, numbers") from None
    known = {key: one for key, one in MARKERS.items() if key in _EXPECTATIONS}
    if name == "compare":
        raise ClaimError("compare needs two servers, and a log tells of one: run the claim")
    if name not in known:
        from .claims.errors import suggest

        hint = suggest(name, known) or f"; known are {', '.join(sorted(known))}"
        raise ClaimError(f"{name!r} is no expectation{hint}")
    import pytest

    mark = getattr(pytest.mark, name)(*positional, **named).mark
    if positional and callable(positional[0]):  # pragma: no cover (literals are never callable)
        raise ClaimError(f"{text!r}: arguments are plain values: texts, numbers")
    found = known[name].parse(mark)
    if not isinstance(found, Expectation):
        raise ClaimError(f"{name!r} is no expectation")
    return found


_EXPECTATIONS: Final = frozenset(
    {"fits", "works", "ooms", "unsupported", "fails", "uses", "ignores", "max_mem", "expect_toks"}
)


#: What the log of a server that is ready leaves open.
_UNSEEN: Final = {"works": "answers", "expect_toks": "tok/s", "peak": "a peak of memory"}


def observation(one: Explained) -> Observation:
    """The boot that a log tells of, as far as a log alone can: an engine's guess from an exit code decides nothing."""
    reading = one.reading
    guessed = reading.signature in GUESSES
    return Observation(
        engine=reading.engine or "unknown",
        engine_version=reading.engine_version,
        outcome="indeterminate.peer_died" if guessed else reading.outcome,
        phase=reading.phase,
        decisive=reading.decisive,
        why=None if guessed else reading.why,
        note=_KILLED if guessed else None,
        memory=reading.memory,
        requested_tokens=reading.clipped[0] if reading.clipped is not None else None,
        log=one.log,
        was_ready=reading.ready_line,
        remedies=one.remedies,
        fullest_rank=reading.fullest_rank,
        resolved=one.resolved,
    )


def judge_log(one: Explained, expectations: Sequence[Expectation]) -> tuple[Judgement, ...]:
    """Each expectation against a log; windows are not asked, since the log's stack is not known."""
    from .claims.verdict import judge

    seen = observation(one)
    judgements = []
    for wanted in expectations:
        judgement = judge(wanted, seen)
        what = _UNSEEN.get(wanted.kind) or (_UNSEEN["peak"] if getattr(wanted, "of", None) == "peak" else None)
        if what is not None and seen.ready:
            fact = f"a log alone does not show {what}: run the claim"
            judgement = replace(judgement, verdict=Verdict.NOT_EVALUATED, fact=fact, details=(), reason="unmeasured")
        judgements.append(judgement)
    return tuple(judgements)
