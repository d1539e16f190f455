"""What changed between two stacks: a fingerprint as flat components, and their difference for a person."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.facts.stack import Stack
from pytest_gpuguard.ledger.changes import UNKNOWN, Change, changes, flatten, told, value_of
from tests.laws import given, st

VALUES = st.one_of(st.none(), st.sampled_from(["1", "2"]))
NAMES = st.sampled_from(["driver", "torch", "nccl", "env A", "package b", "package nvidia-nccl-cu12", "jit_cache c"])
LISTED = st.sampled_from(["packages", "environment"])
COMPONENTS = st.builds(
    lambda named, listed: {**named, **listed},
    st.dictionaries(NAMES, VALUES),
    st.dictionaries(LISTED, st.sampled_from(["d1", "d2"])),
)


def stack(packages: dict[str, str], **facts: Any) -> dict[str, str | None]:
    """The components of a stack with these distributions."""
    known = {"packages": packages, "environment": {}, "torch": {"version": packages.get("torch")}, **facts}
    return flatten(Stack("default", "/opt/a/bin/python", known).fingerprint())


def names(found: tuple[Change, ...]) -> list[str]:
    return [one.component for one in found]


def test_named_packages_are_components_of_their_own_and_all_others_are_listed() -> None:
    flat = stack({"sglang": "0.5.9", "torch": "2.9.1", "nvidia-nccl-cu12": "2.27.5", "numpy": "2.1"})

    assert (flat["sglang"], flat["torch"], flat["nccl"]) == ("0.5.9", "2.9.1", "2.27.5")
    assert [name for name in flat if name.startswith("package ")] == ["package numpy"]


def test_variables_caches_and_the_rig_are_components_too() -> None:
    facts = {"environment": {"NCCL_DEBUG": "INFO"}, "jit_caches": {"triton": {"path": "/c", "state": "warm"}}}
    flat = flatten(Stack("a", "python", facts).fingerprint(), {"driver": "580.82", "gpus": "NVIDIA H200"})

    assert flat["env NCCL_DEBUG"] == "INFO"
    assert flat["jit_cache triton"] == "warm"
    assert (flat["driver"], flat["gpus"]) == ("580.82", "NVIDIA H200")


def test_the_nccls_of_two_cudas_stay_one_component() -> None:
    one = stack({"nvidia-nccl-cu13": "2.28.3"})
    both = stack({"nvidia-nccl-cu13": "2.28.3", "nvidia-nccl-cu12": "2.27.5"})

    assert changes(one, both) == (Change("nccl", "2.28.3", "2.28.3 (nvidia-nccl-cu12 2.27.5)"),)


def test_a_moved_nccl_is_one_change() -> None:
    before, now = stack({"nvidia-nccl-cu12": "2.27.5"}), stack({"nvidia-nccl-cu13": "2.28.3"})

    assert changes(before, now) == (Change("nccl", "2.27.5", "2.28.3"),)


def test_what_only_one_of_two_fingerprints_knows_of_is_no_change() -> None:
    assert changes({"driver": "570.86"}, {"driver": "570.86", "nvcc": "13.0", "package numpy": "2.1"}) == ()


def test_what_is_known_to_be_absent_is_a_change() -> None:
    assert changes({"nvcc": None}, {"nvcc": "13.0"}) == (Change("nvcc", None, "13.0"),)


def test_packages_that_appear_or_vanish_are_changes_because_all_are_listed() -> None:
    found = changes(stack({"numpy": "2.1", "apex": "0.1"}), stack({"numpy": "2.1", "xformers": "0.0.30"}))

    assert found == (Change("package apex", "0.1", None), Change("package xformers", None, "0.0.30"))


def test_a_variable_that_was_set_is_a_change() -> None:
    before, now = stack({}), stack({}, environment={"NCCL_P2P_DISABLE": "1"})

    assert changes(before, now) == (Change("env NCCL_P2P_DISABLE", None, "1"),)


def test_a_package_that_got_a_label_is_not_taken_for_a_vanished_one() -> None:
    now = stack({"nvidia-nccl-cu12": "2.27.5"})
    before = {name: value for name, value in now.items() if name != "nccl"} | {"package nvidia-nccl-cu12": "2.27.5"}

    assert changes(before, now) == ()


def test_a_fingerprint_without_packages_says_nothing_of_them() -> None:
    fingerprint = Stack("a", "python", {"packages": {"numpy": "2.1"}}).fingerprint()
    without = {name: value for name, value in fingerprint.items() if name != "packages"}

    assert value_of(flatten(without), "package numpy") is UNKNOWN
    assert changes(flatten(without), flatten(fingerprint)) == ()


def test_what_people_suspect_first_stands_first() -> None:
    order = [
        "claim", "driver", "torch_cuda", "torch", "sglang", "sgl_kernel", "flashinfer_python", "triton", "nccl",
        "cudnn", "transformers", "python", "nvcc", "kernel", "libcuda", "gpus", "suite",
        "ecc", "env A", "package a", "jit_cache a",
    ]  # fmt: skip
    before, now = dict.fromkeys(reversed(order), "1"), dict.fromkeys(sorted(order), "2")

    assert names(changes(before, now)) == order


def test_sixty_four_upgraded_packages_stay_readable() -> None:
    before = stack({"torch": "2.9.1", **{f"p{at:02}": "1" for at in range(64)}})
    now = stack({"torch": "2.13.0", **{f"p{at:02}": "2" for at in range(64)}})

    lines = told(changes(before, now))

    assert lines[:2] == ["torch 2.9.1 → 2.13.0", "package p00 1 → 2"]
    assert lines[8:] == ["and 57 other packages"]


def test_what_is_left_out_is_counted_by_what_it_is() -> None:
    found = [Change(name, "1", "2") for name in ("torch", "env A", "env B", "package a", "jit_cache a", "jit_cache b")]

    assert told(found, 1) == ["torch 1 → 2", "and 2 other variables, 1 other package and 2 other caches"]
    assert told(found, 0) == ["1 component, 2 variables, 1 package and 2 caches"]


@pytest.mark.parametrize(("number", "lines"), [(0, 0), (8, 8), (9, 9), (10, 9)])
def test_one_more_is_told_rather_than_counted(number: int, lines: int) -> None:
    found = [Change(f"package p{at}", "1", "2") for at in range(number)]

    assert len(told(found)) == lines
    assert "1 other" not in "".join(told(found))


def test_absent_is_said() -> None:
    assert told([Change("package apex", "0.1", None)]) == ["package apex 0.1 → not there"]


def test_hostile_values_stay_on_one_line_without_escapes() -> None:
    (line,) = told([Change("env NCCL_X\n", "\x1b[31mred\r\nline\u202e", "x" * 10_000)])

    assert line.isprintable()
    assert len(line) < 250


def test_long_values_that_differ_late_show_where_they_do() -> None:
    same = "x" * 200

    (line,) = told([Change("claim", f"{same} when=<0.6", f"{same} when=<0.7")])

    assert "<0.6 → …" in line
    assert line.endswith("<0.7")


@given(COMPONENTS, COMPONENTS)
def test_changes_back_are_the_changes_turned_round(before: dict[str, str | None], now: dict[str, str | None]) -> None:
    back = [Change(one.component, one.now, one.before) for one in changes(now, before)]

    assert list(changes(before, now)) == back


@given(COMPONENTS)
def test_nothing_differs_from_itself(components: dict[str, str | None]) -> None:
    assert changes(components, dict(reversed(components.items()))) == ()


@given(COMPONENTS, COMPONENTS)
def test_every_change_has_two_known_values(before: dict[str, str | None], now: dict[str, str | None]) -> None:
    for one in changes(before, now):
        assert (one.before, one.now) == (value_of(before, one.component), value_of(now, one.component))
        assert one.before != one.now


@given(st.lists(st.text(), max_size=30), st.integers(0, 10))
def test_nothing_is_left_out_unsaid(components: list[str], most: int) -> None:
    lines = told([Change(f"package {name}", "1", "2") for name in components], most)

    assert len(lines) <= most + 1
    assert all(line.isprintable() for line in lines)
