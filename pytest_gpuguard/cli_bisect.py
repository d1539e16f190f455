"""``gpuguard bisect``: on which of several stacks, oldest first, a claim comes out otherwise for the first time.

It must never count a stack that could not be evaluated, and never show a ledger's password.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from .facts.choice import RIG_FORMS, SIMULATED, parse_rig, parse_stack
from .names import REHEARSED, is_container

if TYPE_CHECKING:
    from .bisect import Candidate, Evaluation, Found, PytestRunner
    from .facts.gpu import Rig
    from .ledger.record import Kind, Record

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_ARGUMENTS: Final = "pytest_gpuguard.pytest_arguments"


class _WithPytestArguments(click.Command):
    """A command that takes what comes after ``--`` as pytest's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST ARGS...]"]


@click.command(cls=_WithPytestArguments)
@click.argument("claim")
@click.argument("stacks", nargs=-1, required=True, metavar="STACK STACK...")
@click.option(
    "--root",
    default=".",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder that pytest is started in.  [default: this one]",
)
@click.option(
    "--ledger",
    metavar="URL",
    help="The ledger: a SQLite file, sqlite:///FILE or postgresql://…  [default: .gpuguard/ledger.sqlite in ROOT]",
)
@click.option("--rig", default="auto", show_default=True, metavar="RIG", help=f"The GPUs: {RIG_FORMS}.")
@click.option("--fresh", is_flag=True, help="Evaluate also what the ledger knows already.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/bisect.md.")
@click.pass_context
def bisect(
    context: click.Context,
    claim: str,
    stacks: tuple[str, ...],
    root: Path,
    ledger: str | None,
    rig: str,
    fresh: bool,
    as_json: bool,
) -> None:
    """Find the first of several stacks on which CLAIM comes out otherwise.

    STACKs are NAME=PYTHON, or docker:IMAGE or podman:IMAGE after NAME=, oldest first. CLAIM is its id or node id. Exits
    0 when that stack is found, 1 when there is none (oldest and newest agree, or too few could be evaluated), 2 when
    the claim or a stack cannot be evaluated at all.
    """
    from .bisect import BisectError, PytestRunner
    from .claims.account import printable
    from .ledger.store import LedgerError, open_ledger

    named = _named(stacks, rig)
    url = _absolute(ledger, root)
    arguments: Sequence[str] = context.meta[_ARGUMENTS]
    kind: Kind = "rehearsed" if rig.startswith(SIMULATED) else "verified"
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    try:
        with open_ledger(url) as store:
            candidates = _asked(named, rig)
            runner = PytestRunner(store, url, root.resolve(), claim, rig, kind, arguments)
            found, evaluations = _searched(candidates, runner, fresh, quiet=as_json)
            older = _older_claims(found, runner)
    except (BisectError, LedgerError) as error:
        first, *rest = str(error).split("\n")
        raise click.UsageError("\n".join([printable(first), *rest])) from None
    if as_json:
        click.echo(json.dumps(_as_json(claim, kind, candidates, found, evaluations)))
    else:
        for line in _result(candidates, found):
            click.echo(printable(line))
    if older is not None:
        click.echo(printable(older), err=True)
    if found.result != "flipped":
        raise SystemExit(1)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _named(texts: Sequence[str], rig: str) -> list[tuple[str, str]]:
    """The stacks by name, checked as a run of pytest would. Raises click.UsageError."""
    try:
        choice = parse_rig(rig)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if choice.kind == "replayed":
        raise click.UsageError(f"{rig}: nothing can be evaluated on a replayed rig")
    found: dict[str, str] = {}
    for text in texts:
        try:
            name, reference = parse_stack(text)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        if _NAME.fullmatch(name) is None:
            raise click.UsageError(f"{name!r}: a stack's name has letters, digits, '_', '.' and '+' only")
        if name in found:
            raise click.UsageError(f"{text}: there are two stacks called {name!r}")
        if reference.startswith(SIMULATED) != (choice.kind == "simulated"):
            form = f"{name}=sim:sglang==0.5.7" if choice.kind == "simulated" else "a python, or an image"
            raise click.UsageError(f"{text}: this rig ({rig}) goes with {form}")
        found[name] = reference
    if len(found) < 2:
        raise click.UsageError("two stacks or more are searched, oldest first: NAME=PYTHON NAME=PYTHON")
    return list(found.items())


def _absolute(ledger: str | None, root: Path) -> str:
    """The ledger's URL, the same from every folder."""
    if ledger == "none":
        raise click.UsageError("--ledger none: verdicts are read from a ledger, so there must be one")
    text = (ledger or str(root / ".gpuguard" / "ledger.sqlite")).removeprefix("sqlite:///")
    if "://" in text:
        return text
    return str(Path(text).expanduser().resolve())


def _asked(named: Sequence[tuple[str, str]], rig: str) -> list[Candidate]:
    """What each stack is made of. Raises click.UsageError for one that is not there."""
    from .bisect import Candidate
    from .facts.catalogue import slug_of
    from .facts.nvml import query_rig
    from .facts.simulated import SimulationError, simulated_rig
    from .facts.stack import StackError
    from .ledger.changes import components_of

    try:
        found = simulated_rig(rig) if rig.startswith(SIMULATED) else query_rig()
        cards = frozenset(slug_of(gpu.name) for gpu in found.usable)
        candidates = []
        for name, reference in named:
            fingerprint = _fingerprint(name, reference, found)
            simulated = found.kind == "simulated"
            parts = components_of(fingerprint, found, simulated) if fingerprint is not None else None
            candidates.append(Candidate(name, reference, parts, cards))
    except (SimulationError, StackError) as error:
        raise click.UsageError(str(error)) from None
    return candidates


def _fingerprint(name: str, reference: str, rig: Rig) -> dict[str, Any] | None:
    """None for an image that cannot be asked: then only a run can tell. Raises StackError, SimulationError."""
    from .facts.simulated import simulated_stack
    from .facts.stack import StackError, probe_stack

    if rig.kind == "simulated":
        return simulated_stack(name, reference).fingerprint()
    if not is_container(reference):
        return probe_stack(name, reference).fingerprint()
    from .containers.client import ContainerError
    from .containers.image import ContainerSettings
    from .containers.probe import probe_image

    try:
        return probe_image(name, reference, ContainerSettings()).fingerprint()
    except (ContainerError, StackError):
        return None


def _searched(
    candidates: Sequence[Candidate], runner: PytestRunner, fresh: bool, quiet: bool
) -> tuple[Found[Evaluation], dict[int, Evaluation]]:
    """The search, with a line for each evaluation; and all of these, by place. Raises BisectError, LedgerError."""
    from .bisect import Evaluation, remembered, search
    from .ledger.suspects import same_outcome

    known: dict[int, Evaluation] = {}
    if not fresh:
        history = runner.store.history(runner.claim, evidence=True)
        for place, one in enumerate(candidates):
            record = remembered(one, history, runner.kind)
            if record is not None:
                known[place] = Evaluation(record, ran=False)
    evaluations = dict(known)
    width = max(len(one.name) for one in candidates)
    for place, evaluation in known.items():
        _line(candidates[place], evaluation, width, quiet)
    steps = search(len(candidates), lambda one, other: same_outcome(one.record, other.record), known)
    try:
        place = next(steps)
        while True:
            evaluations[place] = evaluation = runner.evaluate(candidates[place])
            _line(candidates[place], evaluation, width, quiet)
            place = steps.send(evaluation if evaluation.answers else None)
    except StopIteration as stop:
        return stop.value, evaluations


def _line(candidate: Candidate, one: Evaluation, width: int, quiet: bool) -> None:
    from .claims.account import printable

    if quiet:
        return
    how = f"run, {one.seconds:.0f} s" if one.ran else f"from the ledger, run {one.record.run}"
    why = "" if one.answers else f"; skipped: {one.record.fact}"
    click.echo(printable(f"{candidate.name:<{width}}  {_verdict(one.record):<28}  {how}{why}"))


def _verdict(one: Record) -> str:
    from .report.payload import labelled

    label = REHEARSED if one.kind == "rehearsed" else None
    return labelled(label, one.verdict) + ("" if one.outcome == "none" else f" ({one.outcome})")


def _older_claims(found: Found[Evaluation], runner: PytestRunner) -> str | None:
    """A line where the ledger's answers were given to claims of another revision."""
    from .ledger.writer import revision

    now = revision(runner.root)
    reused = sorted({one.record.run for one in found.answers.values() if not one.ran})
    suites = {suite for run in reused if (suite := runner.store.run(run).suite) is not None}
    if now is None or suites <= {now}:
        return None
    told = ", ".join(sorted(suites - {now}))
    return f"the ledger's answers are of other revisions of the claims ({told}; now {now}): --fresh evaluates anew"


def _result(candidates: Sequence[Candidate], found: Found[Evaluation]) -> list[str]:
    """What was found, for a person."""
    from .ledger.changes import changes, told

    names = [one.name for one in candidates]
    if found.result == "unanswered":
        return ["nothing to compare: fewer than two of these stacks could be evaluated"]
    if found.after is None or found.first is None:
        oldest = min(found.answers)
        said = _verdict(found.answers[oldest].record)
        return [f"no flip: {names[oldest]} and {names[max(found.answers)]} agree: {said}"]
    before, now = found.answers[found.after].record, found.answers[found.first].record
    flip = f"{_verdict(before)} → {_verdict(now)}"
    if found.result == "flipped":
        lines = [f"first flipped: {names[found.first]}: {flip}", f"  {now.fact}"]
    else:
        between = ", ".join(names[found.after + 1 : found.first])
        lines = [
            f"first flipped: one of {', '.join(names[found.after + 1 : found.first + 1])}: {flip}",
            f"  {now.fact}",
            f"  not narrower, because these could not be evaluated: {between}",
        ]
    changed = told(changes(before.components, now.components), most=12)
    lines += [
        f"changed since {names[found.after]}:" if changed else f"nothing known changed since {names[found.after]}"
    ]
    lines += [f"  {one}" for one in changed]
    if found.again:
        again = ", ".join(names[place] for place in found.again)
        lines.append(f"there are more flips than one: as {names[found.after]} answer again {again}")
    if found.others:
        others = ", ".join(f"{names[place]}: {_verdict(found.answers[place].record)}" for place in found.others)
        lines.append(f"it flipped further: {others}")
    return lines


def _as_json(
    claim: str,
    kind: Kind,
    candidates: Sequence[Candidate],
    found: Found[Evaluation],
    evaluations: Mapping[int, Evaluation],
) -> dict[str, Any]:
    from .ledger.changes import changes

    names = [one.name for one in candidates]
    ends = (found.after, found.first)
    after, first = (found.answers[place].record if place is not None else None for place in ends)
    changed = changes(after.components, first.components) if after is not None and first is not None else ()
    reach = range(ends[0] + 1, ends[1] + 1) if ends[0] is not None and ends[1] is not None else ()
    return {
        "claim": claim,
        "kind": kind,
        "result": found.result,
        "first": names[reach[0]] if len(reach) == 1 else None,
        "candidates": [names[place] for place in reach],
        "after": names[ends[0]] if ends[0] is not None else None,
        "changes": [{"component": one.component, "before": one.before, "now": one.now} for one in changed],
        "again": [names[place] for place in found.again],
        "others": [names[place] for place in found.others],
        "evaluations": [
            {
                "stack": names[place],
                "verdict": one.record.verdict,
                "outcome": one.record.outcome,
                "fact": one.record.fact,
                "run": one.record.run,
                "source": "run" if one.ran else "ledger",
                "seconds": round(one.seconds, 2) if one.ran else None,
                "skipped": not one.answers,
            }
            for place, one in sorted(evaluations.items())
        ],
    }
