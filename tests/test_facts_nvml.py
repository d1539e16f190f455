"""NVML through the real pynvml, on the stand-in: what a rig says, and what happens when the driver is broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpuguard.facts.faults import HostFault, NvmlTimeout
from pytest_gpuguard.facts.gpu import Rig
from pytest_gpuguard.facts.nvml import NvmlChild, query_rig
from pytest_gpuguard.facts.nvml_child import Nvml
from tests.needs import need
from tests.standin.fixtures import FakeRig, FakeRigFactory

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def rig8(fake_rig: FakeRigFactory) -> FakeRig:
    return fake_rig(8)


@pytest.fixture
def child(rig8: FakeRig) -> Iterator[NvmlChild]:
    with NvmlChild(rig8.environ()) as child:
        yield child


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_eight_pro_6000_with_all_their_facts(rig8: FakeRig) -> None:
    rig = query_rig(rig8.environ())
    assert rig.describe() == ("8× NVIDIA RTX PRO 6000 Blackwell Server Edition (SM120, 95.6 GiB), driver 580.105.08")
    assert (rig.kind, rig.cuda, rig.faults, rig.hidden, rig.reason) == ("real", "13.0", (), 0, None)
    gpu = rig.gpus[3]
    assert (gpu.index, gpu.uuid, gpu.bus_id) == (3, rig8.uuid(3), "00000000:49:00.0")
    assert (gpu.sm, gpu.compute_capability, gpu.arch) == ("120", (12, 0), "blackwell")
    assert gpu.memory.version == 2
    assert (gpu.memory.total, gpu.memory.reserved, gpu.memory.used) == (97887 * MIB, 636 * MIB, 0)
    assert gpu.memory.free == (97887 - 636) * MIB
    assert (gpu.clocks.sm, gpu.clocks.memory, gpu.clocks.sm_max, gpu.clocks.memory_max) == (180, 405, 2430, 12481)
    assert (gpu.pcie_gen, gpu.pcie_gen_now, gpu.pcie_width, gpu.pcie_width_max) == (5, 1, 16, 16)
    assert (gpu.power_limit_w, gpu.ecc, gpu.persistence, gpu.mig, gpu.minor_number) == (600.0, True, True, False, 1)
    assert [gpu.numa for gpu in rig.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (gpu.nvlinks, gpu.unified, gpu.fault, gpu.compute_mode) == (0, False, None, 0)


def test_topology_and_p2p_between_all_pairs(rig8: FakeRig) -> None:
    rig8.shared.p2p[0][5] = 4
    rig = query_rig(rig8.environ())
    uuids = [gpu.uuid for gpu in rig.gpus]
    assert rig.topology[uuids[0], uuids[1]] == "PIX"
    assert rig.topology[uuids[0], uuids[2]] == "NODE"
    assert rig.topology[uuids[7], uuids[0]] == "SYS"
    assert rig.p2p[uuids[0], uuids[5]] == "DR"
    assert rig.p2p[uuids[5], uuids[0]] == "OK"
    assert len(rig.topology) == len(rig.p2p) == 56
    assert rig.nvlink == {}


def test_facts_survive_the_way_to_a_worker_as_json(rig8: FakeRig) -> None:
    rig8.link(18)
    rig8.partition(2, ("1g.24gb", 24000))
    rig8.lose(5)
    rig = query_rig(rig8.environ())
    assert Rig.from_dict(json.loads(json.dumps(rig.to_dict()))) == rig


def test_nvlink_through_switches_and_one_gpu_without(rig8: FakeRig) -> None:
    rig8.link(18)
    rig8.shared.gpu[2].links = 0  # as on a real B200 server, vllm #16336
    rig = query_rig(rig8.environ())
    uuids = [gpu.uuid for gpu in rig.gpus]
    assert rig.nvlink[uuids[0], uuids[7]] == 18
    assert not any(uuids[2] in pair for pair in rig.nvlink)
    assert [gpu.nvlinks for gpu in rig.gpus] == [18, 18, 0, 18, 18, 18, 18, 18]


def test_a_bridge_joins_only_its_two_gpus(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(4, "a100-40")
    bus = [fake.shared.gpu[index].bus.decode() for index in range(4)]
    fake.link(2, {0: [bus[1]] * 2, 1: [bus[0]] * 2, 2: [bus[3]] * 2, 3: [bus[2]] * 2})
    rig = query_rig(fake.environ())
    uuids = [gpu.uuid for gpu in rig.gpus]
    assert rig.nvlink == {
        (uuids[0], uuids[1]): 2,
        (uuids[1], uuids[0]): 2,
        (uuids[2], uuids[3]): 2,
        (uuids[3], uuids[2]): 2,
    }
    # also when a bridge's other end is a GPU that the caller may not see
    assert query_rig(fake.environ(CUDA_VISIBLE_DEVICES="0,2")).nvlink == {}


def test_a_driver_before_r510_gives_v1_memory_which_counts_the_reserve_as_used(rig8: FakeRig) -> None:
    rig8.shared.no_memory_v2 = 1
    memory = query_rig(rig8.environ()).gpus[0].memory
    assert (memory.version, memory.used, memory.reserved) == (1, 636 * MIB, None)


def test_another_processs_memory_is_seen_and_vanishes_with_it(rig8: FakeRig, child: NvmlChild) -> None:
    uuids = [rig8.uuid(3), rig8.uuid(4)]
    holder = rig8.hold(3, 40_000 * MIB)
    assert [child.memory(uuids)[uuid].used for uuid in uuids] == [40_000 * MIB, 0]
    assert child.processes(uuids) == {uuids[0]: [(holder.pid, 40_000 * MIB)], uuids[1]: []}
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert child.memory(uuids)[uuids[0]].used == 0
    assert child.processes(uuids)[uuids[0]] == []


def test_memory_that_no_process_owns(rig8: FakeRig, child: NvmlChild) -> None:
    rig8.leak(0, 624 * MIB)
    assert child.memory([rig8.uuid(0)])[rig8.uuid(0)].used == 624 * MIB
    assert child.processes([rig8.uuid(0)]) == {rig8.uuid(0): []}


def test_processes_without_sizes_or_from_an_older_driver(rig8: FakeRig, child: NvmlChild) -> None:
    holder = rig8.hold(0, GIB)
    rig8.shared.hide_sizes = 1
    assert child.processes([rig8.uuid(0)]) == {rig8.uuid(0): [(holder.pid, None)]}
    rig8.shared.hide_sizes, rig8.shared.processes_v2 = 0, 1
    assert child.processes([rig8.uuid(0)]) == {rig8.uuid(0): [(holder.pid, GIB)]}


class Failure(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@pytest.mark.parametrize("code", [3, 13, 999])
@pytest.mark.parametrize("graphics", [True, False])
def test_processes_that_the_driver_does_not_list_are_not_taken_for_none(code: int, graphics: bool) -> None:
    """An empty list means that nobody has the GPU, and a GPU that is busy without anybody is put in quarantine."""

    def fails(handle: object) -> list[object]:
        raise Failure(code)

    pynvml = SimpleNamespace(nvmlDeviceGetHandleByUUID=str)
    pynvml.nvmlDeviceGetComputeRunningProcesses_v3 = pynvml.nvmlDeviceGetComputeRunningProcesses_v2 = fails
    if graphics:
        pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3 = lambda handle: []
    with pytest.raises(Failure) as caught:
        Nvml(pynvml).processes_of("GPU-a")
    assert caught.value.value == code
    pynvml.nvmlDeviceGetComputeRunningProcesses_v2 = lambda handle: []
    assert Nvml(pynvml).processes_of("GPU-a") == []


def test_a_gpu_lost_before_anybody_looked_is_a_fault_and_not_a_missing_gpu(rig8: FakeRig) -> None:
    rig8.lose(2)
    rig = query_rig(rig8.environ())
    assert len(rig.gpus) == 8
    assert len(rig.usable) == 7
    assert [fault.outcome for fault in rig.faults] == ["hardware"]
    assert "lost" in rig.faults[0].cause
    assert "Xid 79" in rig.faults[0].cure
    assert rig.describe().startswith("7× NVIDIA RTX PRO 6000")
    assert "host fault: the GPU is lost" in rig.describe()


def test_a_gpu_lost_while_nvml_is_open_keeps_its_identity(rig8: FakeRig, child: NvmlChild) -> None:
    before = child.rig()
    rig8.lose(2)
    after = child.rig()
    assert [gpu.uuid for gpu in after.gpus] == [gpu.uuid for gpu in before.gpus]
    assert after.faults[0].gpu == rig8.uuid(2)
    assert after.gpus[2].fault == after.faults[0].cause
    with pytest.raises(HostFault, match="lost") as caught:
        child.memory([rig8.uuid(2)])
    assert (caught.value.outcome, caught.value.gpu) == ("hardware", rig8.uuid(2))


def test_a_lost_gpu_outside_the_visible_ones_is_none_of_our_business(rig8: FakeRig, child: NvmlChild) -> None:
    rig8.lose(7)
    rig = query_rig(rig8.environ(CUDA_VISIBLE_DEVICES="0,1"))
    assert (len(rig.gpus), rig.faults) == (2, ())


def test_a_driver_mismatch_is_a_host_fault_with_a_cure(rig8: FakeRig) -> None:
    rig8.mismatch()
    rig = query_rig(rig8.environ())
    assert rig.gpus == ()
    (fault,) = rig.faults
    assert fault.outcome == "driver.mismatch"
    assert "Reboot" in fault.cure
    assert "no NVIDIA driver" not in rig.describe()


@pytest.mark.parametrize(("code", "outcome"), [(4, "hardware"), (999, "hardware")])
def test_any_other_failure_of_nvml_is_a_fault_too(rig8: FakeRig, code: int, outcome: str) -> None:
    rig8.shared.init_result = code
    assert [fault.outcome for fault in query_rig(rig8.environ()).faults] == [outcome]


def test_a_hanging_gpu_is_given_up_and_the_child_with_it(rig8: FakeRig) -> None:
    with NvmlChild(rig8.environ(), deadline_s=1.0) as child:
        child.rig()
        first = child.pid
        assert first is not None
        rig8.hang(3)
        start = time.monotonic()
        with pytest.raises(NvmlTimeout, match=r"did not answer within 1 s \(facts of GPU 3\)") as caught:
            child.rig()
        assert time.monotonic() - start < 5
        assert caught.value.outcome == "hardware"
        assert gone(first)
        assert child.pid is None
        rig8.heal()
        assert len(child.rig().gpus) == 8  # a fresh child
        assert child.pid != first


def test_a_hanging_init_ends_in_a_rig_with_a_fault(rig8: FakeRig) -> None:
    rig8.shared.init_hang = 1
    rig = query_rig(rig8.environ(), init_deadline_s=1.0)
    assert rig.gpus == ()
    assert "nvmlInit" in rig.faults[0].cause
    assert rig.faults[0].outcome == "hardware"


def test_a_library_that_crashes_takes_only_the_child(rig8: FakeRig, child: NvmlChild) -> None:
    child.rig()
    rig8.shared.crash = 1
    with pytest.raises(HostFault, match="died with status -6"):
        child.rig()
    rig8.heal()
    assert len(child.rig().gpus) == 8


def test_a_name_that_is_no_text_is_a_fault_of_that_gpu_only(rig8: FakeRig) -> None:
    rig8.shared.gpu[4].name = b"NVIDIA \xff\xfe"
    rig = query_rig(rig8.environ())
    assert [gpu.index for gpu in rig.gpus if gpu.fault] == [4]
    assert "UnicodeDecodeError" in rig.faults[0].cause


def test_a_library_that_prints_does_not_garble_the_answers(rig8: FakeRig, child: NvmlChild) -> None:
    rig8.shared.chatty = 1
    assert len(child.rig().usable) == 8


def test_ctrl_c_is_not_the_childs_affair(rig8: FakeRig, child: NvmlChild) -> None:
    child.rig()
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert child.memory([rig8.uuid(0)])
    assert child.pid == pid


def test_slow_calls_are_no_hang_as_long_as_each_question_is_answered(rig8: FakeRig) -> None:
    rig8.shared.delay_us = 5000  # a rig in all takes longer than one deadline
    with NvmlChild(rig8.environ(), deadline_s=2.0) as child:
        start = time.monotonic()
        assert len(child.rig().gpus) == 8
        assert time.monotonic() - start > 2.0


def test_no_process_is_left_after_close(rig8: FakeRig) -> None:
    child = NvmlChild(rig8.environ())
    child.rig()
    pid = child.pid
    assert pid is not None
    child.close()
    assert not Path(f"/proc/{pid}").exists()  # ended and reaped


@pytest.mark.parametrize("situation", ["idle", "hanging", "its pipe inherited by a fork"])
def test_the_child_dies_with_its_parent(rig8: FakeRig, situation: str) -> None:
    code = (
        "import os, signal, sys, threading, time\n"
        "from pytest_gpuguard.facts.nvml import NvmlChild\n"
        "child = NvmlChild(deadline_s=600)\n"
        "child.rig()\n"
        "print(child.pid, flush=True)\n"
        "if 'fork' in sys.stdin.readline() and os.fork() == 0: time.sleep(8); os._exit(0)\n"
        "threading.Thread(target=child.rig, daemon=True).start()\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=rig8.environ()
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        pid = int(parent.stdout.readline())
        if situation == "hanging":
            rig8.hang(0)
        parent.stdin.write(situation.encode() + b"\n")
        parent.stdin.flush()
        time.sleep(0.3)
        assert not gone(pid, 0.05)
        parent.kill()
        parent.wait()
        assert gone(pid)


def test_threads_share_one_child(rig8: FakeRig, child: NvmlChild) -> None:
    for index in range(4):
        rig8.leak(index, (index + 1) * GIB)
    wrong: list[object] = []

    def ask(index: int) -> None:
        for _ in range(50):
            used = child.memory([rig8.uuid(index)])[rig8.uuid(index)].used
            if used != (index + 1) * GIB:
                wrong.append((index, used))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interrupted_question_does_not_answer_the_next_one(
    rig8: FakeRig, child: NvmlChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.rig()
    rig8.leak(0, GIB)
    with monkeypatch.context() as patch:
        patch.setattr(type(child._answers), "get", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            child.memory([rig8.uuid(0)])
    assert child.memory([rig8.uuid(1)])[rig8.uuid(1)].used == 0


def test_a_forked_process_starts_its_own_child(rig8: FakeRig, child: NvmlChild) -> None:
    child.rig()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with child:
                os.write(writer, str(len(child.rig().gpus)).encode() + b" " + str(child.pid).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    count, other = os.read(reader, 100).split()
    os.close(reader)
    assert (int(count), int(other) != child.pid) == (8, True)
    assert len(child.rig().gpus) == 8


def test_gb10_has_the_hosts_memory_and_says_so(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(1, "gb10")
    fake.shared.gpu[0].power_limit_mw = 0
    fake.shared.gpu[0].ecc = 2
    rig = query_rig(fake.environ())
    (gpu,) = rig.gpus
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert gpu.unified
    assert gpu.memory.version == 0
    assert gpu.memory.total == int(meminfo["MemTotal"].split()[0]) * 1024
    assert gpu.memory.free is not None
    assert 0 < gpu.memory.free < gpu.memory.total
    assert (gpu.power_limit_w, gpu.ecc, gpu.sm, gpu.arch) == (None, None, "121", "blackwell")
    assert "GiB unified)" in rig.describe()


def test_mig_devices_and_their_uuids(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(2, "h200")
    migs = fake.partition(1, ("NVIDIA H200 MIG 3g.71gb", 71424), ("NVIDIA H200 MIG 1g.18gb", 16384))
    with NvmlChild(fake.environ()) as child:
        rig = child.rig()
        assert [gpu.mig for gpu in rig.gpus] == [False, True]
        assert [device.uuid for device in rig.gpus[1].mig_devices] == migs
        assert rig.gpus[1].mig_devices[0].memory.total == 71424 * MIB
        assert child.memory([migs[1]])[migs[1]].total == 16384 * MIB
    (only,) = query_rig(fake.environ(CUDA_VISIBLE_DEVICES=migs[1])).gpus
    assert only.index == 1
    assert [device.uuid for device in only.mig_devices] == [migs[1]]


def test_pci_order_decides_and_not_nvmls(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(3)
    fake.put_at(0, "00000001:01:00.0")  # another PCI domain
    fake.put_at(1, "00000000:C1:1D.0")
    fake.put_at(2, "00000000:C1:1C.0")  # same bus, lower device (AWS)
    rig = query_rig(fake.environ())
    assert [gpu.uuid for gpu in rig.gpus] == [fake.uuid(2), fake.uuid(1), fake.uuid(0)]
    assert [gpu.index for gpu in rig.gpus] == [0, 1, 2]
    (only,) = query_rig(fake.environ(CUDA_VISIBLE_DEVICES="2")).gpus
    assert only.uuid == fake.uuid(0)


@pytest.mark.parametrize(
    ("value", "indices"),
    [("3,1", [3, 1]), ("7,9,1", [7]), ("", []), ("-1", []), ("GPU-a3,GPU-a0000000", [3, 0]), ("NoDevFiles", [])],
)
def test_the_callers_cuda_visible_devices_bounds_the_rig(rig8: FakeRig, value: str, indices: list[int]) -> None:
    rig = query_rig(rig8.environ(CUDA_VISIBLE_DEVICES=value))
    assert [gpu.index for gpu in rig.gpus] == indices
    assert rig.hidden == 8 - len(indices)
    assert all(gpu.uuid == rig8.uuid(gpu.index) for gpu in rig.gpus)
    if not indices:
        assert rig.describe() == "no GPUs (CUDA_VISIBLE_DEVICES hides all 8), driver 580.105.08"


def test_mixed_cards_are_counted_apart(fake_rig: FakeRigFactory) -> None:
    fake = fake_rig(6)
    for index in range(4):
        gpu = fake.shared.gpu[index]
        gpu.name, gpu.total, gpu.cc_major = b"NVIDIA H200", 143771 * MIB, 9
    assert query_rig(fake.environ()).describe() == (
        "4× NVIDIA H200 (SM90, 140.4 GiB), 2× NVIDIA RTX PRO 6000 Blackwell Server Edition (SM120, 95.6 GiB), "
        "driver 580.105.08"
    )


def test_no_driver_is_a_rig_without_gpus_and_no_fault(nvml_library: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "GPUGUARD_FAKE_RIG"}
    loaded = query_rig({**env, "LD_LIBRARY_PATH": str(nvml_library.parent)})
    assert (loaded.describe(), loaded.faults) == ("no GPUs (no NVIDIA driver loaded)", ())
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    absent = query_rig({**env, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (absent.describe(), absent.faults) == ("no GPUs (no NVIDIA driver)", ())


def test_importing_the_facts_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import pytest_gpuguard.facts.gpu, pytest_gpuguard.facts.stack, pytest_gpuguard.facts.nvml\n"
        "heavy = {'pynvml', 'httpx', 'rich', 'psutil', 'filelock', 'click', 'sqlalchemy', 'tomllib', 'pytest'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_facts_can_be_imported_where_there_is_no_linux() -> None:
    code = (
        "import sys\n"
        "for name in ('fcntl', 'pwd', 'grp', 'resource', 'termios'): sys.modules[name] = None\n"
        "import pytest_gpuguard.facts.gpu, pytest_gpuguard.facts.stack, pytest_gpuguard.facts.nvml\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_asking_process_never_loads_nvml(rig8: FakeRig) -> None:
    code = (
        "import sys\n"
        "from pytest_gpuguard.facts.nvml import query_rig\n"
        "print(len(query_rig().gpus), 'pynvml' in sys.modules, 'libnvidia' in open('/proc/self/maps').read())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=rig8.environ())
    assert done.stdout.split() == ["8", "False", "False"]


def test_the_child_needs_only_the_folder_of_pynvml(rig8: FakeRig, tmp_path: Path) -> None:
    """A hostile PYTHONPATH (sitecustomize, a json.py) must not reach the process that asks NVML."""
    need(sys.executable, "python does not know its own path")
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    (tmp_path / "json.py").write_text("raise SystemExit('not the real json')")
    assert len(query_rig(rig8.environ(PYTHONPATH=str(tmp_path), PYTHONHOME="")).gpus) == 8
