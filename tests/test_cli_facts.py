"""``gpuguard facts`` from the outside, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpuguard import __version__
from pytest_gpuguard.facts.gpu import Rig
from pytest_gpuguard.facts.stack import Stack
from tests.gpuguard_command import RUN, on_a_terminal
from tests.standin.fixtures import FakeRigFactory


def gpuguard(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, env=env, timeout=120)


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, str]:
    return {"GPUGUARD_CACHE_DIR": str(tmp_path / "cache")}


def test_a_pipe_gets_plain_text_with_rig_links_and_stack(fake_rig: FakeRigFactory, cached: dict[str, str]) -> None:
    fake = fake_rig(8)
    done = gpuguard(
        "facts", env=fake.environ(NCCL_DEBUG="INFO", SGLANG_TOKEN="hunter2", NCCL_ODD="\x1b[31mred", **cached)
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert text.startswith(
        "rig: 8× NVIDIA RTX PRO 6000 Blackwell Server Edition (SM120, 95.6 GiB), driver 580.105.08\n"
    )
    assert f"{fake.uuid(3)}  00000000:49:00.0  120" in text
    assert "gen5 x16" in text
    assert "  0  X     PIX   NODE  NODE  SYS" in text
    assert "stack default: " in text
    assert re.search(r"NCCL_DEBUG +INFO\n", text)
    assert r"\x1b[31mred" in text
    assert "hunter2" not in text
    assert "\x1b" not in text
    assert "580.105.08" in text.split("stack default")[1]  # the driver is part of the stack


def test_json_reads_back_as_the_values(fake_rig: FakeRigFactory, cached: dict[str, str]) -> None:
    fake = fake_rig(2)
    done = gpuguard("facts", "--stack", f"mine={sys.executable}", "--json", env=fake.environ(**cached))
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert set(said) == {"rig", "stacks"}
    rig = Rig.from_dict(said["rig"])
    assert [gpu.uuid for gpu in rig.gpus] == [fake.uuid(0), fake.uuid(1)]
    (stack,) = (Stack.from_dict(one) for one in said["stacks"])
    assert (stack.name, stack.driver) == ("mine", "580.105.08")
    assert stack.package("pytest") == pytest.__version__


def test_every_key_of_the_json_is_documented(fake_rig: FakeRigFactory, cached: dict[str, str]) -> None:
    said = json.loads(gpuguard("facts", "--json", env=fake_rig(1).environ(**cached)).stdout)
    text = (Path(__file__).parents[1] / "docs" / "facts.md").read_text(encoding="utf-8")
    keys = {*said["rig"], *said["rig"]["gpus"][0], *said["rig"]["gpus"][0]["memory"], *said["rig"]["gpus"][0]["clocks"]}
    keys |= {*said["stacks"][0], *said["stacks"][0]["facts"], *said["stacks"][0]["facts"]["jit_caches"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in text and f'"{key}"' not in text] == []


def test_a_terminal_gets_tables(fake_rig: FakeRigFactory, cached: dict[str, str]) -> None:
    code, text = on_a_terminal("facts", columns=200, env=fake_rig(2).environ(**cached))
    assert code == 0
    assert "┃" in text
    assert "RTX PRO 6000" in text


def test_a_machine_without_gpus_is_no_error(nvml_library: Path, cached: dict[str, str]) -> None:
    env = {key: value for key, value in os.environ.items() if key != "GPUGUARD_FAKE_RIG"}
    done = gpuguard("facts", env={**env, **cached, "LD_LIBRARY_PATH": str(nvml_library.parent)})
    assert done.returncode == 0
    assert "rig: no GPUs (no NVIDIA driver loaded)" in done.stdout


def test_a_broken_host_is_printed_plainly_and_exits_1(fake_rig: FakeRigFactory, cached: dict[str, str]) -> None:
    fake = fake_rig(2)
    fake.mismatch()
    done = gpuguard("facts", env=fake.environ(**cached))
    assert done.returncode == 1
    assert "driver.mismatch" in done.stdout
    assert "Reboot" in done.stdout
    assert done.stderr.startswith("host fault: driver.mismatch: the NVIDIA driver")
    as_json = gpuguard("facts", "--json", env=fake.environ(**cached))
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["rig"]["faults"][0]["outcome"] == "driver.mismatch"
    fake.heal()
    fake.lose(1)
    assert "the GPU is lost" in gpuguard("facts", env=fake.environ(**cached)).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rig", "replay:folder"], "replayed rigs are not available in this version"),
        (["--rig", "sim:h2000:8"], "'h2000' is no card of the catalogue; did you mean h200"),
        (["--rig", "sim:h200:8", "--stack", "a=python"], "this rig (sim:h200:8) goes with a simulated stack"),
        (["--stack", "a=sim:sglang==0.5.7"], "this rig (auto) goes with a python"),
        (["--rig", "sim:h200"], "write auto, sim:<card>:<n>"),
        (["--rig", "sim:h200:0"], "a rig with 0 GPUs cannot be simulated"),
        (["--rig", "replay:"], "or replay:DIR"),
        (["--rig", "real"], "'real' is no rig"),
        (["--stack", "python"], "'python' is no stack: write NAME=PYTHON"),
        (["--stack", "=python"], "is no stack"),
        (["--stack", "a=docker:"], "'docker:' names no image: write docker:IMAGE"),
        (["--stack", "a=x", "--stack", "a=y"], "two stacks called 'a'"),
        (["--stack", "new=/nowhere/python"], "there is no /nowhere/python"),
        (["--stack", "new=/"], "is a directory"),
        (["--nonsense"], "No such option"),
    ],
)
def test_usage_errors_exit_2_with_the_reason(arguments: list[str], message: str, cached: dict[str, str]) -> None:
    done = gpuguard("facts", *arguments, env={**os.environ, **cached})
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_an_output_that_cannot_show_every_letter_is_no_reason_to_fail(
    fake_rig: FakeRigFactory, cached: dict[str, str]
) -> None:
    fake = fake_rig(1)
    fake.shared.gpu[0].power_limit_mw = 0  # shown as a dash that Latin-1 does not have
    env = fake.environ(PYTHONIOENCODING="latin-1", **cached)
    done = subprocess.run([*RUN, "facts"], capture_output=True, env=env, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "rig: 1× NVIDIA RTX PRO 6000" in done.stdout.decode("latin-1")


def test_a_simulated_rig_is_shown_with_its_links_and_a_simulated_stack(cached: dict[str, str]) -> None:
    env = {**os.environ, **cached, "CUDA_VISIBLE_DEVICES": "0"}
    done = gpuguard("facts", "--rig", "sim:h200:2", "--stack", "old=sim:sglang==0.5.7,cuda==12.9", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rig: simulated: 2× NVIDIA H200 (SM90, 140.4 GiB)")
    assert "GPU-sim-h200-0001" in done.stdout
    assert re.search(r"^ +0 +X +NV18$", done.stdout, re.MULTILINE)
    assert "stack old: simulated: sglang 0.5.7, CUDA 12.9" in done.stdout
    whole = json.loads(gpuguard("facts", "--rig", "sim:rtx-5090:1", "--json", env=env).stdout)
    assert Rig.from_dict(whole["rig"]).kind == "simulated"
    assert Stack.from_dict(whole["stacks"][0]).package("sglang")


def test_the_version() -> None:
    assert gpuguard("--version", env=dict(os.environ)).stdout.strip() == __version__


def test_help_names_what_the_options_take() -> None:
    done = gpuguard("facts", "--help", env=dict(os.environ))
    assert done.returncode == 0
    assert "sim:<card>:<n>" in " ".join(done.stdout.split())
