# ruff: noqa: E501  (log lines are as long as they are)
"""Every spelling of a boot line, release by release: phases, numbers per rank, and what is none of our business."""

from __future__ import annotations

import pytest

from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.lines import peel
from pytest_gpuguard.diagnose.spellings import load_spellings
from pytest_gpuguard.engines.log import LogReader

RULES = load_spellings().rules

BOOTS = {
    "0.4.6": """\
[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', api_key=None, mem_fraction_static=0.88, tp_size=1)
[2026-01-02 03:04:06 TP0] Attention backend not set. Use flashinfer backend by default.
[2026-01-02 03:04:06 TP0] Init torch distributed begin.
[2026-01-02 03:04:07 TP0] sglang is using nccl==2.21.5
[2026-01-02 03:04:07 TP0] Init torch distributed ends. mem usage=0.40 GB
[2026-01-02 03:04:07 TP0] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:04:17 TP0] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:04:18 TP0] KV Cache is allocated. #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB
[2026-01-02 03:04:18 TP0] Memory pool end. avail mem=22.00 GB
[2026-01-02 03:04:18 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=21.50 GB
[2026-01-02 03:04:28 TP0] Capture cuda graph end. Time elapsed: 9.10 s. avail mem=20.00 GB. mem usage=1.50 GB.
[2026-01-02 03:04:28 TP0] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960
[2026-01-02 03:04:30] The server is fired up and ready to roll!
""",
    "0.5.6": """\
[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, tp_size=1)
[2026-01-02 03:04:06] Init torch distributed begin.
[2026-01-02 03:04:07] Init torch distributed ends. mem usage=0.40 GB
[2026-01-02 03:04:07] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:04:17] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:04:17] Using KV cache dtype: torch.bfloat16
[2026-01-02 03:04:18] KV Cache is allocated. #tokens: 400000, KV size: 55.00 GB
[2026-01-02 03:04:18] Memory pool end. avail mem=22.00 GB
[2026-01-02 03:04:18] Capture cuda graph begin. This can take up to several minutes. avail mem=21.50 GB
[2026-01-02 03:04:28] Capture cuda graph end. Time elapsed: 9.10 s. mem usage=1.50 GB. avail mem=20.00 GB.
[2026-01-02 03:04:28] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=20.00 GB
[2026-01-02 03:04:30] The server is fired up and ready to roll!
""",
    "0.5.12": """\
[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, tp_size=1)
[2026-01-02 03:04:06] Init torch distributed begin.
[2026-01-02 03:04:07] Init torch distributed ends. elapsed=0.80 s, mem usage=0.40 GB
[2026-01-02 03:04:07] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:04:17] Load weight end. elapsed=9.90 s, type=Qwen3ForCausalLM, quant=fp8, fmt=e4m3, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:04:18] KV Cache is allocated. #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB
[2026-01-02 03:04:18] Memory pool end. avail mem=22.00 GB
[2026-01-02 03:04:18] Capture piecewise CUDA graph begin. avail mem=22.00 GB
[2026-01-02 03:04:20] Capture piecewise CUDA graph end. Time elapsed: 2.00 s. mem usage=0.50 GB. avail mem=21.50 GB.
[2026-01-02 03:04:20] Capture cuda graph begin. This can take up to several minutes. avail mem=21.50 GB
[2026-01-02 03:04:28] Capture cuda graph end. Time elapsed: 8.10 s. mem usage=1.00 GB. avail mem=20.00 GB.
[2026-01-02 03:04:28] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=20.00 GB
[2026-01-02 03:04:30] The server is fired up and ready to roll!
""",
    "0.5.18": """\
[2026-01-02 03:04:05.123] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88, tp_size=1)
[2026-01-02 03:04:06.001] Init torch distributed begin.
[2026-01-02 03:04:07.002] Init torch distributed ends. elapsed=0.05 s, mem usage=-0.00 GB
[2026-01-02 03:04:07.003] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:04:17.004] Load weight end. elapsed=9.90 s, type=Qwen3ForCausalLM, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:04:18.005] target KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 999999, KV size: 900.00 GB
[2026-01-02 03:04:18.006] Memory pool end. avail mem=77.00 GB
[2026-01-02 03:04:18.007] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 4], avail mem=77.00 GB
[2026-01-02 03:04:28.008] Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=8.10 s, mem usage=1.50 GB, avail mem=75.50 GB.
[2026-01-02 03:04:28.009] Load weight end. Committed real weights after CUDA graph capture in 3.20 s (capture overlap window 1.00 s)
[2026-01-02 03:04:28.010] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 400000, KV size: 55.00 GB, avail mem=20.50 GB
[2026-01-02 03:04:28.011] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, some_new_key=7, available_gpu_mem=20.00 GB
[2026-01-02 03:04:30.012] The server is fired up and ready to roll!
""",
    "0.5.23": """\
[2026-01-02 03:04:05] server_args={'model_path': 'm', 'mem_fraction_static': 0.88, 'tp_size': 1, 'api_key': '***'}
[2026-01-02 03:04:06] Init parallel begin.
[2026-01-02 03:04:06] Init parallel ends. elapsed=0.02 s
[2026-01-02 03:04:07] Memory baseline taken. mem usage=0.40 GB
[2026-01-02 03:04:07] Load weight begin. avail mem=94.00 GB
[2026-01-02 03:04:17] Load weight end. elapsed=9.90 s, type=Qwen3ForCausalLM, avail mem=78.50 GB, mem usage=15.50 GB.
[2026-01-02 03:04:18] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 27.50 GB, V size: 27.50 GB
[2026-01-02 03:04:18] Memory pool end. avail mem=22.00 GB
[2026-01-02 03:04:18] Capture target prefill CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=22.00 GB
[2026-01-02 03:04:20] Capture target prefill CUDA graph end. elapsed=2.00 s, mem usage=0.50 GB, avail mem=21.50 GB.
[2026-01-02 03:04:20] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=21.50 GB
[2026-01-02 03:04:28] Capture target decode CUDA graph end. elapsed=8.00 s, mem usage=1.00 GB, avail mem=20.00 GB.
[2026-01-02 03:04:28] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=20.00 GB
[2026-01-02 03:04:29] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-01-02 03:04:30] The server is fired up and ready to roll!
""",
}


@pytest.mark.parametrize("release", BOOTS)
def test_a_healthy_boot_reads_the_same_in_every_release(release: str) -> None:
    reading = classify_text(BOOTS[release])
    assert (reading.outcome, reading.fatal, reading.ready_line, reading.phase) == ("ready", False, True, "ready")
    memory = reading.memory
    assert (memory.avail_before_gib, memory.avail_after_weights_gib, memory.weights_gib) == (94.0, 78.5, 15.5)
    assert memory.mem_fraction_static == 0.88
    assert (memory.kv_tokens, memory.kv_gib, memory.graph_gib, memory.free_gib) == (400000, 55.0, 1.5, 20.0)
    assert memory.reserved_gib == pytest.approx(94 * 0.12)
    assert memory.rest_gib == pytest.approx(78.5 - 94 * 0.12)
    assert memory.f_min == pytest.approx(1 - 78.5 / 94, abs=1e-4)


@pytest.mark.parametrize("release", BOOTS)
def test_the_phases_come_in_their_order(release: str) -> None:
    reader = LogReader()
    events = reader.feed(BOOTS[release].encode())
    phases = [event.phase for event in events if event.kind == "phase"]
    assert phases[:4] == ["args", "init", "weights", "kv_pool"]
    assert "graph_capture" in phases
    assert phases[-2:] == ["warmup", "ready"]
    assert [event.kind for event in events if event.kind in ("ready", "fatal")] == ["ready"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_rule_applies_to_its_own_example(rule: object) -> None:
    from pytest_gpuguard.diagnose.spellings import LogRule

    assert isinstance(rule, LogRule)
    message = peel(rule.example).body
    applied = load_spellings().rule_for(message)
    assert applied is rule
    numbers = dict(load_spellings().numbers_in(rule, message))
    wanted = {value for number, value in rule.take if number not in ("k_size", "v_size", "kv_size")}
    assert wanted <= set(numbers)


def test_the_cpu_boot_prints_its_own_names() -> None:
    log = """\
[2026-01-02 03:04:05] Init parallel begin.
[2026-01-02 03:04:05] Memory baseline taken. mem usage=-0.00 GB
[2026-01-02 03:04:05] Load weight begin. avail mem=21.09 GB
[2026-01-02 03:04:05] Load weight end. elapsed=0.01 s, type=LlamaForCausalLM, avail mem=21.09 GB, mem usage=-0.00 GB.
[2026-01-02 03:04:06] Memory pool end. avail mem=21.07 GB
[2026-01-02 03:04:06] max_total_num_tokens=4096, chunked_prefill_size=4096, max_prefill_tokens=16384, max_running_requests=2048, context_len=2048, available_cpu_mem=21.05 GB
"""
    reading = classify_text(log)
    assert (reading.outcome, reading.phase, reading.fullest_rank) == ("starting", "warmup", "")
    assert (reading.memory.kv_tokens, reading.memory.free_gib) == (4096, 21.05)


def test_the_fullest_rank_is_the_one_with_least_left_after_the_weights() -> None:
    log = "".join(
        f"[2026-01-02 03:04:05 DP{rank} PP0 ATTN_CP0 MOE_DP0 TP{rank} EP{rank}] Load weight begin. avail mem=94.00 GB\n"
        f"[2026-01-02 03:04:06 DP{rank} PP0 ATTN_CP0 MOE_DP0 TP{rank} EP{rank}] Load weight end. elapsed=1.00 s, "
        f"type=M, avail mem={left} GB, mem usage={94 - left} GB.\n"
        for rank, left in enumerate((20.0, 18.5, 19.0))
    )
    reading = classify_text(log)
    assert reading.fullest_rank == "DP1 PP0 ATTN_CP0 MOE_DP0 TP1 EP1"
    assert reading.memory.avail_after_weights_gib == 18.5


def test_a_draft_model_loaded_after_the_pool_does_not_count_as_weights() -> None:
    log = """\
[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=90.00 GB
[2026-01-02 03:04:06 TP0] Load weight end. type=M, dtype=d, avail mem=40.00 GB, mem usage=50.00 GB.
[2026-01-02 03:04:07 TP0] KV Cache is allocated. #tokens: 1000, K size: 10.00 GB, V size: 10.00 GB
[2026-01-02 03:04:07 TP0] Memory pool end. avail mem=20.00 GB
[2026-01-02 03:04:08 TP0] Load weight begin. avail mem=19.00 GB
[2026-01-02 03:04:09 TP0] Load weight end. type=MTP, dtype=d, avail mem=17.00 GB, mem usage=2.00 GB.
"""
    memory = classify_text(log).memory
    assert (memory.avail_before_gib, memory.avail_after_weights_gib, memory.weights_gib) == (90.0, 40.0, 50.0)
    assert memory.free_gib == 17.0


@pytest.mark.parametrize("granted", [4259140, -561981])
def test_a_clipped_token_count_is_told(granted: int) -> None:
    log = (
        f"[2026-01-02 03:04:05] max_total_tokens=500000000 is larger than the profiled value {granted}. "
        "Use the profiled value instead.\n"
    )
    reading = classify_text(log)
    assert (reading.outcome, reading.clipped) == ("starting", (500000000, granted))


@pytest.mark.parametrize(
    "line",
    [
        "Decode batch. #running-req: 1, #token: 812, token usage: 0.01, gen throughput (token/s): 20.0, #queue-req: 0",
        "Decode batch [40], #running-req: 1, #full token: 812, full token usage: 0.01, cuda graph: True, "
        "gen throughput (token/s): 20.03, #queue-req: 0",
        "Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #queue-req: 0, ",
    ],
)
def test_batches_mean_serving_only_after_ready(line: str) -> None:
    before = f"[2026-01-02 03:04:05] Load weight begin. avail mem=1.00 GB\n[2026-01-02 03:04:06] {line}\n"
    assert classify_text(before).phase == "warmup"
    after = f"[2026-01-02 03:04:05] The server is fired up and ready to roll!\n[2026-01-02 03:04:06] {line}\n"
    assert classify_text(after).phase == "serving"
    assert classify_text(f"[2026-01-02 03:04:06] {line}\n").phase == "serving"


def test_words_of_a_request_do_not_make_a_server_ready() -> None:
    log = (
        "[2026-01-02 03:04:05] Receive: obj=GenerateReqInput(text='The server is fired up and ready to roll!')\n"
        "[2026-01-02 03:04:05] user said: The server is fired up and ready to roll!\n"
        "[2026-01-02 03:04:06] INFO:     Application startup complete.\n"
    )
    reading = classify_text(log)
    assert (reading.outcome, reading.ready_line) == ("starting", False)


def test_gates_carry_a_text_a_behaviour_and_a_source() -> None:
    gates = load_spellings().gates
    assert {gate.behaviour for gate in gates} <= {"rejected", "falls_back", "crashes", "adjusts", "works", "silent"}
    assert all(gate.text and gate.source for gate in gates)
    assert "flashinfer_allreduce_fusion.rejected" in {gate.id for gate in gates}
