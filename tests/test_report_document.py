"""The document of one run: its keys, its counts, its labels, and what it does with evidence that is not as expected."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.verdict import Verdict
from pytest_gpuguard.ledger.record import Record
from pytest_gpuguard.report.document import COVERAGE, document
from pytest_gpuguard.report.trend import POINTS
from pytest_gpuguard.report.words import plain, stamp

from .report_runs import (
    CARD,
    DAY,
    HOSTILE,
    LOAD,
    NEW,
    OLD,
    OOM,
    RAW,
    START,
    earlier,
    evidence,
    failed,
    flip,
    record,
    run,
)


def keys(value: Any) -> set[str]:
    """All keys, however deep, that are not names of things."""
    named = {
        "verdicts",
        "reasons",
        "cells",
        "components",
        "memory",
        "peak_phases",
        "rates",
        "history",
        "latencies_s",
        "coverage",
    }
    if isinstance(value, dict):
        return {key for key in value} | {
            deep
            for key, inner in value.items()
            for deep in (
                set().union(*map(keys, inner.values())) if key in named and isinstance(inner, dict) else keys(inner)
            )
        }
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def everything() -> dict[str, Any]:
    now = record(evidence=evidence(3))
    bad = failed("b::b")
    old = record("b::b", stack="old", components=OLD)
    none = record("c::c", "NOT_EVALUATED", reason="models", outcome="none", fact="no model", cards=())
    return document(
        run(ended=START + 90.0),
        [now, bad, old, none],
        [flip(bad)],
        [flip(bad, old, ranked=False)],
        lambda claim: earlier(now, 9, {4: {"driver": "575"}}),
        {"vanished": ["d::d"]},
    )


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "reports.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", text))
    assert sorted(keys(everything()) - documented) == []
    assert set(COVERAGE) <= documented


def test_it_is_json_and_comes_back_as_it_was() -> None:
    found = everything()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_claims_are_counted_once_each_however_many_expectations_they_have() -> None:
    found = document(
        run(),
        [
            record("a::a", decides=False, expectation="fits()"),
            record("a::a", "CHANGED", expectation="ooms()"),
            record("b::b", "NOT_EVALUATED", reason="sm", fact="needs SM90"),
            record("c::c", "NOT_EVALUATED", reason="sm", fact="needs SM100"),
            record("d::d", hearsay=True),
        ],
    )
    assert found["counts"] == {
        "claims": 4,
        "hearsay": 1,
        "verdicts": {"CHANGED": 1, "NOT_EVALUATED": 2, "HOLDS": 1},
        "reasons": {"sm": {"claims": 2, "example": "needs SM90"}},
    }
    first = found["claims"][0]
    assert (first["claim"], first["verdict"], first["expectation"]) == ("a::a", "CHANGED", "ooms()")
    assert [one["expectation"] for one in first["judgements"]] == ["fits()", "ooms()"]


def test_flips_come_first_then_the_unstated_then_the_worst() -> None:
    flipped = record("z::z")
    others = [record(f"{one.name.lower()}::a", one.value) for one in reversed(Verdict)]
    found = document(run(), [*others, flipped], [flip(flipped, sort="recovered")])
    said = [one["claim"] for one in found["claims"]]
    assert said[:3] == ["z::z", "unstated::a", "infra::a"]
    assert said[-1] == "holds::a"
    assert found["claims"][0]["flip"] == "recovered"
    assert found["flips"][0]["meaning"] == "is as claimed again"


def test_flips_are_ordered_the_worst_first() -> None:
    sorts = ("recovered", "flaky", "better", "changed", "worse")
    found = document(run(), [], [flip(record(f"{sort}::x"), sort=sort) for sort in sorts])
    assert [one["sort"] for one in found["flips"]] == ["worse", "changed", "flaky", "better", "recovered"]


def test_a_flip_tells_both_sides_the_line_and_what_changed_the_shortest_first() -> None:
    [told] = document(run(), [], [flip(failed())])["flips"]
    assert (told["before"]["verdict"], told["now"]["verdict"]) == ("HOLDS", "CONTRADICTED (worse)")
    assert told["now"]["decisive"] == OOM
    assert told["before"]["run"] == "20260112-081200-77aa"
    lengths = [sum(len(text or "") for text in one.values()) for one in told["changed"]]
    assert lengths == sorted(lengths)
    assert [one["rank"] for one in told["suspects"]] == [1, 2, 3, 4]
    assert told["suspects"][0]["for"]
    assert told["suspects"][1]["against"]


def test_without_a_ranking_there_are_no_ranks() -> None:
    [told] = document(run(), [], [flip(failed(), ranked=False)])["flips"]
    assert {one["rank"] for one in told["suspects"]} == {None}
    assert told["ranked"] is False


@pytest.mark.parametrize(("kind", "label"), [("rehearsed", "REHEARSED"), ("replayed", "REPLAYED"), ("verified", None)])
def test_what_verifies_nothing_says_so_at_every_verdict(kind: Any, label: str | None) -> None:
    now = failed(kind=kind)
    old = record(now.claim, stack="old", kind=kind)
    found = document(run(kind), [now, old], [flip(now)], [flip(now, old)])
    assert found["label"] == label
    assert (found["notice"] or "").startswith(label or "")
    assert bool(found["notice"]) == (label is not None)
    labels = [one["label"] for one in (*found["claims"], *found["flips"], *found["differences"])]
    labels += [side["label"] for one in found["flips"] for side in (one["before"], one["now"])]
    labels += [cell["label"] for row in found["side_by_side"] for cell in row["cells"].values()]
    assert set(labels) == {label}


def test_the_history_holds_what_is_alike_only_oldest_first_and_tells_what_changed() -> None:
    now = record(evidence=evidence(1))
    good = earlier(now, 6, {3: {"driver": "575.51"}})
    strangers = [
        record(run="x1", when=START - 5 * DAY, evidence=evidence(), stack="old"),
        record(run="x2", when=START - 5 * DAY, evidence=evidence(), kind="rehearsed"),
        record(run="x3", when=START - 5 * DAY, evidence=evidence(), cards=("NVIDIA H200",)),
        record(run="x4", when=START + 5 * DAY, evidence=evidence()),
        record(run="x5", when=START - 5 * DAY, evidence={}),
        now,
    ]
    [claim] = document(run(), [now], history=lambda name: [*reversed(good), *strangers])["claims"]
    points = claim["history"][LOAD]["points"]
    assert [one["run"] for one in points] == [*(f"r{i:04}" for i in range(6)), now.run]
    assert points[3]["changes"] == [{"component": "driver", "before": OLD["driver"], "now": "575.51"}]
    assert [bool(one["changes"]) for one in points] == [False, False, False, True, False, False, True]
    assert all(one["low"] < one["center"] < one["high"] for one in points)
    assert claim["rates"][LOAD]["interval"]["n"] == 9


def test_a_long_history_keeps_the_newest_and_says_how_many_are_left_out() -> None:
    now = record(evidence=evidence(1))
    [claim] = document(run(), [now], history=lambda name: earlier(now, 100))["claims"]
    told = claim["history"][LOAD]
    assert (len(told["points"]), told["left_out"]) == (POINTS, 101 - POINTS)
    assert told["points"][-1]["run"] == now.run


def test_history_is_asked_only_for_what_was_measured() -> None:
    asked: list[str] = []

    def history(claim: str) -> list[Record]:
        asked.append(claim)
        return []

    document(run(), [record("a::a"), record("b::b", evidence=evidence())], history=history)
    assert asked == ["b::b"]


def test_a_component_that_only_one_side_knows_is_no_change() -> None:
    now = record(evidence=evidence(), components={"torch": "3", "new": "1", "gone": None})
    before = record(run="r", when=START - DAY, evidence=evidence(), components={"torch": "3", "old": "1", "gone": "2"})
    [claim] = document(run(), [now], history=lambda name: [before])["claims"]
    assert claim["history"][LOAD]["points"][1]["changes"] == [{"component": "gone", "before": "2", "now": None}]


def test_stacks_stand_side_by_side_those_that_differ_first() -> None:
    records = [record("a::a", stack=name) for name in ("old", "new")]
    records += [record("b::b", stack="old", components=OLD), failed("b::b"), record("c::c", stack="new")]
    found = document(run(), records)
    assert [(row["claim"], row["differs"]) for row in found["side_by_side"]] == [
        ("b::b", True),
        ("a::a", False),
        ("c::c", False),
    ]
    assert {name: cell["verdict"] for name, cell in found["side_by_side"][0]["cells"].items()} == {
        "old": "HOLDS",
        "new": "CONTRADICTED (worse)",
    }
    old, new = found["stacks"]
    assert (old["name"], new["name"], old["changes"]) == ("old", "new", [])
    assert new["components"]["sglang"] == NEW["sglang"]


def test_one_stack_stands_beside_nothing() -> None:
    assert document(run(stacks=["new"]), [record()])["side_by_side"] == []


def test_an_empty_run_is_a_document() -> None:
    found = document(run(stacks=[]), [])
    assert found["counts"] == {"claims": 0, "hearsay": 0, "verdicts": {}, "reasons": {}}
    assert found["run"]["seconds"] is None
    assert found["coverage"] == {name: [] for name in COVERAGE}


@pytest.mark.parametrize(
    "broken",
    [
        {"rates": {LOAD: None}},
        {"rates": {LOAD: {"samples": ["x", None, -1.0, 0, math.nan, math.inf, True, 10**400]}}},
        {"rates": [], "memory": 7, "peak_phases": "x", "judgements": {"a": 1}, "decisive": "x", "argv": 3},
        {"decisive": {"line": "x", "text": 3}, "resolved": [], "remedies": "text", "peak_gib": "1"},
        {"decisive": {}, "resolved": {"settings": [3, {}]}, "memory": {"weights_gib": math.inf}, "log": 3},
        {"rates": {LOAD: {"latencies_s": {"ttft": math.nan}, "baseline": {"rate": "x", "when": -1e99}}}},
    ],
)
def test_evidence_of_another_shape_is_left_out_and_breaks_nothing(broken: dict[str, Any]) -> None:
    found = document(
        run(), [record(evidence=broken)], history=lambda name: [record(run="r", when=0.0, evidence=broken)]
    )
    json.dumps(found, allow_nan=False)
    assert found["claims"][0]["verdict"] == "HOLDS"


def test_nothing_that_acts_on_a_screen_and_no_secret_gets_into_it() -> None:
    secret = "hf_" + "a1" * 20
    text = f"{HOSTILE} {secret} --api-key hunter22"
    said = {
        **evidence(),
        "title": text,
        "decisive": {"line": 1, "text": text},
        "argv": [text],
        "remedies": [text],
        "log": text,
    }
    now = record(text, evidence=said, fact=text, stack=text, nodeid=text, components={text: text}, expectation=text)
    found = document(
        run(host=text, rig=text), [now], [flip(now)], history=lambda name: earlier(now, 3), coverage={text: [text]}
    )
    strings: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            strings.extend(value)
            list(map(walk, value.values()))
        elif isinstance(value, list):
            list(map(walk, value))
        elif isinstance(value, str):
            strings.append(value)

    walk(found)
    assert not [one for one in strings if any(raw in one for raw in RAW)]
    assert not [one for one in strings if secret in one or "hunter22" in one]
    assert "red" in found["claims"][0]["fact"]
    assert "[31m" not in found["claims"][0]["fact"]


def test_a_long_line_is_cut_and_says_so_and_a_secret_at_the_cut_stays_hidden() -> None:
    found = plain("x" * 1_000_000, 100)
    assert found == "x" * 100 + "… (cut: 1,000,000 characters)"
    assert plain(found, 100) == found
    assert plain(found, 50) == "x" * 50 + "… (cut: 1,000,000 characters)"
    assert "hf_abc" not in plain("y" * 90 + " hf_abcdefghijklmnop" + "z" * 900, 100)


@pytest.mark.parametrize("seconds", [None, math.nan, -1.0, 1e300, "x"])
def test_no_time_is_no_time(seconds: Any) -> None:
    assert stamp(seconds) is None


def test_cards_are_those_of_the_record() -> None:
    assert document(run(), [record()])["claims"][0]["cards"] == [CARD]


def test_when_it_last_held_is_a_side_of_its_own() -> None:
    one = flip(failed("x"), before=failed("x", run="run-7"))
    held, none = document(run(), [], [replace(one, held=record("x", run="run-3")), one])["flips"]
    assert (held["held"]["run"], held["held"]["verdict"]) == ("run-3", "HOLDS")
    assert none["held"] is None
