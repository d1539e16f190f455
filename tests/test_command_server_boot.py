"""One boot of a command, watched directly: readiness by HTTP or by a line, whose port it is, and odd output."""

from __future__ import annotations

import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.claims.observation import Observation
from pytest_gpuguard.commands import read_order
from pytest_gpuguard.engines import boot as boot_module
from pytest_gpuguard.engines.base import BootSpec
from pytest_gpuguard.engines.boot import Boot, Limits
from pytest_gpuguard.engines.command import Command, CommandReader
from pytest_gpuguard.facts.lease import Lease, PortRange
from pytest_gpuguard.lease.ports import lease_ports

from .conftest import own_ports
from .test_command_server import SERVER, FakeRigs, Run, run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"argv": []}, "argv is empty"),
        ({"argv": 5}, "argv is a list of words, not 5"),
        ({"env": 5}, "env=5"),
        ({"argv": ["a\0b"]}, "NUL character"),
        ({"port": 70000}, "port=70000 is not a port"),
        ({"port": True}, "port=True is not a port"),
        ({"gpus": -1}, "gpus=-1 is not a count"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "belongs to the lease"),
        ({"env": {"PORT": "80"}}, "env may not set PORT"),
        ({"env": {"A": 1}}, "names and values are strings"),
        ({"ready": "/a b"}, "is not a path"),
        ({"ready": "(unclosed"}, "neither a path"),
        ({"ready": ".*"}, "is found in every line"),
        ({"ready": "."}, "is found in every line"),
        ({"ready": r"^\w"}, "is found in every line"),
        ({"ready": r"\S+"}, "is found in every line"),
        ({"boot_timeout": "soon"}, "is not a duration"),
        ({"model": " "}, "is not text"),
    ],
)
def test_bad_arguments_are_refused_with_the_cure(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        read_order(**{"argv": ["serve"], **given})


def ready_by(pattern: str, output: bytes) -> bool | None:
    reader = CommandReader(read_order(["serve"], ready=pattern).ready)
    reader.feed(output)
    return reader.reading().ready_line


def test_a_line_is_a_whole_one_of_any_colour_and_only_its_beginning_is_searched() -> None:
    bold = b"INFO:     Uvicorn running on \x1b[1mhttp://127.0.0.1:80\x1b[0m (Press CTRL+C to quit)\n"
    assert ready_by("running on http://", bold)
    assert ready_by("^up$", b"\x1b[1;32mup\x1b[0m\n")
    assert not ready_by("^up", b"up 10 %\rdown\n"), "a progress bar overwrote it"
    assert not ready_by("^up", b"up 10 %\r"), "nothing has ended it yet"
    assert not ready_by("up$", b"x" * 4000 + b"up\n")
    assert ready_by("up$", b"\x1b[1mx\x1b[0m" * 1000 + b"up\n"), "colours are not counted"


@pytest.mark.parametrize("status", [201, 204, 302, 401, 503])
def test_only_200_says_that_a_command_is_ready(status: int) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        spec = BootSpec("command", "s", sys.executable, "serve", ("serve",))
        command = Command(read_order(["serve"]).ready)
        assert not command.ask(f"http://127.0.0.1:{server.server_port}", spec, 5.0).healthy
    finally:
        server.shutdown()
        server.server_close()


def observe(folder: Path, *words: str, ready: str = "/health", port: int | None = None, s: float = 20) -> Observation:
    order = read_order(words, ready=ready, port=port, boot_timeout=s)
    first, last = map(int, own_ports().split("-"))
    with lease_ports(first, last) as ports:
        spec = BootSpec("command", "default", sys.executable, order.model, order.words, boot_timeout_s=s)
        lease = Lease((), (), PortRange(ports.base, ports.size), "here", "test")
        boot = Boot(
            spec, Command(order.ready, order.port), lease, folder / "server.log", Limits(60, 0.2), fds=ports.fds
        )
        try:
            return boot.run()
        finally:
            boot.stop()


def script_of(code: str) -> tuple[str, ...]:
    return ("python", "-u", "-c", code)


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def stranger() -> Any:
    """Somebody else's server, which is healthy."""
    server = HTTPServer(("127.0.0.1", 0), _Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ready", ["/health", "up and running"])
def test_a_stranger_on_the_port_is_no_server_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int, ready: str
) -> None:
    monkeypatch.setattr(boot_module, "_FOREIGN_PORT_S", 0.3)
    seen = observe(
        tmp_path, *script_of("import time; print('up and running'); time.sleep(60)"), ready=ready, port=stranger
    )
    assert (seen.outcome, seen.ready) == ("port.in_use", False)
    assert str(stranger) in (seen.note or "")


def test_a_port_that_the_command_itself_finds_taken_is_told_as_such(tmp_path: Path, stranger: int) -> None:
    server = tmp_path / "serve.py"
    server.write_text(SERVER)
    seen = observe(tmp_path, "python", str(server), "{port}", port=stranger)
    assert seen.outcome == "port.in_use"


def test_readiness_by_a_line_needs_no_port(tmp_path: Path) -> None:
    code = "import time; print('step 1 of 2'); time.sleep(0.3); print('step 2 of 2'); time.sleep(60)"
    seen = observe(tmp_path, *script_of(code), ready=r"step 2 of \d")
    assert seen.ready
    assert seen.phase == "ready"
    assert "step 2 of 2" in seen.tail


def test_a_line_that_never_comes_is_no_readiness(tmp_path: Path) -> None:
    seen = observe(tmp_path, *script_of("import time; print('step 1'); time.sleep(60)"), ready="step 2", s=1)
    assert seen.outcome == "infra.deadline"


def test_a_line_and_an_end_at_once_is_no_server(tmp_path: Path) -> None:
    seen = observe(tmp_path, *script_of("print('step 2')"), ready="step 2")
    assert seen.outcome == "unknown"


def test_what_engines_say_when_they_are_ready_does_not_make_a_command_ready(tmp_path: Path) -> None:
    said = "[2026-01-02 03:04:05] The server is fired up and ready to roll!"
    seen = observe(tmp_path, *script_of(f"import time; print({said!r}); time.sleep(60)"), ready="never said", s=1)
    assert seen.outcome == "infra.deadline"


def test_megabytes_of_noise_and_no_line_end_neither_hide_nor_break_anything(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "for _ in range(64): sys.stdout.write('x' * 100000 + chr(0) + chr(27) + '[31m\\r')\n"
        "print(); print('now serving'); sys.stdout.flush(); time.sleep(60)"
    )
    seen = observe(tmp_path, *script_of(code), ready="^now serving$")
    assert seen.ready


def test_flags_of_other_programs_that_look_like_ours_are_let_pass(tmp_path: Path) -> None:
    code = "import sys, time; print('got', sys.argv[1:]); time.sleep(60)"
    seen = observe(tmp_path, *script_of(code), "--tp", "many", "--api-key", "sk-very-secret", ready="got")
    assert seen.ready
    assert "sk-very-secret" not in " ".join(seen.argv)


def test_a_port_that_is_free_again_is_not_asked_over_ipv6_by_mistake() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    order = read_order(["serve", "--host", "::"])
    spec = BootSpec("command", "s", sys.executable, "serve", ("serve", "--host", "::"))
    facts = Command(order.ready).ask(f"http://[::1]:{port}", spec, 1.0)
    assert (facts.healthy, facts.listens) == (False, False)


def test_a_command_of_a_claim_that_is_to_be_alone_keeps_the_whole_box(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    server = tmp_path / "serve.py"
    server.write_text(SERVER)
    result = run(
        claims,
        f"SERVER = {str(server)!r}\n",
        """
        from pytest_gpuguard.lease.flocks import LeaseTimeout
        from pytest_gpuguard.lease.gpus import lease_gpus

        def other(rig, one):
            return [gpu.uuid for gpu in rig.gpus if gpu.uuid not in one.observation.gpus]

        @needs_gpus(1, exclusive=True)
        def test_alone(command_server, rig):
            one = command_server(["python", SERVER, "{port}"])
            with pytest.raises(LeaseTimeout):
                lease_gpus(other(rig, one), 1)

        @needs_gpus(1)
        def test_beside_others(command_server, rig):
            with lease_gpus(other(rig, command_server(["python", SERVER, "{port}"])), 1) as lease:
                assert len(lease.uuids) == 1
        """,
    )
    result.assert_outcomes(passed=2)
