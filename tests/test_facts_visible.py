"""CUDA_VISIBLE_DEVICES, row by row and by property."""

from __future__ import annotations

import json

import pytest

from pytest_gpuguard.facts.gpu import Gpu, GpuMemory, MigDevice
from pytest_gpuguard.facts.visible import resolve_visible

from .laws import given, st

UUIDS = ("GPU-8f1e0000-aaaa", "GPU-8f2e0000-bbbb", "GPU-c3000000-cccc", "GPU-c3000000-cccc-d")
MIGS = ("MIG-11110000", "MIG-11120000")


def machine() -> list[Gpu]:
    gpus = [
        Gpu(index=index, uuid=uuid, name="card", bus_id=f"00000000:{index:02X}:00.0")
        for index, uuid in enumerate(UUIDS)
    ]
    sliced = Gpu(
        index=4,
        uuid="GPU-dd",
        name="card",
        bus_id="x",
        memory=GpuMemory(total=9000),
        mig=True,
        mig_devices=tuple(MigDevice(uuid, memory=GpuMemory(total=(n + 1) * 1000)) for n, uuid in enumerate(MIGS)),
    )
    return [*gpus, sliced]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("0,1,-1,2", [0, 1]),
        ("0,7,1", [0]),
        ("7,0", []),
        ("0,,1", [0]),
        ("0,", [0]),
        (",0", []),
        ("1x,0", []),
        ("0,1x,2", [0]),
        ("0,0", []),
        ("0,1,0", []),
        ("0,9,0", [0]),
        ("GPU-8f1e", [0]),
        ("gpu-8F1E", [0]),
        ("8f1e", []),
        ("GPU-8f", []),  # ambiguous
        ("GPU-", []),
        ("GPU-c3000000-cccc", [2]),  # exact, although it also begins another
        ("GPU-c3000000-cccc-d", [3]),
        ("GPU-c3,GPU-8f1e", []),
        ("GPU-8f2e,GPU-8f1e", [1, 0]),
        ("GPU-8f1e,GPU-8f1e0000-aaaa", []),
        ("GPU-8f1e,1", [0]),
        ("1,GPU-8f1e", [1]),
        ("GPU-8f1e,GPU-nonsense,GPU-8f2e", [0]),
        ("MIG-1111", [4]),
        ("MIG-111", []),
        ("MIG-1111,MIG-1112", [4]),
        ("MIG-1111,MIG-1111", []),
        ("MIG-nonsense", []),
        ("GPU-dd", [4]),
    ],
)
def test_what_a_value_leaves(value: str | None, expected: list[int]) -> None:
    assert [gpu.index for gpu in resolve_visible(value, machine())] == expected


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("MIG-1112", [MIGS[1]]),
        ("MIG-1112,MIG-1111", [MIGS[1], MIGS[0]]),
        ("MIG-1111,MIG-1112", list(MIGS)),
        ("GPU-dd", list(MIGS)),
        ("4", list(MIGS)),
    ],
)
def test_a_mig_entry_narrows_its_parent(value: str, devices: list[str]) -> None:
    (gpu,) = resolve_visible(value, machine())
    assert [device.uuid for device in gpu.mig_devices] == devices


@pytest.mark.parametrize(
    ("value", "asked", "device", "memory"),
    [
        ("MIG-1111", True, MIGS[0], GpuMemory(total=1000)),
        ("MIG-1112", True, MIGS[1], GpuMemory(total=2000)),
        ("MIG-1112,MIG-1111", True, MIGS[1], GpuMemory(total=2000)),  # CUDA uses the first alone
        ("4", False, "GPU-dd", GpuMemory(total=9000)),
        ("GPU-dd", False, "GPU-dd", GpuMemory(total=9000)),
        ("GPU-dd,MIG-1111", False, "GPU-dd", GpuMemory(total=9000)),
        (None, False, "GPU-dd", GpuMemory(total=9000)),
    ],
)
def test_only_a_mig_device_by_its_name_is_asked_for_and_stands_with_its_own_memory(
    value: str | None, asked: bool, device: str, memory: GpuMemory
) -> None:
    gpu = resolve_visible(value, machine())[-1]
    assert (gpu.uuid, gpu.mig_asked, gpu.device, gpu.memory) == ("GPU-dd", asked, device, memory)


def test_what_was_asked_for_travels_with_the_facts() -> None:
    (gpu,) = resolve_visible("MIG-1112", machine())
    again = Gpu.from_dict(json.loads(json.dumps(gpu.to_dict())))
    assert again == gpu
    assert again.device == MIGS[1]


def test_whole_gpus_and_mig_devices_may_be_named_together() -> None:
    first, second = resolve_visible("GPU-8f2e,MIG-1112", machine())
    assert (first.device, first.mig_asked) == (UUIDS[1], False)
    assert (second.device, second.mig_asked) == (MIGS[1], True)


ENTRIES = st.one_of(
    st.integers(-3, 8).map(str),
    st.sampled_from(UUIDS + MIGS),
    st.sampled_from(UUIDS).map(lambda one: one[:9]),
    st.text(),
)


@given(st.lists(ENTRIES, max_size=8).map(",".join))
def test_never_more_than_the_machine_and_never_twice(value: str) -> None:
    found = resolve_visible(value, machine())
    assert len({gpu.uuid for gpu in found}) == len(found)
    assert {gpu.uuid for gpu in found} <= {gpu.uuid for gpu in machine()}


@given(st.lists(st.integers(0, 4), unique=True), st.lists(ENTRIES, max_size=3))
def test_valid_indices_before_an_invalid_one_all_count(indices: list[int], rest: list[str]) -> None:
    value = ",".join([*map(str, indices), "-1", *rest])
    assert [gpu.index for gpu in resolve_visible(value, machine())] == indices


@given(st.permutations(range(5)))
def test_indices_and_full_uuids_mean_the_same(order: list[int]) -> None:
    gpus = machine()
    by_uuid = ",".join(gpus[index].uuid for index in order)
    assert resolve_visible(by_uuid, gpus) == resolve_visible(",".join(map(str, order)), gpus)
