"""Fixtures and marks as test writers use them: twins, misuse with its cure, servers of one's own, marks everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

Run = Any


def test_every_fixture_has_a_twin_under_our_name(claims: Run) -> None:
    result = claims(
        """
        def test_facts(rig, gpuguard_rig, stack, gpuguard_stack):
            assert rig is gpuguard_rig and stack is gpuguard_stack
            assert rig.gpus == ()
            assert stack.name == "fake" and stack.package("sglang") == "0.5.23"

        @serves("sglang", MODEL, CPU)
        def test_server(server, gpuguard_server):
            assert server is gpuguard_server
            assert server.url == f"http://127.0.0.1:{server.port}" and server.model == MODEL
            assert "fired up" in open(server.log).read()

        @serves("sglang", MODEL, CPU)
        def test_long_name_alone(gpuguard_server):
            assert gpuguard_server.generate("x", 1) == "alpha"

        @fits
        def test_own_server(gpuguard_sglang_server):
            assert gpuguard_sglang_server(MODEL, CPU).generate("x", 1) == "alpha"

        @pytest.mark.parametrize("rig", [1])
        def test_a_name_of_a_project_wins(rig):
            assert rig == 1
        """
    )
    result.assert_outcomes(passed=5)


def test_a_fixture_used_wrongly_says_what_to_use_instead(claims: Run) -> None:
    result = claims(
        """
        @pytest.fixture
        def warmed(server):
            server.generate("warm up")
            return server

        @serves("sglang", MODEL, CPU)
        def test_server_in_a_fixture(warmed): ...

        @pytest.fixture
        def early(sglang_server):
            return sglang_server(MODEL, CPU)

        @fits
        def test_boot_in_a_fixture(early): ...

        def test_boot_in_a_fixture_without_claim(early): ...

        @fits
        def test_nothing_declared(server): ...

        def test_no_claim(server): ...

        @fits
        def test_gpus_without_needs(gpus): ...

        @serves("sglang", MODEL, CPU)
        def test_gpus_beside_a_server(gpus): ...

        @fits
        def test_wrong_option(sglang_server):
            sglang_server(MODEL, CPU, layuot="TP2")
        """
    )
    text = result.stdout.str()
    for name, said in {
        "test_server_in_a_fixture": r"server\.generate was used before the test's call.*sglang_server",
        "test_boot_in_a_fixture": r"sglang_server\(…\) boots in the call phase: call it in the test's body",
        "test_nothing_declared": r"the fixture server needs @serves\(…\) on the test; .*sglang_server",
        "test_gpus_without_needs": r"the fixture gpus needs @needs_gpus\(n\)",
        "test_gpus_beside_a_server": r"a claim with @serves has its server's",
        "test_wrong_option": r"sglang_server: unknown argument 'layuot'; did you mean 'layout'\?",
    }.items():
        assert re.search(rf"^INFRA +\S+::{name} .*{said}", text, re.MULTILINE), f"{name}: {text}"
    assert re.search(r"ERROR at setup of test_no_claim(?s:.)*the fixture server needs @serves", text)
    assert re.search(r"ERROR at setup of test_boot_in_a_fixture_without_claim(?s:.)*boots in the call phase", text)
    assert "HOLDS" not in text


def test_a_plain_test_may_boot_servers_and_is_no_claim(
    claims: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    result = claims(
        """
        def test_passes(sglang_server):
            one = sglang_server(MODEL, CPU)
            assert one.get("/model_info")["model_path"] == MODEL
            body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
            assert one.post("/generate", body)["text"] == "alpha beta"

        def test_fails(sglang_server):
            assert sglang_server(MODEL, CPU).generate("x", 1) == "omega"

        def test_does_not_come_up(sglang_server):
            sglang_server(MODEL, CPU, env={"FAKE_SGLANG": "kv_pool"})

        def test_is_stopped_before_the_next_test(sglang_server):
            import os
            pid = int(open(os.environ["FAKE_SGLANG_BOOTS"]).read().split()[0])
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        """
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*AssertionError*'alpha' == 'omega'*", "*BootFailed: oom.kv_pool in phase *(log: *"])
    assert "gpuguard: 1" not in result.stdout.str()
    assert "= claims =" not in result.stdout.str()
    pids = [int(line.split()[0]) for line in boots.read_text().splitlines()]
    assert len(pids) == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_marks_of_module_class_and_parameters_make_one_claim(claims: Run) -> None:
    result = claims(
        """
        pytestmark = [serves("sglang", MODEL, CPU), claim(source="the module")]
        KV_POOL = {"FAKE_SGLANG": "kv_pool"}

        def test_of_the_module(): ...

        @serves("sglang", MODEL, CPU, env=KV_POOL)
        class TestClass:
            pytestmark = [ooms("kv_pool")]

            def test_of_the_class(self): ...

            @serves("sglang", MODEL, CPU)
            def test_of_the_nearest_server(self): ...

        @pytest.mark.parametrize(
            "tokens",
            [
                pytest.param(1, marks=fits(kv_tokens=">=1")),
                pytest.param(5000, marks=fits(kv_tokens=">=5000")),
                pytest.param(3, marks=[serves("sglang", MODEL, CPU, env=KV_POOL), ooms("kv_pool")]),
            ],
        )
        def test_param(tokens): ...
        """
    )
    result.stdout.fnmatch_lines(
        [
            "CONTRADICTED (better) *test_of_the_nearest_server *",
            "HOLDS *test_of_the_class *oom.kv_pool*",
            "HOLDS *test_of_the_module *ready*",
            "HOLDS *test_param[[]1] *ready*",
            "HOLDS *test_param[[]3] *oom.kv_pool*",
        ]
    )
    result.stdout.fnmatch_lines(["CONTRADICTED (worse) *test_param[[]5000] *4096 KV tokens, claimed >=5000*"])
