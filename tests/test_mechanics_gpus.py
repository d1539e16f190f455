"""Claims on GPUs: needs, leases, dirty and broken GPUs, on a machine that the NVML stand-in shows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

Run = Any
FakeRigs = Any
GIB = 1 << 30
ROOT = Path(__file__).parent.parent


@pytest.fixture
def visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What every server that was booted so far was told of GPUs: one (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER) each."""
    file = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(file))

    def read() -> list[tuple[str, str]]:
        text = file.read_text() if file.exists() else ""
        return re.findall(r"CUDA_VISIBLE_DEVICES=(\S+) CUDA_DEVICE_ORDER=(\S+)$", text, re.MULTILINE)

    return read


def test_needs_are_met_or_told_with_what_the_rig_has(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, visible: Any
) -> None:
    fake_rig(n=8).apply(monkeypatch)
    result = claims(
        """
        @needs_sm120
        @needs_gpus(2, vram="96GB")
        @serves("sglang", MODEL)
        def test_blackwell(): ...

        @serves("sglang", MODEL, layout="TP4")
        def test_layout_alone(): ...

        @needs_sm90
        @serves("sglang", MODEL)
        def test_hopper(): ...

        @needs_gpus(2, vram="200GB")
        @serves("sglang", MODEL)
        def test_more_memory(): ...

        @needs_gpus(9)
        @serves("sglang", MODEL)
        def test_more_gpus(): ...

        @serves("sglang", MODEL, CPU)
        def test_cpu(): ...
        """
    )
    result.stdout.fnmatch_lines(
        [
            "rig: 8× *PRO 6000*",
            "NOT_EVALUATED *test_hopper *needs SM90, this rig has 8× SM120",
            "NOT_EVALUATED *test_more_gpus *needs 9 GPUs, this rig has 8*",
            "NOT_EVALUATED *test_more_memory *200*",
            "HOLDS *test_blackwell *",
            "HOLDS *test_cpu *",
            "HOLDS *test_layout_alone *",
        ]
    )
    assert result.ret == 0
    assert sorted(visible()) == [("0,1", "PCI_BUS_ID"), ("0,1,2,3", "PCI_BUS_ID"), ("None", "None")]


@pytest.mark.parametrize("by_uuid", [False, True])
def test_only_visible_gpus_are_counted_and_given_to_servers(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, visible: Any, by_uuid: bool
) -> None:
    rig = fake_rig(n=8)
    rig.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(rig.uuid(i) for i in (4, 5, 6)) if by_uuid else "4,5,6")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    result = claims(
        """
        @needs_gpus(2)
        @serves("sglang", MODEL)
        def test_two(): ...

        @needs_gpus(4)
        @serves("sglang", MODEL)
        def test_four(): ...
        """
    )
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_four *needs 4 GPUs, this rig has 3*", "HOLDS *test_two *"])
    assert visible() == [("4,5", "PCI_BUS_ID")]


def test_a_server_gets_numbers_of_the_machine_in_whatever_order_the_caller_has_named_them(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, visible: Any
) -> None:
    rig = fake_rig(n=8)
    rig.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4")
    result = claims(
        """
        @needs_gpus(2)
        @serves("sglang", MODEL)
        def test_two(server, rig):
            assert [rig.gpu(uuid).index for uuid in server.observation.gpus] == [6, 4]

        @needs_gpus(1)
        @serves("sglang", MODEL)
        def test_one(): ...
        """
    )
    result.assert_outcomes(passed=2)
    assert sorted(visible()) == [("6", "PCI_BUS_ID"), ("6,4", "PCI_BUS_ID")]


FAULTY = """
    @needs_gpus(8)
    @serves("sglang", MODEL)
    def test_all(): ...

    @needs_gpus(2)
    @serves("sglang", MODEL)
    def test_two(): ...

    @serves("sglang", MODEL, CPU)
    def test_cpu(): ...
"""


def test_a_driver_that_does_not_fit_is_infra_and_never_a_skip(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=8)
    rig.mismatch()
    rig.apply(monkeypatch)
    without_server = """
    @needs_gpus(1)
    @fits
    def test_no_server(): ...

    @needs_gpus(1)
    def test_gated():
        raise AssertionError("this must not even run")
    """
    result = claims(FAULTY + without_server)
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_all *driver.mismatch*",
            "INFRA *test_gated *driver.mismatch*",
            "INFRA *test_no_server *driver.mismatch*",
            "INFRA *test_two *driver.mismatch*",
            "HOLDS *test_cpu *",
        ]
    )
    result.assert_outcomes(passed=1, errors=4)
    assert "must not even run" not in result.stdout.str()
    assert result.ret == 1


def test_a_lost_gpu_is_named_and_the_others_go_on(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, visible: Any
) -> None:
    rig = fake_rig(n=8)
    rig.lose(1)
    rig.apply(monkeypatch)
    result = claims(FAULTY)
    result.stdout.fnmatch_lines(["INFRA *test_all *hardware*lost*", "HOLDS *test_cpu *", "HOLDS *test_two *"])
    # CUDA does not count a lost GPU: 1 and 2 are the pair behind it, and the first one's partner is gone
    assert ("1,2", "PCI_BUS_ID") in visible()
    assert result.ret == 1


def test_a_dirty_gpu_is_infra_that_names_bytes_and_holder(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, visible: Any
) -> None:
    rig = fake_rig(n=2)
    holder = rig.hold(1, 10 * GIB)
    rig.apply(monkeypatch)
    result = claims(
        """
        @needs_gpus(2)
        @serves("sglang", MODEL)
        @ooms("kv_pool")
        def test_both(): ...

        @needs_gpus(1)
        def test_one(gpus): ...
        """,
        ini="gpuguard_reclaim = 1s",
    )
    text = result.stdout.str()
    assert re.search(
        rf"^INFRA +\S+test_both +infra.dirty_gpu: not clean before the boot: {rig.uuid(1)} has 1\d\.\d\d GiB in use: "
        rf"pid {holder.pid} \(",
        text,
        re.MULTILINE,
    ), text
    result.assert_outcomes(passed=1, errors=1)
    assert visible() == []


LEAKS = f"""
    import os, sys
    from pathlib import Path
    sys.path.insert(0, {str(ROOT)!r})

    def leak(gib, gpu):
        from tests.standin import standin
        standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[gpu].leaked = gib << 30

    @needs_gpus(1)
    @serves("sglang", MODEL)
    def test_leaks(server):
        leak(5, 0)

    @serves("sglang", MODEL, CPU)
    def test_not_concerned(): ...

    @needs_gpus(1)
    def test_leaks_without_a_server(gpus):
        assert [gpu.index for gpu in gpus] == [1]  # the other one is in quarantine
        leak(4, 1)

    @needs_gpus(1)
    @serves("sglang", MODEL, "--context-length 1024")
    def test_none_left(): ...
"""


def test_a_leak_is_an_error_of_its_own_and_changes_no_verdict(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    result = claims(LEAKS, ini="gpuguard_reclaim = 1s")
    text = result.stdout.str()
    assert re.search(
        r"ERROR at teardown of test_leaks _(?s:.)*stopped, memory did not come back: GPU-\S+ has \d\.\d\d GiB", text
    )
    assert re.search(
        r"ERROR at teardown of test_leaks_without_a_server(?s:.)*after the test, memory did not come back", text
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_none_left *infra.dirty_gpu: not clean before the boot: GPU-* is in quarantine since *",
            "HOLDS *test_leaks *",
            "HOLDS *test_not_concerned *",
            "gpuguard: 1 INFRA, 2 HOLDS",
        ]
    )
    result.assert_outcomes(passed=3, errors=3)
    assert result.ret == 1


def test_two_runs_never_have_the_same_gpu(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, fake_python: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    source = """
        @needs_gpus(2)
        @serves("sglang", MODEL)
        def test_second(): ...
    """
    holder = pytester.makepyfile(
        test_holder="""
        import time
        from pathlib import Path
        from pytest_gpuguard import needs_gpus

        @needs_gpus(1)
        def test_first(gpus):
            Path("held").touch()
            until = time.monotonic() + 60
            while not Path("go").exists() and time.monotonic() < until:
                time.sleep(0.05)
        """
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(holder)]
    first = subprocess.Popen([*command, f"--gpuguard-stack=fake={fake_python}"], cwd=pytester.path)
    try:
        until = time.monotonic() + 30
        while not (pytester.path / "held").exists():
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        refused = claims(source, "test_claims.py", "--gpuguard-wait", "1")
        assert re.search(
            rf"INFRA +\S+test_second +infra\.lease: gpu-GPU-\S+ held by .*pid {first.pid}, \S*::test_first",
            refused.stdout.str(),
        ), refused.stdout.str()
        assert refused.ret == 1
        (pytester.path / "conftest.py").write_text(
            "from pathlib import Path\n"
            "def pytest_runtest_call(item):\n"
            "    import threading\n"
            "    threading.Timer(1.0, Path('go').touch).start()\n"
        )
        waited = claims(source, "test_claims.py", "--gpuguard-wait", "60")
        waited.assert_outcomes(passed=1)
        waited.stdout.fnmatch_lines(["gpuguard: test_second: waiting for *test_first*"])
        assert first.wait(30) == 0
    finally:
        (pytester.path / "go").touch()
        first.wait(60)
