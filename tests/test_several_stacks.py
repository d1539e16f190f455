"""Several stacks in one run: every claim on each of them, side by side, under a name without the stack's."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .sim_models import DENSE, write_model

Run = Any
RIG = "--gpuguard-rig=sim:rtx-pro-6000-server:2"
BOTH = ("--gpuguard-stack=old=sim:sglang==0.5.3", "--gpuguard-stack=new=sim:sglang==0.5.7")

REPORTS = """
import json
from pathlib import Path

def pytest_runtest_logreport(report):
    if hasattr(report, "gpuguard"):
        with Path("reports.jsonl").open("a") as file:
            print(json.dumps(report.gpuguard), file=file)
"""

CLAIMS = """
    plain = serves("sglang", DENSE, "--mem-fraction-static 0.8")

    @plain
    @fits
    def test_fits(): ...

    @plain
    @fits
    @claim(id="named")
    @pytest.mark.parametrize("n", [1, 2])
    def test_many(n): ...

    @serves("sglang", DENSE, "--tp-size 2 --enable-flashinfer-allreduce-fusion")
    @fits
    def test_fusion(): ...

    def test_no_claim(): ...

    def test_asks(stack): assert stack.package("sglang") in ("0.5.3", "0.5.7")
"""


@pytest.fixture
def both(claims: Run, tmp_path: Path, pytester: pytest.Pytester) -> Run:
    """Runs a file of claims on two simulated stacks."""
    model = write_model(tmp_path / "dense", DENSE)
    pytester.makeconftest(REPORTS)

    def run(source: str, *args: str, stacks: tuple[str, ...] = BOTH) -> pytest.RunResult:
        result: pytest.RunResult = claims(f"DENSE = {str(model)!r}\n" + dedent(source), RIG, *stacks, *args, stack="")
        return result

    return run


def reports() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("reports.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_every_claim_is_evaluated_on_each_stack_and_other_tests_once(both: Run, workers: tuple[str, ...]) -> None:
    result = both(CLAIMS, "-v", *workers)
    assert result.ret == 1
    found = {(one["key"].rpartition("::")[2], one["stack"]): one["verdict"] for one in reports()}
    names = ("test_fits", "named[1]", "named[2]", "test_fusion")
    assert found == {
        **{(name, stack): "HOLDS" for name in names for stack in ("old", "new")},
        ("test_fusion", "new"): "CONTRADICTED (worse)",
    }
    text = result.stdout.str()
    assert "test_claims.py::test_many[1-new] [named]" in text
    assert "test_no_claim[" not in text
    assert "test_asks[old]" in text
    assert "test_asks[new]" in text


def test_equal_servers_boot_once_per_stack_and_stacks_take_turns(both: Run) -> None:
    both(
        """
        plain = serves("sglang", DENSE, "--mem-fraction-static 0.8")
        other = serves("sglang", DENSE, "--mem-fraction-static 0.7")

        @plain
        @fits
        def test_a(): ...

        @other
        @fits
        def test_b(): ...

        @plain
        @works
        def test_c(): ...
        """
    )
    order = [(one["key"].rpartition("::")[2], one["stack"]) for one in reports()]
    assert order == [
        *[("test_a", "old"), ("test_c", "old"), ("test_a", "new"), ("test_c", "new")],
        *[("test_b", "old"), ("test_b", "new")],
    ]
    assert len({one["log"] for one in reports()}) == 4


def test_one_stack_leaves_names_as_they_are(both: Run) -> None:
    both("@serves('sglang', DENSE)\n@fits\ndef test_fits(): ...\n", stacks=BOTH[:1])
    [one] = reports()
    assert (one["nodeid"], one["stack"]) == ("test_claims.py::test_fits", "old")


def test_a_claims_components_are_those_of_its_stack(both: Run) -> None:
    both("@serves('sglang', DENSE)\n@fits\ndef test_fits(): ...\n")
    assert {one["stack"]: one["components"]["sglang"] for one in reports()} == {"old": "0.5.3", "new": "0.5.7"}
    assert {tuple(one["cards"]) for one in reports()} == {("rtx-pro-6000-server",)}


@pytest.mark.parametrize(
    ("stacks", "says"),
    [
        (("old=sim:sglang==0.5.3", "old=sim:sglang==0.5.7"), "two stacks are called 'old'*needs its own name"),
        (("a b=sim:sglang==0.5.3",), "'a b': a name has letters, digits, and _ . + - only"),
        (("a[=sim:sglang==0.5.3",), "'a[[]': a name has letters*"),
    ],
)
def test_names_that_cannot_tell_stacks_apart_are_refused(both: Run, stacks: tuple[str, ...], says: str) -> None:
    result = both("", stacks=tuple(f"--gpuguard-stack={one}" for one in stacks))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gpuguard-stack: {says}*"])


@pytest.mark.parametrize("stacks", [BOTH, BOTH[1:]], ids=["two", "one"])
def test_a_claim_that_the_command_line_names_has_the_marks_of_its_module_too(
    both: Run, stacks: tuple[str, ...]
) -> None:
    source = """
        pytestmark = serves("sglang", DENSE, "--mem-fraction-static 0.8")

        @fits
        def test_fits(): ...
    """
    name = "test_claims.py::test_fits" + ("[new]" if len(stacks) > 1 else "")
    both(source, name, stacks=stacks)
    [one] = reports()
    assert (one["stack"], one["verdict"], one["argv"] != []) == ("new", "HOLDS", True)
