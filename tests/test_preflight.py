"""``gpuguard preflight``: the table, its JSON, its exit status, and what a broken run says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pytest_gpuguard import cli_preflight
from pytest_gpuguard.cli import main

from .test_killed import started_by, wait_for

FakeRigs = Any

LOOK = """
import time
from pytest_gpuguard.probes import kit

def run():
    if kit.args.get("hang"):
        open(kit.args["hang"], "w").close()
        time.sleep(100)
    if kit.args.get("broken"):
        kit.defect("import.abi", "the library is a stand-in")
    kit.answer(said="8 of 8")

if __name__ == "__main__":
    kit.main(run)
"""
CLAIMS = """
import pytest
from pytest_gpuguard import claim, fails, needs_gpus, works

@works
@claim(id="preflight.good", title="something is as it should be")
def test_good(probe):
    probe("./look.py")

@works
@claim(id="preflight.bad", title="the library is real")
def test_bad(probe):
    probe("./look.py", args={"broken": 1})

@fails("import.abi")
@claim(id="preflight.cured", title="a known defect")
def test_cured(probe):
    probe("./look.py")

@needs_gpus(1)
@works
@claim(id="preflight.gpu", title="GPUs answer")
def test_reachable(probe):
    probe("./look.py", gpus="all")
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of four checks, in the place of the shipped one; the current folder is another one."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "look.py").write_text(LOOK)
    (folder / "test_checks.py").write_text(CLAIMS)
    monkeypatch.setattr(cli_preflight, "suite_folder", lambda: folder)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return folder


def preflight(*words: str) -> Result:
    return CliRunner().invoke(main, ["preflight", *words])


def test_the_table_says_what_is_broken_and_why_the_rest_was_not_evaluated(suite: Path, fake_python: Path) -> None:
    result = preflight(f"--stack=fake={fake_python}")
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert result.exit_code == 1
    assert lines[0].startswith("rig: no GPUs")
    assert lines[1].startswith("stack fake: sglang 0.5.23")
    (bad,) = [line for line in lines if "the library is real" in line]
    assert bad.startswith("BROKEN")
    assert bad.endswith("import.abi: the library is a stand-in")
    (good,) = [line for line in lines if "as it should be" in line]
    assert good.startswith("ok")
    assert good.endswith("8 of 8")
    (gpu,) = [line for line in lines if "GPUs answer" in line]
    assert gpu.startswith("- ")
    assert any(line.startswith("better") and "a known defect" in line for line in lines)
    assert any("log: " in line for line in lines)
    assert lines[-1].startswith("1 broken, 1 ok, 1 better than claimed, 1 not evaluated (1 gpus); ")
    assert not [line for line in lines if "===" in line or "passed" in line], "pytest's noise"


def test_nothing_broken_exits_0_and_is_remembered(suite: Path, fake_python: Path) -> None:
    result = preflight(f"--stack=fake={fake_python}", "-k", "test_good or reachable")
    assert result.exit_code == 0, result.output
    told = CliRunner().invoke(main, ["history", "preflight.good"])
    assert "HOLDS" in told.output


def test_json_has_every_check_with_its_evidence(suite: Path, fake_python: Path) -> None:
    result = preflight(f"--stack=fake={fake_python}", "--json", "--ledger=none")
    assert result.exit_code == 1
    whole = json.loads(result.stdout)
    assert set(whole) == {"rig", "stacks", "checks", "broken", "seconds"}
    assert whole["broken"] == 1
    assert whole["stacks"][0]["name"] == "fake"
    by_claim = {one["claim"]: one for one in whole["checks"]}
    assert {name: one["state"] for name, one in by_claim.items()} == {
        "preflight.good": "ok",
        "preflight.bad": "BROKEN",
        "preflight.cured": "better",
        "preflight.gpu": "-",
    }
    assert by_claim["preflight.good"]["found"] == {"said": "8 of 8"}
    assert by_claim["preflight.bad"]["outcome"] == "import.abi"
    assert Path(by_claim["preflight.bad"]["log"]).exists()
    assert by_claim["preflight.gpu"]["reason"] == "gpus"
    assert not Path(".gpuguard/ledger.sqlite").exists()


def test_gpus_are_used_where_there_are_some_and_cold_caches_are_told(
    suite: Path, fake_python: Path, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "empty"))
    result = preflight(f"--stack=fake={fake_python}", "-k", "reachable")
    assert result.exit_code == 0, result.output
    assert "ok     GPUs answer" in result.output
    (cold,) = [line for line in result.output.splitlines() if "cold JIT caches" in line]
    assert "flashinfer" in cold


def test_several_stacks_have_a_column_each(suite: Path, fake_python: Path) -> None:
    result = preflight(f"--stack=old={fake_python}", f"--stack=new={fake_python}", "-k", "good")
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.output.splitlines() if line.startswith("ok ")] == ["old", "new"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-k", "nosuchcheck"), "no check matches 'nosuchcheck'"),
        (("--stack=x=/nowhere/python",), "this python does not exist"),
        (("--rig=sim:nosuchcard:1",), "nosuchcard"),
        (("-k", "and and"), "and and"),
    ],
)
def test_what_cannot_be_run_exits_2_with_the_cause(suite: Path, words: tuple[str, ...], said: str) -> None:
    result = preflight(*words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_broken_suite_is_no_clean_bill(suite: Path, fake_python: Path) -> None:
    (suite / "test_checks.py").write_text("import nosuchmodule\n")
    result = preflight(f"--stack=fake={fake_python}")
    assert result.exit_code == 2
    assert "nosuchmodule" in result.output


def test_settings_are_those_of_this_folder_without_its_options(suite: Path, fake_python: Path) -> None:
    Path("pytest.ini").write_text("[pytest]\naddopts = -k nothing -n 7\ngpuguard_log_dir = mine\n")
    result = preflight(f"--stack=fake={fake_python}", "-k", "bad")
    assert result.exit_code == 1, result.output
    assert list(Path("mine").glob("*probe-look.log"))


def command(suite: Path, fake_python: Path, marker: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own, with this suite; all that it starts carries the marker."""
    code = (
        "import sys; from pathlib import Path; from pytest_gpuguard import cli_preflight; "
        f"cli_preflight.suite_folder = lambda: Path({str(suite)!r}); "
        f"sys.argv = ['gpuguard', 'preflight', '--stack=fake={fake_python}']; "
        "from pytest_gpuguard.cli import main; main()"
    )
    env = {**os.environ, "GPUGUARD_TEST_MARKER": marker}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, start_new_session=True)


def test_ctrl_c_ends_the_probe_too(suite: Path, fake_python: Path) -> None:
    sign = Path("hangs").absolute()
    (suite / "test_checks.py").write_text(
        textwrap.dedent(
            f"""
            from pytest_gpuguard import works

            @works
            def test_it(probe):
                probe("./look.py", args={{"hang": {str(sign)!r}}}, deadline="100s")
            """
        )
    )
    marker = f"{os.getpid()}-preflight"
    run = command(suite, fake_python, marker)
    assert wait_for(sign.exists, 60)
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    assert run.wait(40) != 0
    assert wait_for(lambda: not started_by(marker), 5)
    assert time.monotonic() - began < 40


def test_the_shipped_suite_is_found() -> None:
    assert sorted(one.name for one in cli_preflight.suite_folder().glob("test_*.py"))


def test_what_changed_since_it_was_last_looked_at_is_told(
    suite: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = preflight(f"--stack=fake={fake_python}", "-k", "test_good")
    assert first.exit_code == 0, first.output
    assert "changed since" not in first.output
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    again = preflight(f"--stack=fake={fake_python}", "-k", "test_good")
    assert "stack fake: changed since it was last looked at: env NCCL_ALGO not there → Tree" in again.output
    other = preflight(f"--stack=other={fake_python}", "-k", "test_good")
    assert "changed since" not in other.output, "another stack of which nothing is known"


def test_hearsay_is_left_out_unless_it_is_asked_for(suite: Path, fake_python: Path) -> None:
    source = CLAIMS.replace('@works\n@claim(id="preflight.bad"', '@works\n@claim(status="hearsay", id="preflight.bad"')
    (suite / "test_checks.py").write_text(source)
    without = json.loads(preflight(f"--stack=fake={fake_python}", "--json").stdout)
    assert [one["claim"] for one in without["checks"]] == ["preflight.good", "preflight.cured", "preflight.gpu"]
    result = preflight(f"--stack=fake={fake_python}", "--json", "--hearsay", "-k", "test_bad")
    (bad,) = json.loads(result.stdout)["checks"]
    assert bad["verdict"] == "CONTRADICTED (worse)"
    assert bad["state"] == "open", "hearsay is never red"
    assert result.exit_code == 0


def test_parameters_tell_checks_of_one_title_apart(suite: Path, fake_python: Path) -> None:
    source = """
import pytest
from pytest_gpuguard import claim, works

@pytest.mark.parametrize("name", ["one", "two"])
@works
@claim(id="preflight.several", title="a library")
def test_it(probe, name):
    probe("./look.py", args={"name": name})
"""
    (suite / "test_checks.py").write_text(source)
    result = preflight(f"--stack=fake={fake_python}", f"--stack=other={fake_python}")
    rows = [" ".join(line.split()[1:5]) for line in result.output.splitlines() if line.startswith("ok ")]
    assert sorted(rows) == [f"{stack} a library [{name}]" for stack in ("fake", "other") for name in ("one", "two")]


def test_a_run_that_ends_before_all_checks_is_no_clean_bill(suite: Path, fake_python: Path) -> None:
    (suite / "test_zz.py").write_text(
        "import os\nfrom pytest_gpuguard import works\n@works\ndef test_end(probe):\n    os._exit(0)\n"
    )
    result = preflight(f"--stack=fake={fake_python}", "-k", "test_good or test_end")
    assert result.exit_code == 2
    assert "pytest ended after 1 of 2 checks (status 0)" in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_killed_leaves_no_run_behind(suite: Path, fake_python: Path, number: int) -> None:
    sign, marker = Path("hangs").absolute(), f"{os.getpid()}-preflight-{number}"
    claims = """
        from pytest_gpuguard import works

        @works
        def test_it(probe):
            probe("./look.py", args={"hang": SIGN}, deadline="100s")

        @works
        def test_next(probe):
            probe("./look.py", args={"hang": SIGN + "2"}, deadline="100s")
        """
    (suite / "test_checks.py").write_text(textwrap.dedent(claims).replace("SIGN", repr(str(sign))))
    run = command(suite, fake_python, marker)
    assert wait_for(sign.exists, 60)
    run.send_signal(number)
    run.wait(40)
    assert wait_for(lambda: not started_by(marker), 15)
    assert not Path(f"{sign}2").exists()


def test_settings_that_would_hide_the_suite_do_not(
    suite: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pytest.ini").write_text(
        "[pytest]\npython_files = *_spec.py\npython_functions = spec_*\nusefixtures = nothing_like_it\n"
        "required_plugins = pytest-nothing-like-it\ngpuguard_require = gpus\n"
    )
    Path("json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    result = preflight(f"--stack=fake={fake_python}", "-k", "test_good or reachable")
    assert result.exit_code == 0, result.output
    assert "1 ok, 1 not evaluated" in result.output


def test_the_ledger_is_that_of_the_folder_with_the_settings(
    suite: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pytest.ini").write_text("[pytest]\n")
    Path("deeper").mkdir()
    top = Path.cwd()
    monkeypatch.chdir("deeper")
    assert preflight(f"--stack=fake={fake_python}", "-k", "test_good").exit_code == 0
    assert (top / ".gpuguard" / "ledger.sqlite").exists()


def test_a_ledger_that_cannot_be_written_is_told(suite: Path, fake_python: Path) -> None:
    result = preflight(f"--stack=fake={fake_python}", "--ledger=sqlite:////dev/null/x.sqlite", "-k", "test_good")
    assert result.exit_code == 0
    assert "the ledger failed" in result.stderr


def test_what_fails_after_a_check_is_a_row_of_its_own(suite: Path, fake_python: Path) -> None:
    source = """
import pytest
from pytest_gpuguard import works

@pytest.fixture
def late():
    yield
    raise RuntimeError("it did not come back")

@works
def test_it(probe, late):
    probe("./look.py")
"""
    (suite / "test_checks.py").write_text(source)
    result = preflight(f"--stack=fake={fake_python}")
    assert result.exit_code == 1
    assert "BROKEN after test_it" in result.output
    assert "RuntimeError: it did not come back" in result.output
