# ruff: noqa: E501  (log lines are as long as they are)
"""What tells the phase of a full GPU, what a line of a boot tells, and which exceptions are one client's request only."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.findings import told
from pytest_gpuguard.diagnose.signatures import load_signatures

from .failure_logs import (
    API,
    CORE0,
    LOADING,
    MAIN,
    POOLED,
    RANK0,
    SERVING,
    V0,
    V1,
    V1_LOADING,
    V1_SERVING,
    capture,
    frames,
    prefixed,
    raised,
    sglang,
    vllm,
)

SET = load_signatures()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB."
WORKER = "(VllmWorkerProcess pid=77) ERROR 01-02 03:04:05 multiproc_worker_utils.py:236] "
RUN = "vllm/v1/worker/gpu_model_runner.py "

#: What a traceback tells: phase of the frames' row, then outcome and phase of a full GPU in it, then its frames.
FRAMES = (
    ("graph_capture", "oom.graph_capture", "graph_capture", RUN + "capture_model"),
    ("graph_capture", "oom.graph_capture", "graph_capture", "sglang/srt/model_executor/cuda_graph_runner.py capture_one_batch_size"),
    ("graph_capture", "oom.graph_capture", "graph_capture", "torch/cuda/graphs.py __enter__"),
    ("warmup", "oom.runtime", "warmup", RUN + "profile_run"),
    ("warmup", "oom.runtime", "warmup", "text_generation_server/models/flash_causal_lm.py warmup"),
    ("warmup", "oom.runtime", "warmup", "vllm/worker/worker.py determine_num_available_blocks"),
    ("kv_pool", "oom.kv_pool", "kv_pool", RUN + "_allocate_kv_cache_tensors"),
    ("kv_pool", "oom.kv_pool", "kv_pool", "sglang/srt/mem_cache/kv_cache_configurator.py build"),
    ("kv_pool", "oom.kv_pool", "kv_pool", "sglang/srt/mem_cache/memory_pool.py MHATokenToKVPool._create_buffers"),
    ("weights", "oom.weights", "weights", RUN + "load_model"),
    ("weights", "oom.weights", "weights", "vllm/model_executor/models/qwen3.py __init__"),
    ("weights", "oom.weights", "weights", "sglang/srt/layers/quantization/fp8.py create_weights"),
    ("weights", "oom.weights", "weights", "tensorrt_llm/_torch/model_loader/loader.py run"),
    ("serving", "oom.runtime", "serving", "sglang/srt/managers/scheduler.py event_loop_overlap"),
    ("serving", "oom.runtime", "serving", "vllm/v1/engine/core.py run_busy_loop"),
    ("serving", "oom.runtime", "serving", "text_generation_server/server.py Decode"),
    ("forward", "oom.runtime", "warmup", "torch/nn/modules/module.py _call_impl"),
    ("forward", "oom.runtime", "warmup", "vllm/model_executor/layers/linear.py apply"),
)  # fmt: skip

#: What the failure's own words tell where no frame does.
TOLD = (
    ("weights", "oom.weights", "llama_model_load: error loading model: unable to allocate CUDA0 buffer: cudaMalloc failed: out of memory"),
    ("weights", "oom.weights", "CUDA error: out of memory while loading the checkpoint"),
    ("kv_pool", "oom.kv_pool", "CUDA error: out of memory: cannot allocate 3 layers of KV cache"),
    ("graph_capture", "oom.graph_capture", "CUDA error: out of memory while capturing the CUDA graph"),
    ("warmup", "oom.runtime", 'ERROR warmup{max_input_length=4096}:warmup: Server error: CUDA error: out of memory'),
    ("serving", "oom.runtime", "ERROR batch{batch_size=4}:prefill:prefill{id=1}: Server error: CUDA error: out of memory"),
)  # fmt: skip


@pytest.mark.parametrize(("row", "outcome", "phase", "frame"), FRAMES)
def test_a_stack_frame_tells_the_phase_of_a_full_gpu(row: str, outcome: str, phase: str, frame: str) -> None:
    assert told(SET.frames, frames(frame).splitlines()[0].strip()) == row
    reading = classify_text(raised(OOM, "app/main.py run", frame), engine=None)
    assert (reading.outcome, reading.phase) == (outcome, phase)


@pytest.mark.parametrize(("row", "outcome", "text"), TOLD)
def test_words_tell_the_phase_where_no_frame_does(row: str, outcome: str, text: str) -> None:
    assert told(SET.told, text) == row
    assert classify_text(text + "\n", engine=None).outcome == outcome


def test_every_row_of_frames_and_words_has_an_example() -> None:
    assert {name for name, _ in SET.frames} == {row for row, *_ in FRAMES} | {"execution"}
    assert {name for name, _ in SET.told} == {row for row, *_ in TOLD}


@pytest.mark.parametrize(
    ("method", "outcome", "phase"),
    [
        ("load_model", "oom.weights", "weights"),
        ("determine_num_available_blocks", "oom.runtime", "warmup"),
        ("initialize_cache", "oom.kv_pool", "kv_pool"),
        ("start_worker_execution_loop", "oom.runtime", "serving"),
        ("execute_model", "oom.runtime", "serving"),
        ("init_device", "unknown", "start"),
    ],
)
def test_the_method_that_a_worker_names_tells_the_phase(method: str, outcome: str, phase: str) -> None:
    head = f"Exception in worker VllmWorkerProcess while processing method {method}.\n"
    reading = classify_text(V0 + prefixed(WORKER, head + raised(OOM, "vllm/x.py run")), engine="vllm")
    assert (reading.outcome, reading.phase) == (outcome, phase)


def test_a_full_gpu_before_anything_tells_its_phase_is_unknown() -> None:
    assert classify_text(raised(OOM), engine=None).outcome == "unknown"
    assert (
        classify_text(V1 + CORE0 + "ERROR 01-02 03:04:05 [core.py:1] " + OOM + "\n", engine="vllm").outcome == "unknown"
    )


def test_the_rank_s_own_phase_stands_where_the_frames_are_of_any_time() -> None:
    forward = "torch/nn/modules/module.py _call_impl"
    assert classify_text(sglang(OOM, forward, before=LOADING)).outcome == "oom.weights"
    assert classify_text(sglang(OOM, forward, before=POOLED)).outcome == "oom.runtime"
    assert (
        classify_text(sglang(OOM, "sglang/srt/managers/scheduler.py run_batch", before=LOADING)).outcome
        == "oom.weights"
    )
    assert classify_text(vllm(OOM, "vllm/v1/worker/x.py run"), engine="vllm").outcome == "oom.weights"


def test_a_wrapper_tells_the_phase_before_the_log_does() -> None:
    for before in ("", LOADING, POOLED):
        reading = classify_text(capture(OOM, before=before))
        assert (reading.outcome, reading.phase) == ("oom.graph_capture", "graph_capture")
    failed = sglang(f"RuntimeError: Initialization failed. warmup error: {OOM}", before=POOLED)
    assert (classify_text(failed).outcome, classify_text(failed).phase) == ("oom.runtime", "warmup")


def test_another_rank_s_traceback_tells_the_phase() -> None:
    full = raised(OOM, "vllm/utils.py run")
    other = raised("RuntimeError: worker 1 failed", RUN + "load_model")
    for log in (V1 + prefixed("[rank0]: ", full) + prefixed("[rank1]: ", other), V1 + prefixed("[rank1]: ", other) + prefixed("[rank0]: ", full)):  # fmt: skip
        reading = classify_text(log, engine="vllm")
        assert (reading.outcome, reading.phase) == ("oom.weights", "weights")
        assert reading.decisive is not None
        assert "out of memory" in reading.decisive.text
    served = raised("RuntimeError: worker 1 failed", "vllm/x.py run")
    assert classify_text(V1 + prefixed("[rank0]: ", full) + prefixed("[rank1]: ", served), engine="vllm").outcome == "unknown"  # fmt: skip


@pytest.mark.parametrize(
    ("bar", "outcome"),
    [
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.9it/s]", "oom.weights"),
        ("Loading pt checkpoint shards:  25% Completed | 1/4 [00:01<00:01,  1.9it/s]", "oom.weights"),
        ("Capturing CUDA graphs (decode, FULL):  40%|████      | 4/10 [00:01<00:01]", "oom.graph_capture"),
        ("Fetching 14 files:  50%|█████     | 7/14 [00:01<00:01]", "unknown"),
    ],
)
def test_a_progress_bar_tells_the_phase(bar: str, outcome: str) -> None:
    log = V1 + bar + "\r\n" + raised(OOM, "vllm/utils.py run")
    assert classify_text(log, engine="vllm").outcome == outcome


def test_a_full_bar_tells_nothing_of_what_follows() -> None:
    bar = "Capturing CUDA graphs: 100%|██████████| 10/10 [00:01<00:01]\n"
    loaded = V1_LOADING + CORE0 + "INFO 01-02 03:04:03 [x.py:1] GPU KV cache size: 188,640 tokens\n"
    done = CORE0 + "INFO 01-02 03:04:04 [core.py:1] init engine (profile, create kv cache, warmup model) took 38.75 seconds\n"  # fmt: skip
    log = loaded + bar + done + raised(OOM, "vllm/utils.py run")
    assert classify_text(log, engine="vllm").outcome == "oom.runtime"


# --- what a line of a boot tells: literal of the row, the line, the phase, the numbers of the memory table -------------
LINE = CORE0 + "INFO 01-02 03:04:05 [x.py:1] "
OLD = "INFO 01-02 03:04:05 worker.py:267] "
PHASES: tuple[tuple[str, str, str | None, dict[str, float]], ...] = (
    ("Starting to load model", LINE + "Starting to load model /models/m...", "weights", {}),
    ("Model loading took", LINE + "Model loading took 14.9889 GiB and 3.519 seconds", "kv_pool", {"weights_gib": 14.9889}),
    ("Model loading took", LINE + "Model loading took 14.99 GB and 3.519 seconds", "kv_pool", {"weights_gib": 14.99}),
    ("Loading model weights took", OLD + "Loading model weights took 14.9595 GB", "kv_pool", {"weights_gib": 14.9595}),
    ("the current vLLM instance can use total_gpu_memory", OLD + "the current vLLM instance can use total_gpu_memory (23.64GiB) x gpu_memory_utilization (0.90) = 21.28GiB",
     None, {"total_gib": 23.64, "gpu_memory_utilization": 0.9}),
    ("model weights take ", OLD + "model weights take 14.99GiB; non_torch_memory takes 0.08GiB; PyTorch activation peak memory takes 1.24GiB; the rest of the memory reserved for KV Cache is 4.97GiB.",
     "kv_pool", {"weights_gib": 14.99, "kv_gib": 4.97}),
    ("Memory profiling results: total_gpu_memory=", OLD + "Memory profiling results: total_gpu_memory=23.69GiB initial_memory_usage=15.37GiB peak_torch_memory=16.19GiB memory_usage_post_profile=15.46GiB non_torch_memory=0.46GiB kv_cache_size=4.68GiB gpu_memory_utilization=0.90",
     "kv_pool", {"total_gib": 23.69, "kv_gib": 4.68, "gpu_memory_utilization": 0.9}),
    ("Available KV cache memory: ", LINE + "Available KV cache memory: 9.40 GiB", "kv_pool", {"kv_gib": 9.4}),
    ("Available KV cache memory: ", LINE + "Available KV cache memory: -5.67 GiB", "kv_pool", {"kv_gib": -5.67}),
    ("GPU KV cache size:", LINE + "GPU KV cache size: 188,640 tokens", "graph_capture", {"kv_tokens": 188640}),
    ("CUDA graphs can take additional", OLD + "CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider decreasing `gpu_memory_utilization`.", "graph_capture", {}),
    ("Capturing cudagraphs for decoding", OLD + "Capturing cudagraphs for decoding. This may lead to unexpected consequences if the model is not static.", "graph_capture", {}),
    ("Graph capturing finished in", LINE + "Graph capturing finished in 33 secs, took 1.22 GiB", None, {"graph_gib": 1.22}),
    ("init engine (profile, create kv cache, warmup model) took", LINE + "init engine (profile, create kv cache, warmup model) took 38.75 seconds", "warmup", {}),
    ("sequence length used for profiling", "WARNING 01-02 03:04:05 profiling.py:199] The sequence length used for profiling (max_num_batched_tokens / max_num_seqs = 8192) is too short "
     "to hold the multi-modal embeddings in the worst case.", "warmup", {}),
    ('" 200 OK', API + 'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK', "serving", {}),
    ("load_tensors: loading model tensors", "load_tensors: loading model tensors, this can take a while... (mmap = true)", "weights", {}),
    ("llm_load_print_meta:", "llm_load_print_meta: format           = GGUF V3 (latest)", "weights", {}),
    ("Loaded engine size:", "[TensorRT-LLM][INFO] Loaded engine size: 8423 MiB", "weights", {}),
    (" KV buffer size = ", "llama_kv_cache_init:      CUDA0 KV buffer size =  1024.00 MiB", "kv_pool", {}),
    ("llama runner started in", 'time=2026-01-02T03:04:05.123Z level=INFO source=server.go:601 msg="llama runner started in 3.52 seconds"', "serving", {}),
    ("server is listening on http", "main: server is listening on http://127.0.0.1:8080 - starting the main loop", "serving", {}),
)  # fmt: skip


@pytest.mark.parametrize(("literal", "line", "phase", "numbers"), PHASES)
def test_a_line_of_a_boot_tells_phase_and_numbers(literal: str, line: str, phase: str | None, numbers: dict[str, float]) -> None:  # fmt: skip
    assert literal in line
    reading = classify_text(line + "\n", engine=None)
    assert (reading.outcome, reading.phase) == ("starting", phase or "start")
    printed = {key: value for key, value in dataclasses.asdict(reading.memory).items() if value is not None}
    assert printed == numbers


def test_the_weights_are_those_of_the_worker_that_loaded_most() -> None:
    took = "INFO 01-02 03:04:05 [x.py:1] Model loading took {} GiB and 3.5 seconds\n"
    log = "".join(f"(Worker_TP{rank} pid={rank}) " + took.format(gib) for rank, gib in enumerate((14.5, 15.25, 14.0)))
    reading = classify_text(log, engine="vllm")
    assert reading.memory.weights_gib == 15.25
    assert [table.weights_gib for _, table in reading.ranks] == [14.5, 15.25, 14.0]


def test_every_line_of_a_boot_has_an_example() -> None:
    assert {line.literal for line in SET.phases} == {literal for literal, *_ in PHASES}
    taken = {name for line in SET.phases for name, _ in line.take}
    assert taken == {"weights", "kv", "kv_tokens", "graph", "total", "utilization"}


def test_a_full_gpu_after_a_line_of_another_engine_has_its_phase() -> None:
    failed = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4480.00 MiB on device 3: cudaMalloc failed: out of memory\n"  # fmt: skip
    for line, outcome in (("load_tensors: loading model tensors", "oom.weights"), (" KV buffer size = ", "oom.kv_pool")):  # fmt: skip
        example = next(text for literal, text, *_ in PHASES if literal == line)
        assert classify_text(example + "\n" + failed, engine=None).outcome == outcome


# --- a request that a client got wrong ----------------------------------------------------------------------------------
TOO_LONG = "ValueError: This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
ASKED = "ERROR 01-02 03:04:05 [serving_chat.py:200] Error in preprocessing prompt inputs\n"
REQUESTS = (
    API + ASKED + prefixed(API + "ERROR 01-02 03:04:05 [serving_chat.py:200] ", raised(TOO_LONG)),
    raised("ValueError: The input (5000 tokens) is longer than the model's context length (4096 tokens).", "sglang/srt/managers/tokenizer_manager.py generate_request"),
    raised("ValueError: Requested token count exceeds the model's maximum context length of 4096 tokens.", "sglang/srt/managers/tokenizer_manager.py generate_request"),
    raised("jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant", "vllm/entrypoints/openai/serving_chat.py create_chat_completion"),
    raised("TypeError: unhashable type: 'list'", "vllm/entrypoints/openai/tool_parsers/hermes_tool_parser.py extract_tool_calls"),
    "ERROR:    Exception in ASGI application\n" + raised("KeyError: 'messages'", "starlette/routing.py app"),
    raised("ValueError: image 0 could not be opened", "sglang/srt/managers/tokenizer_manager.py _tokenize_one_request"),
)  # fmt: skip


@pytest.mark.parametrize("text", REQUESTS)
def test_one_client_s_failed_request_is_no_failure_of_the_server(text: str) -> None:
    for before, outcome in ((V1_SERVING, "ready"), (V1_LOADING, "starting"), ("", "starting")):
        reading = classify_text(before + text, engine=None)
        assert (reading.outcome, reading.fatal) == (outcome, False), reading
    reading = classify_text(SERVING + text + RANK0 + "Decode batch. #running-req: 1, gen throughput (token/s): 1.0\n")
    assert (reading.outcome, reading.fatal) == ("ready", False), reading


def test_every_kind_of_request_has_an_example_and_its_words_count_only_there() -> None:
    assert len(SET.requests) == 2
    by_words, by_frame = SET.requests
    assert by_words.matches(TOO_LONG, "")
    assert by_frame.frame is not None
    assert not by_words.matches("jinja2.exceptions.TemplateError: roles", "")
    elsewhere = classify_text(raised("jinja2.exceptions.TemplateError: roles must alternate"), engine=None)
    assert (elsewhere.outcome, elsewhere.fatal) == ("unknown", True)


def test_a_gpu_failure_in_a_request_is_one_of_the_server() -> None:
    serving = "vllm/entrypoints/openai/serving_chat.py create_chat_completion"
    full = classify_text(V1 + raised(OOM, serving, "vllm/v1/engine/core.py run_busy_loop"), engine="vllm")
    assert full.outcome == "oom.runtime"
    broken = raised("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", serving)
    assert classify_text(V1 + broken, engine="vllm").outcome == "illegal_memory"
    dead = raised("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", serving)
    assert classify_text(V1 + dead, engine="vllm").outcome == "indeterminate.peer_died"


def test_a_scheduler_that_dies_of_a_request_has_failed() -> None:
    died = sglang("ValueError: Requested token count exceeds the model's maximum context length", before=SERVING)
    assert classify_text(died).fatal
    assert classify_text(SERVING + MAIN + "Ready for more\n").outcome == "ready"
