"""Claims whose outcome is decided beside the server's log: by the kernel's messages, and by NVML's events."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

Run = Any
FakeRigs = Any

#: The kernel of these runs: a file that the stand-in server writes to, and nothing else.
KERNEL = """
from pathlib import Path
from pytest_gpuguard.facts import kernel_log

kernel_log.PATHS = kernel_log.Paths(Path({kmsg!r}), Path("/proc"), Path("/no/cgroup"), ())
"""


@pytest.fixture
def kmsg(tmp_path: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of /dev/kmsg, with an Xid and a kill that are older than every boot."""
    file = tmp_path / "kmsg"
    file.write_text(
        "4,1,5,-;NVRM: Xid (PCI:0000:16:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
        "4,2,6,-;Out of memory: Killed process 1 (python) total-vm:1kB, anon-rss:1kB\n"
    )
    pytester.makeconftest(KERNEL.format(kmsg=str(file)))
    monkeypatch.setenv("FAKE_SGLANG_KMSG", str(file))
    return file


def facts(result: pytest.RunResult) -> dict[str, tuple[str, str]]:
    """Verdict and fact by test name, off the closing section."""
    section = result.stdout.str().rpartition(" claims ===")[2].partition("\ngpuguard:")[0]
    found = re.findall(r"^([A-Z_]+(?: \(\w+\))?) +\S+::(\w+) +(.*)$", section, re.MULTILINE)
    return {name: (verdict, fact) for verdict, name, fact in found}


def test_a_server_that_the_kernel_killed_ran_out_of_memory(claims: Run, kmsg: Path) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "killed"})
        @ooms("host")
        def test_killed(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "silent_exit"})
        @ooms("host")
        def test_just_ended(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "weights_oom"})
        @ooms("weights")
        def test_full_gpu(): ...
        """
    )
    found = facts(result)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_killed": "HOLDS",
        "test_just_ended": "INCONCLUSIVE",
        "test_full_gpu": "HOLDS",
    }, result.stdout.str()
    assert re.match(
        r"oom\.host: the kernel's OOM killer ended process \d+ \(python\) \(of this boot\): Out of mem",
        found["test_killed"][1],
    )
    assert "kernel log" not in result.stdout.str()


BROKEN = """
    @needs_gpus(1)
    @serves("sglang", MODEL, env={"FAKE_SGLANG": "xid", "FAKE_SGLANG_XID": "0000:16:00 95"})
    @unsupported("a kernel", how="crashes", match="illegal memory access")
    def test_uncontained(): ...

    @needs_gpus(1)
    @serves("sglang", MODEL, env={"FAKE_SGLANG": "xid", "FAKE_SGLANG_XID": "0000:16:00 31"})
    @unsupported("a kernel", how="crashes", match="illegal memory access")
    def test_own_fault(): ...

    @needs_gpus(1)
    @serves("sglang", MODEL, env={"FAKE_SGLANG": "xid", "FAKE_SGLANG_XID": "0000:27:00 79"})
    @unsupported("a kernel", how="crashes", match="illegal memory access")
    def test_another_gpu(): ...

    @needs_gpus(1)
    @serves("sglang", MODEL)
    @fits
    def test_ready(): ...
"""


def test_a_hardware_fault_of_a_leased_gpu_is_no_evidence_for_a_claim(
    claims: Run, kmsg: Path, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = claims(BROKEN)
    found = facts(result)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_uncontained": "INFRA",
        "test_own_fault": "HOLDS",
        "test_another_gpu": "HOLDS",
        "test_ready": "HOLDS",
    }, result.stdout.str()
    quoted = "NVRM: Xid (PCI:0000:16:00): 95"
    words = f"hardware: the driver logged Xid 95 (uncontained memory error) on {rig.uuid(0)}: {quoted}"
    assert found["test_uncontained"][1].startswith(words)


EVENT = """
    import os, sys, threading, time
    sys.path.insert(0, {root!r})

    def after(seconds, act):
        from pathlib import Path
        from tests.standin import standin
        gpu = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0]
        timer = threading.Timer(seconds, act, (gpu,))
        timer.start()
        return timer

    def raise_xid(gpu):
        gpu.xid = 79
        gpu.xids += 1

    @needs_gpus(1)
    @serves("sglang", MODEL, env={{"FAKE_SGLANG": "vanish"}})
    @fits
    def test_vanishes(server):
        after(0, raise_xid).join()
        time.sleep(1)
        server.generate("x")
"""


def test_an_event_of_nvml_decides_where_the_kernel_log_may_not_be_read(
    claims: Run, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(KERNEL.format(kmsg="/no/kmsg"))
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    result = claims(EVENT.format(root=str(Path(__file__).parent.parent)))
    verdict, fact = facts(result)["test_vanishes"]
    assert verdict == "INFRA", result.stdout.str()
    assert fact.startswith(f"hardware: NVML reported Xid 79 (GPU has fallen off the bus) on {rig.uuid(0)}")
    told = (
        "kernel log not readable (/no/kmsg: No such file or directory): hardware faults are judged from NVML's events"
    )
    assert result.stdout.str().count(told) == 1


def test_missing_rights_are_said_once_and_fail_nothing(
    claims: Run, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(KERNEL.format(kmsg="/no/kmsg"))
    rig = fake_rig(n=2)
    rig.no_events(0)
    rig.no_events(1)
    rig.apply(monkeypatch)
    source = """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @fits
        def test_one(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @ooms("kv_pool")
        def test_two(): ...
    """
    for arguments in ((), ("-n", "2")):
        result = claims(source, *arguments)
        text = result.stdout.str()
        assert {verdict for verdict, _ in facts(result).values()} == {"HOLDS"}, text
        assert text.count("kernel log not readable") == 1
        assert text.count("no Xid events from NVML") == 1
        assert result.ret == 0


def test_a_failure_on_gpus_is_still_judged_at_once(
    claims: Run, kmsg: Path, pytester: pytest.Pytester, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    pytester.makeconftest(
        KERNEL.format(kmsg=str(kmsg)) + "import time\n"
        "def pytest_runtest_logreport(report):\n"
        "    if hasattr(report, 'gpuguard'):\n"
        "        Path('judged').write_text(f'{time.time()} {report.gpuguard[\"log\"]}')\n"
    )
    result = claims(
        """
        @needs_gpus(1)
        @serves("sglang", MODEL, env={"FAKE_SGLANG": "stubborn"})
        @ooms("kv_pool")
        def test_stubborn(): ...
        """,
        ini="gpuguard_grace = 5s",
    )
    assert facts(result)["test_stubborn"][0] == "HOLDS"
    at, log = (pytester.path / "judged").read_text().split(" ", 1)
    assert float(at) - Path(log).stat().st_mtime < 3  # 0.2 s as a rule; the stop alone takes 5
    assert time.time() > float(at)
