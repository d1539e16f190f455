"""A stack whose torch, flashinfer and sglang are stand-ins: what goes on between GPUs, without any.

``STANDIN`` in the environment names what is broken. A hang keeps the interpreter's lock, as one in native code may.
Ranks meet through files in the folder ``STANDIN_MEET``, so that a reduction is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
PROBES = ROOT / "pytest_gpuguard" / "probes"

TORCH = '''
import contextlib, ctypes, json, os, sys, time
__version__ = "2.9.0+cu130"
BROKEN = os.environ.get("STANDIN", "").split()
float32 = int32 = bfloat16 = None
class version:
    cuda = None if "no_cuda" in BROKEN else "13.0"
def hang():
    ctypes.PyDLL(None).sleep(3600)
class device:
    def __init__(self, name, index=None):
        self.type, _, number = name.partition(":")
        self.index = int(number or index or 0)
def _place(place):
    return place if isinstance(place, device) else device(place or "cpu")
class Tensor:
    """Its content is one number that stands for all."""
    def __init__(self, size, content, place=None):
        self.size, self.content, self.place = size, content, _place(place)
    def _new(self, content):
        return Tensor(self.size, content, self.place)
    def __mod__(self, other): return self
    def __mul__(self, other): return self._new(self.content * other)
    def __floordiv__(self, other): return self
    def __add__(self, other): return self._new(self.content + getattr(other, "content", other))
    def __sub__(self, other): return self._new(self.content - other)
    def __matmul__(self, other):
        on_gpu = self.place.type == "cuda"
        if "crash_compute" in BROKEN and on_gpu:
            os.kill(os.getpid(), 11)
        return self._new(self.content * other.content + ("wrong_products" in BROKEN and on_gpu))
    def reshape(self, *shape): return self
    def double(self): return self
    def cpu(self): return self.to("cpu")
    def __xor__(self, other): return self._new(self.content ^ other)
    def __eq__(self, other): return self._new(int(self.content == getattr(other, "content", other)))
    def __ne__(self, other): return self._new(int(self.content != getattr(other, "content", other)))
    def sum(self): return self.content * self.size
    def all(self): return self.content
    def numel(self): return self.size
    def fill_(self, content): self.content = content
    def repeat_interleave(self, times): return Tensor(self.size * times, ("gathered", self.size))
    def to(self, place, dtype=None):
        return self if place is None else Tensor(self.size, self.content, place)
    def copy_(self, source, non_blocking=False):
        between = {source.place.type, self.place.type} == {"cuda"}
        if "hang_copy" in BROKEN and between:
            hang()
        if "lost" in BROKEN and between:
            return
        link("32.0 GT/s PCIe", "16")
        time.sleep(0.002)
        self.content = source.content + ("corrupt" in BROKEN and between)
def link(speed, width):
    folder = os.environ.get("STANDIN_LINK")
    for name, text in (("current_link_speed", speed), ("current_link_width", width)) if folder else ():
        if "slow_link" not in BROKEN:
            with open(os.path.join(folder, name + ".new"), "w") as file:
                file.write(text + "\\n")
            os.replace(os.path.join(folder, name + ".new"), os.path.join(folder, name))
def arange(first, last=None, dtype=None, device=None): return Tensor((last or first) - (last and first or 0), 1, device)
def zeros(size, dtype=None, device=None): return Tensor(size, 0, device)
def empty(size, dtype=None, device=None, pin_memory=False): return Tensor(size, 7, device)
def full(size, content, dtype=None, device=None): return Tensor(size[0], content, device)
def equal(one, other): return one.content == other.content
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 30, 4))
    class Stream:
        def wait_stream(self, other): pass
    class CUDAGraph:
        def replay(self): distributed.graph()
    device_count = staticmethod(lambda: len(json.loads(os.environ["GPUGUARD_PROBE"])["gpus"]))
    init = is_bf16_supported = staticmethod(lambda: True)
    get_arch_list = staticmethod(lambda: ["sm_120"])
    set_device = staticmethod(lambda one: None)
    synchronize = staticmethod(lambda one=None: link("2.5 GT/s PCIe", "16"))
    current_stream = Stream
    stream = staticmethod(lambda one: contextlib.nullcontext())
    can_device_access_peer = staticmethod(lambda one, other: "no_p2p" not in BROKEN)
    get_device_capability = staticmethod(lambda one=None: (12, 0))
    @staticmethod
    @contextlib.contextmanager
    def graph(one, stream=None):
        distributed.capturing = True
        yield
        distributed.capturing = False
'''

DISTRIBUTED = '''
import os, sys, time
import torch
BROKEN = torch.BROKEN
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
P2P = os.environ.get("NCCL_P2P_DISABLE") != "1"
capturing, graph = False, None
class Group:
    met, group_name = 0, "0"
    def __init__(self, size): self.size = size
    def hangs(self, where):
        together = self is not group.WORLD and f"hang_{where}_together" in BROKEN
        return together or f"hang_{where}" in BROKEN or f"hang_{where}_of_{self.size}" in BROKEN
class group:
    WORLD = Group(WORLD)
Group.world = group.WORLD
def new_group(ranks):
    made = Group(len(ranks))
    if RANK in ranks and "late_init" not in BROKEN:
        _init(made)
    return made
def is_available(): return True
def is_nccl_available(): return "no_nccl" not in BROKEN
def _meet(value=0, group=group.WORLD):
    """What all ranks gave, by rank."""
    group.met += 1
    stem = os.path.join(os.environ["STANDIN_MEET"], f"{os.environ['MASTER_PORT']}-{group.size}-{group.met}-")
    with open(stem + f"{RANK}.new", "w") as file:
        file.write(str(value))
    os.replace(stem + f"{RANK}.new", stem + str(RANK))
    while not all(os.path.exists(stem + str(rank)) for rank in range(group.size)):
        time.sleep(0.002)
    return [float(open(stem + str(rank)).read()) for rank in range(group.size)]
def _init(group=group.WORLD):
    if group.hangs("init"):
        torch.hang()
    print(f"n:1:1 [{RANK}] NCCL INFO ncclCommInitRankConfig comm 0x1 rank {RANK} nranks {group.size} - Init COMPLETE")
    print(f"n:1:1 [{RANK}] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {'P2P/CUMEM' if P2P else 'SHM/direct/direct'}")
    sys.stdout.flush()
if "late_init" in BROKEN:
    def init_process_group(backend=None, timeout=None): pass
else:
    def init_process_group(backend=None, timeout=None, device_id=None):
        _init()
def all_reduce(data, group=None):
    global graph
    group = group or Group.world
    if capturing:
        graph = lambda: all_reduce(data)
        return
    if group.met:
        data.content *= group.size * (group.size + 1) / 2 / (RANK + 1)
        return
    if "late_init" in BROKEN:
        _init(group)
    if group.hangs("first") and P2P:
        torch.hang()
    if "raise" in BROKEN and RANK == 1:
        raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error, NCCL version 2.30.4")
    if "crash" in BROKEN and RANK == 1:
        os.kill(os.getpid(), 11)
    data.content = sum(_meet(data.content, group)) + ("wrong_sums" in BROKEN)
def all_gather_into_tensor(result, given):
    global graph
    if os.environ.get("NCCL_ALGO") == "Tree" and "cured" not in BROKEN:
        word = "No" if "nccl_2_30" in BROKEN else "no"
        said = f"Error : {word} algorithm/protocol available for function AllGather with datatype ncclFloat32."
        said += " NCCL_ALGO was set to Tree."
        print(f"n:1:1 [{RANK}] enqueue.cc:2046 NCCL WARN {said}", flush=True)
        raise RuntimeError(f"NCCL error in: NCCLUtils.hpp:77, invalid usage, NCCL version 2.30\\nLast error:\\n{said}")
    if capturing:
        graph = lambda: all_gather_into_tensor(result, given)
        return
    _meet(given.content)
    result.content = ("gathered", WORLD)
'''

SYMMETRIC = """
import torch, torch.distributed as dist
mine = None
def empty(size, dtype=None, device=None):
    global mine
    mine = torch.zeros(size)
    return mine
class rendezvous:
    multicast_ptr = 0
    def __init__(self, tensor, name): pass
    def barrier(self): self.all = dist._meet(mine.content)
    def get_buffer(self, peer, size, dtype):
        return torch.full(size, self.all[peer] + ("stale_peers" in dist.BROKEN and peer != dist.RANK))
"""

FLASHINFER = """
import os
__version__ = "0.6.17" if "cured" in os.environ.get("STANDIN", "") else "0.6.9"
"""
FLASHINFER_JIT = """
import os, pathlib
BROKEN = os.environ.get("STANDIN", "").split()
class Spec:
    is_aot = False
    jit_library_path = pathlib.Path(os.environ.get("STANDIN_MEET", "/nowhere")) / "trtllm_comm.so"
    def build_and_load(self):
        if "no_nvcc" in BROKEN:
            raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")
        if "ninja" in BROKEN:
            said = "ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'"
            raise RuntimeError(f"Ninja build failed. Ninja output:\\nFAILED: trtllm_allreduce.cuda.o\\n{said}")
        self.jit_library_path.write_text("")
def gen_trtllm_comm_module():
    majors = [9, 10, 12] if "cured" in BROKEN else [9, 10]
    if 12 not in majors:
        raise RuntimeError(f"No supported CUDA architectures found for major versions {majors}.")
    return Spec()
"""

SGLANG = """
import logging, os, torch
BROKEN = os.environ.get("STANDIN", "").split()
TABLE = {9: {2: 64}, 10: {2: 64}}
if "cured" in BROKEN:
    TABLE[12] = {2: 64}
class TorchSymmMemCommunicator:
    disabled = True
    def __init__(self, group, device):
        major = torch.cuda.get_device_capability(device)[0]
        if "new_sglang" in BROKEN and major not in TABLE:
            said = "TorchSymmMemCommunicator: Device capability %s not supported, communicator is not available."
            logging.getLogger(__name__).warning(said, major)
            return
        TABLE[major][2]
        self.disabled = False
    def all_reduce(self, data):
        import torch.distributed as dist
        dist.all_reduce(data)
        return data
"""

FILES = {
    "torch/__init__.py": TORCH + "\nfrom . import distributed\n",
    "torch/distributed/__init__.py": DISTRIBUTED,
    "torch/distributed/_symmetric_memory.py": SYMMETRIC,
    "torch-2.9.0+cu130.dist-info/METADATA": "Name: torch\nVersion: 2.9.0+cu130\n",
    "flashinfer/__init__.py": FLASHINFER,
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/comm.py": FLASHINFER_JIT,
    "flashinfer_python-0.6.9.dist-info/METADATA": "Name: flashinfer-python\nVersion: 0.6.9\n",
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/distributed/__init__.py": "",
    "sglang/srt/distributed/device_communicators/__init__.py": "",
    "sglang/srt/distributed/device_communicators/torch_symm_mem.py": SGLANG,
    "sglang-0.5.9.dist-info/METADATA": "Name: sglang\nVersion: 0.5.9\n",
}


def build(folder: Path, **versions: str) -> Path:
    """Make the stack in ``folder``; ``versions`` are other ones for sglang or flashinfer_python. Returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, text in FILES.items():
        for package, version in versions.items():
            if name.startswith(f"{package}-"):
                name = f"{package}-{version}.dist-info/METADATA"
                text = f"Name: {package.replace('_', '-')}\nVersion: {version}\n"
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "bin" / "python"


class Told(NamedTuple):
    """How a script ended: its answer, or its defect, or what was absent, and all that it printed."""

    answer: dict[str, Any]
    defect: tuple[str, str] | None
    absent: tuple[str, str] | None
    text: str

    @property
    def said(self) -> str:
        """The line of its answer that a report shows."""
        return str(self.answer["said"])


def ask(python: str | Path, script: str, gpus: int = 0, rig: list[dict[str, Any]] | None = None, **args: Any) -> Told:
    """Run a shipped script by hand, as the launcher would."""
    leased = [f"GPU-{index}" for index in range(gpus)]
    seen = rig if rig is not None else [{"uuid": uuid, "sm": "120"} for uuid in leased]
    order = {"args": args, "gpus": leased, "rig": seen}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GPUGUARD_PROBE": json.dumps(order)}
    command = [str(python), str(PROBES / f"{script}.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    text = done.stdout + done.stderr
    last: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("gpuguard-probe: {"):
            last = json.loads(line.partition(": ")[2])
    defect, absent = last.get("defect"), last.get("absent")
    return Told(last.get("answer", {}), tuple(defect) if defect else None, tuple(absent) if absent else None, text)


def left(marker: str) -> list[int]:
    """Processes with this text in their environment's STANDIN_MEET that are still there."""
    return list(_left(marker))


def _left(marker: str) -> Iterator[int]:
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("STANDIN_MEET") == marker and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
        except psutil.Error:
            continue
