"""What is refused, selected and shown while tests are collected, with a real pytest of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

Run = Any

MISTAKES = """
    import unittest

    @serves("sglang", MODEL, layuot="TP2")
    def test_argument(): ...

    @pytest.mark.need_sm120
    @fits
    def test_mark(): ...

    @needs_gpus(2, vram="lots")
    @fits
    def test_value(): ...

    @pytest.mark.xfail
    @serves("sglang", MODEL, CPU)
    @ooms
    def test_xfail(): ...

    class TestOld(unittest.TestCase):
        @fits
        def test_method(self): ...

    @fits(when="sglang>=0.5")
    @ooms(when="sglang<0.6")
    def test_windows(): ...

    @serves("sglang", MODEL, CPU)
    @serves("sglang", MODEL)
    def test_twice(): ...

    def test_innocent(): ...
"""

SAID = {
    "test_argument": r"@serves: unknown argument 'layuot'; did you mean 'layout'\?",
    "test_mark": r"@need_sm120 is no mark that is known; did you mean 'needs_sm120'\?",
    "test_value": r"@needs_gpus: vram='lots' is not a size: write a number and a unit",
    "test_xfail": r"xfail on a claim: .*with ooms\(…\), unsupported\(…\) or fails\(…\)",
    "TestOld.test_method": r"claims are plain test functions; a unittest method cannot carry one",
    "test_windows": r".*overlap.*",
    "test_twice": r"@serves twice on one test: .*write two claims",
}


@pytest.mark.parametrize("option", [(), ("-n", "2")])
def test_every_mistake_in_a_file_is_one_error_with_place_name_and_cure(
    claims: Run, pytester: pytest.Pytester, option: tuple[str, ...]
) -> None:
    result = claims(MISTAKES, *option)
    text = result.stdout.str()
    source = (pytester.path / "test_claims.py").read_text().splitlines()
    for name, said in SAID.items():
        found = re.search(rf"test_claims\.py:(\d+): {re.escape(name)}: {said}", text)
        assert found, f"{name}: {text}"
        near = "\n".join(source[int(found[1]) - 1 : int(found[1]) + 4])
        assert f"def {name.rpartition('.')[2]}(" in near
    assert "test_innocent: " not in text
    assert result.ret != 0
    assert "passed" not in text


def test_an_xfail_that_is_added_later_turns_no_verdict_around(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name == "test_by_conftest":
                    item.add_marker(pytest.mark.xfail)
        """
    )
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @fits
        def test_by_conftest(): ...

        @pytest.fixture
        def lenient(request):
            request.applymarker(pytest.mark.xfail(strict=False))

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @fits
        def test_by_fixture(lenient): ...

        @serves("sglang", MODEL, CPU)
        def test_by_body(request, server):
            request.node.add_marker(pytest.mark.xfail)
            assert server.generate("x", 1) == "something else"
        """
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_by_body *xfail was added to a claim*",
            "INFRA *test_by_conftest *xfail was added to a claim*",
            "INFRA *test_by_fixture *xfail was added to a claim*",
        ]
    )
    assert "xfailed" not in result.stdout.str()
    assert result.ret == 1


def test_marks_select_by_architecture_and_by_argument(claims: Run, pytester: pytest.Pytester) -> None:
    source = """
        @needs_sm120
        @serves("sglang", MODEL)
        def test_blackwell(): ...

        @needs_sm90
        @serves("sglang", MODEL)
        def test_hopper(): ...

        @needs_gpus(2)
        @serves("sglang", MODEL)
        def test_two(): ...

        @needs_gpus(4)
        def test_gated(): ...

        @pytest.mark.needs_gpus(n=2)
        @fits
        def test_two_by_name(): ...
    """

    def selected(*args: str) -> set[str]:
        result = pytester.runpytest_inprocess("--collect-only", "-q", "--strict-markers", *args)
        text = result.stdout.str()
        return set(re.findall(r"test_claims\.py::(\w+)", text))

    assert claims(source, "--collect-only", "--strict-markers").ret == 0
    everything = {"test_blackwell", "test_hopper", "test_two", "test_gated", "test_two_by_name"}
    assert selected() == everything
    assert selected("-m", "blackwell") == {"test_blackwell"}
    assert selected("-m", "hopper or needs_gpus(n=4)") == {"test_hopper", "test_gated"}
    assert selected("-m", "needs_gpus(n=2)") == {"test_two", "test_two_by_name"}
    assert selected("-m", "not serves") == {"test_gated", "test_two_by_name"}


def test_markers_lists_every_mark_with_its_signature(claims: Run) -> None:
    result = claims("", "--markers")
    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.fits([*], margin=None, kv_tokens=None, *): *",
            "@pytest.mark.needs_gpus(n, vram=None, link=None, exclusive=False): *",
            "@pytest.mark.needs_sm120(): *",
            "@pytest.mark.serves(engine, model, [*]flags, layout=*): *",
            "@pytest.mark.unsupported(what, how=*): *",
        ]
    )
    assert result.ret == 0


LAYOUTS = """
    @needs_gpus(8)
    @serves("sglang", MODEL, "--tp-size 4 --ep-size 2")
    @fits
    def test_half_of_the_rig(): ...

    @serves("sglang", MODEL, layout="TP2")
    def test_two(): ...
"""


def test_collect_only_boots_and_asks_nothing_and_v_shows_layouts(
    claims: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A python that must not even be started stands in for the stack."""
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {told}\nexit 1\n")
    python.chmod(0o755)
    result = claims(LAYOUTS, "--collect-only", "-v", stack=str(python))
    assert not told.exists()
    result.stdout.fnmatch_lines(
        ["test_half_of_the_rig: *TP*EP*(4 used, 8 leased: 4 idle)", "test_two: *TP*", "*Function test_two*"]
    )
    result.stdout.no_fnmatch_line("rig: *")
    assert result.ret == 0
    assert "(4 used" not in claims(LAYOUTS, "--collect-only", stack=str(python)).stdout.str()


def test_a_gate_alone_is_no_claim_and_other_marks_are_left_alone(claims: Run) -> None:
    """A test with needs and no expectation is skipped or run as any other; unknown marks of others are no business."""
    result = claims(
        """
        @needs_package("sglang>=99")
        def test_gated(): ...

        @needs_package("sglang>=0.5")
        @pytest.mark.xfail
        def test_gate_met(): assert False

        @pytest.mark.somebody_elses
        def test_plain(): ...
        """,
        "-rs",
    )
    result.assert_outcomes(passed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_gated *needs sglang >=99, this stack has 0.5.23"])
