"""What the judge makes of the test's own code, of several boots and of windows, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.claim import Claim, Serves
from pytest_gpuguard.claims.expect import (
    Compare,
    Expectation,
    ExpectToks,
    Fails,
    Fits,
    MaxMem,
    Ooms,
    Unsupported,
    Works,
)
from pytest_gpuguard.claims.measurement import Peak
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.observation import Decisive, MemoryTable, Observation
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import Body, Judgement, Verdict, judge, judge_claim
from pytest_gpuguard.claims.window import parse_window

READY = Observation("sglang", "ready", "ready", elapsed_s=42.4)
OOM = Observation(
    "sglang", "oom.weights", "weights", decisive=Decisive(7, " CUDA out of memory "), log="a.log", tail=("one", "two")
)
COMPARE = Compare(ratio=Comparison(">", 2))
TOKENS = Fits(kv_tokens=Comparison(">=", 32768))


def with_memory(**numbers: float) -> Observation:
    return replace(READY, memory=MemoryTable(**numbers))  # type: ignore[arg-type]


def absent(name: str) -> str | None:
    """A stack that has nothing."""
    return None


def claim(*expectations: Expectation) -> Claim:
    return Claim(Needs(), Serves("sglang", "m"), expectations)


def said(expectation: Expectation, observation: Observation, body: Body) -> tuple[Verdict, str]:
    judgement = judge(expectation, observation, body)
    return judgement.verdict, judgement.fact


# ----------------------------------------------------------------------------------------------------- nothing measured


@pytest.mark.parametrize(
    "expectation", [Works(), MaxMem(1.0, "peak"), ExpectToks(60), COMPARE], ids=lambda one: one.kind
)
def test_a_server_of_which_nothing_was_measured_is_inconclusive(expectation: Expectation) -> None:
    assert judge(expectation, READY, Body("passed")).verdict is Verdict.INCONCLUSIVE
    assert judge(expectation, OOM, Body("not_run")).verdict is Verdict.WORSE


def test_a_test_without_a_server_is_judged_by_its_peak_alone() -> None:
    bare = Observation("none", "ready", "ready", peak=Peak(3.0, "GPU-a"))
    peak, fits = judge_claim(claim(MaxMem(4.0, "peak"), Fits()), [bare], absent, Body("passed"))
    assert (peak.verdict, peak.warning) == (Verdict.HOLDS, None)
    assert fits.verdict is Verdict.INFRA
    assert "the test booted no server" in fits.fact
    assert "fixture gpus" in judge_claim(claim(MaxMem(4.0, "peak")), [], absent, Body("passed"))[0].fact


# ------------------------------------------------------------------------------------------------ the test's own code


@pytest.mark.parametrize(
    ("expectation", "kind", "verdict", "fact"),
    [
        (Fits(), "passed", "HOLDS", "ready in 42 s"),
        (Fits(), "not_run", "HOLDS", "ready in 42 s"),
        (Fits(), "assertion", "WORSE", "ready, but why"),
        (ExpectToks(60), "assertion", "WORSE", "ready, but why"),
        (Ooms(), "assertion", "BETTER", "ready in 42 s, against the claim that it runs out of memory"),
        (Fits(), "skip", "NOT_EVALUATED", "skipped in the test: why"),
        (Ooms(), "skip", "NOT_EVALUATED", "skipped in the test: why"),
        (Fits(), "error", "INFRA", "the test itself failed: why"),
        (Ooms(), "error", "INFRA", "the test itself failed: why"),
        (Fits(), "timeout", "INFRA", "time-out in the test: why"),
        (Fails("perf"), "timeout", "INFRA", "time-out in the test: why"),
    ],
)
def test_after_ready_the_tests_own_code_counts(expectation: Expectation, kind: str, verdict: str, fact: str) -> None:
    assert said(expectation, READY, Body(kind, "why")) == (Verdict[verdict], fact)


@pytest.mark.parametrize(
    ("kind", "outcome"), [("error", "infra.test"), ("timeout", "infra.deadline"), ("assertion", "ready")]
)
def test_a_fault_of_the_test_has_its_own_outcome(kind: str, outcome: str) -> None:
    assert judge(Fits(), READY, Body(kind, "why")).outcome == outcome


def test_a_skip_in_the_test_is_counted_by_its_own_reason() -> None:
    assert judge(Fits(), READY, Body("skip", "why")).reason == "skip"


@pytest.mark.parametrize("kind", ["passed", "assertion", "skip", "error", "timeout", "not_run"])
def test_a_server_that_failed_in_use_is_judged_by_its_failure_whatever_the_test_did(kind: str) -> None:
    in_use = replace(OOM, was_ready=True)
    assert judge(Ooms(), in_use, Body(kind, "why")).verdict is Verdict.HOLDS
    assert judge(Fits(), in_use, Body(kind, "why")).verdict is Verdict.WORSE


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("passed", "HOLDS"),
        ("not_run", "HOLDS"),
        ("assertion", "INFRA"),
        ("error", "INFRA"),
        ("timeout", "INFRA"),
        ("skip", "NOT_EVALUATED"),
    ],
)
def test_what_the_test_itself_did_is_not_lost_behind_a_boot_that_failed_as_claimed(kind: str, verdict: str) -> None:
    assert judge(Ooms(), OOM, Body(kind, "why")).verdict is Verdict[verdict]
    assert judge(Fits(), OOM, Body(kind, "why")).verdict is Verdict.WORSE


@pytest.mark.parametrize(
    ("expectation", "kind", "verdict", "outcome"),
    [
        (Fits(), "passed", "INFRA", "infra.test"),
        (Fits(), "assertion", "WORSE", "none"),
        (Fits(), "skip", "NOT_EVALUATED", "none"),
        (Fits(), "error", "INFRA", "infra.test"),
        (Fits(), "timeout", "INFRA", "infra.deadline"),
        (Fits(2.0), "passed", "INFRA", "infra.test"),
        (Ooms(), "passed", "INFRA", "infra.test"),
        (Ooms(), "assertion", "INFRA", "infra.test"),
    ],
)
def test_a_claim_that_booted_nothing_is_judged_by_its_test_alone(
    expectation: Expectation, kind: str, verdict: str, outcome: str
) -> None:
    (judgement,) = judge_claim(claim(expectation), [], {"sglang": "0.6"}.get, Body(kind, "why"))
    assert (judgement.verdict, judgement.outcome) == (Verdict[verdict], outcome)


# --------------------------------------------------------------------------------------------- several, and windows


def test_each_expectation_has_its_own_judgement() -> None:
    judgements = judge_claim(claim(Fits(), MaxMem(1.0, "weights")), [with_memory(weights_gib=2.0)], absent)
    assert [(one.expectation, one.verdict) for one in judgements] == [
        ("fits", Verdict.HOLDS),
        ("max_mem(1GiB, of=weights)", Verdict.WORSE),
    ]


def test_of_several_boots_the_worst_counts() -> None:
    (judgement,) = judge_claim(claim(Ooms()), [OOM, READY, OOM], absent)
    assert judgement.verdict is Verdict.BETTER


OLD = Unsupported("fp8", "rejected", when=parse_window("sglang<0.6"))
OLDER = Ooms(when=parse_window("sglang<0.5"))


@pytest.mark.parametrize(("version", "label"), [("0.5.9", "unsupported(fp8)"), ("0.4", "ooms")])
def test_only_what_is_stated_on_this_stack_is_judged(version: str, label: str) -> None:
    old = replace(OLD, when=parse_window("sglang>=0.5,<0.6"))
    judgements = judge_claim(claim(OLDER, old), [OOM], {"sglang": version}.get)
    assert [one.expectation for one in judgements] == [label]


def unstated(observations: list[Observation], body: Body | None = None, version: str | None = "0.7") -> Judgement:
    (judgement,) = judge_claim(claim(OLDER, OLD), observations, {"sglang": version}.get, body or Body("passed"))
    return judgement


@pytest.mark.parametrize(
    ("observations", "version", "fact"),
    [
        ([READY], "0.7", "new on this stack (sglang 0.7): ready; last opinion: unsupported(fp8), sglang<0.6"),
        (
            [OOM],
            "0.7",
            "new on this stack (sglang 0.7): oom.weights: CUDA out of memory; "
            "last opinion: unsupported(fp8), sglang<0.6",
        ),
        ([], None, "new on this stack (sglang absent): none; last opinion: unsupported(fp8), sglang<0.6"),
        (
            [READY],
            "0.7.dev2",
            "new on this stack (sglang 0.7.dev2): ready; last opinion: unsupported(fp8), sglang<0.6 "
            "(sglang 0.7.dev2 compared as 0.7)",
        ),
    ],
)
def test_where_no_window_matches_the_news_and_the_last_opinion_are_told(
    observations: list[Observation], version: str | None, fact: str
) -> None:
    judgement = unstated(observations, version=version)
    assert (judgement.verdict, judgement.fact) == (Verdict.UNSTATED, fact)
    assert judgement.expectation == "ooms / unsupported(fp8)"


def test_an_assertion_is_part_of_the_news() -> None:
    assert "ready, but 1 != 2; last opinion" in unstated([READY], Body("assertion", "1 != 2")).fact


@pytest.mark.parametrize(
    ("observations", "body", "outcome"),
    [
        ([replace(READY, outcome="port.in_use")], Body("not_run"), "port.in_use"),
        ([replace(READY, outcome="starting")], Body("not_run"), "starting"),
        ([READY], Body("error", "why"), "infra.test"),
        ([], Body("timeout", "why"), "infra.deadline"),
    ],
)
def test_a_fault_is_no_news_even_where_nothing_is_stated(
    observations: list[Observation], body: Body, outcome: str
) -> None:
    judgement = unstated(observations, body)
    assert (judgement.verdict, judgement.outcome) == (Verdict.INFRA, outcome)


def test_a_judgement_says_that_a_build_was_compared_as_its_release() -> None:
    stated = Fits(when=parse_window("sglang>=0.7"))
    (judgement,) = judge_claim(claim(stated), [READY], {"sglang": "0.7.dev2"}.get)
    assert judgement.fact == "ready in 42 s (sglang 0.7.dev2 compared as 0.7)"


# ------------------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("expectation", "fact"),
    [
        (Fits(), "oom.weights: CUDA out of memory"),
        (Ooms(), "oom.weights: CUDA out of memory"),
        (Ooms(("kv_pool",)), "oom.weights: CUDA out of memory (claimed: ooms(kv_pool))"),
        (Fails("perf"), "oom.weights: CUDA out of memory (claimed: fails(perf))"),
        (Fails("oom.weights", "HIP"), "oom.weights: CUDA out of memory (claimed: a line with 'HIP')"),
    ],
)
def test_a_failure_is_told_by_its_line_and_by_what_was_claimed_instead(expectation: Expectation, fact: str) -> None:
    assert judge(expectation, OOM).fact == fact


@pytest.mark.parametrize(
    ("expectation", "claims"),
    [
        (Ooms(("weights", "kv_pool")), "runs out of memory in weights or kv_pool"),
        (Unsupported("fp8"), "does not support fp8"),
        (Fails("perf"), "fails with perf"),
    ],
)
def test_a_server_that_came_up_against_the_claim_says_which(expectation: Expectation, claims: str) -> None:
    assert judge(expectation, replace(READY, elapsed_s=None)).fact == f"ready, against the claim that it {claims}"


@pytest.mark.parametrize(
    ("observation", "fact"),
    [
        (replace(OOM, decisive=None, note="our deadline"), "oom.weights: our deadline"),
        (replace(OOM, decisive=None, why="because"), "oom.weights: because"),
        (replace(OOM, decisive=None), "oom.weights: two"),
        (replace(OOM, decisive=None, tail=()), "oom.weights: the log is empty"),
        (replace(OOM, decisive=Decisive(1, "x" * 200)), "oom.weights: " + "x" * 159 + "…"),
    ],
)
def test_without_a_decisive_line_the_next_best_words_are_told(observation: Observation, fact: str) -> None:
    assert judge(Fits(), observation).fact == fact


def test_a_failure_shows_what_a_person_needs_to_act() -> None:
    observation = replace(OOM, why="because", note="our note", tail=tuple(f"line {n}" for n in range(20)))
    assert judge(Fits(), observation).details == (
        "line 7: CUDA out of memory",
        "because (phase reached: weights)",
        "our note",
        "log: a.log",
        *(f"| line {number}" for number in range(13, 20)),
    )


def test_a_failure_is_told_in_eleven_lines_below_its_verdict_with_memory_and_cures() -> None:
    memory = MemoryTable(
        avail_before_gib=94.0,
        weights_gib=77.7,
        avail_after_weights_gib=16.3,
        mem_fraction_static=0.78,
        reserved_gib=20.68,
        rest_gib=-4.38,
        f_min=0.8266,
    )
    observation = replace(
        OOM,
        why="because",
        note="our note",
        memory=memory,
        fullest_rank="TP3",
        remedies=("one", "two", "three", "four"),
        tail=tuple(f"line {n}" for n in range(20)),
    )
    assert judge(Fits(), observation).details == (
        "line 7: CUDA out of memory",
        "because (phase reached: weights)",
        "our note",
        "memory of TP3, the fullest rank (GiB): 94.00 free before the weights, 77.70 weights, 16.30 left",
        "  20.68 held back at --mem-fraction-static 0.78, short by 4.38, the least fraction is 0.8266",
        "cure: one",
        "cure: two",
        "cure: three",
        "log: a.log",
        "| line 18",
        "| line 19",
    )


def test_a_pool_that_was_there_is_told_with_its_tokens() -> None:
    memory = MemoryTable(kv_gib=30.0, kv_tokens=400000, graph_gib=1.5, free_gib=4.25, reserved_gib=9.4)
    details = judge(Fits(), replace(OOM, memory=memory)).details
    assert "memory (GiB): 30.00 KV pool (400,000 tokens), 1.50 graphs, 4.25 free at the end" in details


def test_a_check_before_the_boot_has_no_line_number() -> None:
    refused = replace(OOM, outcome="args.removed", decisive=Decisive(0, "--x is gone"))
    assert judge(Fits(), refused).details[0] == "--x is gone"


def test_an_unknown_failure_shows_the_end_of_the_log() -> None:
    details = judge(Ooms(), replace(OOM, outcome="unknown", decisive=None)).details
    assert details[-2:] == ("| one", "| two")
