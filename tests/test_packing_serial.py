"""Without workers: each server boots once, whatever stands between its claims, and pytest's switches do their own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

Run = Any
FakeRigs = Any


@pytest.fixture
def boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many servers were booted so far."""
    file = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(file))
    return lambda: len(file.read_text().splitlines()) if file.exists() else 0


APART = """
    class TestFirst:
        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_one(self): ...

        @serves("sglang", MODEL, CPU, "--context-length 2")
        @fits
        def test_two(self): ...

    def test_plain(): ...

    @pytest.fixture(scope="session", params=["p", "q"])
    def whole(request): return request.param

    @pytest.mark.parametrize("n", [1, 2])
    @serves("sglang", MODEL, CPU, "--context-length 2")
    def test_parametrised(whole, n): ...

    @serves("sglang", MODEL, CPU, "--context-length 1")
    def test_in_a_fixture_parametrised_for_the_session(whole): ...

    class TestLast:
        @serves("sglang", MODEL, CPU, "--context-length 1", )
        @fits(kv_tokens=">=1")
        def test_one(self): ...

        @serves("sglang", MODEL, CPU, "--context-length 2", boot_timeout="21m")
        def test_two_with_another_timeout(self, whole): ...
"""


def test_classes_parameters_and_session_fixtures_do_not_separate_equal_servers(claims: Run, boots: Any) -> None:
    result = claims(APART)
    result.assert_outcomes(passed=12)
    assert boots() == 2


def test_modules_far_apart_share_and_stacks_do_not(
    claims: Run, pytester: pytest.Pytester, boots: Any, fake_python: Path, model: Path
) -> None:
    """Folders whose conftest names another stack lie between: two stacks with one server each, two boots."""
    same = """
        from pytest_gpuguard import *

        @serves("sglang", {model!r}, "--device cpu")
        def test_{name}(): ...
    """
    other = fake_python.parent / "other-python"
    if not other.exists():
        other.symlink_to(fake_python.name)
    for number, folder in enumerate(("a", "b", "c", "d")):
        where = pytester.mkdir(folder)
        (where / f"test_{folder}.py").write_text(textwrap.dedent(same).format(name=folder, model=str(model)))
        if number % 2:
            (where / "conftest.py").write_text(
                textwrap.dedent(
                    f"""
                    from pytest_gpuguard.facts.stackref import StackRef

                    def pytest_gpuguard_stack(item):
                        return StackRef("other", {str(other)!r})
                    """
                )
            )
    result = claims("def test_plain(): ...")
    result.assert_outcomes(passed=5)
    assert boots() == 2


def test_x_k_and_lf_boot_what_they_select(claims: Run, boots: Any) -> None:
    source = """
        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_good(): ...

        @serves("sglang", MODEL, CPU, "--context-length 2", env={"FAKE_SGLANG": "kv_pool"})
        def test_bad(): ...

        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_good_too(): ...

        @serves("sglang", MODEL, CPU, "--context-length 3")
        def test_later(): ...
    """
    assert [line for line in claims(source, "--co", "-q").outlines if "::" in line] == [
        f"test_claims.py::test_{name}" for name in ("good", "good_too", "bad", "later")
    ]
    assert boots() == 0
    claims(source, "-x").assert_outcomes(passed=2, failed=1)
    assert boots() == 2
    claims(source, "-k", "later").assert_outcomes(passed=1)
    assert boots() == 3
    claims(source, "-k", "good or bad").assert_outcomes(passed=2, failed=1)
    claims(source, "--lf").assert_outcomes(failed=1)
    assert boots() == 6


def test_stepwise_goes_on_where_it_stopped(claims: Run, boots: Any) -> None:
    """It looks for the failure in the order that claims are run in, so that none is passed over unrun."""
    source = """
        @serves("sglang", MODEL, CPU, "--context-length 1")
        def test_a(): ...

        @serves("sglang", MODEL, CPU, "--context-length 2")
        def test_b(): ...

        @serves("sglang", MODEL, CPU, "--context-length 1", env={})
        @fits(kv_tokens=">=999999999")
        def test_c_fails(): ...
    """
    claims(source, "--stepwise").assert_outcomes(passed=1, failed=1)
    again = claims(source.replace("999999999", "1"), "--stepwise")
    again.assert_outcomes(passed=2, deselected=1)
