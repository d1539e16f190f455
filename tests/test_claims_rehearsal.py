"""What a rehearsal may judge, value by value."""

from __future__ import annotations

import pytest

from pytest_gpuguard.claims.claim import Claim
from pytest_gpuguard.claims.expect import ExpectToks, Fits, MaxMem, Ooms, Works
from pytest_gpuguard.claims.judgement import NOT_RUN, Body, Judgement, Verdict
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.observation import MemoryTable, Observation
from pytest_gpuguard.claims.rehearsal import SIMULATED, as_rehearsed

READY = Observation("sglang", "ready", "ready", memory=MemoryTable(kv_tokens=4096), elapsed_s=1.0)
FAILED = Observation("sglang", "oom.weights", "weights")


def rehearse(
    expectation: object,
    verdict: Verdict,
    seen: Observation = READY,
    unknown: tuple[str, ...] = (),
    body: Body = NOT_RUN,
) -> Judgement:
    claim = Claim(Needs(), None, (expectation,))  # type: ignore[arg-type]
    judgement = Judgement(claim.expectations[0].label, verdict, seen.outcome, "as it was", ("a detail",))
    (found,) = as_rehearsed(claim, [judgement], [seen], unknown, body)
    return found


@pytest.mark.parametrize("verdict", [one for one in Verdict if one is not Verdict.NOT_EVALUATED])
def test_memory_and_arguments_are_judged_as_ever(verdict: Verdict) -> None:
    for expectation in (Fits(), Ooms(("weights",))):
        found = rehearse(expectation, verdict)
        assert (found.verdict, found.fact, found.details) == (verdict, "as it was", ("a detail",))


@pytest.mark.parametrize(
    ("expectation", "why"),
    [
        (ExpectToks(minimum=5.0), "a simulated rig has no speed (its server: ready in 1 s, 4096 KV tokens)"),
        (MaxMem(9.0, "peak"), "a simulated rig has no peaks of memory (its server: ready in 1 s, 4096 KV tokens)"),
        (Works(), "a simulated rig gives no answers worth checking (its server: ready in 1 s, 4096 KV tokens)"),
    ],
)
def test_speed_and_answers_are_never_judged(expectation: object, why: str) -> None:
    for verdict in (Verdict.HOLDS, Verdict.WORSE, Verdict.BETTER, Verdict.INCONCLUSIVE):
        found = rehearse(expectation, verdict)
        assert (found.verdict, found.fact, found.reason) == (Verdict.NOT_EVALUATED, why, SIMULATED)
    assert "its server: oom.weights" in rehearse(expectation, Verdict.WORSE, FAILED).fact


def test_nothing_is_judged_by_a_boot_that_has_no_rule() -> None:
    for verdict in (Verdict.HOLDS, Verdict.WORSE, Verdict.BETTER, Verdict.CHANGED, Verdict.UNSTATED):
        found = rehearse(Ooms(("kv_pool",)), verdict, unknown=("NCCL_ALGO=Tree", "--enable-x"))
        assert found.verdict is Verdict.NOT_EVALUATED
        assert found.fact == "a simulated rig has no rule for NCCL_ALGO=Tree, --enable-x"


def test_a_fault_of_the_host_stays_one() -> None:
    assert rehearse(Fits(), Verdict.INFRA, unknown=("X=1",)).verdict is Verdict.INFRA
    assert rehearse(ExpectToks(minimum=5.0), Verdict.INFRA).verdict is Verdict.INFRA


def test_an_assertion_about_answers_contradicts_nothing() -> None:
    body = Body("assertion", "assert 'Paris' in '…'")
    found = rehearse(Fits(), Verdict.WORSE, body=body)
    assert found.verdict is Verdict.NOT_EVALUATED
    assert found.fact == "a simulated rig gives no answers worth checking: assert 'Paris' in '…'"
    assert rehearse(Fits(), Verdict.WORSE, FAILED, body=body).verdict is Verdict.WORSE
