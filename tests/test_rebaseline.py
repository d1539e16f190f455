"""What ``rebaseline`` proposes to state, and for which stacks: by records of the real judge, applied with git."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpuguard.claims.judgement import Body, Judgement, Verdict
from pytest_gpuguard.ledger.changes import Change
from pytest_gpuguard.ledger.suspects import Suspect
from pytest_gpuguard.rebaseline import propose
from tests.rebaselines import (
    FILE,
    NEW,
    OLD,
    claim_in,
    edited,
    failed,
    flip,
    judged,
    memory,
    put,
    rates,
    ready,
    recorded,
    refused,
    verdict_of,
)

HEAD = "from pytest_gpuguard import compare, expect_toks, fails, fits, max_mem, ooms, serves, unsupported, uses\n\n\n"
OOMS = f'{HEAD}@ooms("kv_pool")\ndef test_it():\n    """Why."""\n'
OOM = failed("oom.kv_pool", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")


def test_an_oom_that_fits_now_keeps_its_statement_for_the_old_release(tmp_path: Path) -> None:
    before, now = judged(OOMS, OOM, OLD, run="r1"), judged(OOMS, ready())
    text = edited(tmp_path, OOMS, now, [flip(before, now)])
    assert text == OOMS.replace(
        '@ooms("kv_pool")', '@ooms("kv_pool", when="sglang<0.5.9")\n@fits(when="sglang>=0.5.9")'
    )
    assert verdict_of(text, ready()) == "HOLDS"
    assert verdict_of(text, OOM, OLD) == "HOLDS"


def test_the_component_that_history_ranks_first_makes_the_window(tmp_path: Path) -> None:
    components = {**NEW, "driver": "580.82.07"}
    before, now = judged(OOMS, OOM, OLD, run="r1"), judged(OOMS, ready(), components)
    suspects = [
        Suspect(Change("driver", "570.86", "580.82.07"), 1),
        Suspect(Change("sglang", "0.5.8", "0.5.9"), 2),
    ]
    text = edited(tmp_path, OOMS, now, [flip(before, now, suspects=suspects)])
    assert '@ooms("kv_pool", when="driver<580.82.07")\n@fits(when="driver>=580.82.07")' in text


@pytest.mark.parametrize("component", ["kernel", "env NCCL_ALGO", "claim", "python", "sgl_kernel"])
def test_what_cannot_stand_in_a_window_makes_none(tmp_path: Path, component: str) -> None:
    before, now = judged(OOMS, OOM, OLD, run="r1"), judged(OOMS, ready(), {**OLD, component: "2"})
    suspects = [Suspect(Change(component, "1", "2"), 1)]
    assert edited(tmp_path, OOMS, now, [flip(before, now, suspects=suspects)]) == OOMS.replace(
        '@ooms("kv_pool")', "@fits"
    )


def test_where_history_separates_nothing_the_statement_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    before, now = judged(OOMS, OOM, OLD, run="r1"), judged(OOMS, ready(), {**NEW, "driver": "580.82"})
    put(tmp_path, OOMS)
    ((one,), _) = propose(now, [flip(before, now)], tmp_path)
    assert (one.before, one.after) == ('@ooms("kv_pool")', "@fits")
    assert "history does not say since when: it does not separate sglang, driver" in one.why


def test_without_a_flip_no_window_is_invented(tmp_path: Path) -> None:
    now = judged(OOMS, ready())
    assert "\n@fits\ndef" in edited(tmp_path, OOMS, now)


def test_what_still_holds_on_another_stack_of_the_run_is_not_replaced(tmp_path: Path) -> None:
    records = [*judged(OOMS, OOM, OLD, stack="old"), *judged(OOMS, ready())]
    one = refused(tmp_path, OOMS, records)
    assert "it holds on stack old, where fits would be CONTRADICTED (worse)" in one.why
    assert one.line == 5
    assert one.write == "@fits for ooms"
    text = edited(tmp_path, OOMS, records, [flip(records[:1], records[1:])])
    assert 'when="sglang<0.5.9"' in text


def test_a_downgrade_makes_a_window_to_the_other_side(tmp_path: Path) -> None:
    before, now = judged(OOMS, OOM, NEW, run="r1"), judged(OOMS, ready(), OLD)
    text = edited(tmp_path, OOMS, now, [flip(before, now)])
    assert '@ooms("kv_pool", when="sglang>0.5.8")\n@fits(when="sglang<=0.5.8")' in text


def test_a_window_that_is_there_is_divided(tmp_path: Path) -> None:
    source = f'{HEAD}@ooms("kv_pool", when="sglang>=0.5,<0.6 and cuda>=12")\ndef test_it(): ...\n'
    before, now = judged(source, OOM, OLD, run="r1"), judged(source, ready())
    text = edited(tmp_path, source, now, [flip(before, now)])
    assert '@ooms("kv_pool", when="cuda>=12 and sglang>=0.5,<0.5.9")\n' in text
    assert '@fits(when="cuda>=12 and sglang>=0.5.9,<0.6")\n' in text


@pytest.mark.parametrize(
    ("observation", "statement"),
    [
        (failed("oom.weights"), '@ooms("weights")'),
        (
            failed("jit.smem", "[TP0] out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
            '@fails("jit.smem", match="out of resource: shared memory, Required:")',
        ),
        (failed("jit.compile", "12:00:01 7f"), '@fails("jit.compile")'),
    ],
)
def test_another_failure_takes_the_place_of_the_one_that_was_stated(
    tmp_path: Path, observation: object, statement: str
) -> None:
    now = judged(OOMS, observation)  # type: ignore[arg-type]
    text = edited(tmp_path, OOMS, now)
    assert text == OOMS.replace('@ooms("kv_pool")', statement)
    assert verdict_of(text, observation) == "HOLDS"  # type: ignore[arg-type]


def test_a_refusal_that_became_a_crash_stays_the_same_unsupported_feature(tmp_path: Path) -> None:
    source = f'{HEAD}@unsupported("allreduce fusion", how="rejected", match="requires SM90")\ndef test_it(): ...\n'
    crash = failed("jit.compile", "RuntimeError: No supported CUDA architectures found for major versions [9, 10]")
    text = edited(tmp_path, source, judged(source, crash))
    assert text == (
        f'{HEAD}@unsupported(\n    "allreduce fusion",\n    how="crashes",\n'
        '    match="RuntimeError: No supported CUDA architectures found for major versions",\n)\ndef test_it(): ...\n'
    )
    assert verdict_of(text, crash) == "HOLDS"
    refusal = failed("unsupported.arch", "ValueError: needs SM100 or newer")  # either way is called so
    text = edited(tmp_path, source, judged(source, refusal))
    assert '@unsupported("allreduce fusion", match="ValueError: needs SM100 or newer")' in text
    assert verdict_of(text, refusal) == "HOLDS"


def test_a_failure_ends_all_that_presupposes_a_server(tmp_path: Path) -> None:
    source = f'{HEAD}@fits(margin="1GiB")\n@max_mem("75GiB", of="weights")\ndef test_it(): ...\n'
    good = memory(weights_gib=70.0, free_gib=3.0)
    before, now = judged(source, good, OLD, run="r1"), judged(source, OOM)
    text = edited(tmp_path, source, now, [flip(before, now, "worse")])
    assert text == (
        f'{HEAD}@fits(margin="1GiB", when="sglang<0.5.9")\n'
        '@max_mem("75GiB", of="weights", when="sglang<0.5.9")\n'
        '@ooms("kv_pool", when="sglang>=0.5.9")\ndef test_it(): ...\n'
    )
    assert edited(tmp_path, source, now) == f'{HEAD}@ooms("kv_pool")\ndef test_it(): ...\n'


def test_a_server_without_an_expectation_fits_until_it_does_not(tmp_path: Path) -> None:
    source = f'{HEAD}@serves("sglang", "qwen3-8b")\ndef test_it(): ...\n'
    before, now = judged(source, ready(), OLD, run="r1"), judged(source, OOM)
    text = edited(tmp_path, source, now, [flip(before, now, "worse")])
    assert '"qwen3-8b")\n@fits(when="sglang<0.5.9")\n@ooms("kv_pool", when="sglang>=0.5.9")\ndef' in text
    assert verdict_of(text, ready(), OLD) == verdict_of(text, OOM) == "HOLDS"


def test_what_nothing_was_stated_of_gets_a_window_that_begins_with_this_stack(tmp_path: Path) -> None:
    source = f'{HEAD}@ooms("kv_pool", when="sglang<0.5.9")\n@fits(when="sglang>=0.6")\ndef test_it(): ...\n'
    now = judged(source, ready())
    assert now[0].verdict == "UNSTATED"
    text = edited(tmp_path, source, now)
    assert text == source.replace("def", '@fits(when="sglang>=0.5.9,<0.6")\ndef')
    assert verdict_of(text, ready()) == "HOLDS"


def test_nightly_builds_make_windows_of_builds(tmp_path: Path) -> None:
    first, second = ({**OLD, "sglang": f"0.6.0.dev{n}+gabc"} for n in (3, 8))
    before, now = judged(OOMS, OOM, first, run="r1"), judged(OOMS, ready(), second)
    text = edited(tmp_path, OOMS, now, [flip(before, now)])
    assert 'when="sglang<0.6.0.dev8")\n@fits(when="sglang>=0.6.0.dev8")' in text


@pytest.mark.parametrize(
    ("statement", "observation", "wanted"),
    [
        ("expect_toks(min=60)", [52.7] * 8, "expect_toks(min=52)"),
        ("expect_toks(60)", [105.9] * 8, "expect_toks(60)"),
        ("expect_toks(min=1200, concurrency=8)", [1061.0] * 8, "expect_toks(min=1050, concurrency=8)"),
        ('expect_toks(about=65, tolerance="5%")', [52.71] * 8, 'expect_toks(about=52.7, tolerance="5%")'),
        ("expect_toks(about=65)", [80.04] * 8, "expect_toks(about=80)"),
        ('max_mem("70GiB", of="weights")', {"weights_gib": 77.72}, 'max_mem("78GiB", of="weights")'),
        ('max_mem(limit="20GiB", of="graph")', {"graph_gib": 21.3}, 'max_mem(limit="21.4GiB", of="graph")'),
        ('fits(kv_tokens=">=300000")', {"kv_tokens": 254321}, 'fits(kv_tokens=">=250000")'),
        ("fits(kv_tokens=300_000)", {"kv_tokens": 105321}, 'fits(kv_tokens=">=105000")'),
        ('fits(margin="2GiB")', {"free_gib": 1.804}, 'fits(margin="1.79GiB")'),
    ],
)
def test_numbers_are_rounded_to_the_safe_side(
    tmp_path: Path, statement: str, observation: list[float] | dict[str, float], wanted: str
) -> None:
    source = f"{HEAD}@{statement}\ndef test_it(): ...\n"
    seen = rates(statement, observation) if isinstance(observation, list) else memory(**observation)
    put(tmp_path, source)
    now = judged(source, seen)
    if statement == wanted:
        assert propose(now, [], tmp_path) == ([], [])
        return
    text = edited(tmp_path, source, now)
    assert text == source.replace(statement, wanted)
    assert verdict_of(text, seen) == "HOLDS"


def test_a_ratio_is_proposed_from_its_interval(tmp_path: Path) -> None:
    statement = 'compare(other=serves("sglang", "m"), ratio=">2")'
    source = f"{HEAD}@{statement}\ndef test_it(): ...\n"
    seen = rates(statement, [1.618] * 8)
    text = edited(tmp_path, source, judged(source, seen))
    assert 'ratio=">1.6")' in text
    assert verdict_of(text, seen) == "HOLDS"


def test_only_this_cards_entry_changes(tmp_path: Path) -> None:
    statement = 'expect_toks(min={"rtx-pro-6000": 60, "h200": 120})'
    source = f"{HEAD}@{statement}\ndef test_it(): ...\n"
    seen = rates(statement, [104.2] * 8, cards=("NVIDIA H200",))
    text = edited(tmp_path, source, judged(source, seen))
    assert text == source.replace('"h200": 120', '"h200": 103')


def test_a_reference_that_drifted_follows_and_a_floor_is_never_lowered_for_it(tmp_path: Path) -> None:
    about = f'{HEAD}@expect_toks(about=65, tolerance="20%")\ndef test_it(): ...\n'
    seen = rates("expect_toks(about=65)", [58.0] * 8, baseline=66.0)
    assert "about=58," in edited(tmp_path, about, judged(about, seen))
    floor = f"{HEAD}@expect_toks(min=50)\ndef test_it(): ...\n"
    seen = rates("expect_toks(min=50)", [58.0] * 8, baseline=66.0)
    assert "min=57)" in edited(tmp_path, floor, judged(floor, seen))


def test_a_floor_that_was_beaten_by_far_is_raised_only_when_asked(tmp_path: Path) -> None:
    source = f"{HEAD}@expect_toks(min=50)\ndef test_it(): ...\n"
    now = judged(source, rates("expect_toks(min=50)", [80.0] * 8))
    put(tmp_path, source)
    assert propose(now, [], tmp_path) == ([], [])
    assert "min=79)" in edited(tmp_path, source, now, tighten=True)
    near = judged(source, rates("expect_toks(min=50)", [54.0] * 8))
    put(tmp_path, source)
    assert propose(near, [], tmp_path, tighten=True) == ([], [])


@pytest.mark.parametrize(
    ("observation", "body", "why"),
    [
        (failed("unknown", "Killed"), Body(), "it came out as unknown"),
        (ready(), Body("assertion", "assert 1 == 2"), "no statement of ours would say it: ready, but assert 1 == 2"),
    ],
)
def test_what_nobody_understood_is_not_stated(tmp_path: Path, observation: object, body: Body, why: str) -> None:
    source = f"{HEAD}@fits\ndef test_it(): ...\n"
    one = refused(tmp_path, source, judged(source, observation, body=body))  # type: ignore[arg-type]
    assert why in one.why
    assert f"{FILE}:" in str(one)


def test_a_flaky_claim_is_left_alone(tmp_path: Path) -> None:
    before, now = judged(OOMS, OOM, OLD, run="r1"), judged(OOMS, ready())
    one = refused(tmp_path, OOMS, now, [flip(before, now, "flaky")])
    assert "fresh boots disagreed" in one.why
    undecided = replace(now[0], verdict="INCONCLUSIVE", evidence={"confirmed": {"boots": 3, "agreed": 2}})
    assert "fresh boots disagreed" in refused(tmp_path, OOMS, [undecided]).why
    assert propose([replace(undecided, evidence={"confirmed": None})], [], tmp_path) == ([], [])


def test_what_holds_needs_no_file() -> None:
    assert propose(judged(OOMS, OOM), [], Path("/nowhere")) == ([], [])
    assert propose([], [], Path("/nowhere")) == ([], [])


def test_parameters_that_share_a_function_are_edited_together_or_not_at_all(tmp_path: Path) -> None:
    both = [*judged(OOMS, ready(), parameters="[a]"), *judged(OOMS, ready(), parameters="[b]")]
    assert "@fits\ndef" in edited(tmp_path, OOMS, both)
    some = [*judged(OOMS, ready(), parameters="[a]"), *judged(OOMS, OOM, parameters="[b]")]
    assert "only some of its parameters came out otherwise, not [b]" in refused(tmp_path, OOMS, some).why
    put(tmp_path, OOMS)
    differ = [*judged(OOMS, ready(), parameters="[a]"), *judged(OOMS, failed("oom.weights"), parameters="[b]")]
    proposals, told = propose(differ, [], tmp_path)
    assert proposals == []
    assert [one.why.partition(",")[0] for one in told] == [
        "it came out otherwise on its other stacks or parameters"
    ] * 2


def test_a_reference_is_not_moved_away_from_another_stack_that_meets_it(tmp_path: Path) -> None:
    source = f"{HEAD}@expect_toks(about=65)\ndef test_it(): ...\n"
    slow, quick = (rates("expect_toks(about=65)", [rate] * 8) for rate in (52.0, 65.0))
    both = [*judged(source, quick, OLD, stack="old"), *judged(source, slow)]
    assert "it holds on stack old, where expect_toks(about=52" in refused(tmp_path, source, both).why
    floor = f"{HEAD}@expect_toks(min=60)\ndef test_it(): ...\n"
    both = [*judged(floor, quick, OLD, stack="old"), *judged(floor, slow)]
    assert "min=51)" in edited(tmp_path, floor, both)


@pytest.mark.parametrize(
    ("old", "verdict", "new"),
    [
        ('uses("custom_allreduce")', Verdict.WORSE, 'unsupported("custom_allreduce", how="falls_back")'),
        ('unsupported("custom_allreduce", how="falls_back")', Verdict.BETTER, 'uses("custom_allreduce")'),
        ('ignores("--enable-x")', Verdict.BETTER, 'uses("--enable-x")'),
    ],
)
def test_what_is_used_or_not_changes_sides(tmp_path: Path, old: str, verdict: Verdict, new: str) -> None:
    source = f"from pytest_gpuguard import *\n@{old}\ndef test_it(): ...\n"
    claim = claim_in(source)
    found = Judgement(claim.expectations[0].label, verdict, "ready", "ready in 42 s: the log shows it")
    now = recorded(claim, [found], ready(), NEW, f"{FILE}::test_it", "new", "r2")
    assert edited(tmp_path, source, now) == source.replace(old, new)
