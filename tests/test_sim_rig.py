"""Rigs and stacks that are not there: how they are spelt, what they say of themselves, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from pytest_gpuguard.claims.needs import Needs, select_gpus
from pytest_gpuguard.facts.catalogue import MIB, cards
from pytest_gpuguard.facts.choice import parse_rig
from pytest_gpuguard.facts.gpu import Rig, arch_of
from pytest_gpuguard.facts.simulated import SimulationError, default_stack, simulated_rig, simulated_stack
from pytest_gpuguard.facts.stackref import StackRef

Run = Any


def test_the_forms_of_a_rig() -> None:
    choice = parse_rig("sim:RTX-Pro-6000-Server:8")
    assert (choice.kind, choice.card, choice.count) == ("simulated", "rtx-pro-6000-server", 8)
    assert str(choice) == "sim:rtx-pro-6000-server:8"
    assert parse_rig("sim:23.65GiB:2").card == "23.65gib"
    assert parse_rig("auto").kind == "real"
    assert parse_rig("replay:folder").folder == "folder"
    for wrong in ("sim:h200", "sim::8", "sim:h200:", "sim:h200:x", "h200:8", "replay:", ""):
        with pytest.raises(ValueError, match="is no rig: write auto"):
            parse_rig(wrong)
    for none in ("sim:h200:0", "sim:h200:65", "sim:h200:100000000"):
        with pytest.raises(ValueError, match="n is 1 to 64"):
            parse_rig(none)


def test_a_simulated_box_has_the_recorded_size_links_and_nodes() -> None:
    rig = simulated_rig("sim:rtx-pro-6000-server:8")
    assert rig.kind == "simulated"
    assert rig.describe().startswith("simulated: 8× NVIDIA RTX PRO 6000 Blackwell Server Edition (SM120, 95.6 GiB)")
    memory = rig.gpus[0].memory
    assert (memory.total, memory.reserved, memory.used) == (97887 * MIB, 636 * MIB, 0)
    assert memory.free == (97887 - 636) * MIB
    uuids = [gpu.uuid for gpu in rig.gpus]
    assert len(set(uuids)) == 8
    assert all(uuid.startswith("GPU-sim-") for uuid in uuids)
    assert (rig.topology[uuids[0], uuids[1]], rig.topology[uuids[0], uuids[7]]) == ("PIX", "SYS")
    assert [gpu.numa for gpu in rig.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rig.nvlink == {}
    assert Rig.from_dict(json.loads(json.dumps(rig.to_dict()))) == rig
    joined = select_gpus(Needs(sms=("120",), link="pix"), 2, rig, arch_of).choice
    assert joined.uuids == tuple(uuids), "each has a partner"
    assert joined.pick(uuids[1:], 2) == (uuids[2], uuids[3])


def test_a_box_with_nvlink_joins_every_pair() -> None:
    rig = simulated_rig("sim:h200:8")
    pairs = {(a.uuid, b.uuid) for a, b in product(rig.gpus, rig.gpus) if a is not b}
    assert set(rig.nvlink) == pairs
    assert set(rig.nvlink.values()) == {18}
    assert len(select_gpus(Needs(link="nvlink"), 8, rig, arch_of).uuids) == 8


def test_any_size_is_a_card_without_an_sm() -> None:
    rig = simulated_rig("sim:23.65GiB:2")
    assert (rig.gpus[0].sm, rig.gpus[0].compute_capability) == ("", None)
    assert rig.gpus[0].memory.total == round(23.65 * 1024) * MIB
    assert rig.driver is None
    assert select_gpus(Needs(sms=("120",)), 1, rig, arch_of).unmet[0].kind == "sm"


def test_a_card_of_another_maker_has_a_size_and_no_sm() -> None:
    rig = simulated_rig("sim:mi355x:8")
    assert rig.gpus[0].memory.total == 294896 * MIB
    assert rig.gpus[0].sm == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sim:rtx-pro-6000:8", "did you mean rtx-pro-6000-"),
        ("sim:zzzzzz:1", "known are a10, "),
        ("sim:gb10:1", "has no memory of its own: give the size, such as sim:119GiB:1"),
        ("sim:0GiB:1", "a card without memory"),
        ("auto", "is no simulated rig"),
    ],
)
def test_what_cannot_be_simulated_is_told_with_what_can(text: str, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        simulated_rig(text)


def test_every_recorded_box_is_square_and_symmetric() -> None:
    for card in cards().values():
        size = len(card.topology)
        assert all(len(row) == size for row in card.topology), card.slug
        for i, j in product(range(size), range(size)):
            assert card.topology[i][j] == card.topology[j][i], card.slug
            assert (card.topology[i][j] == "X") == (i == j), card.slug
        assert not card.nvlinks or card.nvlink, card.slug
        if card.total_mib is not None:
            assert simulated_rig(f"sim:{card.slug}:2").gpus[1].memory.total == card.total_mib * MIB


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.9.9", "simulated: sglang 0.9.9 (newer than what is known: the flags and rules of 0.5.23 are used)"),
        ("0.3.0", "simulated: sglang 0.3.0 (older than what is known: the flags of 0.4.6 are used)"),
        ("0.5.24.dev1+gabc", "simulated: sglang 0.5.24.dev1+gabc (newer than what is known: *)"),
        ("0.4.6.post1", "simulated: sglang 0.4.6.post1"),
        ("0.5.8", "simulated: sglang 0.5.8"),
        ("0.5.23", "simulated: sglang 0.5.23"),
    ],
)
def test_a_release_that_nobody_read_is_told_before_anything_runs(version: str, said: str) -> None:
    from fnmatch import fnmatchcase

    assert fnmatchcase(simulated_stack("s", f"sim:sglang=={version}").describe(), said)


def test_a_simulated_stack_is_what_was_said_of_it() -> None:
    stack = simulated_stack("old", "sim:sglang==0.5.7,cuda==12.9,flashinfer_python==0.5.3")
    assert stack.simulated
    assert (stack.package("sglang"), stack.package("flashinfer-python")) == ("0.5.7", "0.5.3")
    assert (stack.torch_cuda, stack.package("cuda")) == ("12.9", None)
    assert stack.describe() == "simulated: sglang 0.5.7, flashinfer-python 0.5.3, CUDA 12.9"
    assert simulated_stack("new", default_stack()).package("sglang")
    assert StackRef("new", default_stack()).simulated
    assert not StackRef("real", "/opt/bin/python").simulated


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sim:", "is no PACKAGE==VERSION"),
        ("sim:sglang", "is no PACKAGE==VERSION"),
        ("sim:sglang==latest", "'latest' is no version"),
        ("sim:vllm==0.10", "names no engine that can be simulated"),
        ("sim:sglang==0.5.7,sglang==0.5.8", "names sglang twice"),
        ("sim:sglang==0.5.7,,", "is no PACKAGE==VERSION"),
    ],
)
def test_a_stack_that_is_misspelt_is_told_the_form(text: str, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        simulated_stack("x", text)
    with pytest.raises(SimulationError, match=r"sim:sglang==0\.5\.7"):
        simulated_stack("x", text)
