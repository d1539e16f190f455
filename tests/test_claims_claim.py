"""Claims from their marks: what is implied, how many GPUs they take, and which expectations go together."""

from __future__ import annotations

import pytest

from pytest_gpuguard.claims.claim import About, Claim, Serves, build_claim
from pytest_gpuguard.claims.errors import ClaimError
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
from pytest_gpuguard.claims.layout import Layout
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.window import parse_window

SERVER = Serves("sglang", "m")
OLD, NEW = parse_window("sglang<0.6"), parse_window("sglang>=0.6")


def built(*expectations: Expectation, needs: tuple[Needs, ...] = (), serves: Serves | None = SERVER) -> Claim:
    claim = build_claim(needs, serves, expectations)
    assert claim is not None
    return claim


def test_a_server_alone_is_expected_to_come_up() -> None:
    assert built().expectations == (Fits(),)


@pytest.mark.parametrize("stated", [Ooms(), MaxMem(75.0), ExpectToks(60), Works()])
def test_nothing_is_implied_beside_an_expectation(stated: Expectation) -> None:
    assert built(stated).expectations == (stated,)


def test_marks_that_only_gate_make_no_claim() -> None:
    assert build_claim([Needs(gpus=2)], None, []) is None


def test_a_claim_without_an_expectation_is_an_error() -> None:
    with pytest.raises(ClaimError, match=r"claim\(…\) without an expectation: add fits\(\), ooms\(…\)"):
        build_claim([], None, [], About(title="x"))


def test_who_says_so_is_kept_and_hearsay_is_a_status() -> None:
    claim = build_claim([], SERVER, [], About(status="hearsay"))
    assert claim is not None
    assert claim.about.hearsay
    assert not built().about.hearsay


def test_needs_of_all_marks_are_merged() -> None:
    assert built(needs=(Needs(gpus=2), Needs(sms=("120",)))).needs == Needs(gpus=2, sms=("120",))


@pytest.mark.parametrize(
    ("needs", "serves", "gpus"),
    [
        (Needs(), SERVER, 1),
        (Needs(gpus=8), SERVER, 8),
        (Needs(gpus=2), Serves("sglang", "m", ("--tp", "4")), 4),
        (Needs(), Serves("sglang", "m", layout=Layout(tp=8, ep=8)), 8),
        (Needs(), Serves("sglang", "m", ("--tp", "2", "--dp", "2")), 4),
        (Needs(), Serves("sglang", "m", ("--tp", "2", "--dp", "2"), Layout(tp=2, dp=2)), 2),
        (Needs(gpus=2), Serves("sglang", "m", ("--device", "cpu")), 0),
        (Needs(), Serves("sglang", "m", ("--device=cpu",)), 0),
        (Needs(), Serves("sglang", "m", ("--device", "cpu", "--device", "cuda")), 1),
        (Needs(sms=("120",)), None, 1),
        (Needs(gpus=3), None, 3),
        (Needs(), None, 0),
    ],
)
def test_a_claim_takes_the_most_that_needs_layout_and_flags_ask_for(
    needs: Needs, serves: Serves | None, gpus: int
) -> None:
    assert built(Fits(), needs=(needs,), serves=serves).gpus == gpus


def test_a_server_says_itself_as_a_person_would_type_it() -> None:
    serves = Serves("sglang", "my model", ("--tp", "2"), Layout(tp=2))
    assert serves.describe() == "sglang 'my model' --tp 2 [TP2]"


ALLOWED: list[tuple[Expectation, ...]] = [
    (Fits(), ExpectToks(60)),
    (Fits(), Works(), MaxMem(75.0), Uses("x")),
    (Fits(when=OLD), Fits(when=NEW)),
    (Fits(when=NEW), Ooms(when=OLD)),
    (Ooms(("weights",), when=OLD), Unsupported("x", when=NEW)),
    (Unsupported("x", "rejected", when=NEW), Unsupported("x", "crashes", when=parse_window("sglang>=0.5.6,<0.5.8"))),
    (Fits(), Unsupported("x", "falls_back")),
    (Fits(), Ignores("--x")),
    (Unsupported("x", "falls_back"), Unsupported("y", "falls_back")),
    (ExpectToks(60, concurrency=1), ExpectToks(400, concurrency=8)),
    (MaxMem(75.0, "weights"), MaxMem(5.0, "graph")),
    (Uses("x"), Uses("y")),
]  # fmt: skip


@pytest.mark.parametrize("expectations", ALLOWED)
def test_expectations_that_can_be_true_together_are_allowed(expectations: tuple[Expectation, ...]) -> None:
    assert built(*expectations).expectations == expectations


REFUSED: list[tuple[Expectation, Expectation, str]] = [
    (Fits(), Fits(2.0), "fits at all times and fits(margin=2GiB) at all times overlap and state the same"),
    (Fits(), Fits(when=OLD), "fits at all times and fits when sglang<0.6 overlap and state the same"),
    (Fits(), Ooms(), "fits at all times and ooms at all times overlap and state the opposite"),
    (Fits(when=NEW), Ooms(when=parse_window("sglang>=0.7")), "overlap and state the opposite"),
    (MaxMem(75.0), Fails("perf"), "overlap and state the opposite"),
    (ExpectToks(60), Unsupported("x"), "overlap and state the opposite"),
    (Ignores("--x"), Ooms(), "overlap and state the opposite"),
    (Unsupported("x", "falls_back"), Ooms(), "overlap and state the opposite"),
    (Ooms(), Unsupported("x"), "ooms at all times and unsupported(x) at all times overlap and state two failures"),
    (Unsupported("x"), Unsupported("y"), "overlap and state two failures"),
    (Unsupported("x"), Unsupported("x", when=OLD), "overlap and state the same"),
    (Unsupported("x", "falls_back"), Unsupported("x", "rejected"), "overlap and state the same"),
    (ExpectToks(60), ExpectToks(70), "overlap and state the same"),
    (MaxMem(75.0), MaxMem(80.0), "overlap and state the same"),
    (Fits(when=parse_window("sglang>=0.6")), Ooms(when=parse_window("cuda>=13")), "overlap and state the opposite"),
]


@pytest.mark.parametrize(("first", "second", "said"), REFUSED)
def test_expectations_that_would_both_be_stated_are_refused(first: Expectation, second: Expectation, said: str) -> None:
    for pair in ((first, second), (second, first)):
        with pytest.raises(ClaimError, match=r'such as when="sglang<0\.6" and when="sglang>=0\.6"'):
            built(*pair)
    with pytest.raises(ClaimError) as refusal:
        built(first, second)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("expectation", "label"),
    [
        (Fits(), "fits"),
        (Fits(2.5, Comparison(">=", 32768)), "fits(margin=2.5GiB, kv_tokens>=32768)"),
        (Works("full"), "works(full)"),
        (Ooms(), "ooms"),
        (Ooms(("weights", "host")), "ooms(weights, host)"),
        (Unsupported("fp8", "crashes", "x"), "unsupported(fp8)"),
        (Fails("hang.timeout"), "fails(hang.timeout)"),
        (Uses("x"), "uses(x)"),
        (Ignores("--x"), "ignores(--x)"),
        (MaxMem(75.0, "weights"), "max_mem(75GiB, of=weights)"),
        (ExpectToks(60), "expect_toks(min=60, concurrency=1)"),
        (ExpectToks(9, output_len=8, per="request"), "expect_toks(min=9, concurrency=1, output_len=8, per=request)"),
        (ExpectToks(None, 65), "expect_toks(about=65±5%, concurrency=1)"),
        (Compare(SERVER, Comparison(">", 2)), "compare(ratio>2, concurrency=1)"),
    ],
)  # fmt: skip
def test_an_expectation_says_itself_in_one_line(expectation: Expectation, label: str) -> None:
    assert expectation.label == label


def test_two_load_shapes_of_one_claim_have_two_labels() -> None:
    assert ExpectToks(60, input_len=128).label != ExpectToks(60, input_len=1024).label
