"""Layouts: which ranks share what, how many GPUs that takes, and how declared sizes and flags agree."""

from __future__ import annotations

import shlex

import pytest

from pytest_gpuguard.claims.errors import ClaimError
from pytest_gpuguard.claims.layout import (
    SIZE_FLAGS,
    Layout,
    flag_value,
    layout_from_flags,
    parse_layout,
    resolve,
    sizes_from_flags,
)
from tests.laws import given, st


def test_ep_subdivides_tp_and_adds_no_gpus() -> None:
    layout = parse_layout("TP4 EP2")
    assert layout.gpus == 4
    assert layout.groups() == {
        "attention_tp": [[0, 1, 2, 3]],
        "moe_tp": [[0, 1], [2, 3]],
        "moe_ep": [[0, 2], [1, 3]],
    }
    assert layout.describe() == "TP4 EP2 = 4 GPUs: experts split over [0 2] [1 3], each expert over [0 1] [2 3]"


def test_dp_attention_lives_inside_tp() -> None:
    layout = parse_layout("TP8 DP8 EP8")
    assert layout == Layout(tp=8, dp=8, ep=8, dp_attention=True)
    assert (layout.gpus, layout.attention_tp, layout.moe_tp) == (8, 1, 1)
    assert layout.groups() == {
        "attention_tp": [[rank] for rank in range(8)],
        "moe_tp": [[rank] for rank in range(8)],
        "moe_ep": [list(range(8))],
    }
    assert layout.describe() == (
        "TP8 DP8 EP8 = 8 GPUs: experts split over [0 1 2 3 4 5 6 7], whole experts per rank, "
        "attention replicas on [0] [1] [2] [3] [4] [5] [6] [7]"
    )


def test_dp_smaller_than_tp_leaves_attention_groups() -> None:
    assert parse_layout("TP8 DP2").groups()["attention_tp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_only_pp_multiplies() -> None:
    layout = parse_layout("TP2 PP2")
    assert layout.gpus == 4
    assert layout.groups()["moe_tp"] == [[0, 1]]
    assert layout.describe() == "TP2 PP2 = 4 GPUs"


@pytest.mark.parametrize("text", ["TP1", "tp1", "EP1 DP1", "PP1"])
def test_sizes_of_one_are_one_gpu(text: str) -> None:
    layout = parse_layout(text)
    assert (layout.gpus, str(layout), layout.describe()) == (1, "TP1", "TP1 = 1 GPU")


@pytest.mark.parametrize("text", ["TP8 DP8 EP8", "tp8 dp8 ep8", "EP8,DP8,TP8", "  TP8,  DP8 EP8 "])
def test_case_order_and_commas_do_not_matter(text: str) -> None:
    assert str(parse_layout(text)) == "TP8 DP8 EP8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TP2 EP4", "EP4 must divide TP2, because in SGLang EP subdivides TP and adds no GPUs; "),
        ("TP2 EP4", 'for 8 GPUs write "TP8 EP4"'),
        (
            "TP8 DP3",
            "DP3 is dp-attention and must divide TP8; whole replicas are no layout: give --dp-size 3 as a flag",
        ),
        ("TP8 XP2", "'XP2' is none of TPn, DPn, EPn, PPn"),
        ("TP8 8", "'8' is none of TPn"),
        ("TP", "'TP' is none of TPn"),
        ("TP8x", "'TP8x' is none of TPn"),
        ("TP=8", "'TP=8' is none of TPn"),
        ("TP4 TP8", "names TP twice"),
        ("TP4 tp4", "names TP twice"),
        ("TP0", "TP must be at least 1"),
        ("", 'is empty: write "TP8 EP8"'),
        (8, "is empty"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_rule(text: str, said: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        parse_layout(text)
    assert said in str(refusal.value)


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, flags in SIZE_FLAGS.items() for flag in flags])
@pytest.mark.parametrize("form", ["{} 4", "{}=4"])
def test_every_spelling_of_a_size_is_read(name: str, flag: str, form: str) -> None:
    assert sizes_from_flags(shlex.split(form.format(flag))) == {name: 4}


@pytest.mark.parametrize(
    "flag",
    [
        "--tp-size",
        "--tensor-parallel-size",
        "--tp",
        "--pp-size",
        "--pipeline-parallel-size",
        "--dp-size",
        "--data-parallel-size",
        "--attn-dp-size",
        "--ep-size",
        "--expert-parallel-size",
        "--ep",
    ],
)
def test_the_spellings_of_every_release_are_known(flag: str) -> None:
    assert flag in {known for flags in SIZE_FLAGS.values() for known in flags}


def test_plain_dp_means_whole_replicas() -> None:
    layout = layout_from_flags(["--tp", "2", "--dp", "2"])
    assert layout == Layout(tp=2, dp=2, dp_attention=False)
    assert (layout.gpus, layout.attention_tp) == (4, 2)
    assert layout.describe() == "TP2 DP2 = 4 GPUs: 2 whole replicas"


@pytest.mark.parametrize("flags", ["--tp 2 --dp 2 --enable-dp-attention", "--tp 2 --attn-dp-size 2"])
def test_dp_attention_is_asked_for_by_either_flag(flags: str) -> None:
    layout = layout_from_flags(flags.split())
    assert layout == Layout(tp=2, dp=2, dp_attention=True)
    assert layout.gpus == 2


@pytest.mark.parametrize("value", ["zero", "0", "-1", "--ep", "²", "2.0"])
def test_a_size_that_is_no_count_is_refused(value: str) -> None:
    with pytest.raises(ClaimError, match="is not a count of ranks"):
        sizes_from_flags(["--tp", value])


def test_the_last_of_several_spellings_wins_as_in_argparse() -> None:
    assert sizes_from_flags(["--tp", "2", "--tensor-parallel-size=8"]) == {"tp": 8}
    assert flag_value(["--tp"], ("--tp",)) is None
    assert flag_value(["--tp="], ("--tp",)) == ""


@pytest.mark.parametrize("flags", ["", "--tp-size 8", "--tp 8 --ep-size=8", "--dp 8", "--tp 8 --dp 8 --ep 8 --pp 1"])
def test_flags_that_agree_with_the_layout_change_nothing(flags: str) -> None:
    assert resolve(parse_layout("TP8 DP8 EP8"), flags.split()) == Layout(8, 8, 8, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tp 4", "layout TP8 EP8 says TP8, but the flags say --tp-size 4: drop one of them"),
        ("--expert-parallel-size 2", "layout TP8 EP8 says EP8, but the flags say --ep-size 2"),
        ("--dp 2", "layout TP8 EP8 says DP1, but the flags say --dp-size 2"),
        ("--pp=2", "layout TP8 EP8 says PP1, but the flags say --pp-size 2"),
    ],
)
def test_flags_that_conflict_with_the_layout_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ClaimError) as refusal:
        resolve(parse_layout("TP8 EP8"), flags.split())
    assert said in str(refusal.value)


def test_without_a_layout_the_flags_decide() -> None:
    assert resolve(None, ["--tp-size", "4", "--ep-size", "2"]) == Layout(tp=4, ep=2)
    assert resolve(None, []) == Layout()


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    tp = draw(st.integers(1, 16))
    divisors = [size for size in range(1, tp + 1) if tp % size == 0]
    return parse_layout(
        f"TP{tp} DP{draw(st.sampled_from(divisors))} EP{draw(st.sampled_from(divisors))} PP{draw(st.integers(1, 4))}"
    )


@given(_layouts())
def test_every_kind_of_group_partitions_the_ranks(layout: Layout) -> None:
    sizes = {"attention_tp": layout.attention_tp, "moe_tp": layout.moe_tp, "moe_ep": layout.ep}
    for kind, groups in layout.groups().items():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.tp))
        assert {len(group) for group in groups} == {sizes[kind]}


@given(_layouts())
def test_sizes_multiply_to_tp_and_gpus(layout: Layout) -> None:
    assert layout.moe_tp * layout.ep == layout.attention_tp * layout.dp == layout.tp
    assert layout.gpus == layout.tp * layout.pp


@given(_layouts())
def test_an_expert_group_and_a_tensor_group_share_one_rank(layout: Layout) -> None:
    groups = layout.groups()
    assert all(len(set(tensor) & set(expert)) == 1 for tensor in groups["moe_tp"] for expert in groups["moe_ep"])


@given(_layouts())
def test_a_layout_reads_back_what_it_prints(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
