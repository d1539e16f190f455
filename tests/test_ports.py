"""Blocks of ports: never one port to two, never one that a stranger listens on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpuguard.facts.lease import PortRange
from pytest_gpuguard.lease.ports import FIRST, LAST, SIZE, PortsExhausted, is_free, lease_ports
from tests.trees import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are leased on Linux only")

#: Ten units of 64 ports for each xdist worker, so that the listeners of one are not in the way of another.
LOW = 22400 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8 * 640
HIGH = LOW + 639


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "locks"
    path.mkdir()
    return path


def test_the_default_block_covers_what_sglang_derives_from_its_port(folder: Path) -> None:
    with lease_ports(directory=folder) as lease:
        assert lease.size == SIZE
        assert lease.base + 233 + 1 + 5 + 8 in lease.ports
        assert lease.base >= FIRST
        assert lease.base + lease.size - 1 <= LAST < 32768


def test_blocks_do_not_overlap_whatever_their_sizes(folder: Path) -> None:
    leases = [lease_ports(LOW, HIGH, size, directory=folder) for size in (64, 100, 20, 65)]
    assert [lease.base for lease in leases] == [LOW, LOW + 128, LOW + 64, LOW + 256]
    ports = [port for lease in leases for port in lease.ports]
    assert len(ports) == len(set(ports)) == 64 + 100 + 20 + 65
    leases[0].release()
    with lease_ports(LOW, HIGH, 1, directory=folder) as again:
        assert again.base == LOW
    for lease in leases:
        lease.release()
        assert lease.released


GREEDY = """
import json, sys
from pathlib import Path
from pytest_gpuguard.lease.ports import PortsExhausted, lease_ports
leases = []
sys.stdin.readline()
while True:
    try:
        leases.append(lease_ports(28160, 32255, 64, directory=Path(sys.argv[1])))
    except PortsExhausted:
        break
print(json.dumps([lease.base for lease in leases]), flush=True)
sys.stdin.readline()
"""


def test_processes_that_race_never_get_the_same_block_and_none_is_lost(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", GREEDY, str(folder)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    got: list[int] = []
    for racer in racers:
        assert racer.stdout is not None
        got += json.loads(racer.stdout.readline())
    for racer in racers:
        racer.communicate("end\n")
    assert sorted(got) == list(range(28160, 32256, 64))


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")],
)
def test_a_block_with_a_strangers_listener_is_passed_over(folder: Path, family: int, host: str) -> None:
    with socket.socket(family) as stranger:
        try:
            stranger.bind((host, LOW + 63))
        except OSError as error:
            pytest.skip(f"this machine has no address {host}: {error}")
        stranger.listen()
        assert not is_free(LOW + 63)
        with lease_ports(LOW, HIGH, 64, directory=folder) as lease:
            assert lease.base == LOW + 64
    with lease_ports(LOW, HIGH, 64, directory=folder) as lease:
        assert lease.base == LOW


def test_a_connection_that_was_closed_a_moment_ago_is_no_obstacle(folder: Path) -> None:
    server = socket.create_server(("127.0.0.1", LOW))
    with server, socket.create_connection(("127.0.0.1", LOW)) as client:
        peer, _ = server.accept()
        peer.close()  # the side of the server goes to TIME_WAIT
        assert client.recv(1) == b""
    with lease_ports(LOW, HIGH, 64, directory=folder) as lease:
        assert lease.base == LOW


def test_exhaustion_names_holders_and_strangers(folder: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", LOW + 70)),
        lease_ports(LOW, LOW + 63, 64, test="t.py::a", directory=folder),
    ):
        with pytest.raises(PortsExhausted) as caught:
            lease_ports(LOW, LOW + 127, 64, directory=folder)
        assert [holder.test for holder in caught.value.holders] == ["t.py::a"]
        assert caught.value.busy == (LOW + 70,)
        text = str(caught.value)
        assert f"No block of 64 free ports is left in {LOW}-{LOW + 127}." in text
        assert f"pid {os.getpid()}, t.py::a, since 20" in text
        assert f"other programs listen on {LOW + 70}" in text
        assert "Wait until a holder is done" in text


@pytest.mark.parametrize("wrong", [(0, 10, 5), (10, 5, 1), (65000, 70000, 10), (1000, 2000, 0)])
def test_impossible_ranges_are_refused(folder: Path, wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be leased"):
        lease_ports(*wrong, directory=folder)


def test_a_block_is_held_until_the_last_heir_has_closed_it(folder: Path, spawn_sleeper: Callable[..., object]) -> None:
    lease = lease_ports(LOW, LOW + 63, 64, directory=folder)
    end = spawn_sleeper(lease.fds)
    lease.release()
    with pytest.raises(PortsExhausted):
        lease_ports(LOW, LOW + 63, 64, directory=folder)
    assert callable(end)
    end()
    lease_ports(LOW, LOW + 63, 64, directory=folder).release()


@pytest.fixture
def spawn_sleeper() -> Callable[..., object]:
    """Start a process that inherits descriptors; returns what ends it."""

    def spawn(fds: tuple[int, ...]) -> object:
        sleeper = subprocess.Popen(["sleep", "60"], pass_fds=fds)

        def end() -> None:
            sleeper.kill()
            sleeper.wait()

        return end

    return spawn


def test_a_range_of_ports_is_a_container() -> None:
    ports = PortRange(24000, 3)
    assert list(ports) == [24000, 24001, 24002]
    assert len(ports) == 3
    assert 24002 in ports
    assert 24003 not in ports
    assert "24000" not in ports
    assert str(ports) == "24000-24002"
