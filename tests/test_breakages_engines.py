"""The known breakages that end a boot, or the first requests: the shipped claim, once with the symptom and once cured.

What boots is a stand-in, on cards of the NVML stand-in or a simulated rig. Nothing here says anything about real
hardware: docs/breakages.md tells what each does not show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .breakages import (
    BETTER,
    HOLDS,
    SUITE,
    UPGRADES,
    WORSE,
    Judge,
    judged,
    rehearsed,
    stack_with_breakages,
    suite,
)
from .gpuguard_command import Done, called

__all__ = ["judged", "rehearsed", "stack_with_breakages", "suite"]

# ------------------------------------------------------------------------------------------------------------- at boot

DEFAULT_FLAGS = "test_the_default_flags_boot_on_two_cards"


@pytest.mark.parametrize("release", ["0.5.7", "0.5.8"])
def test_1_fusion_by_default_is_stated_of_its_release_and_gone_in_the_next(rehearsed: Judge, release: str) -> None:
    verdict, said = rehearsed(release, UPGRADES, DEFAULT_FLAGS)[DEFAULT_FLAGS]
    assert verdict == f"REHEARSED {HOLDS}"
    assert ("No supported CUDA architectures found for major versions [9, 10]." in said) is (release == "0.5.7")


@pytest.mark.parametrize(("symptom", "verdict"), [("fusion", WORSE), ("", HOLDS)])
def test_1_fusion_by_default_in_a_new_release_is_seen_at_the_first_boot(
    judged: Judge, symptom: str, verdict: str
) -> None:
    found, said = judged(symptom, UPGRADES, DEFAULT_FLAGS)[DEFAULT_FLAGS]
    assert found == verdict, said
    assert ("unsupported.arch" in said) is bool(symptom)


@pytest.mark.parametrize(
    ("symptom", "by_default"), [("fused_shared_experts", WORSE), ("", HOLDS)], ids=["broken", "cured"]
)
def test_4_fused_shared_experts_fail_to_load_and_load_without_fusion(
    judged: Judge, symptom: str, by_default: str
) -> None:
    loads, cure = "test_glm_nvfp4_loads", "test_glm_nvfp4_loads_without_fusion"
    found = judged(symptom, UPGRADES, loads, cure)
    assert (found[loads][0], found[cure][0]) == (by_default, HOLDS), found[loads][1]
    if symptom:
        assert "weights.mismatch" in found[loads][1]
        assert "oom" not in found[loads][1]


@pytest.mark.parametrize(("symptom", "verdict"), [("gdn_gate", WORSE), ("", HOLDS)], ids=["broken", "cured"])
def test_25_a_gate_that_came_back_is_seen(judged: Judge, symptom: str, verdict: str) -> None:
    gate = "test_hybrid_gdn_takes_flashinfer"
    found, said = judged(symptom, UPGRADES, gate)[gate]
    assert found == verdict, said
    assert ("unsupported.arch" in said) is bool(symptom)


def test_25_the_release_that_opened_the_gate_is_rehearsed_as_it_was(rehearsed: Judge) -> None:
    gate = "test_hybrid_gdn_takes_flashinfer"
    assert rehearsed("0.5.10", UPGRADES, gate)[gate][0] == f"REHEARSED {HOLDS}"


# ------------------------------------------------------------------------------------------------------ what resolved


@pytest.mark.parametrize(("backend", "verdict"), [("trtllm_mla", WORSE), ("triton", HOLDS)], ids=["broken", "cured"])
def test_3_the_backend_that_runs_is_judged_and_not_the_one_that_was_meant(
    judged: Judge, backend: str, verdict: str
) -> None:
    resolves = "test_mla_resolves_to_triton"
    info = json.dumps({"attention_backend": backend})
    found, said = judged("", UPGRADES, resolves, BREAKAGE_INFO=info)[resolves]
    assert found == verdict, said
    assert backend in said


@pytest.mark.parametrize(
    ("backend", "verdict"),
    [("trtllm_mla", WORSE), ("triton", HOLDS), (None, "INCONCLUSIVE")],
    ids=["broken", "cured", "untold"],
)
def test_3_a_backend_that_is_asked_for_and_led_elsewhere(judged: Judge, backend: str | None, verdict: str) -> None:
    """The scheduler's own state tells; a server that only hands the argument back proves nothing."""
    asked = "test_the_backend_that_is_asked_for_runs"
    state = {"attention_backend": backend} if backend else {}
    info = json.dumps({"attention_backend": "triton", "internal_states": [state]})
    found, said = judged("", UPGRADES, asked, BREAKAGE_INFO=info)[asked]
    assert found == verdict, said


# ---------------------------------------------------------------------------------------------- at the first requests


@pytest.mark.parametrize(
    ("symptom", "verdict", "negative", "outcome"),
    [
        ("first_prefill", WORSE, HOLDS, "unsupported.arch"),
        ("cached_prefill", WORSE, "CHANGED", "jit.smem"),
        ("", HOLDS, BETTER, "ready"),
    ],
    ids=["2", "7", "cured"],
)
def test_2_and_7_a_server_that_boots_and_dies_on_its_first_or_second_prefill(
    judged: Judge, symptom: str, verdict: str, negative: str, outcome: str
) -> None:
    twice, mla = "test_the_same_prompt_twice", "test_trtllm_mla_is_unsupported"
    found = judged(symptom, UPGRADES, twice, mla)
    assert found[twice][0] == verdict, found[twice][1]
    assert outcome in found[twice][1]
    assert found[mla][0] == negative, found[mla][1]


# ----------------------------------------------------------------------------------------------------- vLLM, by its log

_CORE = "(EngineCore_DP0 pid=4711) "
_INFO = f"{_CORE}INFO 01-10 22:23:40 "
_ERROR = f"{_CORE}ERROR 01-10 22:23:50 [core.py:936] "
VLLM_STARTS = (
    "(APIServer pid=4700) INFO 01-10 22:23:05 [api_server.py:1277] vLLM API server version 0.14.0\n"
    f"{_INFO}[gpu_model_runner.py:3600] Model loading took 29.05 GiB and 61.2 seconds\n"
)
#: vllm-project/vllm#32109: the frames speak of memory, for the kernel is first met while profiling.
VLLM_BROKEN = VLLM_STARTS + "".join(
    f"{_ERROR}{line}\n"
    for line in (
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "/opt/vllm/vllm/v1/engine/core.py", line 243, in _initialize_kv_caches',
        "    available_gpu_memory = self.model_executor.determine_available_memory()",
        '  File "/opt/vllm/vllm/v1/worker/gpu_worker.py", line 324, in determine_available_memory',
        "    self.model_runner.profile_run()",
        '  File "/opt/vllm/vllm/_custom_ops.py", line 872, in cutlass_scaled_mm',
        "    torch.ops._C.cutlass_scaled_mm(out, a, b, scale_a, scale_b, bias)",
        "RuntimeError: No compiled cutlass_scaled_mm for CUDA device capability: 120",
    )
)
VLLM_CURED = VLLM_STARTS + (
    f"{_INFO}[gpu_worker.py:360] Available KV cache memory: 9.20 GiB\n"
    f"{_INFO}[kv_cache_utils.py:1291] GPU KV cache size: 100,464 tokens\n"
    "(APIServer pid=4700) INFO 01-10 22:24:40 [api_server.py:1600] Starting vLLM API server 0 on http://0.0.0.0:8000\n"
    "(APIServer pid=4700) INFO:     Application startup complete.\n"
)


@pytest.mark.parametrize(
    ("log", "verdict", "outcome"),
    [(VLLM_BROKEN, WORSE, "unsupported.arch"), (VLLM_CURED, HOLDS, "ready")],
    ids=["broken", "cured"],
)
def test_15_vllm_without_the_kernel_is_no_memory_problem(
    log: str, verdict: str, outcome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM is not booted by this version; what the shipped claim states is judged by a log instead."""
    claim = (SUITE / UPGRADES).read_text(encoding="utf-8").partition("def test_vllm_boots_fp8_experts")[0]
    assert '@fits\n@claim(\n    id="vllm-32109"' in claim
    path = tmp_path / "vllm.log"
    path.write_text(log)
    done: Done = called(capsys, "judge", path, "--expect", "fits")
    assert done.out.startswith(f"{verdict}: fits: {outcome}"), done.out
    assert "oom" not in done.out
