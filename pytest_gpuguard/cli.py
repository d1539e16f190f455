"""The ``gpuguard`` command: what the plug-in knows, without a test run.

Exit status: 0 done, 1 the answer is "no" (the host is broken, a claim does not hold), 2 usage or unreadable input.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from . import __version__
from .facts.choice import RIG_FORMS, SIMULATED, RigChoice, parse_rig, parse_stack
from .names import is_container

if TYPE_CHECKING:
    from .facts.gpu import Rig
    from .facts.stack import Stack


#: Commands of other modules, which are imported when one of theirs is asked for.
_ELSEWHERE: Final = {
    "bisect": "cli_bisect",
    "diff": "cli_history",
    "fetch": "cli_fetch",
    "history": "cli_history",
    "ledger": "cli_ledger",
    "matrix": "cli_history",
    "predict": "cli_predict",
    "preflight": "cli_preflight",
    "rebaseline": "cli_rebaseline",
    "reference": "cli_reference",
    "report": "cli_history",
    "who": "cli_who",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        found = getattr(importlib.import_module(f".{_ELSEWHERE[cmd_name]}", __package__), cmd_name)
        return found if isinstance(found, click.Command) else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
def main() -> None:
    """Claims about LLM-serving hardware, run for real and judged by reason."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "×" is no reason to fail


def _rig(context: click.Context, parameter: click.Parameter, text: str) -> RigChoice:
    try:
        choice = parse_rig(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if choice.kind == "replayed":
        raise click.BadParameter(f"{text}: replayed rigs are not available in this version")
    return choice


def _check_image(text: str, reference: str) -> None:
    from .containers.image import parse_reference

    try:
        parse_reference(reference)
    except ValueError as error:
        raise click.BadParameter(f"{text}: {error}") from None


def _stacks(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    chosen: list[tuple[str, str]] = []
    rig: RigChoice | None = context.params.get("rig")
    simulated = rig is not None and rig.kind == "simulated"
    for text in texts:
        try:
            name, python = parse_stack(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if is_container(python):
            _check_image(text, python)
        if python.startswith(SIMULATED) != simulated:
            with_it = "a simulated stack, such as NAME=sim:sglang==0.5.7" if simulated else "a python"
            raise click.BadParameter(f"{text}: this rig ({rig}) goes with {with_it}")
        if name in {one for one, _ in chosen}:
            raise click.BadParameter(f"{text}: there are two stacks called {name!r}")
        chosen.append((name, python))
    if simulated and not chosen:
        from .facts.simulated import default_stack

        return [("simulated", default_stack())]
    return chosen or [("default", sys.executable)]


@main.command()
@click.option(
    "--rig",
    default="auto",
    callback=_rig,
    is_eager=True,  # which stacks may be named depends on it
    metavar="RIG",
    help=f"The GPUs: {RIG_FORMS}.",
    show_default=True,
)
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    callback=_stacks,
    metavar="NAME=PYTHON",
    help="The software under test; repeatable. Without it: the python that runs gpuguard, or on a simulated rig the "
    "newest release of SGLang.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/facts.md.")
def facts(rig: RigChoice, stacks: list[tuple[str, str]], as_json: bool) -> None:
    """Show the GPUs of this machine and the software under test.

    Exits 1 when the host is broken (driver mismatch, lost GPU, NVML that hangs), 2 when a stack cannot be asked.
    """
    from .facts.show import plain, print_rich, sheets
    from .facts.simulated import SimulationError
    from .facts.stack import StackError

    try:
        found, probed = _asked(rig, stacks)
    except (SimulationError, StackError) as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps({"rig": found.to_dict(), "stacks": [one.to_dict() for one in probed]}, indent=1))
    elif sys.stdout.isatty():
        print_rich(list(sheets(found, probed)))
    else:
        for sheet in sheets(found, probed):
            click.echo(plain(sheet))
    if found.faults:
        for fault in found.faults:
            click.echo(f"host fault: {fault}", err=True)
        raise SystemExit(1)


def _asked(rig: RigChoice, stacks: list[tuple[str, str]]) -> tuple[Rig, list[Stack]]:
    """The rig and the stacks: asked of the machine, or simulated. Raises SimulationError, StackError."""
    from .facts.nvml import query_rig
    from .facts.simulated import simulated_rig, simulated_stack
    from .facts.stack import probe_stack

    if rig.kind == "simulated":
        return simulated_rig(rig), [simulated_stack(name, python) for name, python in stacks]
    found = query_rig()
    probed = [_probe_image(*one) if is_container(one[1]) else probe_stack(*one) for one in stacks]
    return found, [stack.with_driver(found.driver) for stack in probed]


def _probe_image(name: str, reference: str) -> Stack:
    from .containers.client import ImageAbsent
    from .containers.image import ContainerSettings
    from .containers.probe import probe_image
    from .facts.stack import StackError

    try:
        return probe_image(name, reference, ContainerSettings())
    except ImageAbsent as error:
        raise StackError(name, error.cause, error.cure.replace("NAME=", f"{name}=")) from None


def _signature_files(context: click.Context, parameter: click.Parameter, paths: tuple[str, ...]) -> Any:
    from .diagnose.signatures import SignatureError, read_signature_files

    try:
        return read_signature_files(paths)
    except SignatureError as error:
        raise click.BadParameter(str(error)) from None


def _version(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text)) if text is not None else None
    except InvalidVersion:
        raise click.BadParameter(f"{text!r} is no release: write 0.5.10, or 0.5.15.dev1+gabc") from None


_LOG_OPTIONS: Final = (
    click.option("--engine", type=click.Choice(["auto", "sglang", "vllm"]), default="auto", help="Whose log it is."),
    click.option(
        "--engine-version",
        metavar="VERSION",
        callback=_version,
        help="The engine's release, where the log does not say it.",
    ),
    click.option("--flags", default="", metavar="FLAGS", help="The server's flags: tells what was asked."),
    click.option("--server-info", metavar="FILE", help="The server's /server_info, saved as JSON."),
    click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="GPUs that the boot could have used."),
    click.option(
        "--signatures", multiple=True, callback=_signature_files, metavar="FILE", help="Failure signatures of your own."
    ),
)


def _log_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_LOG_OPTIONS):
        command = option(command)
    return command


def _how(engine: str, engine_version: str | None, signatures: Any) -> Any:
    from .logs import Reading

    return Reading(None if engine == "auto" else engine, engine_version, signatures)


def _known(flags: str, server_info: str | None, gpus: int) -> Any:
    from .explain import beside

    try:
        return beside(flags, server_info, gpus)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per log, one per line (docs/diagnosis.md).")
@click.option("--follow", is_flag=True, help="Follow one log while it grows, until the server has failed.")
@_log_options
def explain(
    logs: tuple[str, ...],
    as_json: bool,
    follow: bool,
    engine: str,
    engine_version: str | None,
    flags: str,
    server_info: str | None,
    gpus: int,
    signatures: Any,
) -> None:
    """Say why a server failed, and what its memory looked like, from its log alone.

    LOG is a file (also .gz), a folder of logs, or - for standard input. Exits 0 whatever the log says, 2 when a log
    cannot be read; the others are explained nevertheless.
    """
    from .claims.account import printable
    from .explain import explain as explained
    from .logs import LogError, expand, read
    from .report.explained import as_json as to_json
    from .report.explained import plain, print_rich

    how, known = _how(engine, engine_version, signatures), _known(flags, server_info, gpus)
    if follow:
        _follow(logs, how, known, as_json)
        return
    unread = 0
    for log in expand(logs):
        try:
            if isinstance(log, LogError):
                raise log
            one = explained(log, read(log, how), known)
        except LogError as error:
            unread += 1
            click.echo(printable(str(error)), err=True)
            continue
        if as_json:
            click.echo(json.dumps(to_json(one)))
        elif sys.stdout.isatty():
            print_rich(one)
        else:
            click.echo(plain(one))
    if unread:
        raise SystemExit(2)


def _follow(logs: tuple[str, ...], how: Any, known: Any, as_json: bool) -> None:
    from .claims.account import printable
    from .explain import explain as explained
    from .logs import Follower, LogError
    from .report.explained import as_json as to_json
    from .report.explained import plain, print_rich

    if len(logs) != 1:
        raise click.UsageError("--follow takes one log")
    terminal = sys.stdout.isatty() and not as_json
    clean = "\r\x1b[2K" if terminal else ""
    log = Follower(logs[0], how)
    said = None
    try:
        for events in log:
            if as_json and any(event.kind != "progress" for event in events):
                said = to_json(explained(logs[0], log.reading(), known))
                click.echo(json.dumps(said))
            for event in () if as_json else events:
                if event.kind == "progress" and terminal and event.progress is not None:
                    done = event.progress
                    click.echo(f"{clean}{done.phase}: {done.done} of {done.total}", nl=False)
                elif event.kind == "ready" or (event.kind == "phase" and event.phase != "ready"):
                    click.echo(f"{clean}line {event.line}: {event.phase}")
            sys.stdout.flush()
    except LogError as error:
        click.echo(clean + printable(str(error)), err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        pass
    one = explained(logs[0], log.close(), known)
    if as_json:
        if to_json(one) != said:
            click.echo(json.dumps(to_json(one)))
    elif terminal:
        click.echo(clean, nl=False)
        print_rich(one)
    else:
        click.echo(plain(one))


def _expectations(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Any:
    from .claims.errors import ClaimError
    from .explain import expectation

    try:
        return [expectation(text) for text in texts]
    except ClaimError as error:
        raise click.BadParameter(str(error)) from None


@main.command()
@click.argument("log", metavar="LOG")
@click.option(
    "--expect",
    "expectations",
    multiple=True,
    required=True,
    callback=_expectations,
    metavar="EXPECTATION",
    help="What is claimed, as in a test: 'ooms(\"weights\")', 'fits(margin=\"2GiB\")'. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (docs/diagnosis.md).")
@_log_options
def judge(
    log: str,
    expectations: Any,
    as_json: bool,
    engine: str,
    engine_version: str | None,
    flags: str,
    server_info: str | None,
    gpus: int,
    signatures: Any,
) -> None:
    """Judge a log that is there already by an expectation, as if the server had just been booted.

    Exits 0 when every expectation holds, 1 when one does not, 2 when the log cannot be read.
    """
    from .claims.account import printable
    from .claims.judgement import Verdict, worst
    from .explain import explain as explained
    from .explain import judge_log
    from .logs import LogError, read
    from .report.explained import as_json as to_json
    from .report.explained import label
    from .report.payload import labelled

    known = _known(flags, server_info, gpus)
    try:
        one = explained(log, read(log, _how(engine, engine_version, signatures)), known)
    except LogError as error:
        click.echo(printable(str(error)), err=True)
        raise SystemExit(2) from None
    judgements = judge_log(one, expectations)
    if as_json:
        found = [
            {"expectation": each.expectation, "verdict": each.verdict.value, "outcome": each.outcome, "fact": each.fact}
            for each in judgements
        ]
        click.echo(json.dumps(to_json(one) | {"verdict": worst(judgements).verdict.value, "judgements": found}))
    else:
        for each in judgements:
            said = labelled(label(one), f"{each.verdict}: {each.expectation}: {each.fact}")
            click.echo(printable(said))
            for line in each.details if each.verdict is not Verdict.HOLDS else ():
                click.echo(f"  {printable(line)}")
    if any(each.verdict is not Verdict.HOLDS for each in judgements):
        raise SystemExit(1)
