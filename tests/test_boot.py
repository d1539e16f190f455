"""One boot, watched directly: what the kernel and the clock say beside the log."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_gpuguard.claims.observation import Observation
from pytest_gpuguard.engines import boot as boot_module
from pytest_gpuguard.engines.base import BootSpec
from pytest_gpuguard.engines.boot import Boot, Limits
from pytest_gpuguard.engines.sglang import SGLang
from pytest_gpuguard.facts.kernel import KernelWatch, Paths
from pytest_gpuguard.facts.lease import Lease, PortRange
from pytest_gpuguard.facts.oom_counters import Counter, OomCounters
from pytest_gpuguard.lease.ports import lease_ports
from tests.conftest import own_ports


def observe(
    python: Path, model: Path, folder: Path, mode: str, *flags: str, kernel: KernelWatch | None = None
) -> tuple[Observation, float]:
    """The observation of one boot of the stand-in, and the epoch seconds at which it was made."""
    first, last = map(int, own_ports().split("-"))
    with lease_ports(first, last) as ports:
        spec = BootSpec("sglang", "fake", str(python), str(model), flags, (("FAKE_SGLANG", mode),))
        lease = Lease((), (), PortRange(ports.base, ports.size), "here", "test")
        limits = Limits(stall_s=60, grace_s=0.2)
        boot = Boot(spec, SGLang(), lease, folder / "server.log", limits, fds=ports.fds, kernel=kernel)
        try:
            return boot.run(), time.time()
        finally:
            boot.stop()


@pytest.mark.parametrize(("struck", "outcome"), [(True, "oom.host"), (False, "indeterminate.peer_died")])
def test_only_the_kernel_says_that_it_was_the_oom_killer(
    fake_python: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, struck: bool, outcome: str
) -> None:
    counts = iter([7, 8] if struck else [7, 7])
    monkeypatch.setattr(OomCounters, "_read_host", lambda self: next(counts))
    kernel = KernelWatch(paths=Paths(tmp_path / "kmsg", tmp_path, tmp_path, ()))
    observation, _ = observe(fake_python, model, tmp_path, "rank_died", kernel=kernel)
    assert observation.outcome == outcome
    assert "OOM killer" in (observation.note or "")


NOBODY = "[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=94.00 GB\n"
SIGQUIT = f"{NOBODY}[2026-01-02 03:04:05] Received sigquit from a child process. It usually means the child failed.\n"
UNCAUGHT = (
    f"{NOBODY}[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/managers/scheduler.py", line 1, in run\nKeyError: 12\n'
)
#: Printed by somebody, and never said to have ended anything.
PRINTED = (
    f"{NOBODY}Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/model_loader/loader.py", line 1, in load\n'
    "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1.\n"
)


@pytest.mark.parametrize(
    ("mode", "log", "outcome"),
    [
        ("log", NOBODY, "oom.host"),
        ("log", SIGQUIT, "indeterminate.peer_died"),
        ("log", UNCAUGHT, "unknown"),
        ("log", PRINTED, "oom.kv_pool"),
        ("silent_exit", NOBODY, "unknown"),
        ("keyerror", NOBODY, "unknown"),
    ],
)
def test_somebodys_oom_kill_counts_only_where_sigkill_came_from_outside(
    fake_python: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, log: str, outcome: str
) -> None:
    (tmp_path / "said").write_text(log)
    monkeypatch.setenv("FAKE_SGLANG_LOG", str(tmp_path / "said"))
    counts = iter([5, 6])
    monkeypatch.setattr(OomCounters, "_read_host", lambda self: next(counts))
    kernel = KernelWatch(paths=Paths(tmp_path / "kmsg", tmp_path, tmp_path, ()))
    observation, _ = observe(fake_python, model, tmp_path, mode, kernel=kernel)
    assert observation.outcome == outcome
    assert "oom_kill 5 -> 6" in (observation.note or "")


def test_a_failure_that_was_only_printed_last_gives_way_to_a_kill_in_the_servers_own_cgroup(
    fake_python: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(PRINTED)
    monkeypatch.setenv("FAKE_SGLANG_LOG", str(tmp_path / "said"))
    own = Counter("/sys/fs/cgroup/docker/a/memory.events", 0, 1)
    monkeypatch.setattr(OomCounters, "cgroups", lambda self: (own,))
    kernel = KernelWatch(paths=Paths(tmp_path / "kmsg", tmp_path, tmp_path, ()))
    observation, _ = observe(fake_python, model, tmp_path, "log", kernel=kernel)
    assert observation.outcome == "oom.host"
    assert (observation.decisive, observation.remedies) == (None, ())
    assert "the log alone says oom.kv_pool" in (observation.note or "")


@pytest.mark.parametrize("mode", ["kv_pool", "stubborn"])
def test_a_failure_is_judged_at_once(fake_python: Path, model: Path, tmp_path: Path, mode: str) -> None:
    observation, made = observe(fake_python, model, tmp_path, mode)
    assert observation.outcome == "oom.kv_pool"
    assert observation.decisive is not None
    assert made - (tmp_path / "server.log").stat().st_mtime < 5  # 0.1 s as a rule; the goal is 0.5 s


def test_a_server_on_every_address_is_asked_on_loopback(fake_python: Path, model: Path, tmp_path: Path) -> None:
    observation, _ = observe(fake_python, model, tmp_path, "ready", "--host", "0.0.0.0")
    assert observation.ready


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ((), "http://127.0.0.1:7"),
        (("--host", "::"), "http://[::1]:7"),
        (("--host", "10.0.0.3"), "http://10.0.0.3:7"),
        (("--ssl-certfile", "x.pem"), "https://127.0.0.1:7"),
    ],
)
def test_where_a_server_is_asked(flags: tuple[str, ...], url: str) -> None:
    assert boot_module._url(flags, 7) == url
