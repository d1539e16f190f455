"""The ``gpuguard`` command: what the plug-in knows, without a test run.

Exit status: 0 done, 1 the answer is "no" (here: the host is broken), 2 usage or unreadable input.
"""

from __future__ import annotations

import io
import json
import sys

import click

from . import __version__
from .facts.choice import RIG_FORMS, RigChoice, parse_rig, parse_stack


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    if choice.kind != "real":
        raise click.BadParameter(f"{text}: {choice.kind} rigs are not available in this version")
    return choice


def _stacks(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    chosen: list[tuple[str, str]] = []
    for text in texts:
        try:
            name, python = parse_stack(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if python.startswith(("docker:", "podman:")):
            raise click.BadParameter(f"{text}: container stacks are not available in this version")
        if name in {one for one, _ in chosen}:
            raise click.BadParameter(f"{text}: there are two stacks called {name!r}")
        chosen.append((name, python))
    return chosen or [("default", sys.executable)]


@main.command()
@click.option("--rig", default="auto", callback=_rig, metavar="RIG", help=f"The GPUs: {RIG_FORMS}.", show_default=True)
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    callback=_stacks,
    metavar="NAME=PYTHON",
    help="The software under test; repeatable. Without it: the python that runs gpuguard.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/facts.md.")
def facts(rig: RigChoice, stacks: list[tuple[str, str]], as_json: bool) -> None:
    """Show the GPUs of this machine and the software under test.

    Exits 1 when the host is broken (driver mismatch, lost GPU, NVML that hangs), 2 when a stack cannot be asked.
    """
    from .facts.nvml import query_rig
    from .facts.show import plain, print_rich, sheets
    from .facts.stack import StackError, probe_stack

    found = query_rig()
    try:
        probed = [probe_stack(name, python).with_driver(found.driver) for name, python in stacks]
    except StackError as error:
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
