"""Every option: what it refuses at once, naming option, cause and cure, and what only a claim can find out."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import own_ports

Run = Any

PLAIN = "def test_plain(): ..."

BAD = [
    ("--gpuguard-rig", "sim:rtx-pro-6000:8", "is no card of the catalogue; did you mean rtx-pro-6000-"),
    ("--gpuguard-rig", "sim:h200:0", "a rig with 0 GPUs cannot be simulated; n is 1 to 64"),
    ("--gpuguard-rig", "sim:h200", "is no rig: write auto, sim:<card>:<n>"),
    ("--gpuguard-rig", "replay:folder", "replayed rigs are not available in this version; use auto"),
    ("--gpuguard-stack", "new=sim:sglang==0.5.7", "a simulated stack runs on a simulated rig only"),
    ("--gpuguard-rig", "h200", "'h200' is no rig: it takes auto"),
    ("--gpuguard-stack", "/opt/new/bin/python", "write NAME=PYTHON, such as --gpuguard-stack new=/opt/new/bin/python"),
    ("--gpuguard-stack", "new=", "write NAME=PYTHON"),
    ("--gpuguard-stack", "new=docker:", "'docker:' names no image: write docker:IMAGE"),
    ("--gpuguard-stack", "new=podman:--privileged", "names no image: write podman:IMAGE"),
    ("gpuguard_mounts", "data", "'data' is no mount: write HOST:CONTAINER"),
    ("gpuguard_mounts", "/no/such/folder:/data", "there is no /no/such/folder on this machine"),
    ("gpuguard_container_env", "A-B=planted", "'A-B' is no name of a variable"),
    ("gpuguard_container_args", "--restart=always", "'--restart=always' is not yours to set"),
    ("gpuguard_container_args", "'", "are no words of a command line"),
    ("--gpuguard-stack", "new=/no/such/python", "does not exist; give the python of the environment"),
    ("--gpuguard-stack", "new=FOLDER", "is not an executable file; give the python of the environment"),
    ("--gpuguard-stack", "new=FILE", "is not an executable file; give the python of the environment"),
    ("--gpuguard-wait", "soon", "'soon' is not a duration"),
    ("--gpuguard-wait", "-5", "'-5' is not a duration"),
    ("--gpuguard-require", "gpu", "'gpu' is not known; did you mean 'gpus'?"),
    ("--gpuguard-require", "sm", "'sm' is never a fault of this runner; it takes gpus, driver, cuda, package"),
    ("--gpuguard-fail-on", "worse,chnged", "'chnged' is not known; did you mean 'changed'?"),
    ("--gpuguard-fail-on", "xyz", "'xyz' is not known; it takes worse, changed, better"),
    ("--gpuguard-ports", "30000", "'30000' is not a port range: write 20000-32767"),
    ("--gpuguard-ports", "30000-20000", "is not a port range"),
    ("--gpuguard-ports", "80-443", "is not a port range"),
    ("gpuguard_stall_timeout", "never", "'never' is not a duration"),
    ("gpuguard_grace", "a while", "'a while' is not a duration"),
    ("gpuguard_reclaim", "3 parsecs", "'3 parsecs' is not a duration"),
    ("gpuguard_baseline", "1024", "'1024' is not a size"),
    ("gpuguard_models", "qwen", "'qwen' is not NAME = VALUE"),
    ("gpuguard_wait", "soon", "'soon' is not a duration"),
]


def test_every_bad_value_is_a_usage_error_with_option_cause_and_cure(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """In this process: a usage error needs none of its own."""
    from pytest_gpuguard.options import read_config
    from pytest_gpuguard.plugin import pytest_configure

    (tmp_path / "file").write_text("")
    failed = []
    for option, value, said in BAD:
        value = value.replace("FOLDER", str(tmp_path)).replace("FILE", str(tmp_path / "file"))
        if option.startswith("--"):
            pytester.makeini("[pytest]")
            config = pytester.parseconfig(f"{option}={value}")
        else:
            pytester.makeini(f"[pytest]\n{option} = {value}")
            config = pytester.parseconfig()
        name = option.removeprefix("--gpuguard-").removeprefix("gpuguard_").replace("_", "-")
        try:
            pytest_configure(config)
        except pytest.UsageError as error:
            if said not in str(error) or name not in str(error).replace("_", "-").partition(":")[0]:
                failed.append(f"{option}={value}: {error}")
        else:
            failed.append(f"{option}={value} was taken: {read_config(config)}")
    assert failed == []


def test_a_usage_error_ends_pytest_with_its_own_code(claims: Run) -> None:
    result = claims(PLAIN, "--gpuguard-fail-on=wors")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpuguard-fail-on: 'wors' is not known; did you mean 'worse'?"])


def test_good_values_mean_what_they_say(pytester: pytest.Pytester) -> None:
    from pytest_gpuguard.options import read_config

    pytester.makeini(
        "[pytest]\ngpuguard_wait = 2h\ngpuguard_fail_on = worse\ngpuguard_baseline = 2GiB\ngpuguard_log_dir = logs\n"
        "gpuguard_models =\n  a = /models/a\n  b = /models/b\n"
    )
    config = read_config(pytester.parseconfig("--gpuguard-wait=90", "--gpuguard-require=gpus,models,gpus"))
    assert config.wait_s == 90
    assert config.fail_on == ("worse",)
    assert config.require == ("gpus", "models")
    assert config.baseline_bytes == 2 << 30
    assert config.log_dir == pytester.path / "logs"
    assert dict(config.models) == {"a": "/models/a", "b": "/models/b"}
    assert (config.rig, config.stacks, config.strict, config.ports) == ("auto", (), False, (20000, 32767))


def test_a_simulated_rig_of_the_ini_labels_the_run(pytester: pytest.Pytester) -> None:
    from pytest_gpuguard.options import is_simulated, names_a_stack, read_config

    pytester.makeini("[pytest]\ngpuguard_rig = sim:H200:2\n")
    config = pytester.parseconfig()
    settings = read_config(config)
    assert (settings.rig, settings.simulated, settings.label) == ("sim:h200:2", True, "REHEARSED")
    assert (is_simulated(config), names_a_stack(config)) == (True, False)
    real = pytester.parseconfig("--gpuguard-rig=auto", "--gpuguard-stack=a=/bin/sh")
    assert (is_simulated(real), names_a_stack(real), read_config(real).label) == (False, True, None)


ONE = """
    @serves("sglang", MODEL, CPU)
    @ooms("kv_pool")
    def test_it(): ...
"""


def test_ports_that_cannot_be_had_are_infra_with_a_cure(claims: Run) -> None:
    first = int(own_ports().partition("-")[0])
    narrow = claims(ONE, f"--gpuguard-ports={first}-{first + 99}")
    narrow.stdout.fnmatch_lines([f"INFRA *test_it *infra.lease: No block of 256 free ports is left in {first}-*"])
    assert "wider range of ports" in narrow.stdout.str()
    start = -(-first // 64) * 64
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", start + 7))
        stranger.listen()
        taken = claims(ONE, f"--gpuguard-ports={start}-{start + 255}")
    taken.stdout.fnmatch_lines([f"*other programs listen on {start + 7}*"])
    assert re.search(r"^INFRA +\S+test_it +infra\.lease", taken.stdout.str(), re.MULTILINE)
    assert (narrow.ret, taken.ret) == (1, 1)


def test_a_log_folder_that_cannot_be_is_infra_with_its_path(claims: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "in-the-way").write_text("a file")
    result = claims(ONE, "--gpuguard-log-dir=in-the-way/logs")
    text = result.stdout.str()
    assert re.search(r"^INFRA +\S+test_it +infra\.boot: /\S+/in-the-way/logs/", text, re.MULTILINE), text
    assert "log cannot be written (Not a directory), so nothing was started" in text
    assert "--gpuguard-log-dir" in text
    assert result.ret == 1
    elsewhere = claims(ONE, "--gpuguard-log-dir=elsewhere")
    assert elsewhere.ret == 1
    assert list((pytester.path / "elsewhere").glob("*test_it.log"))


def test_a_stack_without_the_engine_is_a_fault_only_where_it_was_named(claims: Run, tmp_path: Path) -> None:
    named = claims(ONE, stack=sys.executable)
    named.stdout.fnmatch_lines(["INFRA *test_it *stack 'fake' (*) has no sglang: install it there, or name another*"])
    assert named.ret == 1
    default = claims(ONE, stack="")
    default.stdout.fnmatch_lines(
        ["NOT_EVALUATED *test_it *stack 'default' (*) has no sglang: name one with --gpuguard-stack NAME=PYTHON"]
    )
    assert default.ret == 0
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho this is no python >&2\nexit 3\n")
    broken.chmod(0o755)
    gated = """
    @needs_package("sglang>=0.5")
    def test_gated(): ...
    """
    result = claims(ONE + gated, stack=str(broken))
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_gated *ended with status 3 instead of answering*",
            "INFRA *test_it *infra.boot: *ended with status 3 instead of answering*",
        ]
    )
    result.assert_outcomes(errors=2)
    assert result.ret == 1


def test_a_folder_that_is_no_model_is_told_and_evaluates_nothing(claims: Run, model: Path) -> None:
    (model / "config.json").unlink()
    result = claims(ONE)
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_it *the folder has no config.json, so it is no model*"])
    assert result.ret == 0
    assert claims(ONE, "--gpuguard-require=models").ret == 1


def test_a_stack_that_prints_at_start_up_is_read_all_the_same(claims: Run, tmp_path: Path, fake_python: Path) -> None:
    noisy = tmp_path / "noisy"
    noisy.mkdir()
    (noisy / "sitecustomize.py").write_text(
        "import sys; print('{\"hello\": 1}'); print('a warning', file=sys.stderr)\n"
    )
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={noisy} exec {fake_python} "$@"\n')
    wrapper.chmod(0o755)
    result = claims('@serves("sglang", MODEL, CPU)\ndef test_it(): ...', stack=str(wrapper))
    result.stdout.fnmatch_lines(["stack fake: sglang 0.5.23*", "HOLDS *test_it *"])
