"""Claims about what a server really runs, from mark to verdict, against the stand-in stack."""

from __future__ import annotations

from typing import Any

import pytest

Run = Any
FakeRigs = Any


def lines(result: pytest.RunResult, *patterns: str) -> None:
    result.stdout.fnmatch_lines(list(patterns), consecutive=False)


def test_fall_backs_are_judged_by_what_the_server_says(claims: Run) -> None:
    result = claims(
        """
        OFF = "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available."
        ON = "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=2"
        symm = "--enable-torch-symm-mem"

        @serves("sglang", MODEL, CPU, symm, env={"FAKE_SGLANG_SAYS": OFF})
        @unsupported("torch symm mem", how="falls_back", match="Device capability 12")
        def test_a_falls_back(): ...

        @serves("sglang", MODEL, CPU, "--flashinfer-allreduce-fusion-backend trtllm", env={"FAKE_SGLANG_SAYS": ON})
        @unsupported("flashinfer allreduce fusion", how="falls_back")
        def test_b_works_now(): ...

        @serves("sglang", MODEL, CPU, symm, env={"FAKE_SGLANG_INFO": '{"enable_torch_symm_mem": true}'})
        @unsupported("torch symm mem", how="falls_back")
        def test_c_says_nothing(): ...

        @serves("sglang", MODEL, CPU, "--enable-mscclpp", env={"FAKE_SGLANG_INFO": '{"enable_mscclpp": false}'})
        @ignores("--enable-mscclpp")
        def test_d_ignores(): ...

        @serves("sglang", MODEL, CPU, "--attention-backend trtllm_mla",
                env={"FAKE_SGLANG_INFO": '{"internal_states": [{"attention_backend": "triton"}]}'})
        @unsupported("trtllm_mla", how="falls_back")
        def test_e_another_backend(): ...

        @serves("sglang", MODEL, CPU, symm, env={"FAKE_SGLANG": "kv_pool"})
        @unsupported("torch symm mem", how="falls_back")
        def test_f_fails(): ...

        @serves("sglang", MODEL, CPU)
        @ignores("--warp-drive")
        def test_g_unknown(): ...
        """
    )
    lines(
        result,
        "CHANGED *test_f_fails *oom.kv_pool*",
        "CONTRADICTED (better) *test_b_works_now *line *: FlashInfer AllReduce Fusion enabled*",
        "INCONCLUSIVE *test_c_says_nothing *nothing the server said shows*",
        "INCONCLUSIVE *test_g_unknown *'--warp-drive' is no feature*known: *custom_allreduce*",
        "HOLDS *test_a_falls_back *line *: TorchSymmMemCommunicator: Device capability 12 not supported*",
        "HOLDS *test_d_ignores *server_info enable_mscclpp is False*",
        "HOLDS *test_e_another_backend *asked trtllm_mla, runs triton (server_info attention_backend)*",
    )


def test_uses_is_judged_by_what_the_server_says(claims: Run) -> None:
    result = claims(
        """
        picked = "Attention backend not specified. Use fa3 backend by default."
        off = "CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs."

        @serves("sglang", MODEL, CPU, env={"FAKE_SGLANG_SAYS": picked + chr(10) + off})
        @uses("attention_backend=fa3")
        @uses("custom all-reduce")
        def test_both(): ...

        @serves("sglang", MODEL, CPU)
        @uses("custom_allreduce")
        def test_silent(): ...

        @serves("sglang", MODEL, CPU, "--context-length 9")
        @uses("cuda_graph")
        def test_shown_by_the_body(server):
            with open(server.log, "a") as log:
                log.write("[2026-01-02 03:04:05] Decode batch, #running-req: 1, cuda graph: True, gen throughput\\n")
        """
    )
    lines(
        result,
        "CONTRADICTED (worse) *test_both *CustomAllreduce is disabled because*",
        "*HOLDS: uses(attention_backend=fa3): *runs fa3 (line *: *Use fa3 backend by default.)",
        "INCONCLUSIVE *test_silent *",
        "HOLDS *test_shown_by_the_body *cuda graph: True*",
    )


def test_a_difference_is_told_below_the_claim_and_changes_no_verdict(claims: Run) -> None:
    result = claims(
        """
        @serves("sglang", MODEL, CPU, "--attention-backend trtllm_mla",
                env={"FAKE_SGLANG_INFO": '{"attention_backend": "triton"}'})
        @fits
        def test_fits(): ...
        """
    )
    result.assert_outcomes(passed=1)
    lines(
        result,
        "HOLDS *test_fits *ready*",
        "* attention_backend: asked trtllm_mla, runs triton (server_info attention_backend)",
    )


def test_a_server_that_silently_runs_on_the_cpu_is_caught(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = claims(
        """
        @needs_gpus(2)
        @serves("sglang", MODEL, layout="TP2", env={"FAKE_SGLANG_DEVICE": "cpu"})
        @fits
        def test_fits(): ...

        @serves("sglang", MODEL, env={"FAKE_SGLANG_DEVICE": "cpu", "FAKE_SGLANG": "kv_pool"})
        @ooms("kv_pool")
        def test_ooms(): ...

        @serves("sglang", MODEL)
        @fits
        def test_on_the_gpu(): ...

        @serves("sglang", MODEL, CPU)
        @fits
        def test_asked_for(): ...
        """,
        "-v",
    )
    lines(
        result,
        "INFRA *test_fits *infra.device: the server runs on the CPU although 2 GPUs are leased to it*",
        "INFRA *test_ooms *although 1 GPU is leased to it (line *: server_args device); it ended as oom.kv_pool*",
        "HOLDS *test_asked_for *",
        "HOLDS *test_on_the_gpu *",
    )
    assert "torch is a CPU build, or sees no CUDA device" in result.stdout.str()
    assert result.ret == 1
