"""MIG: a GPU that is split is leased only by who names its devices, one device to a claim on one GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.markers import needs_gpus, needs_sm90, needs_sm120
from pytest_gpuguard.claims.needs import Needs, Selection, Unmet, select_gpus
from pytest_gpuguard.engines.base import BootSpec
from pytest_gpuguard.engines.sglang import SGLang
from pytest_gpuguard.facts.gpu import Gpu, GpuMemory, MigDevice, Rig, arch_of
from pytest_gpuguard.facts.lease import Lease, PortRange
from pytest_gpuguard.facts.nvml import NvmlChild, query_rig
from tests.standin.fixtures import FakeRigFactory

GIB = 1 << 30
MIB = 1 << 20
SLICE = ("NVIDIA H200 MIG 3g.71gb", 71424)
SMALL = ("NVIDIA H200 MIG 1g.18gb", 16384)


def whole(index: int, sm: str = "90") -> Gpu:
    return Gpu(index, f"g{index}", "a card", f"bus{index}", sm=sm, memory=GpuMemory(total=141 * GIB))


def split(index: int, total: int = 71 * GIB, asked: bool = True) -> Gpu:
    memory = GpuMemory(total=total)
    devices = (MigDevice(f"MIG-{index}", memory=memory),)
    return replace(whole(index), memory=memory, mig=True, mig_devices=devices, mig_asked=asked)


def select(count: int, *gpus: Gpu, needs: Needs | None = None) -> Selection:
    return select_gpus(needs or Needs(), count, Rig(gpus), arch_of)


def test_a_claim_on_one_gpu_takes_the_device_that_was_asked_for_under_the_lock_of_its_gpu() -> None:
    found = select(1, split(0))
    assert found.unmet == ()
    assert found.choice.pick(["g0"], 1) == ("g0",)


def test_a_split_gpu_that_nobody_asked_for_is_refused_in_the_words_that_it_always_was() -> None:
    refused = (Unmet("gpus", "needs a GPU, this rig's GPUs are all split by MIG"),)
    assert select(1, split(0, asked=False)).unmet == refused
    assert select(1, split(0, asked=False), split(1)).uuids == ("g1",)
    assert select(1, split(0, asked=False), whole(1)).uuids == ("g1",)


@pytest.mark.parametrize(
    ("gpus", "has"),
    [
        ((split(0),), "MIG devices"),
        ((split(0), split(1)), "MIG devices"),
        ((whole(0), split(1), split(2)), "1 and MIG devices"),
    ],
)
def test_a_claim_on_more_than_one_is_told_why_mig_devices_do_not_do(gpus: tuple[Gpu, ...], has: str) -> None:
    (reason,) = select(2, *gpus).unmet
    text = f"needs 2 GPUs, this rig has {has}: CUDA gives a process one MIG device only"
    assert reason == Unmet("gpus", text)


def test_whole_gpus_beside_mig_devices_do_for_a_claim_on_more() -> None:
    assert select(2, whole(0), split(1), whole(2)).uuids == ("g0", "g2")


def test_a_whole_gpu_is_taken_before_a_mig_device() -> None:
    choice = select(1, split(0), whole(1)).choice
    assert choice.pick(["g0", "g1"], 1) == ("g1",)
    assert choice.pick(["g0"], 1) == ("g0",)


def test_memory_is_that_of_the_device() -> None:
    asked = needs_gpus.build(1, vram="80GB")
    assert select(1, split(0, total=71 * GIB), needs=asked).unmet == (
        Unmet("vram", "needs 1× 80GB, this rig has 1× 76.2 GB"),
    )
    assert select(1, split(0, total=80 * GIB), needs=asked).uuids == ("g0",)


def test_the_kind_of_card_is_looked_at_first() -> None:
    assert [one.kind for one in select(2, split(0), needs=needs_sm120.build()).unmet] == ["sm"]
    mixed = (whole(0, "120"), whole(1, "120"), split(2))
    assert [one.kind for one in select(2, *mixed, needs=needs_sm90.build()).unmet] == ["gpus"]


def test_the_device_is_what_is_asked_of_and_comes_back_from_json() -> None:
    gpu = split(0)
    assert (gpu.uuid, gpu.device) == ("g0", "MIG-0")
    assert split(0, asked=False).device == "g0"
    assert whole(3).device == "g3"
    assert Gpu.from_dict(json.loads(json.dumps(gpu.to_dict()))) == gpu
    before = {key: value for key, value in whole(3).to_dict().items() if key != "mig_asked"}
    assert Gpu.from_dict(before) == whole(3), "facts that an earlier release wrote"


def test_a_rig_says_that_it_is_a_mig_device() -> None:
    assert Rig((split(0),)).describe() == "1× a card (SM90, 71.0 GiB, one MIG device)"


def test_the_rig_of_who_names_mig_devices_has_the_first_of_each_gpu(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(n=3, card="h200")
    migs = fake.partition(1, SLICE, SMALL)
    (gpu,) = query_rig(fake.environ(CUDA_VISIBLE_DEVICES=f"{migs[1]},{migs[0]}")).gpus
    assert (gpu.index, gpu.uuid, gpu.device) == (1, fake.uuid(1), migs[1])
    assert gpu.memory.total == 16384 * MIB
    needs = needs_gpus.build(1, vram="60GB")
    assert [one.kind for one in select_gpus(needs, 1, Rig((gpu,)), arch_of).unmet] == ["vram"]
    both = query_rig(fake.environ(CUDA_VISIBLE_DEVICES=f"{fake.uuid(2)},{migs[0]}"))
    assert [(one.device, one.mig_asked) for one in both.gpus] == [(fake.uuid(2), False), (migs[0], True)]


@pytest.mark.parametrize("named", ["1", "uuid", None])
def test_a_gpu_that_is_named_whole_while_mig_is_on_is_not_asked_for(
    fake_rig: FakeRigFactory, named: str | None
) -> None:
    fake = fake_rig(n=2, card="h200")
    fake.partition(1, SLICE)
    value = {} if named is None else {"CUDA_VISIBLE_DEVICES": fake.uuid(1) if named == "uuid" else named}
    gpu = query_rig(fake.environ(**value)).gpus[-1]
    assert (gpu.mig, gpu.mig_asked, gpu.device) == (True, False, fake.uuid(1))


def test_memory_and_holders_are_read_of_the_device_by_a_fresh_child_too(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(n=2, card="h200")
    migs = fake.partition(1, SLICE)
    env = fake.environ(CUDA_VISIBLE_DEVICES=migs[0])
    (gpu,) = query_rig(env).gpus
    with NvmlChild(env) as child:
        assert child.memory([gpu.device])[gpu.device].total == 71424 * MIB
        assert child.processes([gpu.device]) == {gpu.device: []}


SPEC = BootSpec("sglang", "stack", "/opt/stack/bin/python", "/models/tiny")


@pytest.mark.parametrize(
    ("uuids", "indices", "visible", "told"),
    [
        (("g6", "g4"), (6, 4), (), "6,4"),
        (("g1",), (1,), ("MIG-1",), "MIG-1"),
        ((), (), (), None),
    ],
)
def test_a_server_is_told_of_indices_or_of_its_mig_device(
    uuids: tuple[str, ...], indices: tuple[int, ...], visible: tuple[str, ...], told: str | None
) -> None:
    lease = Lease(uuids, indices, PortRange(30000, 8), "here", "test", visible)
    env = SGLang().environment(SPEC, lease)
    assert env.get("CUDA_VISIBLE_DEVICES") == told
    assert env.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if told else None)


def test_a_run_that_names_a_mig_device_boots_on_it_and_on_nothing_else(
    claims: Any, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(tmp_path / "boots"))
    fake = fake_rig(n=2, card="h200")
    migs = fake.partition(1, SLICE, SMALL)
    fake.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", migs[0])
    result = claims(
        """
        @needs_gpus(1, vram="70GB")
        @serves("sglang", MODEL)
        def test_one(server, rig):
            assert server.observation.gpus == (rig.gpus[0].uuid,)

        @needs_gpus(1, vram="80GB")
        @serves("sglang", MODEL)
        def test_large(): ...

        @serves("sglang", MODEL, layout="TP2")
        def test_two(): ...
        """
    )
    result.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED *test_large *needs 1× 80GB, this rig has 1× 74.9 GB",
            "NOT_EVALUATED *test_two *needs 2 GPUs, this rig has MIG devices: CUDA gives a process one MIG device only",
            "HOLDS *test_one *",
        ]
    )
    (boot,) = (tmp_path / "boots").read_text().splitlines()
    assert boot.rpartition("CUDA_VISIBLE_DEVICES=")[2].split()[0] == migs[0]
