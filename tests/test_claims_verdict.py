"""The verdict table of the design, row by row and column by column, and the laws that hold for every outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pytest_gpuguard.claims.expect import (
    Compare,
    Expectation,
    ExpectToks,
    Fails,
    Fits,
    Ignores,
    MaxMem,
    Ooms,
    Unsupported,
    Uses,
    Works,
)
from pytest_gpuguard.claims.judgement import Judgement, worst
from pytest_gpuguard.claims.observation import Decisive, MemoryTable, Observation
from pytest_gpuguard.claims.outcome import (
    GPU_OOM_PHASES,
    HOST_FAULTS,
    OOM_PHASES,
    OUTCOMES,
    PHASES,
    READY,
    STACK_FAILURES,
    STARTING,
    UNDECIDED,
)
from pytest_gpuguard.claims.resolved import FeatureEvidence, Resolved, Setting, Term, Vocabulary
from pytest_gpuguard.claims.series import Series
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.verdict import TABLE, Body, Seen, Verdict, judge, row_of, seen
from tests.laws import given, settings, st

HOLDS, WORSE, BETTER = Verdict.HOLDS, Verdict.WORSE, Verdict.BETTER
CHANGED, INCONCLUSIVE, INFRA = Verdict.CHANGED, Verdict.INCONCLUSIVE, Verdict.INFRA
NOTHING = None  # "–" in the design: such an expectation claims no failure

#: design.md, "Verdicts": expectation ↓ observed →
COLUMNS = (Seen.READY, Seen.CLAIMED, Seen.OTHER, Seen.UNKNOWN, Seen.HOST)
DESIGN = {
    "positive": (HOLDS, NOTHING, WORSE, WORSE, INFRA),
    "negative": (BETTER, HOLDS, CHANGED, INCONCLUSIVE, INFRA),
    "off": (INCONCLUSIVE, NOTHING, CHANGED, INCONCLUSIVE, INFRA),
}
ROWS: list[tuple[str, Expectation]] = [
    ("positive", Fits()),
    ("positive", Works()),
    ("positive", MaxMem(75.0)),
    ("positive", ExpectToks(60)),
    ("positive", Compare(ratio=Comparison(">", 2))),
    ("positive", Uses("x")),
    ("negative", Ooms()),
    ("negative", Unsupported("x")),
    ("negative", Unsupported("x", "rejected")),
    ("negative", Unsupported("x", "crashes")),
    ("negative", Fails("hang.timeout")),
    ("off", Ignores("--x")),
    ("off", Unsupported("x", "falls_back")),
]

SERIES = {ExpectToks(60).subject: Series((70.0, 71.0, 70.5, 70.2, 70.8, 70.4, 70.6))}


def saw(outcome: str, text: str | None = "the line") -> Observation:
    """A boot with this outcome, all of whose numbers are good."""
    memory = MemoryTable(weights_gib=40.0, kv_gib=20.0, kv_tokens=262144, free_gib=4.0)
    decisive = Decisive(7, text) if text is not None else None
    return Observation("sglang", outcome, "weights", decisive=decisive, memory=memory, series=SERIES)


@pytest.mark.parametrize(("row", "column"), [(row, column) for row in DESIGN for column in COLUMNS])
def test_the_table_is_the_designs(row: str, column: Seen) -> None:
    assert TABLE.get((row, column)) is DESIGN[row][COLUMNS.index(column)]


def test_the_table_has_nothing_that_the_design_has_not() -> None:
    assert {row for row, _ in TABLE} == set(DESIGN)
    assert set(COLUMNS) == set(Seen)


@pytest.mark.parametrize(("row", "expectation"), ROWS, ids=lambda value: getattr(value, "label", value))
def test_every_expectation_is_in_its_row(row: str, expectation: Expectation) -> None:
    assert row_of(expectation) == row


#: (expectation, ready, the claimed failure, another failure of the stack, unknown, host fault): outcome → verdict.
JUDGED: list[tuple[Expectation, str | None, str]] = [
    (Fits(), None, "oom.weights"),
    (MaxMem(75.0), None, "oom.kv_pool"),
    (ExpectToks(60), None, "hang.timeout"),
    (Ooms(("weights",)), "oom.weights", "oom.kv_pool"),
    (Ooms(), "oom.runtime", "oom.host"),
    (Unsupported("x", "rejected"), "unsupported.config", "jit.compile"),
    (Unsupported("x", "crashes"), "jit.compile", "unsupported.config"),
    (Unsupported("x"), "unsupported.model", "oom.weights"),
    (Fails("hang.timeout"), "hang.timeout", "nccl.timeout"),
    (Fails("args.removed"), "args.removed", "unsupported.config"),
]


def _cells() -> Iterator[tuple[Expectation, str, Seen]]:
    for expectation, claimed, other in JUDGED:
        yield expectation, READY, Seen.READY
        if claimed is not None:
            yield expectation, claimed, Seen.CLAIMED
        yield expectation, other, Seen.OTHER
        yield expectation, "args.removed" if claimed != "args.removed" else other, Seen.OTHER
        yield from ((expectation, outcome, Seen.UNKNOWN) for outcome in sorted(UNDECIDED))
        yield from ((expectation, outcome, Seen.HOST) for outcome in sorted(HOST_FAULTS))
        yield expectation, STARTING, Seen.HOST
        yield expectation, "an outcome of a later version", Seen.HOST


@pytest.mark.parametrize(
    ("expectation", "outcome", "column"), list(_cells()), ids=lambda value: str(getattr(value, "label", value))
)
def test_the_judge_reads_the_table(expectation: Expectation, outcome: str, column: Seen) -> None:
    judgement = judge(expectation, saw(outcome))
    assert seen(expectation, saw(outcome)) is column
    assert judgement.verdict is DESIGN[row_of(expectation)][COLUMNS.index(column)]
    assert (judgement.outcome, judgement.expectation) == (outcome, expectation.label)


# -------------------------------------------------------------------------------------------------------- outcomes


def test_every_outcome_is_in_exactly_one_group() -> None:
    groups = [{READY}, {STARTING}, STACK_FAILURES, HOST_FAULTS, UNDECIDED]
    assert sum(map(len, groups)) == len(OUTCOMES)
    assert set().union(*groups) == OUTCOMES


@pytest.mark.parametrize("outcome", sorted(OUTCOMES))
def test_the_two_questions_about_an_outcome_never_agree(outcome: str) -> None:
    assert not (outcome in STACK_FAILURES and outcome in HOST_FAULTS)


@pytest.mark.parametrize(
    "outcome",
    ["bad.args", "model.missing", "port.in_use", "hardware", "driver.mismatch", "infra.deadline", "infra.dirty_gpu"],
)
def test_what_says_nothing_about_the_stack_is_a_host_fault(outcome: str) -> None:
    assert outcome in HOST_FAULTS


def test_every_memory_phase_has_its_outcome() -> None:
    assert {f"oom.{phase}" for phase in OOM_PHASES} == {one for one in STACK_FAILURES if one.startswith("oom.")}
    assert set(OOM_PHASES) - set(GPU_OOM_PHASES) == {"host"}
    assert PHASES.index("weights") < PHASES.index("kv_pool") < PHASES.index("graph_capture") < PHASES.index("ready")


# ------------------------------------------------------------------------------------- only the claimed reason holds


@pytest.mark.parametrize("phase", OOM_PHASES)
def test_memory_that_runs_out_in_another_phase_is_a_change(phase: str) -> None:
    verdicts = {other: judge(Ooms((phase,)), saw(f"oom.{other}")).verdict for other in OOM_PHASES}
    assert verdicts == {other: HOLDS if other == phase else CHANGED for other in OOM_PHASES}


def test_without_a_phase_any_gpu_memory_will_do_but_not_the_hosts() -> None:
    verdicts = {phase: judge(Ooms(), saw(f"oom.{phase}")).verdict for phase in OOM_PHASES}
    assert verdicts == {**dict.fromkeys(GPU_OOM_PHASES, HOLDS), "host": CHANGED}


@pytest.mark.parametrize("claim", [Fails("hang.timeout", "watch.?dog"), Unsupported("x", "rejected", "watch.?dog")])
@pytest.mark.parametrize(
    ("text", "verdict"), [("the watchdog fired", HOLDS), ("something else", CHANGED), (None, CHANGED)]
)
def test_the_decisive_line_must_say_what_was_claimed(
    claim: Fails | Unsupported, text: str | None, verdict: Verdict
) -> None:
    outcome = claim.outcome if isinstance(claim, Fails) else "unsupported.arch"
    assert judge(claim, saw(outcome, text)).verdict is verdict


_REJECTED = {"unsupported.arch", "unsupported.config", "unsupported.model"}
_CRASHED = {
    "unsupported.arch", "jit.compile", "jit.smem", "graph.incompatible", "illegal_memory", "import.abi",
    "comm.p2p", "comm.deepep", "nccl.error", "nccl.shm",
}  # fmt: skip
REFUSALS = {
    "rejected": frozenset(_REJECTED),
    "crashes": frozenset(_CRASHED),
    "falls_back": frozenset(),
    None: frozenset(_REJECTED | _CRASHED),
}


@pytest.mark.parametrize("how", ["rejected", "crashes", None])
def test_each_way_of_being_unsupported_has_its_own_failures(how: str | None) -> None:
    held = {one for one in STACK_FAILURES if judge(Unsupported("x", how, "said"), saw(one, "said")).verdict is HOLDS}
    assert held == REFUSALS[how]


@pytest.mark.parametrize("how", ["crashes", None])
def test_a_crash_that_any_broken_installation_shows_needs_the_words_of_the_claim(how: str | None) -> None:
    held = {one for one in STACK_FAILURES if judge(Unsupported("x", how), saw(one, "said")).verdict is HOLDS}
    assert held == REFUSALS[how] - {"import.abi", "comm.p2p", "comm.deepep", "nccl.error", "nccl.shm"}


@pytest.mark.parametrize("outcome", sorted(UNDECIDED))
@pytest.mark.parametrize(
    ("claim", "text", "verdict"),
    [
        (Unsupported("x", "crashes", "No supported CUDA"), "No supported CUDA architectures", HOLDS),
        (Unsupported("x", "crashes", "No supported CUDA"), "Segmentation fault", INCONCLUSIVE),
        (Unsupported("x", "crashes", "No supported CUDA"), None, INCONCLUSIVE),
        (Unsupported("x", "crashes"), "No supported CUDA architectures", INCONCLUSIVE),
        (Unsupported("x", "rejected", "No supported CUDA"), "No supported CUDA architectures", INCONCLUSIVE),
        (Unsupported("x", None, "No supported CUDA"), "No supported CUDA architectures", INCONCLUSIVE),
        (Fails("jit.compile", "No supported CUDA"), "No supported CUDA architectures", INCONCLUSIVE),
        (Ooms(), "out of memory", INCONCLUSIVE),
        (Fits(), "out of memory", WORSE),
    ],
)
def test_a_failure_of_unknown_cause_satisfies_only_a_crash_with_its_words(
    outcome: str, claim: Expectation, text: str | None, verdict: Verdict
) -> None:
    assert judge(claim, saw(outcome, text)).verdict is verdict


def test_a_flag_that_only_other_releases_know_is_a_failure_of_the_stack() -> None:
    gone = saw("args.removed", "--enable-x is no flag of this release")
    assert judge(Ooms(), gone).verdict is CHANGED
    assert judge(Unsupported("x", "rejected"), gone).verdict is CHANGED
    assert judge(Fails("args.removed"), gone).verdict is HOLDS
    assert judge(Fits(), gone).verdict is WORSE


def test_a_flag_that_no_release_knows_says_nothing() -> None:
    assert {judge(one, saw("bad.args")).verdict for one in (Ooms(), Fails("args.removed"), Fits())} == {INFRA}


# ------------------------------------------------------------------------- uses, ignores, falls back: positive evidence

_WORDS = Vocabulary(
    {
        "custom": Term("feature", "custom"),
        "disablecustom": Term("feature", "custom", want=False),
        "backend": Term("setting", "backend"),
    },
    {"fa3": (("backend", "fa3"),), "triton": (("backend", "triton"), ("moe", "triton"))},
    names=("backend=…", "custom"),
)
ON, OFF = FeatureEvidence("custom", True, "line 4: it is up"), FeatureEvidence("custom", False, "line 5: it is down")
ECHOED = FeatureEvidence("custom", True, "server_info enable_custom is True", echo=True)
ECHOED_OFF = FeatureEvidence("custom", False, "server_info disable_custom is True", requested=True, echo=True)
REFUSED = FeatureEvidence("custom", False, "server_info disable_custom is True", requested=True)


def shows(
    *features: FeatureEvidence,
    asked: str | None = None,
    backend: tuple[str | None, str | None] = (None, None),
    echo: bool = False,
) -> Observation:
    """A server that is ready and shows this: evidence, what was asked of ``custom``, and ``backend`` (asked, runs)."""
    wanted, runs = backend
    differs = wanted is not None and runs is not None and wanted != runs
    settings = [Setting("backend", wanted, runs, "server_info backend", differs, echo)]
    settings += [Setting("custom", asked)] if asked is not None else []
    return replace(saw(READY), resolved=Resolved(tuple(settings), features, _WORDS))


USES, FALLS_BACK = Uses("custom"), Unsupported("custom", "falls_back")
ASKED_AND_RUNS = ("trtllm", "triton")


@pytest.mark.parametrize(
    ("expectation", "observation", "verdict", "said"),
    [
        (USES, shows(ON), HOLDS, "line 4: it is up"),
        (USES, shows(OFF), WORSE, "line 5: it is down"),
        (USES, shows(REFUSED), WORSE, "disable_custom is True"),
        (USES, shows(), INCONCLUSIVE, "nothing the server said shows"),
        (USES, shows(asked="on"), INCONCLUSIVE, "nothing the server said shows"),
        (USES, shows(ON, OFF), INCONCLUSIVE, "on (line 4: it is up) and off (line 5: it is down)"),
        (Uses("warp"), shows(ON), INCONCLUSIVE, "'warp' is no feature that evidence is known of (known: backend=…, cu"),
        (Uses("backend=fa3"), shows(backend=(None, "fa3")), HOLDS, "runs fa3 (server_info backend)"),
        (Uses("fa3"), shows(backend=("fa3", "fa3")), HOLDS, "asked fa3, runs fa3 (server_info backend)"),
        (
            Uses("fa3"),
            shows(backend=("fa3", "fa3"), echo=True),
            INCONCLUSIVE,
            "only repeats the argument that it was g",
        ),
        (Uses("backend=x"), shows(backend=("fa3", "fa3"), echo=True), INCONCLUSIVE, "only repeats the argument"),
        (USES, shows(ECHOED, asked="on"), INCONCLUSIVE, "only repeats the argument that it was given, which is no ev"),
        (USES, shows(ECHOED, ON, asked="on"), HOLDS, "line 4: it is up"),
        (USES, shows(ECHOED, OFF, asked="on"), WORSE, "line 5: it is down"),
        (USES, shows(ECHOED_OFF, asked="off"), WORSE, "disable_custom is True"),
        (Uses("backend=fa3"), shows(backend=("fa3", "triton")), WORSE, "asked fa3, runs triton (server_info backend)"),
        (Uses("fa3"), shows(backend=("fa3", None)), INCONCLUSIVE, "nothing the server said shows its backend"),
        (Uses("fa3"), shows(backend=(None, "fa3 (prefill), x (decode)")), INCONCLUSIVE, "one of several"),
        (Uses("triton"), shows(backend=(None, "triton")), INCONCLUSIVE, "write backend=triton or moe=triton"),
        (Uses("backend"), shows(backend=(None, "fa3")), INCONCLUSIVE, "claim a value, backend=…; it runs fa3"),
        (FALLS_BACK, shows(OFF), HOLDS, "line 5: it is down"),
        (FALLS_BACK, shows(OFF, asked="on"), HOLDS, "line 5: it is down"),
        (FALLS_BACK, shows(ON), BETTER, "line 4: it is up"),
        (FALLS_BACK, shows(), INCONCLUSIVE, "nothing the server said shows"),
        (FALLS_BACK, shows(asked="on"), INCONCLUSIVE, "nothing the server said shows"),
        (FALLS_BACK, shows(REFUSED), INCONCLUSIVE, "nothing the server said shows"),
        (FALLS_BACK, shows(ON, OFF), INCONCLUSIVE, "contradicts itself"),
        (Unsupported("warp", "falls_back"), shows(OFF), INCONCLUSIVE, "'warp' is no feature"),
        (Unsupported("custom", "falls_back", "is down"), shows(OFF), HOLDS, "line 5: it is down"),
        (Unsupported("custom", "falls_back", "is sad"), shows(OFF), INCONCLUSIVE, "(claimed: a line with 'is sad')"),
        (Unsupported("backend=trtllm", "falls_back"), shows(backend=ASKED_AND_RUNS), HOLDS, "asked trtllm, runs tri"),
        (Unsupported("backend=trtllm", "falls_back"), shows(backend=("trtllm", "trtllm")), BETTER, "runs trtllm"),
        (Unsupported("backend=trtllm", "falls_back"), shows(backend=("trtllm", None)), INCONCLUSIVE, "nothing the se"),
        (Unsupported("backend=trtllm", "falls_back"), shows(backend=("fa3", "triton")), INCONCLUSIVE, "asked fa3"),
        (Unsupported("backend=trtllm", "falls_back"), shows(backend=(None, "triton")), INCONCLUSIVE, "not asked"),
        (Ignores("--custom"), shows(OFF, asked="on"), HOLDS, "line 5: it is down"),
        (Ignores("--custom"), shows(ON, asked="on"), BETTER, "line 4: it is up"),
        (Ignores("--custom"), shows(asked="on"), INCONCLUSIVE, "nothing the server said shows"),
        (Ignores("--custom"), shows(OFF), INCONCLUSIVE, "--custom was not asked of this server"),
        (Ignores("--custom"), shows(OFF, asked="off"), INCONCLUSIVE, "--custom was not asked of this server"),
        (Ignores("--disable-custom"), shows(ON, asked="off"), HOLDS, "line 4: it is up"),
        (Ignores("--disable-custom"), shows(REFUSED, asked="off"), BETTER, "disable_custom is True"),
        (Ignores("--disable-custom"), shows(ECHOED_OFF, asked="off"), INCONCLUSIVE, "only repeats the argument"),
        (FALLS_BACK, shows(ECHOED, asked="on"), INCONCLUSIVE, "only repeats the argument"),
        (FALLS_BACK, shows(ECHOED, OFF, asked="on"), HOLDS, "line 5: it is down"),
        (Ignores("--backend"), shows(backend=("fa3", "fa3"), echo=True), INCONCLUSIVE, "only repeats the argument"),
        (Ignores("--backend"), shows(backend=ASKED_AND_RUNS), HOLDS, "asked trtllm, runs triton"),
        (Ignores("--backend trtllm"), shows(backend=ASKED_AND_RUNS), HOLDS, "asked trtllm, runs triton"),
        (Ignores("--backend"), shows(backend=("fa3", "fa3")), BETTER, "asked fa3, runs fa3"),
        (Ignores("--backend"), shows(backend=(None, "fa3")), INCONCLUSIVE, "--backend was not asked of this server"),
        (Ignores("--warp"), shows(OFF), INCONCLUSIVE, "'--warp' is no feature"),
    ],
)
def test_only_what_the_server_says_shows_a_feature_on_or_off(
    expectation: Expectation, observation: Observation, verdict: Verdict, said: str
) -> None:
    judgement = judge(expectation, observation)
    assert judgement.verdict is verdict
    assert said in judgement.fact
    assert judgement.fact.startswith("ready")


@pytest.mark.parametrize("expectation", [USES, FALLS_BACK, Ignores("--custom")])
@pytest.mark.parametrize(
    ("outcome", "column"),
    [
        ("unsupported.arch", Seen.OTHER),
        ("oom.weights", Seen.OTHER),
        ("unknown", Seen.UNKNOWN),
        ("port.in_use", Seen.HOST),
        ("infra.device", Seen.HOST),
    ],
)
def test_a_boot_that_failed_shows_no_feature_whatever_its_log_said(
    expectation: Expectation, outcome: str, column: Seen
) -> None:
    observation = replace(shows(ON, OFF, asked="on"), outcome=outcome)
    assert judge(expectation, observation).verdict is TABLE[row_of(expectation), column]


def test_a_setting_that_runs_otherwise_than_asked_is_told_and_changes_no_other_verdict() -> None:
    told = "backend: asked trtllm, runs triton (server_info backend)"
    for expectation in (Fits(), MaxMem(75.0)):
        judgement = judge(expectation, shows(backend=ASKED_AND_RUNS))
        assert judgement.verdict is HOLDS
        assert judgement.details == (told,)
    assert judge(Fits(), shows(backend=("fa3", "fa3"))).details == ()
    assert told in judge(MaxMem(1.0), shows(backend=ASKED_AND_RUNS)).details


# ------------------------------------------------------------------------------------------------------ worst-of order


def test_the_order_from_worst_to_best_is_the_designs() -> None:
    assert [verdict.name for verdict in sorted(Verdict, key=lambda one: one.severity)] == [
        "INFRA", "WORSE", "CHANGED", "BETTER", "INCONCLUSIVE", "UNSTATED", "NOT_EVALUATED", "HOLDS",
    ]  # fmt: skip
    assert (str(WORSE), str(BETTER)) == ("CONTRADICTED (worse)", "CONTRADICTED (better)")


@given(st.lists(st.sampled_from(list(Verdict)), min_size=1))
def test_the_worst_of_several_judgements_decides(verdicts: list[Verdict]) -> None:
    judgements = [Judgement("x", verdict, READY, "") for verdict in verdicts]
    assert worst(judgements).verdict.severity == min(verdict.severity for verdict in verdicts)


# ------------------------------------------------------------------------------------------------------------ laws

_STACK = st.sampled_from(sorted(STACK_FAILURES))
_MATCH = st.none() | st.just("the line") | st.just("never said")
_HOW = st.sampled_from([None, "rejected", "crashes", "falls_back"])
_NEGATIVE = (
    st.lists(st.sampled_from(OOM_PHASES), unique=True).map(lambda phases: Ooms(tuple(phases)))
    | st.builds(Unsupported, st.just("x"), _HOW, _MATCH)
    | st.builds(Fails, _STACK, _MATCH)
)
_ANY: st.SearchStrategy[Expectation] = _NEGATIVE | st.sampled_from([one for _, one in ROWS])
_BODY = st.sampled_from(["passed", "assertion", "skip", "error", "timeout", "not_run"]).map(
    lambda kind: Body(kind, "x")
)
_OUTCOME = st.sampled_from([*sorted(OUTCOMES), "no such outcome"])
_TEXT = st.none() | st.sampled_from(["the line", "another"])


@given(_ANY, _OUTCOME, _TEXT, _BODY)
@settings(max_examples=200)
def test_every_observation_has_a_verdict(expectation: Expectation, outcome: str, text: str | None, body: Body) -> None:
    judgement = judge(expectation, saw(outcome, text), body)
    assert judgement.verdict is not Verdict.UNSTATED
    assert judgement.fact


@given(_ANY, _OUTCOME.filter(lambda outcome: outcome != READY), _TEXT, _BODY)
@settings(max_examples=200)
def test_no_failure_holds_but_the_claimed_one(
    expectation: Expectation, outcome: str, text: str | None, body: Body
) -> None:
    named: frozenset[str] = frozenset()
    if isinstance(expectation, Ooms):
        named = frozenset(f"oom.{phase}" for phase in expectation.phases or GPU_OOM_PHASES)
    elif isinstance(expectation, Fails):
        named = frozenset({expectation.outcome})
    elif isinstance(expectation, Unsupported):
        named = REFUSALS[expectation.how] | (UNDECIDED if expectation.how == "crashes" and expectation.match else set())
    said = getattr(expectation, "match", None)
    if judge(expectation, saw(outcome, text), body).verdict is HOLDS:
        assert outcome in named
        assert said is None or said == text


@given(_ANY, st.sampled_from([*sorted(HOST_FAULTS), STARTING, "no such outcome"]), _TEXT, _BODY)
def test_a_fault_of_the_host_is_never_more_than_infra(
    expectation: Expectation, outcome: str, text: str | None, body: Body
) -> None:
    assert judge(expectation, saw(outcome, text), body).verdict is INFRA
