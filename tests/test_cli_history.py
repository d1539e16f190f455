"""``gpuguard history``, ``diff``, ``matrix``, ``report`` and ``ledger`` on a ledger that is written here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_gpuguard.cli import main
from pytest_gpuguard.ledger.record import Record, Run
from pytest_gpuguard.ledger.store import open_ledger

LEDGER = ".gpuguard/ledger.sqlite"
Command = Callable[..., Result]


def run_of(number: int, kind: str = "verified") -> Run:
    return Run(f"run-{number}", 1000.0 * number, "box", kind, "8 GPUs", "0.1.0", "abc", ("prod",), 1000.0 * number + 9)  # type: ignore[arg-type]


def record(number: int, verdict: str, torch: str, claim: str = "a.py::test_a", **more: object) -> Record:
    values = {
        **{"run": f"run-{number}", "claim": claim, "stack": "prod", "expectation": "fits", "verdict": verdict},
        **{"outcome": "ready" if verdict == "HOLDS" else "oom.weights", "fact": f"fact {number} <b>", "nodeid": claim},
        **{"when": 1000.0 * number + 1, "kind": "verified", "cards": ("h200",), "components": {"torch": torch}},
    }
    return Record(**{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Three runs: held, held, worse with another torch; and runs the command in their folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".gpuguard").mkdir()
    with open_ledger(LEDGER) as ledger:
        for number, verdict, torch in ((1, "HOLDS", "2.9"), (2, "HOLDS", "2.9"), (3, "CONTRADICTED (worse)", "2.13")):
            ledger.begin(run_of(number))
            ledger.add([record(number, verdict, torch), record(number, "HOLDS", torch, "a.py::test_b")])

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), catch_exceptions=False)

    return run


def test_diff_says_what_flipped_and_exits_with_one(command: Command) -> None:
    found = command("diff")
    assert found.exit_code == 1
    assert found.output.startswith("1 claim flipped: 1 worse\nWORSE a.py::test_a [prod]")
    assert "torch 2.9 -> 2.13" in found.output
    quiet = command("diff", "last~1")
    assert (quiet.exit_code, quiet.output) == (0, "run run-2: nothing flipped\n")
    back = command("diff", "run-1", "run-3", "--json")
    assert back.exit_code == 1
    [flip] = json.loads(back.output)["flips"]
    assert (flip["sort"], flip["before"]["run"], flip["now"]["run"]) == ("recovered", "run-3", "run-1")


def test_history_tells_a_claims_runs_and_what_changed_between(command: Command) -> None:
    told = command("history", "a.py::test_a").output.splitlines()
    assert [line.split("  ")[1] for line in told if not line.startswith(" ")] == [
        *("HOLDS, ready", "HOLDS, ready", "CONTRADICTED (worse), oom.weights"),
    ]
    assert told[-1].strip() == "torch 2.9 → 2.13"
    assert len(command("history", "a.py::test_a", "--limit", "1").output.splitlines()) == 1
    assert command("history").output.split() == ["a.py::test_a", "a.py::test_b"]
    data = json.loads(command("history", "a.py::test_a", "--json").output)
    assert [one["verdict"] for one in data] == ["HOLDS", "HOLDS", "CONTRADICTED (worse)"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("history", "test_a"), "the ledger has no claim 'test_a'; did you mean 'a.py::test_a'?"),
        (("diff", "nope"), "has no run 'nope'"),
        (("diff", "run-"), "3 runs begin with 'run-'"),
        (("report", "last~7"), "has 3 runs, so there is no last~7"),
        (("matrix", "--ledger", "absent.sqlite"), "there is no ledger absent.sqlite"),
        (("matrix", "--link", "https://host/run"), "names no run: put {run}"),
        (("ledger", "import", "absent.jsonl"), "absent.jsonl cannot be read: No such file"),
        (("ledger", "alias", "nobody", "new"), "the ledger has no claim 'nobody'"),
        (("report", "--github"), "GITHUB_STEP_SUMMARY is not set"),
        (("report", "--markdown", "no/folder.md"), "no/folder.md cannot be written"),
        (("diff", "--ledger", "mysql://host/db"), "mysql"),
    ],
)
def test_bad_input_is_told_in_a_line(
    command: Command, args: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    found = command(*args)
    assert found.exit_code == 2
    assert says in found.output
    assert "Traceback" not in found.output


def test_where_there_is_no_ledger_it_is_said_what_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["diff"])
    assert found.exit_code == 2
    assert "there is no ledger here" in found.output


def test_the_ledger_of_a_folder_above_is_found(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("suites").mkdir()
    monkeypatch.chdir("suites")
    assert command("history").exit_code == 0


def test_the_matrix_shows_what_was_verified_last(command: Command) -> None:
    text = command("matrix").output
    assert "| `a.py::test_a` | h200 | CONTRADICTED (worse)" in text
    assert "`run-3`" in text
    assert "no verdict that counts" in command("matrix", "--kind", "rehearsed").output
    cells = json.loads(command("matrix", "--json").output)
    assert {one["claim"]: one["run"] for one in cells} == {"a.py::test_a": "run-3", "a.py::test_b": "run-3"}


def test_a_report_has_several_forms_at_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("before\n")
    found = command("report", "--github", "--markdown", "run.md", "--html", "page.html", "--json", "-o", "run.json")
    assert found.exit_code == 0
    assert found.output.startswith("::error ")
    assert Path("summary.md").read_text().startswith("before\n")
    assert "test_a" in Path("summary.md").read_text()
    assert json.loads(Path("run.json").read_text())["run"]["id"] == "run-3"
    page = Path("page.html").read_text()
    assert "fact 3 &lt;b&gt;" in page
    assert "test_a" in Path("run.md").read_text()
    assert command("report", "run-2").output.startswith("run run-2: 2 HOLDS")


def test_runs_go_from_ledger_to_ledger(command: Command) -> None:
    assert command("ledger", "export", "-o", "all.jsonl").exit_code == 0
    with Path("all.jsonl").open("a") as file:
        file.write("{broken\n")
    found = command("ledger", "import", "--ledger", "other.sqlite", "all.jsonl")
    assert found.exit_code == 1
    assert "all.jsonl: 3 runs, 6 judgements" in found.output
    lines = len(Path("all.jsonl").read_text().splitlines())
    assert f"all.jsonl:{lines}: " in found.output
    again = command("ledger", "import", "--ledger", "other.sqlite", "all.jsonl", "--json")
    assert json.loads(again.output)["problems"][0]["line"] == lines
    merged = command("ledger", "merge", "--ledger", "third.sqlite", "other.sqlite", LEDGER)
    assert merged.exit_code == 0
    with open_ledger("third.sqlite") as ledger:
        assert ledger.count() == (3, 6)
    one = command("ledger", "export", "last", "run-1").output
    assert "run-2" not in one


def test_a_renamed_claim_keeps_its_history(command: Command) -> None:
    assert command("ledger", "alias", "a.py::test_a", "a.py::test_new").exit_code == 0
    assert len([line for line in command("history", "a.py::test_new").output.splitlines() if "HOLDS" in line]) == 2
    assert command("ledger", "alias").output == "a.py::test_a -> a.py::test_new\n"


@pytest.mark.parametrize(
    "args", [("history",), ("history", "a.py::test_a"), ("diff",), ("matrix",), ("report",), ("ledger", "export")]
)
@pytest.mark.parametrize("closed", [False, True], ids=["full", "closed"])
def test_an_output_that_takes_nothing_is_bad_input_and_no_flip(
    command: Command, args: tuple[str, ...], closed: bool
) -> None:
    program = "from pytest_gpuguard.cli import main; main()"
    line = shlex.join([sys.executable, "-c", program, *args])
    done = subprocess.run(f"{line} {'>&-' if closed else '>/dev/full'}", shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: standard output ")
    assert len(done.stderr.splitlines()) == 1


def test_a_pipe_or_device_is_written_to_and_not_replaced(command: Command) -> None:
    os.mkfifo("pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        assert command("matrix", "-o", "pipe").exit_code == 0
        assert "a.py::test_a" in reader.communicate()[0]
    assert Path("pipe").is_fifo()


def test_json_and_annotations_do_not_share_standard_output(command: Command) -> None:
    found = command("report", "--github", "--json")
    assert found.exit_code == 2
    assert "-o FILE" in found.output


def test_names_that_a_terminal_would_act_on_are_spelled_out(command: Command) -> None:
    name = "a.py::\x1b[31mtest_red\nfake"
    with open_ledger(LEDGER) as ledger:
        ledger.begin(Run("run-\x1b[1m", 9000.0, "box", "verified", "", "0", None, ("prod",)))
        ledger.add([record(1, "HOLDS", "2.9", name, run="run-\x1b[1m")])
    assert command("ledger", "alias", name, f"{name}2").exit_code == 0
    for args in (("history",), ("ledger", "alias"), ("report",), ("diff",)):
        output = command(*args).output
        assert "\x1b" not in output
        assert "\nfake" not in output
    assert f"{name}2" in json.loads(command("history", "--json").output)


def test_an_unknown_run_is_told_before_anything_is_exported(command: Command) -> None:
    found = command("ledger", "export", "run-1", "nope")
    assert (found.exit_code, "{" in found.output) == (2, False)


def test_a_rehearsed_run_is_called_one_also_where_nothing_flipped(command: Command) -> None:
    with open_ledger(LEDGER) as ledger:
        ledger.begin(run_of(4, "rehearsed"))
        ledger.add([record(4, "HOLDS", "2.13", kind="rehearsed")])
    assert command("diff").output == "run run-4: REHEARSED nothing flipped\n"
    assert command("report").output.startswith("run run-4: REHEARSED 1 HOLDS")
