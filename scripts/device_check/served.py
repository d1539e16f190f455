"""A server that torch runs on, booted by ``command_server`` in a real run of pytest, and the tok/s meter on it.

pytest is started from this checkout without an installation, and without whatever else is installed beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Final

from .result import Device, Findings
from .work import STAND_IN, command
from .workload import die_with_parent

ROOT: Final = Path(__file__).resolve().parents[2]
#: A range of ports for pytest in the place of the usual one, for tests that have lock folders of their own.
PORTS: Final = "DEVICE_CHECK_PORTS"
SERVER: Final = Path(__file__).with_name("server.py")
_RUN_S: Final = 150.0
_WINDOW_S: Final = 3.0
#: How far the meter may be from what the server counts itself.
_NEAR: Final = 0.02

#: What is run: two claims that must hold, and one whose server runs out of memory while it loads.
TEST: Final = """
import json, time
from pytest_gpuguard import fits, max_mem, needs_gpus, ooms, works
from pytest_gpuguard.measure.load import Load
from pytest_gpuguard.measure.meter import Meter

GPUS, PYTHON, DEVICE, SERVER, OOM = {gpus!r}, {python!r}, {device!r}, {server!r}, {oom!r}
on_gpus = needs_gpus(GPUS) if GPUS else lambda test: test


@on_gpus
@fits
@works
def test_a_server_and_its_rate(command_server):
    one = command_server([PYTHON, SERVER, "{{port}}", DEVICE], boot_timeout="120s")
    figures = []
    for concurrency in (1, 8):
        load = Load(concurrency=concurrency, input_len=32, output_len=64, api="completions")
        with Meter(one.url, {{}}, load, model=one.info["served_model_name"]) as meter:
            meter.warm_up()
            window = meter.sample({window_s!r})
        assert window.failed is None, window.failed
        sent = one.get(f"/sent?since={{window.started}}&until={{window.ended}}")["tokens"]
        figures.append({{"concurrency": concurrency, "meter": window.output_toks, "seconds": window.seconds,
                        "server": sent / window.seconds, "doubts": list(window.doubts)}})
    with open("figures.json", "w") as file:
        json.dump(figures, file)
    for row in figures:
        assert abs(row["meter"] / row["server"] - 1) <= {near!r}, row


if GPUS:
    @on_gpus
    @max_mem("8GiB", of="peak")
    def test_its_peak(command_server):
        one = command_server([PYTHON, SERVER, "{{port}}", DEVICE], boot_timeout="120s")
        time.sleep(1.0)

    @on_gpus
    @ooms("weights")
    def test_one_that_cannot_load(command_server):
        command_server([*OOM, "load"], boot_timeout="120s")
"""


def served(device: Device) -> Findings:
    """Claims about a torch server hold, an OOM is one, and the meter counts what the server counts."""
    torch_device = "none" if os.environ.get(STAND_IN) else "cuda"
    return run_claims(device.scratch / "served", 1, torch_device, command("oom"), device.env)


def run_claims(
    folder: Path, gpus: int, device: str, oom: list[str], env: dict[str, str], python: str = sys.executable
) -> Findings:
    """The same with any number of GPUs and any device of ``python``'s torch (none at all on "none")."""
    found = Findings()
    folder.mkdir()
    test = TEST.format(
        gpus=gpus, python=python, device=device, server=str(SERVER), oom=oom, near=_NEAR, window_s=_WINDOW_S
    )
    (folder / "test_served.py").write_text(test, encoding="utf-8")
    ports = f"gpuguard_ports = {env[PORTS]}\n" if env.get(PORTS) else ""
    (folder / "pytest.ini").write_text(f"[pytest]\ngpuguard_log_dir = logs\n{ports}", encoding="utf-8")
    try:
        done = subprocess.run(
            pytest_command("--junitxml", "junit.xml", "test_served.py"),
            cwd=folder,
            env={**env, **pytest_env(env)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_RUN_S,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        found.log = (error.output or b"").decode(errors="replace")[-8000:]
        found.problems.append(f"pytest did not end within {_RUN_S:g} s")
        return found
    found.log = done.stdout.decode(errors="replace")[-12000:]
    verdicts = read_verdicts(folder / "junit.xml")
    found.figures["claims"] = verdicts
    for name, told in verdicts.items():
        found.expect(told.get("verdict") == "HOLDS", f"{name}: {told.get('verdict')}: {told.get('fact')}")
    wanted = 3 if gpus else 1
    found.expect(
        len(verdicts) == wanted, f"{len(verdicts)} verdicts instead of {wanted} (pytest ended with {done.returncode})"
    )
    figures = folder / "figures.json"
    if found.expect(figures.exists(), "nothing was measured"):
        found.figures["toks"] = rates = json.loads(figures.read_text())
        shown = ", ".join(f"{row['meter']:.1f} against {row['server']:.1f}" for row in rates)
        found.headline = f"{wanted} claims hold; tok/s by our meter against the server's own count: {shown}"
    return found


def pytest_command(*words: str) -> list[str]:
    """Run pytest with our plugin from this checkout, and no other; without a ledger, which needs SQLAlchemy."""
    command = [sys.executable, "-m", "pytest", "-p", "pytest_gpuguard.plugin", "-p", "no:cacheprovider", "-rA"]
    return [*command, "--gpuguard-ledger=none", *words]


def pytest_env(env: dict[str, str]) -> dict[str, str]:
    """What makes pytest find this checkout first, and nothing that is installed beside it."""
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}


def read_verdicts(junit: Path) -> dict[str, dict[str, Any]]:
    """Verdict, outcome and fact by test, from JUnit's properties; empty without a file."""
    try:
        tree = ET.parse(junit)
    except (OSError, ET.ParseError):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for case in tree.iter("testcase"):
        told = {one.get("name", "").removeprefix("gpuguard_"): one.get("value") for one in case.iter("property")}
        found[case.get("name", "?")] = {name: told.get(name) for name in ("verdict", "outcome", "fact")}
    return found
