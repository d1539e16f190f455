"""Our side of NVML: one child process that holds NVML open, asked over pipes with a deadline for every answer.

This process never loads NVML: a call that hangs in the driver is abandoned by killing the child.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from .faults import HARDWARE, HostFault, NvmlTimeout, nvml_fault
from .gpu import GpuMemory, Rig
from .nvml_facts import LinkTables, as_gpu, gpu_fault
from .visible import resolve_visible

DEADLINE_S: Final = 10.0
INIT_DEADLINE_S: Final = 30.0
_CHILD: Final = Path(__file__).with_name("nvml_child.py")
#: NVML's own words for "there is no NVIDIA driver here" (nvml.h): a rig without GPUs, not a fault.
_NO_DRIVER: Final = {9: "no NVIDIA driver loaded", 12: "no NVIDIA driver"}
_NO_GPU: Final = "the NVIDIA driver sees no GPU"


class _NvmlError(Exception):
    """An error that NVML itself returned."""

    def __init__(self, name: str, code: int | None, kind: str) -> None:
        super().__init__(name, code, kind)
        self.name, self.code, self.kind = name, code, kind


class NvmlChild:
    """The child process, started when first asked and again after it had to be killed. Safe to share by threads.

    ``env`` is its environment (default: ours at the time it starts; CUDA_VISIBLE_DEVICES is read from it too).
    ``deadline_s`` bounds every single question (one GPU's facts are one question), ``init_deadline_s`` nvmlInit.
    Every method raises ``NvmlTimeout`` when the answer does not come in time, and ``HostFault`` when NVML or a GPU
    asked about is broken.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        init_deadline_s: float = INIT_DEADLINE_S,
    ) -> None:
        self._env = env
        self._deadline_s = deadline_s
        self._init_deadline_s = init_deadline_s
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._count = 0
        self._opened: dict[str, Any] | None = None
        self._seen: dict[int, dict[str, Any]] = {}  # NVML index → identity, for GPUs that get lost later

    def __enter__(self) -> NvmlChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._process.pid if self._process else None

    def rig(self) -> Rig:
        """All facts about the GPUs inside CUDA_VISIBLE_DEVICES.

        A missing driver is a rig without GPUs; a driver mismatch or a lost GPU is in the rig's ``faults``.
        """
        with self._lock:
            try:
                host = self._open()
            except _NvmlError as error:
                if error.code in _NO_DRIVER:
                    return Rig(reason=_NO_DRIVER[error.code])
                fault = self._fault(error)
                return Rig(faults=(fault,), reason=f"NVML does not work: {fault.outcome}")
            raw = _by_bus(self._gpu(index) for index in range(host["count"]))
            machine = [as_gpu(index, facts) for index, facts in enumerate(raw)]
            visible = resolve_visible(self._variable("CUDA_VISIBLE_DEVICES"), machine)
            tables = self._links(raw, {gpu.uuid for gpu in visible})
        hidden = len(machine) - len(visible)
        reason = None
        if not machine:
            reason = _NO_GPU
        elif not visible:
            reason = f"CUDA_VISIBLE_DEVICES hides all {hidden}"
        return Rig(
            gpus=tuple(visible),
            driver=host["driver"],
            cuda=host["cuda"],
            topology=tables.topology,
            p2p=tables.p2p,
            nvlink=tables.nvlink,
            faults=tuple(gpu_fault(gpu.uuid, raw[gpu.index]) for gpu in visible if gpu.fault),
            hidden=hidden,
            reason=reason,
        )

    def machine(self) -> Rig:
        """All GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says, without links; each is asked apart.

        One that hangs has a ``fault`` as one that is lost has, and hides no other. Raises NvmlTimeout, HostFault.
        """
        hung: dict[int, str] = {}
        with self._lock:
            try:
                host = self._open()
                raw = []
                for index in range(host["count"]):
                    self._open()  # again, when the child had to be killed
                    try:
                        raw.append(self._gpu(index))
                    except NvmlTimeout as fault:
                        raw.append({"nvml_index": index, **self._seen.get(index, {})})
                        hung[index] = fault.cause
            except _NvmlError as error:
                if error.code in _NO_DRIVER:
                    return Rig(reason=_NO_DRIVER[error.code])
                raise self._fault(error) from None
        gpus = [
            replace(as_gpu(index, facts), fault=hung[facts["nvml_index"]])
            if facts["nvml_index"] in hung
            else as_gpu(index, facts)
            for index, facts in enumerate(_by_bus(raw))
        ]
        return Rig(tuple(gpus), host["driver"], host["cuda"], reason=None if gpus else _NO_GPU)

    def memory(self, uuids: Iterable[str]) -> dict[str, GpuMemory]:
        """Memory of GPUs or MIG devices, now, in bytes."""
        return {uuid: GpuMemory(**self._about(uuid, "memory")) for uuid in uuids}

    def processes(self, uuids: Iterable[str]) -> dict[str, list[tuple[int, int | None]]]:
        """Who holds each GPU: (pid, bytes). Bytes are None where the driver does not say (WSL, Windows).

        Inside a container the pids are the host's, or there are none: evidence, but never proof of absence.
        """
        return {uuid: [(pid, used) for pid, used in self._about(uuid, "processes")] for uuid in uuids}

    def xid_events(self, uuids: Iterable[str]) -> dict[str, bool]:
        """Whether NVML reports Xid events of each GPU: not under WSL, not for MIG devices."""
        return {uuid: bool(self._about(uuid, "xid_events")) for uuid in uuids}

    def close(self) -> None:
        """End the child. A later question starts a fresh one."""
        with self._lock:
            process, self._process, self._opened = self._process, None, None
            if process is None or self._owner != os.getpid():
                return
            try:
                if process.stdin:
                    process.stdin.close()
                process.wait(1.0)
            except (OSError, subprocess.TimeoutExpired):
                self._kill(process)

    def _about(self, uuid: str, op: str) -> Any:
        with self._lock:
            try:
                self._open()
                return self._ask(op, f"{op} of {uuid}", self._deadline_s, uuid=uuid)
            except _NvmlError as error:
                if error.code in _NO_DRIVER:
                    raise HostFault(HARDWARE, f"{uuid} is gone: {_NO_DRIVER[error.code]}", "See dmesg", uuid) from None
                raise self._fault(error, uuid) from None

    @staticmethod
    def _fault(error: _NvmlError, uuid: str | None = None) -> HostFault:
        if error.kind in ("ImportError", "ModuleNotFoundError"):
            return _no_binding()
        return nvml_fault(error.name, error.code, uuid)

    def _gpu(self, index: int) -> dict[str, Any]:
        facts: dict[str, Any] = self._ask("gpu", f"facts of GPU {index}", self._deadline_s, index=index)
        if "uuid" in facts:
            self._seen[index] = {
                key: facts[key] for key in ("uuid", "bus_id", "name", "compute_capability") if key in facts
            }
        return {**self._seen.get(index, {}), **facts}

    def _links(self, raw: list[dict[str, Any]], chosen: set[str]) -> LinkTables:
        tables = LinkTables({}, {}, {})
        buses = {facts["bus_id"].upper() for facts in raw if "bus_id" in facts}
        sound = {facts["nvml_index"]: facts for facts in raw if facts.get("uuid") in chosen and "fault" not in facts}
        for index in sound:
            others = [other for other in sound if other != index]
            try:
                rows = self._ask("links", f"links of GPU {index}", self._deadline_s, index=index, others=others)
            except _NvmlError:
                continue  # lost since we asked for its facts: the next look will say so
            for row in rows:
                tables.add(sound[index], sound[row["other"]], row, buses)
        return tables

    def _variable(self, name: str) -> str | None:
        return (os.environ if self._env is None else self._env).get(name)

    def _open(self) -> dict[str, Any]:
        """Make sure there is a child with NVML open."""
        if self._owner != os.getpid():  # forked: the pipes belong to the parent's child
            self._owner, self._process, self._opened = os.getpid(), None, None
        if self._process is not None and self._process.poll() is not None:
            self._kill(self._process)
        if self._opened is None:
            if self._process is None:
                self._start()
            opened: dict[str, Any] = self._ask("open", "nvmlInit", self._init_deadline_s)
            self._opened = opened
        return self._opened

    def _start(self) -> None:
        process = start_child(_CHILD, env=self._env)
        self._process, self._answers = process, queue.Queue()
        threading.Thread(target=_read, args=(process, self._answers), name="gpuguard-nvml", daemon=True).start()

    def _ask(self, op: str, what: str, deadline_s: float, **args: Any) -> Any:
        process = self._process
        if process is None:
            raise HostFault(HARDWARE, f"NVML was not open ({what})", "This is a bug of pytest-gpuguard")
        self._count += 1
        request = json.dumps({"id": self._count, "op": op, "args": args}) + "\n"
        until = time.monotonic() + deadline_s
        answer: dict[str, Any] = {}
        try:
            assert process.stdin is not None
            process.stdin.write(request.encode())
            process.stdin.flush()
            while answer.get("id") != self._count:  # an older one belongs to a question that was interrupted
                line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                if not line:
                    break
                answer = json.loads(line)
        except queue.Empty:
            self._kill(process)
            raise NvmlTimeout(what, deadline_s) from None
        except OSError:
            answer = {}
        if answer.get("id") != self._count:
            self._kill(process)
            raise HostFault(
                HARDWARE,
                f"the process that asks NVML died with status {process.returncode} ({what})",
                "NVML itself probably crashed: see dmesg, and try nvidia-smi",
            )
        if "error" in answer:
            raise _NvmlError(answer["error"]["name"], answer["error"]["code"], answer["error"]["kind"])
        return answer["result"]

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self._process = self._opened = None
        process.kill()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            pass  # stuck in the kernel: it goes as soon as the driver lets it
        try:
            if process.stdin is not None:
                process.stdin.close()
        except OSError:
            pass  # an unsent request, to a process that is gone


def _by_bus(raw: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By domain, bus, device and function; GPUs whose bus was never learnt come last."""
    return sorted(raw, key=lambda one: (not one.get("bus_id"), one.get("bus_id", "").upper(), one["nvml_index"]))


def binding_folder() -> Path | None:
    """The folder that pynvml is imported from; None when it is not installed. Finds it, and does not import it."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def start_child(script: Path, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process of ours that may load NVML: pipes at stdin and stdout, and the folder of pynvml before ``args``.

    Raises HostFault without pynvml, OSError when no process can be started.
    """
    folder = binding_folder()
    if folder is None:
        raise _no_binding()
    return subprocess.Popen(
        # -I -S: neither the user's sitecustomize nor any .pth file can slow or disturb the child
        [sys.executable, "-I", "-S", str(script), str(folder), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=None if env is None else dict(env),
    )


def query_rig(
    env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S, init_deadline_s: float = INIT_DEADLINE_S
) -> Rig:
    """The facts of this machine's GPUs, once. Never raises for a fault of the host: see the rig's ``faults``."""
    with NvmlChild(env, deadline_s, init_deadline_s) as child:
        try:
            return child.rig()
        except HostFault as fault:
            return Rig(faults=(fault.with_traceback(None),), reason=f"NVML does not work: {fault.outcome}")


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[bytes]) -> None:
    """Move the child's lines into a queue, which can be waited for with a deadline; b"" is its end."""
    assert process.stdout is not None
    with process.stdout as stdout:
        for line in stdout:
            answers.put(line)
    answers.put(b"")


def _no_binding() -> HostFault:
    return HostFault(
        HARDWARE,
        "NVML cannot be asked: the Python package nvidia-ml-py is missing",
        f"{sys.executable} -m pip install nvidia-ml-py",
    )
