"""``gpuguard bisect``: the search asks little and is right, and its evaluations are real runs or the ledger's own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuguard.bisect import BisectError, Candidate, Evaluation, Found, PytestRunner, remembered, search
from pytest_gpuguard.cli_bisect import bisect
from pytest_gpuguard.ledger.record import Kind, Record, Run
from pytest_gpuguard.ledger.store import open_ledger

RIG = "sim:rtx-pro-6000-server:2"
WORSE = "CONTRADICTED (worse)"


# ---------------------------------------------------------------------------------------------------------- the search


def ended(steps: Generator[int, Any, Found[Any]], truth: Sequence[Any]) -> tuple[Found[Any], list[int]]:
    """What a search finds where ``truth`` answers, and what it asked; None cannot be evaluated."""
    asked: list[int] = []
    try:
        place = next(steps)
        while True:
            assert place not in asked
            asked.append(place)
            place = steps.send(truth[place])
    except StopIteration as stop:
        return stop.value, asked


def searched(truth: Sequence[Any], known: Sequence[int] = ()) -> tuple[Found[Any], list[int]]:
    steps = search(len(truth), lambda one, other: one == other, {place: truth[place] for place in known})
    return ended(steps, truth)


def flipped_at(number: int, first: int) -> list[str | None]:
    return ["holds" if place < first else "worse" for place in range(number)]


@pytest.mark.parametrize("number", range(2, 13))
def test_every_flip_is_found_with_few_questions(number: int) -> None:
    for first in range(1, number):
        found, asked = searched(flipped_at(number, first))
        assert (found.result, found.after, found.first) == ("flipped", first - 1, first)
        assert len(asked) <= 2 + math.ceil(math.log2(number))
        assert (found.again, found.others, found.skipped) == ((), (), ())


@pytest.mark.parametrize("number", range(2, 13))
def test_ends_that_agree_are_asked_and_nothing_else(number: int) -> None:
    found, asked = searched(["holds"] * number)
    assert (found.result, asked) == ("agree", [0, number - 1])


@pytest.mark.parametrize("number", range(2, 9))
def test_whatever_cannot_be_evaluated_the_answer_is_as_narrow_as_can_be(number: int) -> None:
    for first in range(1, number):
        for left_out in (one for size in range(number + 1) for one in combinations(range(number), size)):
            truth = flipped_at(number, first)
            for place in left_out:
                truth[place] = None
            found, _ = searched(truth)
            before = [place for place, one in enumerate(truth) if one == "holds"]
            after = [place for place, one in enumerate(truth) if one == "worse"]
            if len(before) + len(after) < 2:
                assert found.result == "unanswered"
            elif not (before and after):
                assert found.result == "agree"
            else:
                assert (found.after, found.first) == (before[-1], after[0])
                assert found.result == ("flipped" if after[0] == before[-1] + 1 else "range")
                assert set(found.skipped) <= set(left_out)


@given(st.integers(2, 4000), st.data())
def test_long_lists_take_few_questions_too(number: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, number - 1))
    found, asked = searched(flipped_at(number, first))
    assert found.first == first
    assert len(asked) <= 2 + math.ceil(math.log2(number))


@given(st.lists(st.sampled_from(["holds", "worse", "changed", None]), min_size=2, max_size=20), st.data())
def test_in_any_history_two_neighbours_that_differ_are_found(truth: list[str | None], data: st.DataObject) -> None:
    answered = [place for place, one in enumerate(truth) if one is not None]
    known = data.draw(st.lists(st.sampled_from(answered), unique=True)) if answered else []
    found, asked = searched(truth, known)
    assert not set(asked) & set(known)
    assert set(found.answers) | set(found.skipped) == {*asked, *known}
    if found.result in ("flipped", "range"):
        assert found.after is not None
        assert found.first is not None
        oldest = truth[min(found.answers)]
        assert truth[found.after] == oldest != truth[found.first]
        assert all(truth[place] is None for place in range(found.after + 1, found.first))
        assert all(truth[place] == oldest for place in found.answers if place <= found.after)


def test_what_is_known_is_not_asked_again() -> None:
    found, asked = searched(flipped_at(10, 4), known=[0, 3, 4, 9])
    assert (found.result, found.first, asked) == ("flipped", 4, [])


def test_more_flips_than_one_are_told_when_they_are_seen() -> None:
    truth = ["holds", "holds", "worse", "worse", "holds", "changed"]
    found, _ = searched(truth, known=[0, 2, 4, 5])
    assert (found.after, found.first) == (1, 2)
    assert (found.again, found.others) == ((4,), (5,))


def test_ends_that_agree_hide_no_flip_that_the_ledger_has_seen() -> None:
    found, _ = searched(["holds", "worse", "holds"], known=[1])
    assert (found.result, found.first) == ("flipped", 1)


def test_one_stack_is_no_list() -> None:
    with pytest.raises(ValueError, match="two stacks"):
        next(search(1, lambda one, other: one == other))


# --------------------------------------------------------------------------------------------- answers of the ledger

PARTS = {"python": "3.11.7", "torch": "2.9.1", "driver": "580.82", "gpus": "RTX", "packages": "abc", "jit_cache a": "x"}


def recorded(verdict: str = "HOLDS", **changed: Any) -> Record:
    values: dict[str, Any] = {
        "run": "20260130-130455-3f2a",
        "claim": "F9",
        "stack": "old",
        "expectation": "fits",
        "verdict": verdict,
        "outcome": "ready" if verdict == "HOLDS" else "oom.weights",
        "fact": "as seen",
        "when": 1.0,
        "kind": "verified",
        "nodeid": "test_a.py::test_a",
        "cards": ("rtx",),
        "components": PARTS,
    }
    return Record(**values | changed)


def known_of(*records: Record, parts: dict[str, str | None] | None = None, kind: Kind = "verified") -> Record | None:
    candidate = Candidate("new", "/x", dict(PARTS) if parts is None else parts, frozenset({"rtx"}))
    return remembered(candidate, records, kind)


def test_the_newest_answer_on_the_same_stack_counts_whatever_it_was_called() -> None:
    newest = recorded(when=3.0, run="b")
    assert known_of(recorded(), newest, recorded(when=2.0)) is newest


@pytest.mark.parametrize(
    "changed",
    [
        {"components": PARTS | {"torch": "2.13.0"}},
        {"components": PARTS | {"driver": "570.86"}},
        {"components": PARTS | {"package vllm": "0.9"}},
        {"components": {}},
        {"cards": ("h200",)},
        {"kind": "rehearsed"},
        {"decides": False},
        {"verdict": "INFRA"},
        {"verdict": "NOT_EVALUATED"},
        {"verdict": "INCONCLUSIVE"},
        {"evidence": {"confirmed": {"boots": 2, "agreed": 1}}},
    ],
)
def test_what_was_another_stack_or_no_answer_does_not_count(changed: dict[str, Any]) -> None:
    assert known_of(recorded(**changed)) is None


def test_jit_caches_do_not_tell_stacks_apart_because_a_run_fills_them() -> None:
    assert known_of(recorded(components=PARTS | {"jit_cache a": "y", "jit_cache b": "z"})) is not None


def test_a_claim_that_needs_no_gpu_is_known_whatever_the_rig() -> None:
    parts: dict[str, str | None] = {name: one for name, one in PARTS.items() if name not in ("driver", "gpus")}
    assert known_of(recorded(components=parts, cards=())) is not None


def test_answers_that_disagree_on_one_stack_are_none() -> None:
    assert known_of(recorded(), recorded(WORSE, when=2.0)) is None


def test_a_stack_that_could_not_be_asked_has_no_answers() -> None:
    assert remembered(Candidate("new", "docker:x"), [recorded()], "verified") is None


# ------------------------------------------------------------------------------------------------------- the command

STACKS = [f"s{minor}=sim:sglang==0.5.{minor}" for minor in (5, 6, 7, 8, 9)]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def told(tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command over evaluations that are made up: name of a stack → verdict."""

    def run(truth: dict[str, str], *arguments: str, claim: str = "F9") -> Result:
        def evaluate(self: PytestRunner, candidate: Candidate) -> Evaluation:
            verdict = truth[candidate.name]
            record = recorded(
                verdict,
                stack=candidate.name,
                kind=self.kind,
                components=candidate.components,
                run=f"r-{candidate.name}",
            )
            return Evaluation(record, ran=True, seconds=2.0)

        monkeypatch.setattr(PytestRunner, "evaluate", evaluate)
        options = ["--rig", RIG, "--ledger", str(ledger), "--root", str(tmp_path)]
        return CliRunner().invoke(bisect, [claim, *STACKS, *options, *arguments])

    return run


def truth(*verdicts: str) -> dict[str, str]:
    return dict(zip((one.partition("=")[0] for one in STACKS), verdicts, strict=True))


def test_the_first_that_flips_is_told_with_what_changed(told: Callable[..., Result]) -> None:
    result = told(truth("HOLDS", "HOLDS", "HOLDS", WORSE, WORSE))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[0] == "s5"
    assert "REHEARSED HOLDS (ready)" in lines[0]
    assert lines[0].endswith("run, 2 s")
    assert f"first flipped: s8: REHEARSED HOLDS (ready) → REHEARSED {WORSE} (oom.weights)" in lines
    assert "  sglang 0.5.7 → 0.5.8" in lines


def test_ends_that_agree_end_with_status_1(told: Callable[..., Result]) -> None:
    result = told(truth("HOLDS", WORSE, WORSE, WORSE, "HOLDS"))
    assert result.exit_code == 1
    assert "no flip: s5 and s9 agree: REHEARSED HOLDS (ready)" in result.stdout
    assert len(result.stdout.splitlines()) == 3


def test_stacks_that_cannot_be_evaluated_are_skipped_and_a_range_is_told(told: Callable[..., Result]) -> None:
    result = told(truth("HOLDS", "INFRA", "NOT_EVALUATED", "INCONCLUSIVE", WORSE))
    assert result.exit_code == 1
    assert "first flipped: one of s6, s7, s8, s9: " in result.stdout
    assert "skipped: as seen" in result.stdout
    assert "could not be evaluated: s6, s7, s8" in result.stdout


def test_where_nothing_can_be_evaluated_nothing_is_found(told: Callable[..., Result]) -> None:
    result = told(truth(*["INFRA"] * 5), "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["result"], said["first"], [one["skipped"] for one in said["evaluations"]]) == (
        "unanswered",
        None,
        [True] * 5,
    )


def test_json_has_it_all(told: Callable[..., Result]) -> None:
    said = json.loads(told(truth("HOLDS", "HOLDS", "HOLDS", WORSE, WORSE), "--json").stdout)
    assert (said["claim"], said["kind"], said["result"]) == ("F9", "rehearsed", "flipped")
    assert (said["after"], said["first"], said["candidates"]) == ("s7", "s8", ["s8"])
    assert {"component": "sglang", "before": "0.5.7", "now": "0.5.8"} in said["changes"]
    assert said["evaluations"][0] == {
        "stack": "s5",
        "verdict": "HOLDS",
        "outcome": "ready",
        "fact": "as seen",
        "run": "r-s5",
        "source": "run",
        "seconds": 2.0,
        "skipped": False,
    }


def remember(ledger: Path, *verdicts: tuple[str, str, str]) -> None:
    """Put answers into a ledger: (release, verdict, kind)."""
    from pytest_gpuguard.cli_bisect import _asked

    with open_ledger(str(ledger)) as store:
        for number, (release, verdict, kind) in enumerate(verdicts):
            run = f"2026013{number}-130455-3f2a"
            store.begin(Run(run, float(number), "host", kind, "", "0", None, ("x",)))  # type: ignore[arg-type]
            (one,) = _asked([("x", f"sim:sglang=={release}")], RIG)
            cards = tuple(one.cards)
            store.add([recorded(verdict, run=run, stack="x", kind=kind, components=one.components, cards=cards)])


def test_what_the_ledger_knows_is_shown_as_such_and_not_run(told: Callable[..., Result], ledger: Path) -> None:
    remember(ledger, ("0.5.5", "HOLDS", "rehearsed"), ("0.5.8", WORSE, "rehearsed"), ("0.5.7", WORSE, "verified"))
    result = told(truth("", "HOLDS", "HOLDS", "", ""))
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in lines[:4]] == ["s5", "s8", "s6", "s7"]
    assert lines[0].endswith("from the ledger, run 20260130-130455-3f2a")
    assert lines[2].endswith("run, 2 s")
    assert any(line.startswith("first flipped: s8") for line in lines)


def test_fresh_ignores_what_the_ledger_knows(told: Callable[..., Result], ledger: Path) -> None:
    remember(ledger, ("0.5.5", WORSE, "rehearsed"))
    result = told(truth("HOLDS", "HOLDS", "HOLDS", WORSE, WORSE), "--fresh")
    assert "from the ledger" not in result.stdout
    assert "first flipped: s8" in result.stdout


def test_more_flips_than_one_are_said(told: Callable[..., Result], ledger: Path) -> None:
    remember(ledger, ("0.5.6", WORSE, "rehearsed"), ("0.5.8", "HOLDS", "rehearsed"))
    result = told(truth("HOLDS", "", "HOLDS", "", "HOLDS"))
    assert "first flipped: s6" in result.stdout
    assert "there are more flips than one: as s5 answer again s8" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["F9", "a=sim:sglang==0.5.7"], "two stacks or more"),
        (["F9", "a=sim:sglang==0.5.7", "a=sim:sglang==0.5.8"], "two stacks called 'a'"),
        (["F9", "a-b=sim:sglang==0.5.7", "b=sim:sglang==0.5.8"], "'a-b': a stack's name has letters"),
        (["F9", "a=/opt/python", "b=sim:sglang==0.5.8"], "goes with a=sim:sglang==0.5.7"),
        (["F9", "nothing", "b=sim:sglang==0.5.8"], "is no stack"),
        (["F9", "a=sim:sglang==0.5.7", "b=sim:torch==2"], "names no engine"),
        (["F9", "a=sim:sglang==0.5.7", "b=sim:sglang==0.5.8", "--ledger", "none"], "there must be one"),
        (["F9", "a=sim:sglang==0.5.7", "b=sim:sglang==0.5.8", "--rig", "sim:rtx-pro-6000:0"], "cannot be simulated"),
        (["F9", "a=/no/python", "b=/no/python", "--rig", "auto"], "/no/python"),
        (["x/t.py::t", "a=sim:sglang==0.5.7", "b=sim:sglang==0.5.8"], "there is no file x/t.py"),
        (["F 9", "a=sim:sglang==0.5.7", "b=sim:sglang==0.5.8"], "no id that can be collected"),
        (["F9", "a=sim:sglang==0.5.7", "b=sim:sglang==0.5.8", "--ledger", "/proc/no/x"], "/proc/no/x"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_cause_and_cure(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(bisect, ["--rig", RIG, *arguments])
    assert result.exit_code == 2
    assert said in result.stderr


# ------------------------------------------------------------------------------------------------------- real runs

SUITE = """
    from pytest_gpuguard import *

    @serves("sglang", "./a-model", "--mem-fraction-static 0.8 --enable-flashinfer-allreduce-fusion", layout="TP2")
    @fits
    @claim(id="fusion", minutes=1)
    def test_allreduce_fusion(): ...

    @needs_gpus(1)
    @serves("sglang", "./a-model", "--mem-fraction-static 0.8")
    @fits
    @claim(minutes=1)
    @pytest.mark.parametrize("size", ["s-1"])
    def test_boots(size): ...
"""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "model_type": "qwen3",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "a-model").mkdir(parents=True)
    (root / "a-model" / "config.json").write_text(json.dumps(CONFIG))
    (root / "test_mine.py").write_text("import pytest\n" + textwrap.dedent(SUITE))
    from .conftest import PLAIN, own_ports

    (root / "pytest.ini").write_text(f"[pytest]\naddopts = {PLAIN}\ngpuguard_ports = {own_ports()}\n")
    return root


def command(project: Path, claim: str, *arguments: str, releases: Sequence[str]) -> list[str]:
    stacks = [f"s{number}=sim:sglang=={release}" for number, release in enumerate(releases)]
    words = [sys.executable, "-c", "from pytest_gpuguard.cli_bisect import bisect; bisect()"]
    return [*words, claim, *stacks, "--rig", RIG, "--root", str(project), *arguments]


def ran(project: Path, claim: str, *arguments: str, releases: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        command(project, claim, *arguments, releases=releases), capture_output=True, text=True, env=env, timeout=110
    )


def test_real_runs_find_the_release_that_refuses_a_feature(project: Path) -> None:
    releases = ["0.5.9", "0.5.10", "0.5.15", "0.5.16"]
    first = ran(project, "fusion", releases=releases)
    assert first.returncode == 0, first.stdout + first.stderr
    assert (
        "first flipped: s2: REHEARSED HOLDS (ready) → REHEARSED CONTRADICTED (worse) (unsupported.arch)" in first.stdout
    )
    assert "  sglang 0.5.10 → 0.5.15" in first.stdout
    again = ran(project, "fusion", "--json", releases=releases)  # the ledger knows it all
    said = json.loads(again.stdout)
    assert (said["first"], {one["source"] for one in said["evaluations"]}) == ("s2", {"ledger"})


def test_a_claim_without_an_id_goes_by_its_node_id(project: Path) -> None:
    result = ran(project, "test_mine.py::test_boots[s-1]", releases=["0.5.6", "0.5.7"])
    assert "no flip: s0 and s1 agree: REHEARSED HOLDS (ready)" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 1


def test_a_claim_that_is_nowhere_is_told_with_what_pytest_said(project: Path) -> None:
    result = ran(project, "F9", releases=["0.5.6", "0.5.7"])
    assert result.returncode == 2
    assert "there is no claim F9 in" in result.stderr
    assert "2 deselected" in result.stderr


def test_arguments_for_pytest_come_after_two_dashes(project: Path) -> None:
    result = ran(project, "fusion", "--", "--gpuguard-wait", "nonsense", releases=["0.5.6", "0.5.7"])
    assert result.returncode == 2
    assert "nonsense" in result.stderr


def test_a_stack_that_a_conftest_pins_is_told(project: Path) -> None:
    (project / "conftest.py").write_text(
        "from pytest_gpuguard.facts.stackref import StackRef\n"
        "def pytest_gpuguard_stack(item):\n    return StackRef('pinned', 'sim:sglang==0.5.6')\n"
    )
    result = ran(project, "test_mine.py::test_boots[s-1]", releases=["0.5.6", "0.5.7"])
    assert result.returncode == 2
    assert "on the stack 'pinned' and not on 's0': a conftest.py pins it" in result.stderr


def test_somebody_elses_run_at_the_same_time_is_not_taken_for_ours(
    project: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ours runs, two others judge the same claim on stacks of the same name: of other parts, and of ours."""
    other: list[dict[str, Any]] = [{"components": PARTS | {"torch": "1"}}]
    with open_ledger(str(ledger)) as store:

        def run(self: PytestRunner, words: Sequence[str]) -> tuple[int, str]:
            for number, changed in enumerate([{"verdict": WORSE}, *other]):
                store.begin(Run(f"r{number}", 1.0, "host", "verified", "", "0", None, ("new",)))
                store.add([recorded(run=f"r{number}", stack="new", **changed)])
            return 0, ""

        monkeypatch.setattr(PytestRunner, "_pytest", run)
        monkeypatch.setattr(PytestRunner, "nodeid", lambda self: "test_a.py::test_a")
        candidate = Candidate("new", "/x", PARTS, frozenset({"rtx"}))
        runner = PytestRunner(store, str(ledger), project, "F9", "auto", "verified")
        assert runner.evaluate(candidate).record.verdict == WORSE
        other.append({"verdict": "HOLDS"})
        with open_ledger(str(ledger.with_name("another.sqlite"))) as another:
            store = another
            runner.store = another
            with pytest.raises(BisectError, match="give the stacks names that nobody else uses"):
                runner.evaluate(candidate)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_the_command_that_started_it(project: Path, how: signal.Signals) -> None:
    (project / "conftest.py").write_text(
        "import os, pathlib, time\n"
        "def pytest_collection_finish(session):\n"
        "    pathlib.Path('pid.new').write_text(str(os.getpid())); os.rename('pid.new', 'pid'); time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = command(project, "test_mine.py::test_boots[s-1]", releases=["0.5.6", "0.5.7"])
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        pid = project / "pid"
        until = time.monotonic() + 60
        while not pid.exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(how)
        process.wait(30)
        until = time.monotonic() + 20
        while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid.read_text()}").exists()
