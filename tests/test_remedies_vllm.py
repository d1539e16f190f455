# ruff: noqa: E501  (log lines are as long as they are)
"""What would cure a boot of vLLM that ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.claims.observation import MemoryTable
from pytest_gpuguard.claims.resolved import LogEvidence
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.remedies import Setup, remedies, setup_of
from pytest_gpuguard.diagnose.resolved import resolve

from .boot_logs import FULL, cure, failed

# ----------------------------------------------------------------------------------------------------------------- vLLM

CORE = "(EngineCore_DP0 pid=1310) "


def vllm(text: str, kv: str = "", more: str = "") -> str:
    lines = [
        "INFO 01-02 03:04:01 [gpu_model_runner.py:2602] Starting to load model m...",
        "INFO 01-02 03:04:09 [gpu_model_runner.py:2653] Model loading took 65.9651 GiB and 8.1 seconds",
        *([f"INFO 01-02 03:04:12 [gpu_worker.py:298] Available KV cache memory: {kv} GiB"] if kv else []),
        *([more] if more else []),
        "ERROR 01-02 03:04:13 [core.py:708] EngineCore failed to start.",
        "ERROR 01-02 03:04:13 [core.py:708] Traceback (most recent call last):",
        'ERROR 01-02 03:04:13 [core.py:708]   File "/x/vllm/v1/engine/core.py", line 1, in __init__',
        f"ERROR 01-02 03:04:13 [core.py:708] {text}",
    ]
    return "".join(f"{CORE}{line}\n" for line in lines)


TOO_LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.71 GiB). Based on the available memory, the estimated maximum "
    "model length is 13984. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
    "engine."
)
TOTAL = "INFO 01-02 03:04:12 [worker.py:1] the current vLLM instance can use total_gpu_memory (79.11GiB) x gpu_memory_utilization (0.70) = 55.38GiB"


def test_vllm_gets_the_length_that_fits_and_the_share_that_would_hold_the_one_asked_for() -> None:
    assert cure(vllm(TOO_LONG, "1.71"), engine="vllm") == (
        "--max-model-len 13984 or less",
        "or a higher --gpu-memory-utilization: 14.3 GiB are missing",
    )
    assert cure(vllm(TOO_LONG, "1.71", TOTAL), engine="vllm")[1] == (
        "or --gpu-memory-utilization of at least 0.89 (14.3 GiB are missing at 0.70)"
    )
    assert cure(vllm(TOO_LONG, "1.71", TOTAL.replace("0.70", "0.90")), engine="vllm")[1] == (
        "or no --gpu-memory-utilization helps: 14.3 GiB more than at 0.90 is not on the card"
    )


def test_vllm_s_share_and_card_are_taken_from_wherever_they_are_said() -> None:
    """0.70 + 14.29 / 79.11 is 0.881; the share may stand among the arguments, the card in torch's report."""
    dumped = "INFO 01-02 03:04:00 [utils.py:326] non-default args: {'model': 'm', 'gpu_memory_utilization': 0.7}\n"
    assert cure(dumped + vllm(TOO_LONG, "1.71"), engine="vllm")[1] == (
        "or a higher --gpu-memory-utilization than 0.7: 14.3 GiB are missing"
    )
    assert cure(vllm(TOO_LONG, "1.71"), "--gpu-memory-utilization 0.6", engine="vllm")[1] == (
        "or a higher --gpu-memory-utilization than 0.6: 14.3 GiB are missing"
    )
    card = TOTAL.replace(" x gpu_memory_utilization (0.70)", "")
    assert cure(dumped + vllm(TOO_LONG, "1.71", card), engine="vllm")[1] == (
        "or --gpu-memory-utilization of at least 0.89 (14.3 GiB are missing at 0.70)"
    )
    memory = MemoryTable(gpu_memory_utilization=None, total_gib=79.11)
    reading = failed("oom.kv_pool", memory, TOO_LONG, "vllm")
    reading = replace(reading, evidence=LogEvidence(dump=(("gpu_memory_utilization", "0.7"),), line=1))
    found = setup_of(resolve("vllm", ["--gpu-memory-utilization", "0.6"], reading.evidence), reading)
    assert found.gpu_memory_utilization == 0.7
    assert "of at least 0.89 (14.3 GiB are missing at 0.70)" in remedies(reading, found)[1]
    for odd in ("0.9.1", "nan", "inf", "-0.5", "1e400", "x", "7", "9" * 400):
        found = setup_of(resolve("vllm", ["--gpu-memory-utilization", odd], LogEvidence()), failed("oom.kv_pool", memory, TOO_LONG, "vllm"))  # fmt: skip
        assert (
            "a higher --gpu-memory-utilization: 14.3 GiB"
            in remedies(replace(reading, evidence=LogEvidence()), found)[1]
        )


OLD = (
    "INFO 12-02 03:04:05 model_runner.py:1077] Loading model weights took 14.9888 GB\n"
    "INFO 12-02 03:04:05 worker.py:232] Memory profiling results: total_gpu_memory=79.11GiB initial_memory_usage=15.37GiB "
    "peak_torch_memory=16.19GiB memory_usage_post_profile=15.46GiB non_torch_memory=0.46GiB kv_cache_size=4.68GiB "
    "gpu_memory_utilization=0.30\n"
    "ERROR 12-02 03:04:05 engine.py:366] ValueError: The model's max seq len (131072) is larger than the maximum number of "
    "tokens that can be stored in KV cache (38304). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
    "when initializing the engine.\n"
)


def test_an_older_vllm_s_numbers_tell_the_share_too() -> None:
    """131,072 tokens at 4.68 GiB for 38,304 are 16.01 GiB: 11.33 more of 79.11 is 0.1433."""
    reading = classify_text(OLD, "vllm")
    assert (reading.memory.total_gib, reading.memory.kv_gib, reading.memory.gpu_memory_utilization) == (
        79.11,
        4.68,
        0.3,
    )
    assert cure(OLD, engine="vllm") == (
        "--max-model-len 38304 or less",
        "or --gpu-memory-utilization of at least 0.45 (11.3 GiB are missing at 0.30)",
    )
    assert cure(OLD.replace("79.11", "23.69").replace("0.30", "0.90"), engine="vllm")[1] == (
        "or no --gpu-memory-utilization helps: 11.3 GiB more than at 0.90 is not on the card"
    )


def test_a_profiling_run_that_fills_the_gpu_is_not_cured_by_a_lower_share() -> None:
    said = FULL.format("2.32 GiB.", "1.05 GiB")
    profiling = vllm(said).replace('core.py", line 1, in __init__', 'gpu_model_runner.py", line 1, in profile_run')
    assert classify_text(profiling, "vllm").outcome == "oom.runtime"
    assert cure(profiling, engine="vllm") == (
        "the forward pass was short by at least 1.3 GiB: a smaller --max-num-batched-tokens or --max-num-seqs",
    )
    lower = ("the forward pass was short by at least 1.3 GiB: a lower --gpu-memory-utilization",)
    for more in ({"memory": MemoryTable(kv_gib=5.0)}, {"memory": MemoryTable(kv_tokens=9)}, {"ready_line": True}, {"phase": "serving"}):  # fmt: skip
        assert remedies(replace(failed("oom.runtime", MemoryTable(), said, "vllm"), **more), Setup("vllm")) == lower


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        (
            "10.2/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28",
            (
                "10.2 of 23.64 GiB are free: something else holds 13.4 GiB",
                "or --gpu-memory-utilization of at most 0.43",
            ),
        ),
        (
            "22.9/23.64 GiB) on startup is less than desired GPU memory utilization (0.98, 23.17",
            ("22.9 of 23.64 GiB are free: --gpu-memory-utilization of at most 0.96",),
        ),
        (
            "0.1/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28",
            ("0.1 of 23.64 GiB are free: something else holds 23.5 GiB",),
        ),
        ("0.0/0.0 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28", ()),
        ("none of it", ()),
    ],
)
def test_a_gpu_that_is_not_free_is_told_with_the_share_that_would_do(numbers: str, advice: tuple[str, ...]) -> None:
    text = f"ValueError: Free memory on device ({numbers} GiB). Decrease GPU memory utilization."
    assert remedies(failed("infra.dirty_gpu", MemoryTable(), text, "vllm"), Setup("vllm")) == advice
    device = text.replace("on device (", "on device cuda:0 (")
    assert remedies(failed("infra.dirty_gpu", MemoryTable(), device, "vllm"), Setup("vllm")) == advice


def test_vllm_without_any_room_is_told_what_is_missing() -> None:
    said = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
    assert cure(vllm(said, "-2.14"), engine="vllm") == ("a higher --gpu-memory-utilization: 2.1 GiB are missing",)
    assert cure(vllm(said), engine="vllm") == ()


def test_vllm_that_fills_the_gpu_itself_wants_a_lower_share_and_its_own_flags() -> None:
    memory = MemoryTable()
    said = FULL.format("2.00 GiB.", "1.00 GiB")
    assert remedies(failed("oom.graph_capture", memory, said, "vllm"), Setup("vllm")) == (
        "graph capture was short by at least 1.0 GiB: a smaller --max-num-seqs or fewer --cuda-graph-sizes",
        "or a lower --gpu-memory-utilization",
    )
    assert remedies(failed("oom.kv_pool", memory, said, "vllm"), Setup("vllm")) == (
        "the KV cache was short by at least 1.0 GiB: a lower --gpu-memory-utilization",
    )
    assert remedies(failed("oom.weights", memory, said, "vllm"), Setup("vllm", 2, leased=4)) == (
        "2 GPUs are used, 4 are leased: --tensor-parallel-size 4",
    )
