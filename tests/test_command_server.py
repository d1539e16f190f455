"""Any command as a server, in runs of pytest: leased GPUs, its port, and how its end is judged."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import own_ports
from .test_killed import WITHIN_S, started_by, wait_for

Run = Any
FakeRigs = Any

#: Answers /health after a while, tells its environment, and ends as it is told to.
SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
OOM = '''Traceback (most recent call last):
  File "/opt/serve.py", line 9, in decode
    logits = model(ids)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of
'''
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"ok"
        if self.path == "/env":
            body = json.dumps(dict(os.environ)).encode()
        elif self.path == "/v1/models":
            body = b'{"data": [{"id": "tiny"}]}'
        elif self.path == "/oom":
            print(OOM, flush=True)
            os._exit(1)
        elif self.path == "/survived":
            print(OOM, flush=True)
            body = b"{}"
        self.send_response(200 if self.path in ("/health", "/env", "/v1/models", "/survived") else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("starting", flush=True)
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving at last", flush=True)
server.serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "serve.py"
    file.write_text(SERVER)
    return f"SERVER = {str(file)!r}\n"


def run(claims: Run, script: str, source: str, *args: str, **options: Any) -> pytest.RunResult:
    lines = source.splitlines()
    indent = min(len(one) - len(one.lstrip()) for one in lines if one.strip())
    result: pytest.RunResult = claims(script + "\n".join(one[indent:] for one in lines), *args, **options)
    return result


def test_a_command_is_booted_asked_and_stopped(claims: Run, script: str) -> None:
    result = run(
        claims,
        script,
        """
        @fits
        @works
        def test_python_of_the_stack(command_server, stack):
            one = command_server(["python", SERVER, "{port}"], env={"MINE": "1"})
            env = one.get("/env")
            assert (env["PORT"], env["MINE"], env["HF_HUB_OFFLINE"]) == (str(one.port), "1", "1")
            assert env["CUDA_VISIBLE_DEVICES"] == ""
            assert env["PATH"].split(":")[0] == stack.python.rpartition("/")[0]
            assert one.info == {"served_model_name": "tiny"}
            assert "serving at last" in open(one.log).read()
            open("port", "w").write(str(one.port))

        @fits
        def test_plain_files(gpuguard_command_server):
            one = gpuguard_command_server(
                ["python", "-m", "http.server", "--bind", "127.0.0.1", "{port}"], ready="/", model="files")
            with one.client() as client:
                assert "test_claims.py" in client.get("/").text
            assert (one.model, one.observation.engine) == ("files", "command")

        def test_no_claim_and_the_one_before_is_gone(command_server):
            import socket
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(open("port").read())), timeout=5)
            assert command_server(["python", SERVER, "{port}"]).info

        @fits
        def test_assertion(command_server):
            assert command_server(["python", SERVER, "{port}"]).model == "something else"
        """,
    )
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED *test_assertion *something else*",
            "HOLDS *test_plain_files *ready in *",
            "HOLDS *test_python_of_the_stack *ready in *, and answers",
            "*HOLDS: works(short): ready in *, and answers: readiness: GET /health answers 200",
        ]
    )
    result.assert_outcomes(passed=3, failed=1)


def test_a_command_has_the_gpus_that_its_claim_needs_and_no_others(
    claims: Run, script: str, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=4).apply(monkeypatch)
    result = run(
        claims,
        script,
        """
        def seen(one):
            env = one.get("/env")
            assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            return env["CUDA_VISIBLE_DEVICES"]

        @needs_gpus(2)
        @fits
        def test_two(command_server):
            one = command_server(["python", SERVER, "{port}"])
            assert seen(one) == "0,1" and len(one.observation.gpus) == 2

        @needs_gpus(4)
        @fits
        def test_two_at_once(command_server):
            first = command_server(["python", SERVER, "{port}"], gpus=1)
            second = command_server(["python", SERVER, "{port}"], gpus=3)
            assert (seen(first), seen(second)) == ("0", "1,2,3")
            assert first.port != second.port

        @fits
        def test_none(command_server):
            assert seen(command_server(["python", SERVER, "{port}"])) == ""

        @needs_gpus(1)
        @fits
        def test_more_than_there_are(command_server):
            command_server(["python", SERVER, "{port}"], gpus=5)
        """,
    )
    result.stdout.fnmatch_lines(
        [
            "NOT_EVALUATED *test_more_than_there_are *needs 5 GPUs, this rig has 4*",
            "HOLDS *test_none *",
            "HOLDS *test_two *",
            "HOLDS *test_two_at_once *",
        ]
    )


def test_a_command_that_does_not_come_up_is_judged_by_its_log(claims: Run, script: str) -> None:
    result = run(
        claims,
        script,
        r'''
        import time
        OOM = """
        print("loading", flush=True)
        def {name}():
            raise type("OutOfMemoryError", (RuntimeError,), dict(__module__="torch"))(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "1.00 GiB is free.")
        {name}()
        """

        def outcome_of(command_server, name):
            import textwrap
            open("oom.py", "w").write(textwrap.dedent(OOM).format(name=name))
            command_server(["python", "oom.py"])

        @ooms("weights")
        def test_while_loading(command_server):
            outcome_of(command_server, "load_weights")

        @ooms("graph_capture")
        def test_in_graph_capture(command_server):
            outcome_of(command_server, "capture_graphs")

        @ooms("weights")
        def test_elsewhere(command_server):
            outcome_of(command_server, "execute_model")

        @ooms("runtime")
        def test_when_it_was_up(command_server):
            one = command_server(["python", SERVER, "{port}"])
            with pytest.raises(Exception):
                one.get("/oom")
            time.sleep(0.5)

        @ooms("runtime")
        def test_when_it_was_up_and_went_on(command_server):
            import os, psutil
            one = command_server(["python", SERVER, "{port}"])
            assert one.get("/survived") == {}
            listening = [c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == one.port]
            os.kill(next(filter(None, listening)), 9)
            time.sleep(0.5)

        @fits
        def test_exits_at_once(command_server):
            command_server(["python", "-c", "print('that was it')"])

        @fits
        def test_is_not_ready_in_time(command_server):
            command_server(["python", "-c", "import time; time.sleep(60)"], boot_timeout="1s")

        @fits
        def test_is_no_program(command_server):
            command_server(["no-such-program", "{port}"])

        @fits
        def test_path_is_not_there(command_server):
            command_server(["python", SERVER, "{port}"], ready="/healthy", boot_timeout="1s")
        ''',
    )
    text = result.stdout.str()
    for name, verdict, fact in [
        ("test_while_loading", "HOLDS", "out of memory"),
        ("test_in_graph_capture", "HOLDS", "out of memory"),
        ("test_elsewhere", "CHANGED", "out of memory"),
        ("test_when_it_was_up", "HOLDS", "out of memory"),
        ("test_when_it_was_up_and_went_on", "INCONCLUSIVE", r"the process ended \(exit code -9\)"),
        ("test_exits_at_once", "CONTRADICTED", r"the process ended \(exit code 0\)"),
        ("test_is_not_ready_in_time", "INFRA", "boot_timeout of 1 s passed"),
        ("test_is_no_program", "INFRA", "the command could not be started: .*no-such-program"),
        ("test_path_is_not_there", "INFRA", "boot_timeout of 1 s passed"),
    ]:
        assert re.search(rf"^{verdict} .*::{name} .*{fact}", text, re.MULTILINE), f"{name}: {text}"


def test_one_that_is_killed_in_the_test_is_a_failure_of_its_own(claims: Run, script: str) -> None:
    result = run(
        claims,
        script,
        """
        @fits
        def test_killed(command_server):
            import os, psutil
            one = command_server(["python", SERVER, "{port}"])
            listening = [c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == one.port]
            os.kill(next(filter(None, listening)), 9)
            one.get("/env")
        """,
    )
    result.stdout.fnmatch_lines(["CONTRADICTED *test_killed *unknown*exit code -9*"])


def test_the_boot_of_a_command_counts_for_none_of_the_tests_own_time(claims: Run, script: str) -> None:
    result = run(
        claims,
        script,
        """
        import time

        @pytest.mark.timeout(2)
        def test_boots_longer_than_its_time(command_server):
            code = "import time; time.sleep(3); print('up', flush=True); time.sleep(60)"
            command_server(["python", "-c", code], ready="^up$")

        @pytest.mark.timeout(1)
        def test_runs_longer_than_its_time(command_server):
            command_server(["python", SERVER, "{port}"])
            time.sleep(20)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the test's time-out of 1 s passed (boots are not counted)*"])


def test_kill_9_of_pytest_takes_the_command_along(
    claims: Run, script: str, pytester: pytest.Pytester, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"command-{time.time_ns()}"
    pytester.makeini(f"[pytest]\ngpuguard_ports = {own_ports()}\n")
    pytester.makepyfile(
        script
        + "import time\nfrom pytest_gpuguard import fits\n"
        + "@fits\ndef test_it(command_server):\n"
        + "    command_server(['python', SERVER, '{port}'])\n    open('up', 'w').close()\n    time.sleep(60)\n"
    )
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--gpuguard-stack=fake={fake_python}"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.delenv("GPUGUARD_TEST_MARKER")
    try:
        assert wait_for(lambda: (pytester.path / "up").exists(), 60)
        assert len(started_by(marker)) >= 3, "pytest, warden and server"
        started.kill()
        started.wait()
        assert wait_for(lambda: not started_by(marker), WITHIN_S)
    finally:
        started.kill()
        for process in started_by(marker):
            process.kill()


def test_a_wrong_call_says_what_is_right(claims: Run, script: str) -> None:
    result = run(
        claims,
        script,
        """
        @pytest.fixture
        def early(command_server):
            return command_server(["python", SERVER, "{port}"])

        @fits
        def test_in_a_fixture(early): ...

        @fits
        def test_a_string(command_server):
            command_server("python -m http.server")
        """,
    )
    result.stdout.re_match_lines_random(
        [
            r"INFRA .*test_in_a_fixture .*command_server\(…\) boots in the call phase: call it in the test's body.*",
            r"INFRA .*test_a_string .*command_server: argv is a list of words, not one string.*",
        ]
    )


def test_a_command_is_not_run_where_its_gpus_are_only_simulated_or_its_stack_is_an_image(
    claims: Run, script: str
) -> None:
    source = """
        @needs_gpus(1)
        @fits
        def test_it(command_server):
            command_server(["touch", "it-was-run"])
        """
    simulated = run(claims, script, source, "--gpuguard-rig=sim:h200:1", stack="")
    simulated.stdout.fnmatch_lines(["*NOT_EVALUATED *test_it *a simulated rig has no GPUs that a command could use*"])
    image = run(
        claims, script, source.replace("@needs_gpus(1)", ""), "--gpuguard-stack=x=docker:nobody/nothing:1", stack=""
    )
    image.stdout.fnmatch_lines(
        ["NOT_EVALUATED *test_it *is an image, and command_server runs commands on this machine*"]
    )
