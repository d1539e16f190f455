"""Claims from mark to verdict, in a pytest of their own, against a stack that boots in a tenth of a second."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import psutil
import pytest

Run = Any


def lines(result: pytest.RunResult, *patterns: str) -> None:
    result.stdout.fnmatch_lines(list(patterns), consecutive=False)


def test_a_server_that_comes_up_makes_fits_hold(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @fits(kv_tokens=">=4096")
        def test_fits(): ...
        """
    )
    result.assert_outcomes(passed=1)
    lines(result, "rig: *", "stack fake: sglang 0.5.23*", "HOLDS *test_fits*ready*4096 KV tokens", "gpuguard: 1 HOLDS")
    assert result.ret == 0


NEGATIVE = """
    @serves("sglang", MODEL, CPU, env={{"FAKE_SGLANG": "{mode}"}})
    @{expectation}
    def test_it(): ...
"""


@pytest.mark.parametrize(
    ("mode", "expectation", "verdict"),
    [
        ("kv_pool", 'ooms("kv_pool")', "HOLDS"),
        ("ready", 'ooms("kv_pool")', "CONTRADICTED (better)"),
        ("weights_oom", 'ooms("kv_pool")', "CHANGED"),
        ("weights_oom", 'ooms("weights")', "HOLDS"),
        ("weights_oom", "ooms", "HOLDS"),
        ("host_oom", 'ooms("host")', "HOLDS"),
        ("host_oom", "ooms", "CHANGED"),
        ("keyerror", 'ooms("kv_pool")', "INCONCLUSIVE"),
        ("keyerror", 'unsupported("symm mem", how="crashes", match="KeyError: 12")', "HOLDS"),
        ("silent_exit", 'ooms("kv_pool")', "INCONCLUSIVE"),
        ("port", 'ooms("kv_pool")', "INFRA"),
        ("foreign", 'ooms("kv_pool")', "INFRA"),
        ("kv_pool", "fits", "CONTRADICTED (worse)"),
        ("keyerror", "fits", "CONTRADICTED (worse)"),
        ("silent_exit", "fits", "CONTRADICTED (worse)"),
        ("port", "fits", "INFRA"),
    ],
)
def test_a_boot_is_judged_by_its_reason(claims: Run, mode: str, expectation: str, verdict: str) -> None:
    result = claims(NEGATIVE.format(mode=mode, expectation=expectation))
    found = re.search(r"^gpuguard: 1 ([A-Z_]+(?: \(\w+\))?)", result.stdout.str(), re.MULTILINE)
    assert found, result.stdout.str()
    assert found[1] == verdict
    good = verdict in ("HOLDS", "INCONCLUSIVE")
    assert result.ret == (0 if good else 1)


def test_what_a_plain_strict_xfail_would_let_pass_does_not_hold(claims: Run) -> None:
    """Set-up error, wrong cause, busy port, our own deadline, missing model, a swallowed failure, a skip."""
    result = claims(
        """
        @pytest.fixture
        def broken():
            raise RuntimeError("the fixture is broken")

        @serves("sglang", MODEL, CPU)
        @ooms("kv_pool")
        def test_setup_error(broken): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "weights_oom"})
        @ooms("kv_pool")
        def test_wrong_cause(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "port"})
        @ooms("kv_pool")
        def test_busy_port(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "chatty"}, boot_timeout="1s")
        @ooms("kv_pool")
        def test_our_deadline(): ...

        @serves("sglang", "/no/such/model", CPU)
        @ooms("kv_pool")
        def test_missing_model(): ...

        @ooms("kv_pool")
        def test_swallowed(sglang_server):
            try:
                sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "weights_oom"})
            except Exception:
                pass

        @ooms("kv_pool")
        def test_not_even_booted():
            raise MemoryError("CUDA out of memory")

        @serves("sglang", MODEL, CPU)
        @ooms("kv_pool")
        def test_skips(server):
            pytest.skip("not today")

        @serves("sglang", MODEL, CPU)
        @ooms("kv_pool")
        def test_raises_the_right_words(server):
            raise RuntimeError("torch.OutOfMemoryError: CUDA out of memory")

        @serves("sglang", MODEL, CPU)
        @ooms("kv_pool")
        def test_calls_xfail(server):
            pytest.xfail("out of memory")
        """
    )
    lines(
        result,
        "INFRA *test_busy_port *port.in_use*",
        "INFRA *test_calls_xfail *xfail*",
        "INFRA *test_not_even_booted *",
        "INFRA *test_our_deadline *boot_timeout of 1 s*",
        "INFRA *test_raises_the_right_words *",
        "INFRA *test_setup_error *the fixture is broken*",
        "CHANGED *test_swallowed *oom.weights*",
        "CHANGED *test_wrong_cause *oom.weights*",
        "NOT_EVALUATED *test_missing_model *no such folder*",
        "NOT_EVALUATED *test_skips *not today*",
    )
    assert "HOLDS" not in result.stdout.str()
    assert result.ret == 1


def test_the_judge_reads_the_observation_also_when_the_body_swallows_it(claims: Run) -> None:
    result = claims(
        """
        @ooms("kv_pool")
        def test_swallowed(sglang_server):
            with pytest.raises(Exception, match="oom.kv_pool"):
                sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})

        @ooms("kv_pool")
        def test_raised(sglang_server):
            sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})

        @fits
        def test_came_up(sglang_server):
            assert sglang_server(MODEL, CPU).generate("x", 2) == "alpha beta"
        """
    )
    result.assert_outcomes(passed=3)
    lines(result, "gpuguard: 3 HOLDS")


def test_the_body_decides_whether_a_ready_server_works(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        def test_right(server):
            assert server.generate("x", 2) == "alpha beta"
            assert server.info["version"] == "0.5.23"

        @serves("sglang", MODEL, CPU)
        def test_wrong(server):
            assert server.generate("x", 2) == "something else"

        @serves("sglang", MODEL, CPU)
        def test_own_fault(server):
            server.no_such_thing

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "runtime_oom"})
        @ooms("runtime")
        def test_dies_in_use(server):
            server.generate("x")

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "runtime_oom"})
        @fits
        def test_dies_against_the_claim(server):
            server.generate("x")
        """
    )
    lines(
        result,
        "INFRA *test_own_fault *no_such_thing*",
        "CONTRADICTED (worse) *test_dies_against_the_claim *oom.runtime*",
        "CONTRADICTED (worse) *test_wrong *",
        "HOLDS *test_dies_in_use *oom.runtime*",
        "HOLDS *test_right *",
    )


def test_clipped_tokens_do_not_satisfy_the_claim(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, "--max-total-tokens 5000000")
        @fits(kv_tokens=">=5000000")
        def test_clipped(): ...
        """
    )
    lines(result, "CONTRADICTED (worse) *1000000 KV tokens (asked for 5000000, silently clipped), claimed >=5000000")


def test_flags_are_checked_before_anything_is_booted(claims: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(tmp_path / "boots"))
    result = claims(
        """
        @serves("sglang", MODEL, CPU, "--enable-ep-moe")
        @fits
        def test_removed(): ...

        @serves("sglang", MODEL, CPU, "--enable-ep-moe")
        @fails("args.removed")
        def test_removed_as_claimed(): ...

        @serves("sglang", MODEL, CPU, "--mem-fracton-static 0.8")
        @ooms("kv_pool")
        def test_typo(): ...
        """
    )
    lines(
        result,
        "INFRA *test_typo *--mem-fracton-static*did you mean --mem-fraction-static*",
        "CONTRADICTED (worse) *test_removed *args.removed*",
        "HOLDS *test_removed_as_claimed *args.removed*",
    )
    assert not (tmp_path / "boots").exists()


def test_argv_is_booted_verbatim_with_quotes_and_spaces(claims: Run, tmp_path: Path, monkeypatch: Any) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    result = claims(
        """
        @serves("sglang", MODEL, CPU, "--served-model-name 'a name' --json-model-override-args '{\\"a\\": \\"b c\\"}'",
                wrapper="env WRAPPED=1", layout="TP2 EP2")
        def test_it(): ...
        """
    )
    result.assert_outcomes(passed=1)
    argv = boots.read_text()
    assert """--device cpu --served-model-name a name --json-model-override-args {"a": "b c"}""" in argv
    assert "--tp-size 2 --ep-size 2" in argv


def test_equal_servers_boot_once_and_bodies_get_an_untouched_one(claims: Run, tmp_path: Path, monkeypatch: Any) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    source = """
        same = serves("sglang", MODEL, CPU)

        @same
        def test_first(): ...

        @serves("sglang", MODEL, CPU, "--context-length 99")
        def test_another_server(): ...

        @same
        def test_uses_it(server): assert server.generate("x", 1) == "alpha"

        @same
        @fits(kv_tokens=">=1")
        def test_second(): ...

        @same
        def test_uses_it_too(server): assert server.generate("x", 1) == "alpha"

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @ooms("kv_pool")
        def test_fails_once(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @ooms
        def test_fails_the_same(): ...
    """
    claims(source).assert_outcomes(passed=7)
    assert len(boots.read_text().splitlines()) == 4  # shared by three, another, one more for a body, the failing one
    boots.unlink()
    claims(source, "-p", "randomly", "-p", "no:cacheprovider").assert_outcomes(passed=7)
    boots.unlink()
    result = claims(source, "-k", "test_first or test_second")
    result.assert_outcomes(passed=2, deselected=5)
    assert len(boots.read_text().splitlines()) == 1


def test_windows_decide_what_is_stated_and_none_is_unstated(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @fits(when="sglang<0.5")
        @ooms("kv_pool", when="sglang>=0.5")
        def test_stated(): ...

        @serves("sglang", MODEL, CPU)
        @unsupported("x", how="rejected", when="sglang<0.5")
        def test_unstated(): ...
        """
    )
    lines(
        result,
        "UNSTATED *test_unstated *new on this stack (sglang 0.5.23): ready; last opinion: unsupported(x), sglang<0.5",
        "HOLDS *test_stated *",
    )
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == 0


def test_an_engine_that_is_not_driven_is_never_passed(claims: Run) -> None:
    result = claims(
        """
        @serves("vllm", MODEL)
        @fits
        def test_vllm(): ...
        """
    )
    result.assert_outcomes(skipped=1)
    lines(result, "NOT_EVALUATED *test_vllm *engine vllm is not driven by this version")


def test_max_mem_is_judged_from_what_the_engine_reports(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU)
        @max_mem("1.6GiB", of="weights")
        @max_mem("3.4GiB", of="static")
        def test_it(): ...
        """
    )
    lines(
        result, "*CONTRADICTED (worse): max_mem(3.4GiB, of=static): static memory 3.50 GiB*", "*HOLDS: max_mem(1.6GiB*"
    )


def test_hearsay_never_fails_and_fail_on_chooses(claims: Run) -> None:
    source = """
        @claim(status="hearsay")
        @serves("sglang", MODEL, CPU)
        @ooms
        def test_hearsay(): ...

        @serves("sglang", MODEL, CPU, "--context-length 7")
        @ooms
        def test_better(): ...
    """
    assert claims(source).ret == 1
    result = claims(source, "--gpuguard-fail-on", "worse,changed")
    assert result.ret == 0
    lines(result, "*1 skipped, 1 hearsay*")


def test_strict_fails_on_inconclusive(claims: Run) -> None:
    source = NEGATIVE.format(mode="keyerror", expectation="ooms")
    result = claims(source)
    assert result.ret == 0
    lines(result, "*1 inconclusive*")
    assert claims(source, "--gpuguard-strict").ret == 1


@pytest.mark.parametrize("option", [(), ("-n", "2")])
def test_junit_carries_verdict_and_outcome(claims: Run, pytester: pytest.Pytester, option: tuple[str, ...]) -> None:
    claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})
        @ooms("kv_pool")
        def test_holds(): ...

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "port"})
        @ooms("kv_pool")
        def test_infra(): ...

        @needs_sm120
        @serves("sglang", MODEL)
        @fits
        def test_elsewhere(): ...
        """,
        "--junitxml=out.xml",
        *option,
    )
    cases = {case.get("name"): case for case in ET.parse(pytester.path / "out.xml").iter("testcase")}
    found = {
        name: {prop.get("name"): prop.get("value") for prop in case.iter("property")} for name, case in cases.items()
    }
    assert found["test_holds"]["gpuguard_verdict"] == "HOLDS"
    assert found["test_holds"]["gpuguard_outcome"] == "oom.kv_pool"
    assert found["test_infra"]["gpuguard_verdict"] == "INFRA"
    assert found["test_elsewhere"]["gpuguard_reason"] == "gpus"
    assert cases["test_infra"].find("failure") is not None
    assert cases["test_holds"].find("failure") is None


def test_nothing_is_left_running(claims: Run, tmp_path: Path, monkeypatch: Any) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    claims(
        """
        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG": "proof"})
        def test_proof(): ...

        @serves("sglang", MODEL, CPU)
        def test_leaves_early(server):
            raise KeyboardInterrupt
        """,
        ini="gpuguard_grace = 1s",
    )
    pids = [int(line.split()[0]) for line in boots.read_text().splitlines()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("mode", ["noise"])
def test_a_log_full_of_noise_is_no_error(claims: Run, mode: str) -> None:
    claims(NEGATIVE.format(mode=mode, expectation="fits")).assert_outcomes(passed=1)
