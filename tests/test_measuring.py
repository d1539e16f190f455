"""Measured claims from mark to verdict, in a pytest of their own: answers, speed, comparisons and peaks of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpuguard.ledger.store import open_ledger
from tests.measured import QUICK, Boots, Run, fact, lines, loaded


@pytest.fixture(autouse=True)
def _short_samples(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(QUICK)


# ----------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ("nan", "numerics: prefill: the log-prob of output token 0 is nan"),
        ("zeros", "numerics: prefill: all 16 output tokens are token 0"),
        ("repeat", "numerics"),
        ("first_dies", "unsupported.arch"),
        ("second_dies", "jit.smem"),
        ("burst_dies", "illegal_memory"),
    ],
)
def test_ready_is_not_works(claims: Run, answers: str, outcome: str) -> None:
    """A third of the known upgrade breakages boot, and then crash or answer garbage (facts of nine reports)."""
    result = claims(
        f"""
        broken = serves("sglang", MODEL, CPU, env=dict(FAKE_SGLANG_ANSWERS="{answers}"))

        @broken
        @fits
        def test_fits(): raise AssertionError("the body must not run against a broken server")

        @broken
        @fails("{outcome.partition(":")[0]}")
        def test_fails(): ...
        """
    )
    said = fact(result, "test_fits")
    assert said.startswith("CONTRADICTED (worse)")
    assert outcome in said
    assert fact(result, "test_fails").startswith("HOLDS")


def test_a_server_that_answers_says_so_and_one_with_dummy_weights_is_not_asked(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @fits
        @works
        def test_real(): ...

        @serves("sglang", MODEL, CPU, "--load-format dummy")
        @fits
        def test_fits_dummy(): ...

        @serves("sglang", MODEL, CPU, "--load-format dummy", env={"FAKE_SGLANG_ANSWERS": "nan"})
        @works
        def test_works_dummy(): ...

        @serves("sglang", MODEL, CPU, "--load-format dummy", env={"FAKE_SGLANG_ANSWERS": "second_dies"})
        @fits
        def test_crashes_all_the_same(): ...
        """
    )
    lines(result, "CONTRADICTED (worse) *test_crashes_all_the_same *jit.smem: *")
    lines(result, "INCONCLUSIVE *test_works_dummy *dummy weights give no answers worth judging*")
    lines(result, "HOLDS *test_fits_dummy *and answers (dummy weights: what it answers is not judged)*")
    lines(result, "*HOLDS: fits: ready in * s, and answers", "*HOLDS: works(short): ready *burst: 8 requests*")


def test_questions_give_an_accuracy_and_bad_files_are_told_before_any_boot(claims: Run, pytester: Any) -> None:
    good = [{"question": f"say it, {number}", "answer": "beta", "match": "contains"} for number in range(30)]
    (pytester.path / "good.jsonl").write_text("".join(json.dumps(one) + "\n" for one in good))
    (pytester.path / "bad.jsonl").write_text('{"question": "no answer"}\n')
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @works(accuracy=">=0.5", questions="good.jsonl")
        def test_good(): ...

        @serves("sglang", MODEL, CPU)
        @works(accuracy=">=0.5", questions="bad.jsonl")
        def test_bad(): ...

        @serves("sglang", MODEL, CPU)
        @works(accuracy=">=0.5", questions="missing.jsonl")
        def test_missing(): ...
        """
    )
    lines(result, "INFRA *test_bad *bad.args: *bad.jsonl:1: *", "INFRA *test_missing *bad.args: *missing.jsonl*")
    lines(result, "HOLDS *test_good *accuracy 1.000 (0.8*30 questions), claimed >=0.5")


# ------------------------------------------------------------------------------------------------------------- speed


def test_a_rate_is_judged_by_its_interval_and_one_boot_serves_all(
    claims: Run, monkeypatch: pytest.MonkeyPatch, boots: Boots
) -> None:
    result = loaded(
        claims,
        """
        quick = serves("sglang", MODEL, CPU, env={"FAKE_SGLANG_TOKS": "200"})

        @quick
        @expect_toks(min=1, **LOAD)
        def test_floor(): ...

        @quick
        @expect_toks(min=100_000, **LOAD)
        def test_too_much(): ...

        @quick
        @uses("cuda_graph")
        @expect_toks(min=1, **LOAD)
        def test_unshown(): ...
        """,
    )
    lines(result, "CONTRADICTED (worse) *test_too_much *tok/s (*samples), claimed at least 100000")
    lines(result, "HOLDS *test_floor *tok/s (*samples), claimed at least 1")
    lines(
        result, "INCONCLUSIVE *test_unshown *", "*INCONCLUSIVE: expect_toks*because uses(cuda_graph) is INCONCLUSIVE*"
    )
    assert len(boots()) == 1


def test_requests_that_fail_contradict_a_rate(claims: Run) -> None:
    result = loaded(
        claims,
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "runtime_oom"})
        @expect_toks(min=1, **LOAD)
        def test_dies(): ...
        """,
    )
    assert "oom.runtime" in fact(result, "test_dies")
    assert fact(result, "test_dies").startswith("CONTRADICTED (worse)")


def test_a_rate_that_decays_slowly_is_seen_though_it_holds(claims: Run, pytester: Any) -> None:
    source = """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG_TOKS": "200"})
        @expect_toks(min=1, **LOAD)
        def test_floor(): ...
    """
    first = loaded(claims, source)
    assert "drift" not in first.stdout.str()
    file = pytester.path / ".gpuguard" / "history.json"
    history = json.loads(file.read_text())
    (entry,) = history["claims"].values()
    ((name, rate),) = entry["rates"].items()
    assert name == "expect_toks(1, 8, 8, total) on no GPU"
    assert 1 < rate["rate"] < 400
    rate["rate"] *= 1000
    file.write_text(json.dumps(history))
    second = loaded(claims, source)
    lines(second, "HOLDS *test_floor *", "*warning: drift: * less than the * verified on 20*")
    (entry,) = json.loads(file.read_text())["claims"].values()
    assert entry["rates"][name]["rate"] == rate["rate"]  # a slower run does not lower what later ones are held against


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_decay_is_seen_against_the_ledger_where_this_machine_knows_nothing(
    claims: Run, pytester: Any, workers: tuple[str, ...]
) -> None:
    source = """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG_TOKS": "200"})
        @expect_toks(min=1, **LOAD)
        def test_floor(): ...
    """
    loaded(claims, source)
    with open_ledger(str(pytester.path / ".gpuguard" / "ledger.sqlite")) as ledger:
        [one] = ledger.records(ledger.run("last").id, evidence=True)
        ((subject, measured),) = one.evidence["rates"].items()
        faster = {**measured, "samples": [1000 * rate for rate in measured["samples"]]}
        ledger.add([replace(one, evidence={**one.evidence, "rates": {subject: faster}})])
    (pytester.path / ".gpuguard" / "history.json").unlink()
    lines(loaded(claims, source, *workers), "HOLDS *test_floor *", "*warning: drift: * less than the * verified on 20*")


def test_what_is_not_about_speed_knows_no_rate(claims: Run, pytester: Any) -> None:
    claims('@serves("sglang", MODEL, CPU)\n@fits\ndef test_fits(): ...\n')
    (entry,) = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())["claims"].values()
    assert entry["rates"] == {}


def test_questions_are_each_claims_own(claims: Run, pytester: Any) -> None:
    """Two claims share a server, not its answers to other questions."""
    for name, answer in (("given", "beta"), ("never", "omega")):
        one = {"question": "say it", "answer": answer, "match": "contains"}
        (pytester.path / f"{name}.jsonl").write_text((json.dumps(one) + "\n") * 30)
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @works(accuracy=">=0.5", questions="given.jsonl")
        def test_given(): ...

        @serves("sglang", MODEL, CPU)
        @works(accuracy=">=0.5", questions="never.jsonl")
        def test_never(): ...

        @serves("sglang", MODEL, CPU)
        @fits
        def test_fits(): ...
        """
    )
    lines(result, "CONTRADICTED (worse) *test_never *accuracy 0.000*", "HOLDS *test_fits *ready in * s, and answers")
    lines(result, "HOLDS *test_given *accuracy 1.000*")


@pytest.mark.parametrize("order", [("fits", "expect_toks(min=1, **LOAD)"), ("expect_toks(min=1, **LOAD)", "fits")])
def test_the_speed_of_a_server_that_answers_garbage_is_none_in_any_order(claims: Run, order: tuple[str, str]) -> None:
    first, second = order
    result = loaded(
        claims,
        f"""
        broken = serves("sglang", MODEL, CPU, env=dict(FAKE_SGLANG_ANSWERS="nan"))

        @broken
        @{first}
        def test_first(): ...

        @broken
        @{second}
        def test_second(): ...
        """,
    )
    for test in ("test_first", "test_second"):
        assert fact(result, test).startswith("CONTRADICTED (worse)")
        assert "numerics" in fact(result, test)


def test_a_rate_is_remembered_whichever_window_is_written_first(claims: Run, pytester: Any) -> None:
    source = """
        @serves("sglang", MODEL, CPU)
        @expect_toks(min=1, when="sglang>=0.5", **LOAD)
        @expect_toks(min=2, when="sglang<0.5", **LOAD)
        def test_here_first(): ...

        @serves("sglang", MODEL, CPU)
        @expect_toks(min=2, when="sglang<0.5", **LOAD)
        @expect_toks(min=1, when="sglang>=0.5", **LOAD)
        def test_here_last(): ...
        """
    loaded(claims, source)
    history = json.loads((pytester.path / ".gpuguard" / "history.json").read_text())
    assert [list(one["rates"]) for one in history["claims"].values()] == [["expect_toks(1, 8, 8, total) on no GPU"]] * 2
