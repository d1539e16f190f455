"""Which GPUs the caller's CUDA_VISIBLE_DEVICES leaves, in the order in which CUDA would number them.

Pure: it knows only the value and the list of GPUs, and never widens what the caller allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from .gpu import Gpu

_INDEX: Final = re.compile(r"\d+")


def resolve_visible(value: str | None, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs that ``value`` names, in its order; ``gpus`` must be all GPUs of the machine in PCI bus order.

    None (unset) means all of them, "" none. An entry is an index into ``gpus`` (CUDA_DEVICE_ORDER=PCI_BUS_ID), a
    full or unambiguous short UUID ("GPU-8f1e"), or a MIG UUID; indices and UUIDs do not mix. CUDA stops at the
    first invalid entry, "-1" among them, and so do we (CUDA programming guide, environment variables). A list with
    a GPU twice makes CUDA see none. A MIG entry yields its parent as ``mig_asked``, with ``mig_devices`` narrowed to
    those named, in that order, and the memory of the first, which is the one that CUDA would use.
    """
    machine = list(gpus)
    if value is None:
        return machine
    entries = [entry.strip() for entry in value.split(",")]
    if _INDEX.fullmatch(entries[0]):
        found = _by_index(entries, machine)
        return [] if len({gpu.index for gpu in found}) < len(found) else found
    return _by_uuid(entries, machine)


def _by_index(entries: list[str], machine: list[Gpu]) -> list[Gpu]:
    found = []
    for entry in entries:
        if not _INDEX.fullmatch(entry) or int(entry) >= len(machine):
            break
        found.append(machine[int(entry)])
    return found


def _by_uuid(entries: list[str], machine: list[Gpu]) -> list[Gpu]:
    whole: list[str] = []  # full UUIDs of GPUs and MIG devices, in the order given
    order: list[Gpu] = []
    slices: dict[str, list[str]] = {}  # parent UUID → MIG UUIDs
    for entry in entries:
        candidates = _candidates(entry, machine)
        if len(candidates) != 1:
            break
        gpu, mig = candidates[0]
        uuid = mig or gpu.uuid
        if uuid in whole:
            return []
        whole.append(uuid)
        if gpu not in order:
            order.append(gpu)
        if mig:
            slices.setdefault(gpu.uuid, []).append(mig)
    return [_narrowed(gpu, slices[gpu.uuid]) if gpu.uuid in slices and gpu.uuid not in whole else gpu for gpu in order]


def _narrowed(gpu: Gpu, migs: list[str]) -> Gpu:
    devices = sorted((one for one in gpu.mig_devices if one.uuid in migs), key=lambda one: migs.index(one.uuid))
    return replace(gpu, mig_asked=True, mig_devices=tuple(devices), memory=devices[0].memory)


def _candidates(entry: str, machine: list[Gpu]) -> list[tuple[Gpu, str | None]]:
    """(GPU, MIG UUID or None) for everything whose UUID starts with ``entry``; an exact UUID is alone."""
    text = entry.casefold()
    if text.startswith("mig-") and len(text) > len("mig-"):
        named: list[tuple[Gpu, str | None]] = [(gpu, mig.uuid) for gpu in machine for mig in gpu.mig_devices]
    elif text.startswith("gpu-") and len(text) > len("gpu-"):
        named = [(gpu, None) for gpu in machine]
    else:
        return []
    matching = [(gpu, mig) for gpu, mig in named if (mig or gpu.uuid).casefold().startswith(text)]
    exact = [(gpu, mig) for gpu, mig in matching if (mig or gpu.uuid).casefold() == text]
    return exact or matching
