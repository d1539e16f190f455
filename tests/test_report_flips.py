"""Flips as plain lines: the order, the width, the ranks, and what must not reach a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.ledger.flips import SORTS, Change, Flip, Suspect
from pytest_gpuguard.ledger.record import Kind
from pytest_gpuguard.report.flips import MOST, lines, ordered

from .report_runs import HOSTILE, OOM, RAW, failed, flip, record


def test_no_flip_is_no_line() -> None:
    assert lines([]) == []


def test_a_flip_says_what_it_was_what_it_is_why_and_what_changed() -> None:
    assert lines([flip(failed("ep8"))], 200) == [
        "1 claim flipped: 1 worse",
        "WORSE ep8 [new] got worse",
        "    was HOLDS, ready (2026-01-12, run 20260112-081200-77aa)",
        "    now CONTRADICTED (worse), oom.weights: fits(kv_tokens=>=32768)",
        f"    why {OOM}",
        "    changed (4, ranked by this ledger's history):",
        "      1. sglang 0.5.18 -> 0.5.23",
        "         for: held under every sglang before 0.5.23, 7 runs",
        "      2. torch_cuda 12.8 -> 13.0",
        "         against: held on 2026-01-20 with torch_cuda 13.0",
        "      3. driver 570.86.15 -> 580.65.06",
        "         against: held on 2026-01-20 with driver 580.65.06",
        "      4. flashinfer-python 0.6.3 -> 0.6.9",
        "         against: held on 2026-01-20 with flashinfer-python 0.6.9",
    ]


def test_the_worst_come_first() -> None:
    found = lines([flip(record(sort), sort=sort) for sort in reversed(SORTS)])
    assert [line.split()[0].lower() for line in found if line[0].isupper()] == list(SORTS)


def test_the_decisive_line_stands_beside_a_fact_that_does_not_hold_it() -> None:
    found = "\n".join(lines([flip(failed(fact="short of 2.6 GiB"))], 300))
    assert f"why short of 2.6 GiB | {OOM}" in found


def test_unranked_suspects_are_a_list_the_shortest_first_and_not_too_long() -> None:
    suspects = [Suspect(Change("c" * (30 - i), "1", None), 1, ("for",), ("against",)) for i in range(12)]
    found = lines([Flip("worse", record(), failed(), tuple(suspects), ranked=False)])
    listed = [line for line in found if line.startswith("      - ")]
    assert len(listed) == MOST
    assert [len(line) for line in listed] == sorted(len(line) for line in listed)
    assert found[-1] == "      … and 4 more"
    assert "for:" not in "\n".join(found)
    assert listed[0].endswith("1 -> absent")


def test_no_known_change_is_said() -> None:
    assert lines([Flip("changed", record(), failed())])[-1] == "    changed: nothing that is known"


@pytest.mark.parametrize("width", [1, 40, 77, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    now = failed("suites/" + "x" * 500, fact=HOSTILE * 30, stack="s" * 70)
    assert max(map(len, lines([flip(now), flip(now, ranked=False)], width))) <= max(width, 40)


def test_nothing_acts_on_a_terminal() -> None:
    now = failed(HOSTILE, fact=HOSTILE, stack=HOSTILE, expectation=HOSTILE, outcome=HOSTILE, run=HOSTILE)
    found = lines([flip(now, before=now)], 100)
    assert all(line.isprintable() for line in found)
    assert not [line for line in found if any(raw in line for raw in RAW)]


def test_a_rehearsal_is_labelled_on_both_sides() -> None:
    found = "\n".join(lines([flip(failed(kind="rehearsed"))]))
    assert "was REHEARSED HOLDS" in found
    assert "now REHEARSED CONTRADICTED (worse)" in found


def test_a_huge_line_costs_nothing_and_is_cut() -> None:
    found = lines([flip(failed(fact="word " * 300_000))])
    assert len("\n".join(found)) < 3000


def test_when_it_last_held_is_told_where_neither_side_held() -> None:
    found = replace(flip(failed("ep8"), before=failed("ep8", run="run-7")), held=record("ep8", run="run-3"))
    told = lines([found], 200)
    assert "    held last on 2026-01-30, run run-3" in told
    assert "    changed since it held (4, ranked by this ledger's history):" in told
    bare = lines([replace(found, suspects=())], 200)
    assert "    changed since it held: nothing that is known" in bare


@pytest.mark.parametrize(("kind", "label"), [("rehearsed", "REHEARSED "), ("replayed", "REPLAYED "), ("verified", "")])
def test_the_head_of_flips_that_verify_nothing_says_so(kind: Kind, label: str) -> None:
    assert lines([flip(failed("ep8", kind=kind))])[0] == f"{label}1 claim flipped: 1 worse"


def test_of_one_sort_those_with_the_fewest_changes_are_first() -> None:
    many, few = flip(failed("a")), flip(failed("b"))
    assert ordered([many, replace(few, suspects=few.suspects[:1])])[0].now.claim == "b"
