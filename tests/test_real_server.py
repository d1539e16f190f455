"""The real thing: SGLang on this machine's CPU, booted, watched, judged and taken down by the plugin."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.needs import need

ROOT = Path(__file__).parents[1]
STACK = Path(os.environ.get("GPUGUARD_CPU_STACK") or ROOT / ".cpu-stack")

pytestmark = [pytest.mark.real_server, pytest.mark.timeout(900)]

#: Apart from those of the other tests, whose locks lie in folders of their own.
PORTS = "26240-28095"

RECORD = """
import json
def pytest_runtest_logreport(report):
    if hasattr(report, "gpuguard"):
        with open({path!r}, "a") as file:
            file.write(json.dumps(report.gpuguard) + "\\n")
"""


@pytest.fixture(autouse=True)
def _cpu_stack() -> None:
    need(
        (STACK / "venv" / "bin" / "python").exists(),
        f"the CPU stack is not built at {STACK}: python tools/cpu_stack.py",
    )


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs claims on the real stack in a pytest of their own; gives the verdicts by test name."""
    monkeypatch.delenv("GPUGUARD_LOCK_DIR")  # real servers wait for each other, whoever runs them
    record = tmp_path / "verdicts.jsonl"
    (tmp_path / "gpuguard_record.py").write_text(RECORD.format(path=str(record)))

    def run(*args: str) -> dict[str, dict[str, Any]]:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "GPUGUARD_CPU_STACK": str(STACK)}
        command = [sys.executable, "-m", "pytest", "-p", "gpuguard_record", "-p", "no:cacheprovider", *args]
        command += ["--gpuguard-log-dir", str(tmp_path / "logs"), "--gpuguard-ports", PORTS]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=850, check=False)
        sys.stdout.write(done.stdout + done.stderr)
        found = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return {one["nodeid"].rpartition("::")[2]: one for one in found}

    return run


def test_the_shipped_cpu_claims_hold_on_real_boots(real: Any) -> None:
    # The comparison alone is three boots one after the other; that way is tested with stand-in servers.
    verdicts = real("suites/cpu", "--deselect=suites/cpu/test_cpu.py::test_the_prefix_cache_costs_little")
    # Other tests run beside these: a speed may come out undecided, and never otherwise.
    speed = verdicts.pop("test_a_tiny_model_makes_five_tokens_per_second")
    assert speed["verdict"] in ("HOLDS", "INCONCLUSIVE")
    assert {name: one["verdict"] for name, one in verdicts.items()} == dict.fromkeys(
        [
            "test_a_tiny_model_fits",
            "test_a_tiny_model_works",
            "test_the_same_prompt_answers_the_same",
            "test_tp2_fits",
            "test_a_tiny_fraction_leaves_no_kv_pool",
            "test_an_address_space_limit_makes_the_pool_allocation_fail",
            "test_more_tokens_than_memory_are_silently_clipped",
            "test_enable_ep_moe_is_gone",
        ],
        "HOLDS",
    )
    outcomes = {name: one["outcome"] for name, one in verdicts.items()}
    assert outcomes["test_a_tiny_fraction_leaves_no_kv_pool"] == "oom.kv_pool"
    assert outcomes["test_an_address_space_limit_makes_the_pool_allocation_fail"] == "oom.host"
    assert outcomes["test_enable_ep_moe_is_gone"] == "args.removed"
    fits = verdicts["test_a_tiny_model_fits"]
    assert fits["engine_version"] == "0.5.23"
    assert fits["memory"]["kv_tokens"] == 4096
    assert [one["ok"] for one in verdicts["test_a_tiny_model_works"]["answers"]["checks"]] == [True] * 4
    assert "came from the prefix cache" in verdicts["test_a_tiny_model_works"]["answers"]["checks"][1]["fact"]
    # The four claims about the same server shared one boot: one of them uses it, and was given it last.
    assert fits["log"] == verdicts["test_the_same_prompt_answers_the_same"]["log"]


#: Puts NaN into one matrix of the last layer.
SPOIL = """
import sys
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
weights["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
save_file(weights, sys.argv[1], metadata={"format": "pt"})
"""

NAN = """
from pytest_gpuguard import *

spoiled = serves("sglang", {model!r}, "--device cpu --max-total-tokens 4096", boot_timeout="5m")

@spoiled
@fits
def test_fits(): ...

@spoiled
@fails("numerics")
def test_numerics(): ...
"""


def test_nan_in_a_server_that_calls_itself_healthy_is_found(real: Any, tmp_path: Path) -> None:
    model = shutil.copytree(STACK / "models" / "tiny", tmp_path / "model")
    python = STACK / "venv" / "bin" / "python"
    subprocess.run([python, "-c", SPOIL, model / "model.safetensors"], check=True)
    (tmp_path / "conftest.py").write_text((ROOT / "suites" / "cpu" / "conftest.py").read_text())
    (tmp_path / "test_nan.py").write_text(NAN.format(model=str(model)))
    verdicts = real(str(tmp_path / "test_nan.py"), "--rootdir", str(tmp_path))
    assert verdicts["test_fits"]["verdict"] == "CONTRADICTED (worse)"
    assert verdicts["test_fits"]["outcome"] == "numerics"
    assert verdicts["test_numerics"]["verdict"] == "HOLDS"
    assert "log-prob" in verdicts["test_fits"]["fact"]


FLIPPED = """
from pytest_gpuguard import *

# A short context makes the prompts short that a ready server is asked: long ones take a minute on two cores.
MID = "--device cpu --load-format dummy --max-total-tokens 20000 --context-length 256"
mid = serves("sglang", "mid", MID, boot_timeout="5m")

@mid
@ooms("kv_pool")
def test_without_the_tiny_fraction(): ...

@mid
@ooms("host")
def test_without_the_address_space_limit(): ...

@mid
@fails("args.removed")
def test_without_the_removed_flag(): ...

@serves("sglang", "tiny", "--device cpu --mem-fraction-static 0.02 --max-total-tokens 500000000", boot_timeout="5m")
@fits(kv_tokens=">=500000000")
def test_clipped_tokens(): ...
"""


def test_with_the_cause_removed_each_negative_claim_is_contradicted(real: Any, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "suites" / "cpu" / "conftest.py").read_text())
    (tmp_path / "test_flipped.py").write_text(FLIPPED)
    verdicts = real(str(tmp_path / "test_flipped.py"), "--rootdir", str(tmp_path))
    assert {name: one["verdict"] for name, one in verdicts.items()} == {
        "test_without_the_tiny_fraction": "CONTRADICTED (better)",
        "test_without_the_address_space_limit": "CONTRADICTED (better)",
        "test_without_the_removed_flag": "CONTRADICTED (better)",
        "test_clipped_tokens": "CONTRADICTED (worse)",
    }
    assert "silently clipped" in verdicts["test_clipped_tokens"]["fact"]


def test_kill_9_of_pytest_leaves_nothing_of_a_real_boot(tmp_path: Path) -> None:
    """At a moment when SGLang has started its processes, which a TERM to its main process would orphan."""
    env = {**os.environ, "GPUGUARD_CPU_STACK": str(STACK)}
    command = [sys.executable, "-m", "pytest", "suites/cpu", "-k", "test_a_tiny_model_fits", "-p", "no:cacheprovider"]
    command += ["--gpuguard-log-dir", str(tmp_path), "--gpuguard-ports", PORTS]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as holder:
        deadline = time.monotonic() + 300
        tree: list[psutil.Process] = []
        while time.monotonic() < deadline:
            tree = psutil.Process(holder.pid).children(recursive=True)
            if sum("python" in _name(one) or "sglang" in _name(one) for one in tree) >= 4:
                break
            time.sleep(0.2)
        assert len(tree) >= 4, [_name(one) for one in tree]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        _, alive = psutil.wait_procs(tree, timeout=5)
    assert not [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
