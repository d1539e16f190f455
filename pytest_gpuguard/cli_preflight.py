"""``gpuguard preflight``: the claims of suites/preflight as a table, in about a minute and without a model.

They are evaluated by pytest, like any claim: leased GPUs, deadlines, the ledger. It must never call a stack fine of
which it could not ask anything.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from .claims.account import short
from .facts.choice import RIG_FORMS
from .preflight_tell import PIPE, title_of

_HERE: Final = Path(__file__).resolve().parent
#: pytest's status when there was nothing to run.
_NOTHING: Final = 5
#: How a verdict is told in the table.
STATES: Final[Mapping[str, str]] = {
    "HOLDS": "ok",
    "CONTRADICTED (worse)": "BROKEN",
    "CHANGED": "BROKEN",
    "INFRA": "BROKEN",
    "CONTRADICTED (better)": "better",
    "INCONCLUSIVE": "open",
    "UNSTATED": "new",
    "NOT_EVALUATED": "-",
}
#: What the user's settings would change of how the suite is collected.
_OURS: Final = (
    "addopts=",
    "python_files=test_*.py",
    "python_functions=test",
    "usefixtures=",
    "required_plugins=",
    "gpuguard_require=",
)
_NOT_PASSED: Final = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
_COLOURS: Final = {"ok": "green", "BROKEN": "red", "better": "cyan", "open": "yellow", "new": "yellow"}


def suite_folder() -> Path:
    """Where the preflight claims are: in the installed package, or beside it in a checkout. Raises UsageError."""
    for folder in (_HERE / "suites" / "preflight", _HERE.parent / "suites" / "preflight"):
        if folder.is_dir():
            return folder
    raise click.UsageError("this installation has no suites/preflight: install pytest-gpuguard anew")


@click.command()
@click.option("--rig", default="auto", show_default=True, metavar="RIG", help=f"The GPUs: {RIG_FORMS}.")
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    metavar="NAME=PYTHON",
    help="The software under test: a python, docker:IMAGE or podman:IMAGE (repeatable).  [default: this python]",
)
@click.option(
    "--ledger",
    metavar="URL",
    help="Where the verdicts are remembered, or none.  [default: .gpuguard/ledger.sqlite here]",
)
@click.option("-k", "expression", metavar="EXPRESSION", help="Only checks whose name matches, as for pytest.")
@click.option("--hearsay", is_flag=True, help="Also what was only reported, and is never red.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/preflight.md.")
def preflight(
    rig: str, stacks: tuple[str, ...], ledger: str | None, expression: str | None, hearsay: bool, as_json: bool
) -> None:
    """Find out in a minute, without a model, what is broken about rig and stack.

    Settings are those of the pytest.ini of this folder. Exits 0 when nothing is broken, 1 when something is, 2 when the
    checks could not be run.
    """
    words = [f"--gpuguard-rig={rig}", *(f"--gpuguard-stack={one}" for one in stacks)]
    words += [f"--gpuguard-ledger={ledger}"] if ledger is not None else []
    words += ["-k", expression] if expression is not None else []
    words += ["--gpuguard-preflight-hearsay"] if hearsay else []
    began = time.monotonic()
    table = _Table(silent=as_json)
    code, said = _run(words, table)
    seconds = time.monotonic() - began
    if not table.begun or code not in (0, 1, _NOTHING):
        raise click.UsageError(_last_words(said) or f"pytest ended with status {code}")
    if not table.ended or len(table.claims) < table.count:
        raise click.UsageError(
            f"pytest ended after {len(table.claims)} of {table.count} checks (status {code}): {_last_words(said)}"
        )
    for line in said.splitlines():
        if line.startswith("gpuguard: the ledger"):
            click.echo(line, err=True)
    if not table.checks:
        raise click.UsageError(f"no check matches {expression!r}" if expression else "there are no checks")
    broken = sum(one["state"] == "BROKEN" for one in table.checks)
    if as_json:
        whole = {
            "rig": table.lines,
            "stacks": table.stacks,
            "checks": table.checks,
            "broken": broken,
            "seconds": round(seconds, 1),
        }
        click.echo(json.dumps(whole, allow_nan=False))
    else:
        table.end(seconds)
    if code == 1 and not any(one["state"] in ("BROKEN", "better", "open") for one in table.checks):
        click.echo(f"Error: {_last_words(said)}", err=True)  # something that is no check's
        raise SystemExit(1)
    if broken:
        raise SystemExit(1)


class _Table:
    """What is shown, a line when it is known."""

    def __init__(self, silent: bool) -> None:
        self.begun = self.ended = False
        #: How many checks there are to be, and which of them have a verdict.
        self.count = 0
        self.claims: set[tuple[str, str]] = set()
        self.lines: list[str] = []
        self.stacks: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self._silent = silent
        self._several = False
        self._width = 44

    def take(self, event: Mapping[str, Any]) -> None:
        """One line of what pytest's process tells."""
        if event["kind"] == "begin":
            self.begun, self.count = True, len(event["titles"])
            self.lines, self.stacks = list(event["lines"]), list(event["stacks"])
            self._several = len(self.stacks) > 1
            for line in self.lines:
                self._print(line)
            self._width = min(72, max([len(title) for title in event["titles"]], default=0))
            for line in _cold(self.stacks) if event["gpus"] else ():
                self._print(line)
            for stack in self.stacks:
                for line in stack["changed"]:
                    self._print(f"stack {stack['name']}: changed since it was last looked at: {line}")
            self._print("")
        elif event["kind"] == "end":
            self.ended = True
        elif event["kind"] == "verdict":
            check = _check(event)
            self.claims.add((event["claim"]["nodeid"], event["claim"]["stack"]))
            self.checks.append(check)
            self._show(check)
        else:
            said = [line for line in str(event["said"]).splitlines() if line.strip()]
            own = [line[1:].strip() for line in said if line.startswith("E ")]
            fact = (own or said or [""])[-1]
            title = str(event["nodeid"]).rpartition("::")[2]
            check = {"claim": event["nodeid"], "title": f"after {title}", "state": "BROKEN", "verdict": "INFRA"}
            check.update(outcome="infra.test", fact=fact.strip(), stack=None, seconds=0.0)
            check.update(label=None, reason=None, log=None, found={}, remedies=[])
            self.checks.append(check)
            self._show(check)

    def end(self, seconds: float) -> None:
        """The counts, and why checks were not decided."""
        counts = {state: sum(one["state"] == state for one in self.checks) for state in ("BROKEN", "ok", "better", "-")}
        rest = len(self.checks) - sum(counts.values())
        parts = [f"{counts['BROKEN']} broken", f"{counts['ok']} ok"]
        parts += [f"{counts['better']} better than claimed"] if counts["better"] else []
        parts += [f"{rest} undecided"] if rest else []
        if counts["-"]:
            reasons: dict[str, int] = {}
            for one in self.checks:
                if one["state"] == "-":
                    reasons[one["reason"] or "?"] = reasons.get(one["reason"] or "?", 0) + 1
            why = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
            parts.append(f"{counts['-']} not evaluated ({why})")
        self._print("")
        self._print(f"{', '.join(parts)}; {seconds:.0f} s")

    def _show(self, check: Mapping[str, Any]) -> None:
        state = click.style(f"{check['state']:<6}", fg=_COLOURS.get(check["state"]), bold=check["state"] == "BROKEN")
        stack = f"{check['stack'] or '':<10.10} " if self._several else ""
        width, title = self._width, str(check["title"])
        title = title if len(title) <= width else title[: width - 1] + "…"
        fact = check["fact"]
        if check["state"] == "ok":
            fact = fact.partition(": ")[2] if fact.startswith("answered in") else fact
        if check["state"] != "BROKEN":  # of what is broken all is said
            room = shutil.get_terminal_size((1000, 24)).columns if sys.stdout.isatty() else 1000
            fact = short(fact, max(40, room - width - len(stack) - 19))
        self._print(f"{state} {stack}{title:<{width}} {check['seconds']:>5.1f} s  {fact}")
        if check["state"] == "BROKEN" and check.get("log"):
            self._print(f"{' ' * (len(stack) + width + 16)}  log: {check['log']}")

    def _print(self, line: str) -> None:
        if not self._silent:
            click.echo(line)


def _check(event: Mapping[str, Any]) -> dict[str, Any]:
    data = event["claim"]
    state = STATES.get(data["verdict"], "open")
    return {
        "claim": data["claim"],
        "title": title_of(data["key"], data["title"]),
        "stack": data["stack"],
        "state": "open" if state == "BROKEN" and data["hearsay"] else state,
        "verdict": data["verdict"],
        "label": data["label"],
        "outcome": data["outcome"],
        "fact": data["fact"],
        "reason": data["reason"],
        "found": data["found"],
        "remedies": data["remedies"],
        "seconds": event["seconds"],
        "log": data["log"],
    }


def _cold(stacks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in stacks:
        cold = sorted(name for name, state in one["jit_caches"].items() if state == "cold")
        if cold:
            yield f"stack {one['name']}: cold JIT caches: {', '.join(cold)}; what compiles a kernel first takes longer"


def _run(words: Sequence[str], table: _Table) -> tuple[int, str]:
    """Pytest over the suite; its status and what it printed."""
    reader, writer = os.pipe()
    env = {name: one for name, one in os.environ.items() if name not in _NOT_PASSED} | {PIPE: str(writer)}
    # Not -m: that would take a json.py of the current folder for the standard library's.
    command = [
        *(sys.executable, "-c", "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main())"),
        *(str(suite_folder()), "-q", "-p", "no:cacheprovider", "-p", "no:randomly"),
        *("-p", "pytest_gpuguard.preflight_tell"),
        *(word for one in _OURS for word in ("-o", one)),
        *_ini(),
        *words,
    ]
    was = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, pass_fds=(writer,)
            )
        finally:
            os.close(writer)
        try:
            with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
                for line in pipe:
                    table.take(json.loads(line))
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            signal.signal(signal.SIGTERM, was)
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It gives its GPUs back first, as after Ctrl-C."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ini() -> list[str]:
    """The settings of the folder that this was called in: pytest would look beside the suite."""
    signs = {"pytest.ini": "", ".pytest.ini": "", "pyproject.toml": "[tool.pytest", "tox.ini": "[pytest]"}
    signs["setup.cfg"] = "[tool:pytest]"
    here = Path.cwd()
    for folder in (here, *here.parents):
        for name, sign in signs.items():
            try:
                if sign in (folder / name).read_text(encoding="utf-8", errors="replace"):
                    return ["-c", str(folder / name), f"--rootdir={folder}"]
            except OSError:
                continue
    return ["-c", os.devnull, f"--rootdir={here}"]


def _last_words(said: str) -> str:
    """What pytest said of why it did not run: its error lines, or its last ones."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if line.startswith(("ERROR", "E  ", "FAILED"))), None)
    return "\n".join(lines[-8:] if first is None else lines[first : first + 8])
