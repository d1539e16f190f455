"""The documents say what there is, and nothing else: names, defaults, links, files and the README's example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pytest_gpuguard
from pytest_gpuguard import newhooks, options, plugin
from pytest_gpuguard.claims.claim import Claim
from pytest_gpuguard.claims.expect import Fits
from pytest_gpuguard.claims.judgement import Judgement, Verdict
from pytest_gpuguard.claims.markers import MARKERS
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.observation import MemoryTable
from pytest_gpuguard.claims.outcome import OUTCOMES, PHASES
from pytest_gpuguard.ledger import schema
from pytest_gpuguard.names import NOT_REQUIRABLE, REQUIRABLE
from pytest_gpuguard.recording import PROPERTIES
from pytest_gpuguard.report.payload import payload

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

#: Folders whose files the documents name by their path.
_FOLDERS = "pytest_gpuguard|examples|suites|tests|tools|docs|benchmarks|scripts|\\.ci"
_FILE = re.compile(rf"(?<![\w/.<-])(?:{_FOLDERS})/[\w./-]*\w(?!\w|[*<]|…)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PLANNED = re.compile(r"^## Not there yet$.*?(?=^## )", re.MULTILINE | re.DOTALL)

each_document = pytest.mark.parametrize("document", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def words(text: str) -> set[str]:
    """Every name in a text, also those with dots, dashes and underscores in them."""
    return {word for run in re.findall(r"[\w.-]+", text) for word in (run, run.strip(".-"))}


def missing(names: Any, document: str) -> list[str]:
    return sorted(set(names) - words(read(document)))


def inis() -> set[str]:
    return {f"gpuguard_{option.name.replace('-', '_')}" for option in options._OPTIONS}


def junit_properties() -> set[str]:
    return {f"gpuguard_{name}" for name in PROPERTIES}


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    prose = _FENCE.sub("", text)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_decorator_is_documented_with_its_arguments() -> None:
    assert missing(pytest_gpuguard.__all__, "docs/claims.md") == []
    arguments = {name for marker in MARKERS.values() for name in marker.signature.parameters}
    unnamed = {"sms", "name", "spec", "requirement", "phases", "outcome", "feature", "flag", "what", "limit"}
    assert missing(arguments - unnamed, "docs/claims.md") == []


def test_every_fixture_and_hook_is_documented() -> None:
    assert missing(plugin.__all__, "docs/claims.md") == []
    hooks = [name for name in vars(newhooks) if name.startswith("pytest_gpuguard_")]
    assert len(hooks) >= 2
    assert missing(hooks, "docs/claims.md") == []


@pytest.mark.parametrize("option", options._OPTIONS, ids=lambda option: option.name)
def test_every_option_stands_in_a_row_with_its_ini_twin_and_default(option: Any) -> None:
    ini = f"`gpuguard_{option.name.replace('-', '_')}`"
    rows = [row for row in read("docs/options.md").splitlines() if row.startswith("|") and f"| {ini} |" in row]
    assert len(rows) == 1, f"{ini} has {len(rows)} rows"
    if option.flag:
        metavar = f" {option.metavar}" if option.metavar else ""
        assert f"| `--gpuguard-{option.name}{metavar}` |" in rows[0]
    if option.default:
        assert f"| `{option.default}` |" in rows[0]


def test_every_environment_variable_is_documented() -> None:
    used: set[str] = set()
    for folder, files in (("pytest_gpuguard", "*.py"), ("suites", "*.py"), ("tools", "*.*")):
        for path in (ROOT / folder).rglob(files):
            used |= set(re.findall(r"GPUGUARD_[A-Z_]+", path.read_text(encoding="utf-8", errors="replace")))
    assert {"GPUGUARD_LOCK_DIR", "GPUGUARD_CPU_STACK"} <= used
    assert missing(used, "docs/options.md") == []


def test_verdicts_outcomes_phases_and_reasons_are_documented() -> None:
    text = read("docs/verdicts.md")
    assert [verdict.value for verdict in Verdict if f"| {verdict.value} |" not in text] == []
    assert missing(OUTCOMES | set(PHASES) | set(REQUIRABLE) | set(NOT_REQUIRABLE), "docs/verdicts.md") == []
    assert missing(options.FAIL_ON, "docs/verdicts.md") == []
    rows = re.findall(r"^\| ([A-Z_]+(?: \(\w+\))?) \|", text, re.MULTILINE)
    assert rows == [verdict.value for verdict in Verdict], "the table of verdicts is not in the order of severity"


def test_every_key_of_the_payload_and_every_junit_property_is_documented() -> None:
    claim = Claim(Needs(), None, (Fits(),))
    data = payload("a.py::b", claim, "stack", [Judgement("fits", Verdict.HOLDS, "ready", "ready")], [])
    keys = {*data, *data["judgements"][0], *MemoryTable().as_dict(), "line", "text"}
    assert missing(keys, "docs/verdicts.md") == []
    assert missing(junit_properties(), "docs/verdicts.md") == []


@each_document
def test_no_link_is_dead(document: Path) -> None:
    dead = []
    for target in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            dead.append(target)
    assert dead == []


def test_the_index_links_to_every_document() -> None:
    linked = {((ROOT / "docs") / target).resolve() for target in _LINK.findall(read("docs/index.md"))}
    assert [path.name for path in DOCS if path.name != "index.md" and path not in linked] == []


@each_document
def test_only_options_that_exist_are_mentioned(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if document.name == "README.md":
        assert _PLANNED.search(text), "the README no longer says what is not there yet"
        text = _PLANNED.sub("", text)
    flags = {f"--gpuguard-{option.name}" for option in options._OPTIONS if option.flag}
    assert set(re.findall(r"--gpuguard-[\w-]*\w", text)) - flags == set()
    known = inis() | junit_properties() | set(plugin.__all__) | set(schema.metadata.tables)
    ours = {word for word in words(text) if word.startswith("gpuguard_") and not word.startswith("gpuguard_cpu_stack")}
    assert ours - known == set()


@each_document
def test_only_files_that_exist_are_mentioned(document: Path) -> None:
    found = _FILE.findall(document.read_text(encoding="utf-8"))
    assert [name for name in found if not (ROOT / name).exists() and not (document.parent / name).exists()] == []


def examples(document: Path) -> list[str]:
    return [code for language, code in _FENCE.findall(document.read_text(encoding="utf-8")) if language == "python"]


@pytest.mark.parametrize("document", [one for one in DOCS if examples(one)], ids=lambda path: path.name)
def test_python_examples_collect(document: Path, pytester: pytest.Pytester) -> None:
    """In a pytest of their own, which boots nothing; the README's three claims are all found."""
    tests = 0
    for number, code in enumerate(examples(document)):
        name = "conftest.py" if "\ndef pytest_" in f"\n{code}" else f"test_example_{number}.py"
        (pytester.path / name).write_text(code, encoding="utf-8")
        tests += len(re.findall(r"^def test_", code, re.MULTILINE))
    result = pytester.runpytest_subprocess("--co", "-q", "-p", "no:randomly")
    assert result.ret == (pytest.ExitCode.OK if tests else pytest.ExitCode.NO_TESTS_COLLECTED)
    assert len(re.findall(r"^test_example_\d+\.py::", result.stdout.str(), re.MULTILINE)) == tests
    assert document.name != "README.md" or tests >= 3


def test_there_is_no_placeholder_left() -> None:
    assert [path.name for path in DOCS if re.search(r"<!--|TODO|FIXME|XXX", path.read_text(encoding="utf-8"))] == []
