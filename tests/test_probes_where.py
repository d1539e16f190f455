"""Where probes run: leased GPUs, other stacks, containers, beside a server; and what is left when pytest is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .docker.fixtures import IMAGE, Docker
from .probed import one
from .test_killed import started_by, wait_for

Run = Any
FakeRigs = Any


def test_a_simulated_rig_runs_no_probes(claims: Run, probed: Any) -> None:
    result = claims(
        one("answer", "@needs_gpus(1)\n        @works"), "--gpuguard-rig=sim:h200:1", stack="sim:sglang==0.5.9"
    )
    result.stdout.fnmatch_lines(["REHEARSED NOT_EVALUATED *a simulated rig runs no probes"])
    assert probed() == []


def test_gpus_are_leased_clean_and_no_more_than_asked_for(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=4)
    rig.apply(monkeypatch)
    rig.alloc(3, 5 << 30)
    result = claims(
        """
        @needs_gpus(2)
        @works
        def test_two(probe):
            probe("./look.py", args={"how": "a"})

        @needs_gpus(1)
        @works
        def test_none(probe):
            found = probe("./look.py", args={"how": "b"}, gpus=0).data
            assert len(found["rig"]) == 4 and found["sms"] == ["120"] and found["driver"]

        @needs_gpus(1)
        @works
        def test_more(probe):
            probe("./look.py", args={"how": "c"}, gpus=2)

        @needs_gpus(5)
        @works
        def test_too_many(probe):
            probe("./look.py", args={"how": "d"})
        """,
        "--gpuguard-wait=1",
    )
    result.stdout.fnmatch_lines(
        [
            "INFRA *test_more *write @needs_gpus(2)*",
            "NOT_EVALUATED *test_too_many *needs 5 GPUs*",
            "HOLDS *test_none *",
            "HOLDS *test_two *",
        ]
    )
    assert sorted(probed()) == [f"a 0,1 {rig.uuid(0)} {rig.uuid(1)}", "b  "]


def test_all_gpus_that_meet_the_needs_are_leased_at_once(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    claims(one("answer", "@needs_gpus(1)\n        @works", ', gpus="all"')).assert_outcomes(passed=1)
    (line,) = probed()
    assert line.split()[1] == "0,1,2"


def test_a_dirty_gpu_is_a_fault_of_the_host(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.alloc(0, 5 << 30)
    source = one("answer", "@needs_gpus(1)\n        @works")
    result = claims(source, "--gpuguard-wait=1", ini="gpuguard_reclaim = 1s\n")
    result.stdout.fnmatch_lines(["INFRA *infra.dirty_gpu*"])
    assert probed() == []


def test_a_stack_that_cannot_be_asked_is_a_fault_of_the_host(claims: Run, probed: Any, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    claims(one("answer"), stack=str(broken)).stdout.fnmatch_lines(["INFRA *infra.boot*instead of answering*"])


def test_an_image_that_is_not_there_is_not_evaluated(claims: Run, probed: Any, docker: Docker) -> None:
    result = claims(one("answer"), stack="docker:example/none:1")
    result.stdout.fnmatch_lines(["gpuguard: 1 NOT_EVALUATED (1 stack: *"])


def test_a_probe_runs_in_a_container_too(claims: Run, probed: Any, docker: Docker) -> None:
    result = claims(one("answer", given=", env={'PROBED': '/dev/null'}"), stack=f"docker:{IMAGE}")
    result.stdout.fnmatch_lines(["HOLDS *answered in * all is answer"])
    assert docker.containers == []


def test_after_kill_9_of_pytest_the_probe_is_gone(
    pytester: pytest.Pytester, probed: Any, fake_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"{os.getpid()}-probe"
    monkeypatch.setenv("GPUGUARD_TEST_MARKER", marker)
    pytester.makepyfile(
        """
        from pytest_gpuguard import works

        @works
        def test_it(probe):
            probe("./look.py", args={"how": "hang"}, deadline="100s")
        """
    )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--gpuguard-stack=fake={fake_python}"]
    run = subprocess.Popen(words, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for(probed, 60)
    assert len(started_by(marker)) >= 3, "pytest, warden, probe"
    run.kill()
    run.wait()
    assert wait_for(lambda: not started_by(marker), 5)


def test_a_test_without_a_claim_asks_each_stack(claims: Run, probed: Any, fake_python: Path) -> None:
    source = """
        def test_it(probe):
            assert probe("./look.py").data["how"] == "answer"
        """
    result = claims(source, f"--gpuguard-stack=other={fake_python}")
    result.assert_outcomes(passed=2)


def test_a_small_gpu_beside_those_that_serve_is_left_out(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=3)
    rig.shared.gpu[0].total = 2 << 30
    rig.shared.gpu[0].cc_major, rig.shared.gpu[0].cc_minor = 6, 1
    rig.apply(monkeypatch)
    result = claims(
        """
        @needs_gpus(1)
        @works
        def test_all(probe):
            probe("./look.py", args={"how": "all"}, gpus="all")

        @needs_gpus(1)
        @works
        def test_none(probe):
            assert probe("./look.py", args={"how": "none"}, gpus=0).data["sms"] == ["120"]
        """
    )
    result.assert_outcomes(passed=2)
    assert probed()[0].split()[:2] == ["all", "1,2"]


@pytest.mark.parametrize("asked", [', gpus="all"', ""])
def test_where_one_gpu_serves_it_is_the_one(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    rig = fake_rig(n=2)
    rig.shared.gpu[0].total = 2 << 30
    rig.apply(monkeypatch)
    claims(one("answer", "@needs_gpus(1)\n        @works", asked)).assert_outcomes(passed=1)
    (line,) = probed()
    assert line.split()[1] == "1"


def test_of_several_mig_devices_a_probe_gets_one(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process the first one alone."""
    rig = fake_rig(n=2, card="h200")
    migs = [rig.partition(gpu, ("3g.71gb", 71424))[0] for gpu in (0, 1)]
    rig.apply(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(migs))
    claims(one("answer", "@needs_gpus(1)\n        @works", ', gpus="all"')).assert_outcomes(passed=1)
    (line,) = probed()
    assert line.split()[1:] in ([migs[0], migs[0]], [migs[1], migs[1]])


def test_each_python_is_asked_itself(claims: Run, probed: Any, fake_python: Path) -> None:
    other = f"--gpuguard-stack=other={fake_python.with_name('python3')}"
    claims(one("answer"), other).assert_outcomes(passed=2)
    assert len(probed()) == 2


def test_a_fault_of_the_host_is_asked_again(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.apply(monkeypatch)
    rig.alloc(0, 5 << 30)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    result = claims(
        """
        import os
        from pathlib import Path
        from tests.standin import standin

        @needs_gpus(1)
        @works
        def test_1(probe):
            probe("./look.py")

        @needs_gpus(1)
        @works
        def test_2(probe):
            for slot in standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0].process:
                slot.bytes = slot.pid = 0
            probe("./look.py")
        """,
        "--gpuguard-wait=1",
        ini="gpuguard_reclaim = 1s\n",
    )
    result.stdout.fnmatch_lines(["INFRA *test_1 *infra.dirty_gpu*", "HOLDS *test_2 *answered in*"])


def test_a_probe_leaves_the_claims_own_server_alone(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(
        """
        import urllib.request

        @needs_gpus(1)
        @serves("sglang", MODEL)
        @fits(margin="1GiB")
        def test_it(server, probe):
            probe("./look.py")
            assert urllib.request.urlopen(server.url + "/health").status == 200
        """
    )
    result.stdout.fnmatch_lines(["HOLDS *test_it *GiB free"])
    assert len(probed()) == 1


def test_an_exclusive_claim_has_the_whole_box_clean(
    claims: Run, probed: Any, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=2)
    rig.apply(monkeypatch)
    rig.alloc(1, 5 << 30)
    source = one("answer", "@needs_gpus(1, exclusive=True)\n        @works")
    result = claims(source, "--gpuguard-wait=1", ini="gpuguard_reclaim = 1s\n")
    result.stdout.fnmatch_lines(["INFRA *infra.dirty_gpu*"])
