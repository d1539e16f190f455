"""Ways in which a verdict could be wrong, each seen once or thought of: none of them may come back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

Run = Any

RECORD = """
import json, time
def pytest_runtest_logreport(report):
    if hasattr(report, "gpuguard"):
        with open("verdicts.jsonl", "a") as file:
            file.write(json.dumps({**report.gpuguard, "at": time.time()}) + "\\n")
"""


def verdicts(result: pytest.RunResult) -> dict[str, str]:
    """Verdict by test name, off the closing section."""
    found = re.findall(r"^((?:hearsay: )?[A-Z_]+(?: \(\w+\))?) +\S+::(\w+)", result.stdout.str(), re.MULTILINE)
    return {name: verdict for verdict, name in found}


def test_each_boot_is_judged_by_its_own_log(claims: Run) -> None:
    result = claims(
        """
        @fits
        def test_second_is_fine(sglang_server):
            with pytest.raises(Exception, match="oom.kv_pool"):
                sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
            assert sglang_server(MODEL, CPU).generate("x", 1) == "alpha"
        """
    )
    # The claim is contradicted by its first boot; the second one came up, or its generate would have raised.
    assert "oom.kv_pool" in result.stdout.str()
    assert verdicts(result) == {"test_second_is_fine": "CONTRADICTED (worse)"}


def test_a_server_that_a_test_uses_is_not_replaced_by_another(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @fits
        def test_two(server, sglang_server):
            with pytest.raises(Exception, match="one server at a time"):
                sglang_server(MODEL, CPU, "--context-length 7")
            assert server.generate("x", 1) == "alpha"
        """
    )
    assert verdicts(result) == {"test_two": "INFRA"}
    assert "call stop() on the first one" in result.stdout.str()


def test_a_first_server_may_be_stopped_for_a_second(claims: Run) -> None:
    result = claims(
        """
        @fits
        def test_in_turn(sglang_server):
            first = sglang_server(MODEL, CPU)
            first.stop()
            assert sglang_server(MODEL, CPU, "--context-length 7").generate("x", 1) == "alpha"
        """
    )
    assert verdicts(result) == {"test_in_turn": "HOLDS"}


def test_what_the_body_itself_did_is_not_lost(claims: Run) -> None:
    result = claims(
        """
        @ooms("kv_pool")
        def test_asserts_after(sglang_server):
            try:
                sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
            except Exception:
                pass
            assert 1 == 2

        @fits
        def test_without_a_server(): ...

        @serves("sglang", MODEL, CPU)
        @fits
        async def test_async(): ...
        """
    )
    assert set(verdicts(result).values()) == {"INFRA"}
    assert len(verdicts(result)) == 3


def test_failing_requests_contradict_a_speed(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "flaky"})
        @expect_toks(min=1, output_len=4)
        def test_flaky(): ...
        """
    )
    assert verdicts(result) == {"test_flaky": "CONTRADICTED (worse)"}
    assert "requests failed in 1 of " in result.stdout.str()


def test_a_fault_of_the_moment_is_not_shared(claims: Run) -> None:
    result = claims(
        """
        slow = {"FAKE_SGLANG_DELAY": "1"}

        @serves("sglang", MODEL, CPU, env=slow, boot_timeout="1s")
        @fits
        def test_1_impatient(): ...

        @serves("sglang", MODEL, CPU, env=slow)
        @fits
        def test_2_patient(): ...
        """
    )
    assert verdicts(result) == {"test_1_impatient": "INFRA", "test_2_patient": "HOLDS"}


def test_who_killed_the_server_decides(claims: Run) -> None:
    result = claims(
        """
        import os, signal
        import psutil

        def server_process():
            (one,) = [p for p in psutil.Process().children(recursive=True) if "launch_server" in " ".join(p.cmdline())]
            return one

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "vanish"})
        @fits
        def test_dies_by_itself(server):
            server.generate("x")

        @serves("sglang", MODEL, CPU)
        @fits
        def test_warden_is_killed(server):
            server_process().parent().kill()
            server_process().wait(10)

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "rank_died"})
        @ooms("host")
        def test_exit_code_says_oom(): ...
        """
    )
    assert verdicts(result) == {
        "test_dies_by_itself": "CONTRADICTED (worse)",
        "test_warden_is_killed": "INFRA",
        "test_exit_code_says_oom": "INCONCLUSIVE",
    }


def test_a_flood_before_the_end_is_read_to_its_end(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "burst"})
        @ooms("kv_pool")
        def test_burst(): ...
        """
    )
    assert verdicts(result) == {"test_burst": "HOLDS"}


def test_the_judgement_does_not_wait_for_a_server_that_will_not_stop(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RECORD)
    claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "stubborn"})
        @ooms("kv_pool")
        def test_stubborn(): ...
        """,
        ini="gpuguard_grace = 10s",
    )
    (data,) = [json.loads(line) for line in (pytester.path / "verdicts.jsonl").read_text().splitlines()]
    assert data["verdict"] == "HOLDS"
    assert data["at"] - Path(data["log"]).stat().st_mtime < 5  # 0.1 s as a rule; the stop alone takes 10


def test_missing_things_are_the_same_whoever_asks(claims: Run) -> None:
    result = claims(
        """
        @fits
        def test_model(sglang_server):
            sglang_server("/no/such/model", CPU)

        @fits
        def test_gpus(sglang_server):
            sglang_server(MODEL, "--tp-size 4")
        """
    )
    assert set(verdicts(result).values()) == {"NOT_EVALUATED"}
    assert "1 models: " in result.stdout.str()
    assert "1 gpus: " in result.stdout.str()


def test_hearsay_is_never_red_also_with_a_broken_fixture(claims: Run) -> None:
    result = claims(
        """
        @pytest.fixture
        def broken():
            raise RuntimeError("the fixture is broken")

        @serves("sglang", MODEL, CPU)
        @claim(status="hearsay")
        @fits
        def test_it(broken): ...
        """
    )
    assert result.ret == 0
    assert verdicts(result) == {"test_it": "hearsay: INFRA"}


def test_a_worker_that_crashes_takes_no_claim_out_of_the_count(claims: Run) -> None:
    result = claims(
        """
        import os

        @serves("sglang", MODEL, CPU)
        @fits
        def test_crashes(server):
            os._exit(3)

        @serves("sglang", MODEL, CPU)
        @fits
        def test_other(): ...
        """,
        "-n",
        "2",
    )
    assert verdicts(result)["test_crashes"] == "INFRA"
    assert result.ret == 1


def test_secrets_stay_out_of_everything_that_is_kept(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RECORD)
    result = claims(
        """
        @serves("sglang", MODEL, CPU, "--api-key 'a secret' --served-model-name 'b c'")
        @fits
        def test_ready(server):
            assert server.generate("x", 1) == "alpha"

        @serves("sglang", MODEL, CPU, "--api-key=sekret --enable-ep-moe")
        @fits
        def test_refused(): ...
        """,
        "--junitxml=out.xml",
        "-v",
    )
    kept = (pytester.path / "verdicts.jsonl").read_text() + (pytester.path / "out.xml").read_text()
    kept += result.stdout.str()
    assert "a secret" not in kept
    assert "sekret" not in kept
    assert '"b c"' in kept  # the other words of the command line are all there
    assert verdicts(result)["test_ready"] == "HOLDS"
    log = Path(json.loads((pytester.path / "verdicts.jsonl").read_text().splitlines()[0])["log"])
    assert log.stat().st_mode & 0o077 == 0


def test_what_the_lease_decides_cannot_be_overridden(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, env={"CUDA_VISIBLE_DEVICES": "7"})
        @fits
        def test_it(): ...
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: @serves: env may not set CUDA_VISIBLE_DEVICES*"])


def test_a_strangers_unregistered_mark_is_no_misspelt_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.server\n@pytest.mark.fit\ndef test_it(): ...")
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1, warnings=2)


def test_a_body_may_ask_for_its_server_late(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @fits
        def test_late(request):
            assert request.getfixturevalue("server").generate("x", 1) == "alpha"
        """
    )
    assert verdicts(result) == {"test_late": "HOLDS"}
