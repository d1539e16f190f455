"""Which claims a budget of time evaluates, that it is kept, and what is said of the others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuguard.packing.budget import (
    CHANGED,
    NEW,
    PATIENCE,
    SAME,
    STUCK,
    TEST,
    Candidate,
    Selection,
    Value,
    estimate,
    select,
    value_of,
)
from pytest_gpuguard.packing.history import Attempts, Expected, Seen
from pytest_gpuguard.packing.plan import Work, bound, units_of

from .conftest import HERE

Run = Any
FakeRigs = Any

GPUS = tuple(f"GPU-{number}" for number in range(8))
DAY = 86400.0
NOW = 2_000_000_000.0


def candidate(
    name: str,
    seconds: float = 300.0,
    kind: str = NEW,
    *,
    gpus: int = 1,
    boot: float | None = None,
    since: float = 0.0,
    server: str | None = None,
    uses: bool = False,
    exclusive: bool = False,
    cpu_server: bool = False,
) -> Candidate:
    index = int(re.sub(r"\D", "", name) or ord(name[0]))
    work = Work(index, name, gpus, seconds, exclusive, cpu_server, server, uses, None, boot)
    return Candidate(work, Expected(seconds, boot, "by default"), Value(kind, kind, since))


def chosen(candidates: list[Candidate], budget_s: float, gpus: tuple[str, ...] = GPUS, workers: int = 1) -> list[str]:
    return sorted(select(candidates, budget_s, gpus, workers).chosen)


# ---------------------------------------------------------------------------------------------------------------- value


def test_never_evaluated_then_changed_then_the_rest_by_how_long_ago() -> None:
    parts = {"sglang": "0.5.23"}
    same = Seen("HOLDS", NOW - 3 * DAY, parts)
    values = {
        "new": value_of(None, Attempts(), parts, NOW),
        "tried": value_of(None, Attempts(PATIENCE - 1, NOW), parts, NOW),
        "changed": value_of(Seen("CHANGED", NOW, {"sglang": "0.5.22"}), Attempts(), parts, NOW),
        "older": value_of(replace(same, when=NOW - 9 * DAY), Attempts(), parts, NOW),
        "same": value_of(same, Attempts(), parts, NOW),
        "same, tried since": value_of(same, Attempts(1, NOW - DAY), parts, NOW),
    }
    assert sorted(values, key=lambda name: (values[name].rank, name)) == [
        "new",
        "tried",
        "changed",
        "older",
        "same",
        "same, tried since",
    ]
    assert values["changed"].why == "CHANGED within the last hours, before sglang 0.5.22 → 0.5.23"
    assert values["older"].why == "HOLDS on this very stack 9 days ago"
    assert values["new"].why == "never evaluated"


def test_a_claim_that_three_runs_could_not_verify_waits_its_turn() -> None:
    """Else one broken claim would take the budget of every run."""
    stuck = Attempts(PATIENCE, NOW - 2 * DAY)
    for seen in (None, Seen("HOLDS", NOW - 9 * DAY, {"sglang": "0.5.22"})):
        value = value_of(seen, stuck, {"sglang": "0.5.23"}, NOW)
        assert value.kind == STUCK
        assert value.rank == value_of(Seen("HOLDS", NOW - 2 * DAY, {}), Attempts(), {}, NOW).rank
        assert value.why == "run 3 times without a verdict that counts, last 2 days ago"


def test_a_test_without_a_claim_is_worth_no_more_than_a_claim_that_holds() -> None:
    ran = value_of(None, Attempts(0, NOW - DAY), {}, NOW, is_claim=False)
    assert (ran.kind, ran.rank) == (TEST, value_of(Seen("HOLDS", NOW - DAY, {}), Attempts(), {}, NOW).rank)


# ------------------------------------------------------------------------------------------------------------ selection


def test_value_goes_before_cheapness_and_cheapness_decides_within_a_class() -> None:
    some = [
        candidate("a", 100, SAME, since=2),
        candidate("b", 500, CHANGED),
        candidate("c", 400, NEW),
        candidate("d", 200, NEW),
        candidate("e", 100, SAME, since=1),
    ]
    assert chosen(some, 200) == ["d"]
    assert chosen(some, 600) == ["c", "d"]
    assert chosen(some, 700) == ["c", "d", "e"], "what does not fit is passed over, and the older one is worth more"
    assert chosen(some, 1200) == ["b", "c", "d", "e"]
    assert chosen(some, 1300) == ["a", "b", "c", "d", "e"]


def test_a_claim_that_joins_a_chosen_server_costs_its_own_part_only() -> None:
    some = [
        candidate("a", 300, server="s", boot=280),
        candidate("b", 310, server="s", boot=280),
        candidate("c", 100),
    ]
    assert chosen(some, 430) == ["a", "b", "c"]
    assert chosen(some, 429) == ["a", "c"]
    assert chosen([replace(one, expected=replace(one.expected)) for one in some[:2]], 330) == ["a", "b"]


def test_a_second_test_whose_code_uses_the_server_boots_its_own() -> None:
    some = [candidate(name, 300, server="s", boot=280, uses=True) for name in ("a", "b")]
    assert chosen(some, 599) == ["a"]
    assert chosen(some, 600) == ["a", "b"]
    assert chosen([*some[:1], candidate("c", 310, server="s", boot=280)], 330) == ["a", "c"]


def test_what_was_too_dear_alone_is_taken_once_its_server_is_up_anyway() -> None:
    dear = candidate("a", 600, NEW, server="s", boot=570)
    cheap = candidate("b", 500, SAME, server="s", boot=480)
    assert chosen([dear, cheap], 520) == ["b"]
    assert chosen([dear, cheap, candidate("c", 100, NEW)], 550) == ["c"], "nothing fits beside it"
    # Both together take the longer one's boot: 600 + 20 seconds. With equal boots the dear one fits in.
    dear = candidate("a", 560, NEW, server="s", boot=480)
    assert chosen([dear, cheap], 579) == ["a"]
    assert chosen([dear, cheap], 580) == ["a", "b"]


def test_gpus_side_by_side_count_once_and_workers_limit_them() -> None:
    ones = [candidate(f"t{number}", 300) for number in range(8)]
    assert len(chosen(ones, 300, workers=8)) == 8
    assert len(chosen(ones, 300, workers=4)) == 4
    assert len(chosen(ones, 300, workers=1)) == 1
    assert len(chosen(ones, 300, gpus=GPUS[:2], workers=8)) == 2
    wide = [candidate("t8", 300, gpus=8), candidate("t9", 300, exclusive=True)]
    assert len(chosen([*ones, *wide], 900, workers=8)) == 10
    assert len(chosen([*ones, *wide], 899, workers=8)) == 9
    servers = [candidate(f"t{number}", 300, gpus=0, cpu_server=True) for number in range(4)]
    assert len(chosen(servers, 600, workers=4)) == 2, "one server on the CPU at a time"


def test_a_budget_too_small_for_any_says_what_the_cheapest_needs() -> None:
    selection = select([candidate("a", 300), candidate("b", 240), candidate("c", 600)], 60, GPUS)
    assert selection.chosen == {}
    assert selection.expected_s == 0
    assert selection.left_out["a"].fact == (
        "out of budget: expected 5 min, by default; never evaluated; no claim fits into 60 s, the cheapest needs 4 min"
    )


def test_no_candidates_are_no_problem() -> None:
    assert select([], 60, ()) == Selection()


def test_a_selection_travels_as_json() -> None:
    selection = select([candidate("a", 300), candidate("b", 300, SAME, boot=200)], 400, GPUS)
    assert Selection.from_dict(json.loads(json.dumps(selection.to_dict()))) == selection
    assert (len(selection.chosen), len(selection.left_out)) == (1, 1)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        seconds = draw(st.integers(1, 900))
        server = draw(st.sampled_from([None, None, "s1", "s2", "s3"]))
        gpus = {"s1": 1, "s2": 2, "s3": 0}.get(server or "", draw(st.integers(0, 9)))
        found.append(
            candidate(
                f"t{number}",
                float(seconds),
                draw(st.sampled_from([NEW, CHANGED, SAME, STUCK, TEST])),
                gpus=gpus,
                boot=draw(st.none() | st.integers(0, seconds).map(float)),
                since=float(draw(st.integers(0, 3))),
                server=server,
                uses=server is not None and draw(st.booleans()),
                exclusive=server is None and gpus > 0 and draw(st.booleans()),
                cpu_server=server == "s3",
            )
        )
    return found


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(1, 3000), st.integers(0, 8), st.integers(1, 8), st.randoms())
def test_a_selection_fits_is_the_same_every_time_and_leaves_no_single_one_out_that_would_go_first(
    some: list[Candidate], budget_s: int, gpus: int, workers: int, chance: Any
) -> None:
    rig = GPUS[:gpus]
    selection = select(some, float(budget_s), rig, workers)
    taken = [one for one in some if one.work.nodeid in selection.chosen]
    assert {*selection.chosen, *selection.left_out} == {one.work.nodeid for one in some}
    assert not set(selection.chosen) & set(selection.left_out)
    length = estimate([one.work for one in taken], rig, workers, budget_s)
    assert length == selection.expected_s
    assert length <= budget_s
    assert bound(units_of([one.work for one in taken]), gpus, workers) <= budget_s + 1e-6
    shuffled = list(some)
    chance.shuffle(shuffled)
    assert select(shuffled, float(budget_s), rig, workers) == selection
    if some:
        first = min(some, key=lambda one: (one.value.rank, one.expected.seconds, one.work.nodeid))
        fits = estimate([first.work], rig, workers, budget_s) is not None
        assert (first.work.nodeid in selection.chosen) or not fits
    for one in some:  # alone on the rig, a more valuable one that fits is not passed over for nothing
        if not selection.chosen:
            assert estimate([one.work], rig, workers, budget_s) is None


@settings(max_examples=100, deadline=None)
@given(candidates(), st.integers(1, 3000))
def test_without_workers_side_by_side_nothing_that_is_left_out_would_still_fit(
    some: list[Candidate], budget_s: int
) -> None:
    selection = select(some, float(budget_s), GPUS, 1)
    taken = [one.work for one in some if one.work.nodeid in selection.chosen]
    for one in some:
        if one.work.nodeid in selection.left_out:
            assert estimate([*taken, one.work], GPUS, 1, budget_s) is None


# ----------------------------------------------------------------------------------------------------------- whole runs


FOUR = """
    @claim(minutes=5)
    @serves("sglang", MODEL, CPU, "--context-length 1")
    def test_alpha(): ...

    @claim(minutes=5)
    @serves("sglang", MODEL, CPU, "--context-length 2")
    def test_beta(): ...

    @serves("sglang", MODEL, CPU, "--context-length 3")
    def test_gamma(): ...

    @serves("sglang", MODEL, CPU, "--context-length 4")
    def test_delta(): ...

    @needs_sm120
    @serves("sglang", MODEL, "--context-length 5")
    def test_elsewhere(): ...

    def test_plain(): ...
"""
NO_BUDGET_FOR = re.compile(r"^NOT_EVALUATED +test_claims\.py::(\w+) +out of budget: (.*)$", re.MULTILINE)


def verdicts(result: pytest.RunResult) -> dict[str, str]:
    """Test → verdict, from the section at the end."""
    text = result.stdout.str().partition("= claims =")[2]
    return {name: verdict for verdict, name in re.findall(r"^([A-Z_]+) +test_claims\.py::(\w+)", text, re.MULTILINE)}


def left_out(result: pytest.RunResult) -> dict[str, str]:
    return dict(NO_BUDGET_FOR.findall(result.stdout.str()))


def remember(pytester: pytest.Pytester, seconds: float) -> None:
    """As if every claim that is remembered had taken so long, without any boot."""
    file = pytester.path / ".gpuguard" / "history.json"
    data = json.loads(file.read_text())
    for one in data["claims"].values():
        one["boot_s"], one["rest_s"] = [], [seconds]
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_second_run_evaluates_what_the_first_had_no_time_for(claims: Run, workers: tuple[str, ...]) -> None:
    first = claims(FOUR, "--gpuguard-budget=11m", *workers)
    assert first.ret == 0
    first.assert_outcomes(passed=3, skipped=3)
    assert left_out(first) == {
        "test_gamma": "expected 5 min, by default; never evaluated",
        "test_delta": "expected 5 min, by default; never evaluated",
    }
    first.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED *test_elsewhere *needs SM120*",
            "gpuguard: 3 NOT_EVALUATED (*2 budget: out of budget*), 2 HOLDS",
            "budget 11m: 2 of 4 claims evaluated, 10 min expected, * s taken; left out: 2 never evaluated",
        ]
    )
    second = claims(FOUR, "--gpuguard-budget=10m", *workers)
    assert second.ret == 0
    out = left_out(second)
    assert set(out) == {"test_alpha", "test_beta"}
    assert re.fullmatch(r"expected [\d.]+ s, as measured before; HOLDS on this very stack .+", out["test_alpha"])
    second.stdout.fnmatch_lines(["budget 10m: 2 of 4 claims *; left out: 2 verified on this very stack"])


@pytest.fixture
def newer_stack(tmp_path: Path) -> str:
    """The stand-in stack of a later release."""
    packages = tmp_path / "packages"
    shutil.copytree(HERE / "fake_stack", packages, ignore=shutil.ignore_patterns("__pycache__"))
    (old,) = packages.glob("sglang-*.dist-info")
    new = old.rename(packages / "sglang-0.5.24.dist-info")
    (new / "METADATA").write_text((new / "METADATA").read_text().replace("0.5.23", "0.5.24"))
    folder = tmp_path / "newer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return str(folder / "bin" / "python")


def test_claims_whose_stack_has_changed_go_before_those_that_hold_on_it(
    claims: Run, pytester: pytest.Pytester, newer_stack: str
) -> None:
    claims(FOUR, "-k", "test_gamma or test_delta")
    claims(FOUR, "-k", "test_alpha or test_beta", stack=newer_stack)
    remember(pytester, 290)
    result = claims(FOUR, "--gpuguard-budget=10m", stack=newer_stack)
    assert set(left_out(result)) == {"test_alpha", "test_beta"}
    again = claims(FOUR, "--gpuguard-budget=2m", stack=newer_stack)
    assert set(left_out(again)) == {"test_alpha", "test_beta", "test_gamma", "test_delta"}
    remember(pytester, 290)
    back = claims(FOUR, "--gpuguard-budget=10m", "-n", "2")
    assert set(left_out(back)) == {"test_delta", "test_gamma"}
    assert "HOLDS within the last hours, before sglang 0.5.24 → 0.5.23" in left_out(back)["test_delta"]
    back.stdout.fnmatch_lines(["budget 10m: 2 of 4 claims *; left out: 2 verified on another stack"])


def test_a_budget_too_small_evaluates_nothing_and_never_fails_a_run(claims: Run) -> None:
    result = claims(FOUR, "--gpuguard-budget=90s")
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=5)
    assert len(left_out(result)) == 4
    assert "no claim fits into 1.5 min, the cheapest needs 5 min" in left_out(result)["test_alpha"]
    result.stdout.fnmatch_lines(["budget 1m30s: 0 of 4 claims evaluated, 0 s expected, *; left out: 4 never evaluated"])
    quiet = claims(FOUR, "--gpuguard-budget=90s", "-q").stdout.str()
    assert "budget 1m30s" not in quiet
    assert "5 NOT_EVALUATED" in quiet
    refused = claims(FOUR, "--gpuguard-budget=90s", "--gpuguard-require=budget")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR


def test_deselection_comes_first_and_collect_only_selects_nothing(claims: Run, pytester: pytest.Pytester) -> None:
    result = claims(FOUR, "--gpuguard-budget=10m", "-k", "test_gamma or test_delta or plain")
    assert verdicts(result) == {"test_gamma": "HOLDS", "test_delta": "HOLDS"}
    result.stdout.fnmatch_lines(["budget 10m: 2 of 2 claims evaluated, 10 min expected, * taken"])
    collected = claims(FOUR, "--gpuguard-budget=10m", "--collect-only", "-v")
    assert "budget" not in collected.stdout.str().partition("collected")[2]
    plain = claims("def test_plain(): ...", "--gpuguard-budget=10m", name="test_other")
    assert plain.ret == 0


RUNS_LATE = """
    @claim(minutes=0.01)
    @serves("sglang", MODEL, CPU, "--context-length 7")
    def test_alpha(): ...

    @claim(minutes=1)
    @serves("sglang", MODEL, CPU)
    def test_beta(): ...

    @claim(minutes=1)
    @serves("sglang", MODEL, CPU)
    @fits(kv_tokens=">=100")
    def test_gamma(): ...
"""
#: As if the run had begun a minute earlier, of which workers know from the controller only.
BEGAN_EARLIER = """
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(session):
        budget = session.config.pluginmanager.get_plugin("gpuguard-budget")
        if not hasattr(session.config, "workerinput"):
            budget._began -= 60
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_the_clock_leaves_out_what_was_chosen_when_the_time_is_gone(
    claims: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(BEGAN_EARLIER)
    result = claims(RUNS_LATE, "--gpuguard-budget=80s", *workers)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=2)
    assert set(left_out(result)) == {"test_beta", "test_gamma"}
    for said in left_out(result).values():
        assert re.fullmatch(r"[\d.]+ s left, needs 60 s", said)
    result.stdout.fnmatch_lines(
        ["budget 1m20s: 1 of 3 claims evaluated, 73 s expected, * taken; left out: 2 never evaluated"]
    )


def test_a_server_that_is_up_already_is_joined_when_only_its_boot_would_not_fit(claims: Run) -> None:
    source = """
        @claim(minutes=1)
        @serves("sglang", MODEL, CPU)
        def test_beta(pytestconfig):
            pytestconfig.pluginmanager.get_plugin("gpuguard-budget")._began -= 30  # so long it took

        @claim(minutes=1)
        @serves("sglang", MODEL, CPU)
        @fits(kv_tokens=">=100")
        def test_gamma(): ...
    """
    result = claims(source, "--gpuguard-budget=72s")
    assert left_out(result) == {}
    result.assert_outcomes(passed=2)


def test_tests_that_lease_count_and_learn_their_times(
    claims: Run, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = """
        @needs_gpus(1)
        def test_gpus(gpus): ...

        @needs_gpus(1)
        def test_gated(rig): ...

        def test_own(sglang_server):
            sglang_server(MODEL, CPU)
    """
    first = claims(source, "--gpuguard-budget=5m")
    assert first.ret == 0
    first.assert_outcomes(passed=2, skipped=1)
    assert left_out(first) == {"test_own": "expected 5 min, by default; a test without a claim"}
    first.stdout.fnmatch_lines(["budget 5m: 1 of 2 claims evaluated, *; left out: 1 without a claim"])
    second = claims(source, "--gpuguard-budget=6m")
    second.assert_outcomes(passed=3)
    second.stdout.fnmatch_lines(["budget 6m: 2 of 2 claims evaluated, 5 min expected, * taken"])
    data = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"]
    assert {name.partition("::")[2]: (one["verdict"], len(one["rest_s"])) for name, one in data.items()} == {
        "test_gpus": (None, 2),
        "test_own": (None, 1),
    }


def test_a_fault_of_the_host_is_told_and_no_budget_hides_it(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.mismatch()
    rig.apply(monkeypatch)
    result = claims('@needs_gpus(1)\n@serves("sglang", MODEL)\ndef test_it(): ...', "--gpuguard-budget=1s")
    result.stdout.fnmatch_lines(["INFRA *test_it *driver.mismatch*"])
    assert result.ret == 1


def test_claims_side_by_side_on_gpus_share_a_budget(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = FOUR.replace("CPU, ", "")
    assert len(left_out(claims(source, "--gpuguard-budget=5m", "--collect-only"))) == 0
    two = claims(source, "--gpuguard-budget=5m", "-n", "2", "-k", "not elsewhere")
    assert len(left_out(two)) == 2
    two.stdout.fnmatch_lines(["budget 5m: 2 of 4 claims evaluated, 5 min expected, *"])


def test_a_packed_run_plans_what_the_budget_has_chosen(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = FOUR.replace("CPU, ", "")
    packed = claims(source, "--gpuguard-budget=5m", "--gpuguard-pack", "-n", "2", "-k", "not elsewhere")
    assert packed.ret == 0
    packed.assert_outcomes(passed=3, skipped=2)
    assert len(left_out(packed)) == 2
    packed.stdout.fnmatch_lines(["packing: 2 tests in 2 leases on 2 GPUs *about 5 min expected", "budget 5m: 2 of 4 *"])


@pytest.mark.parametrize("text", ["0", "0s", "-5", "soon", "", "25 apples", "nan", "inf"])
def test_a_budget_that_is_no_time_is_a_usage_error(pytester: pytest.Pytester, text: str) -> None:
    from pytest_gpuguard.options import read_config

    with pytest.raises(pytest.UsageError, match="--gpuguard-budget"):
        read_config(pytester.parseconfig(f"--gpuguard-budget={text}"))


def test_a_budget_is_given_by_option_or_ini(pytester: pytest.Pytester) -> None:
    from pytest_gpuguard.options import read_config

    assert read_config(pytester.parseconfig()).budget_s is None
    pytester.makeini("[pytest]\ngpuguard_budget = 2h\n")
    assert read_config(pytester.parseconfig()).budget_s == 7200
    for text, seconds in (("25m", 1500), ("90s", 90), ("90", 90)):
        assert read_config(pytester.parseconfig(f"--gpuguard-budget={text}")).budget_s == seconds
