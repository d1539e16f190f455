"""Annotations: the commands as GitHub's runner reads them, and nothing from a log that could be one."""

import re

import pytest

from pytest_gpuguard.report.document import document
from pytest_gpuguard.report.github import MOST, annotations, command

from .report_runs import HOSTILE, failed, flip, record, run

#: How the runner reads a line: command, properties, data.
_COMMAND = re.compile(r"^::(\w+)(?: ([^:\n\r]*))?::([^\n\r]*)$")


def read(line: str) -> tuple[str, dict[str, str], str]:
    found = _COMMAND.match(line)
    assert found is not None, line

    def back(text: str) -> str:
        for code, one in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            text = text.replace(code, one)
        return text

    said = dict(one.split("=", 1) for one in (found[2] or "").split(",") if one)
    return found[1], {name: back(value) for name, value in said.items()}, back(found[3])


def test_a_flip_is_an_error_at_its_test() -> None:
    now = failed("suites/test_kimi.py::test_ep8")
    [line] = annotations(document(run(), [now], [flip(now)]), {now.nodeid: 41}, prefix="gpu/")
    kind, said, message = read(line)
    assert kind == "error"
    assert said == {
        "file": "gpu/suites/test_kimi.py",
        "line": "41",
        "title": "worse: suites/test_kimi.py::test_ep8 [new]",
    }
    assert message.startswith("was HOLDS on 2026-01-12, now CONTRADICTED (worse), oom.weights: torch.OutOfMemoryError")
    assert "; changed: sglang 0.5.18 -> 0.5.23" in message


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        ("INFRA", "error"),
        ("CHANGED", "error"),
        ("CONTRADICTED (better)", "error"),
        ("INCONCLUSIVE", "warning"),
        ("UNSTATED", "warning"),
        ("NOT_EVALUATED", None),
        ("HOLDS", None),
    ],
)
def test_a_verdict_without_a_flip_has_its_kind(verdict: str, kind: str | None) -> None:
    found = annotations(document(run(), [record(verdict=verdict)]))
    assert [read(line)[0] for line in found] == ([kind] if kind else [])


def test_hearsay_and_rehearsals_are_no_errors() -> None:
    assert [read(line)[0] for line in annotations(document(run(), [failed(hearsay=True)]))] == ["notice"]
    [line] = annotations(document(run("rehearsed"), [failed(kind="rehearsed")]))
    kind, said, _ = read(line)
    assert kind == "warning"
    assert said["title"].startswith("REHEARSED ")


def test_flips_come_first_and_at_most_ten_of_a_kind() -> None:
    flipped = failed("z::z")
    records = [*(failed(f"a::{i}") for i in range(20)), flipped, *(record(f"b::{i}", "UNSTATED") for i in range(10))]
    found = [read(line) for line in annotations(document(run(), records, [flip(flipped)]))]
    errors = [one for one in found if one[0] == "error"]
    assert len(errors) == MOST
    assert errors[0][1]["title"] == "worse: z::z [new]"
    assert errors[-1][2] == "and 12 more: see the report of this run"
    assert len([one for one in found if one[0] == "warning"]) == 10


def test_nothing_from_a_log_is_a_command_of_its_own() -> None:
    now = failed(f"{HOSTILE},line=1::x", fact=f"100% {HOSTILE}", stack=HOSTILE, nodeid=f"a,b:c%0A{HOSTILE}::t")
    found = annotations(document(run(), [now, failed("x::x", fact=HOSTILE)], [flip(now)]))
    assert len(found) == 2
    for line in found:
        kind, said, message = read(line)
        assert kind == "error"
        assert set(said) == {"file", "title"}
        assert "\n" not in line
        assert "\r" not in line
        assert message
    assert read(found[0])[1]["file"].startswith("a,b:c%0A")


def test_escapes_are_those_of_the_runner() -> None:
    assert command("error", "50% a:b,c", file="a%b:c,d.py", line=None) == "::error file=a%25b%3Ac%2Cd.py::50%25 a:b,c"
    assert command("notice", "x") == "::notice::x"


def test_the_line_of_the_test_is_told_where_the_evidence_has_it() -> None:
    one, other = failed(evidence={"line": 12}), failed("other", evidence={"line": "12"})
    first, second = annotations(document(run(), [one, other], [flip(one)]))
    assert ",line=12," in first
    assert "line=" not in second
