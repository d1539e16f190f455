# ruff: noqa: E501  (log lines are as long as they are)
"""What holds for every failure signature: it has an example, and counts only where and how its data say."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.blocks import HEADER, is_exception_line
from pytest_gpuguard.diagnose.lines import peel
from pytest_gpuguard.diagnose.signature import Signature
from pytest_gpuguard.diagnose.signatures import load_signatures

from . import (
    test_signature_examples_comm,
    test_signature_examples_engines,
    test_signature_examples_files,
    test_signature_examples_gpu,
    test_signature_examples_machine,
)
from .failure_logs import (
    CORE0,
    INIT,
    LOADING,
    MAIN,
    RANK0,
    RANK1,
    SERVING,
    V1_LOADING,
    V1_SERVING,
    Example,
    prefixed,
    raised,
    readings,
)

EXAMPLES: tuple[Example, ...] = (
    test_signature_examples_engines.EXAMPLES
    + test_signature_examples_machine.EXAMPLES
    + test_signature_examples_files.EXAMPLES
    + test_signature_examples_gpu.EXAMPLES
    + test_signature_examples_comm.EXAMPLES
)
SIGNATURES = {signature.id: signature for signature in load_signatures().all()}
LESSER = ("symptom", "collective", "last", "consequence")
#: A cause that a rank prints after everything else, with the prefix of its engine.
CAUSE = raised("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge")
CORE1 = "(EngineCore_DP1 pid=1003) ERROR 01-02 03:04:06 [core.py:708] "
LATER = {
    "vllm": prefixed(CORE1, "EngineCore failed to start.\n" + CAUSE),
    None: RANK1 + "Scheduler hit an exception: " + CAUSE + "\n" + MAIN + "Killing all child processes\n",
}
#: What shows, at whatever level, that somebody else died.
HEARSAY = [one for one in SIGNATURES.values() if one.where == "warning" and one.tier == "consequence"]

#: What healthy boots and machines print that sounds like one of them.
HEALTHY: tuple[str, ...] = (
    test_signature_examples_machine.HEALTHY + test_signature_examples_gpu.HEALTHY + test_signature_examples_comm.HEALTHY
)


#: What a signature would claim but for the words that it excludes; and what it is.
EXCLUDED = (
    ("host.enomem", "unknown", "RuntimeError: ibv_reg_mr failed: Cannot allocate memory"),
    ("arch.compute_capability", "unknown", "RuntimeError: CUDA out of memory, device capability: only 16 GiB"),
    ("arch.sm_required", "jit.compile", "RuntimeError: ptxas fatal   : unsupported: only sm_90 is not defined for option 'gpu-name'"),
    ("arch.this_gpu", "unknown", "RuntimeError: peer memory is not supported on this GPU"),
    ("arch.unsupported_architecture", "unsupported.model", "ValueError: Unsupported architectures: NewForCausalLM"),
    ("config.constraint", "unknown", "ValueError: a tensor must be set before it is read"),
    ("config.one_of", "unsupported.arch", "ValueError: expects arch to be one of [sm_100a, sm_103a], but got sm_120a"),
    ("graph.capture_broken", "starting", "Search for `cudaErrorStreamCaptureInvalidated' in the CUDA runtime API docs."),
    ("jit.smem.limit", "unknown", "RuntimeError: shared memory segment exceeds the limit of the system"),
    ("jit.tool_missing", "jit.compile", "RuntimeError: '/usr/local/cuda/bin/nvcc' returned non-zero exit status 1"),
    ("graph.during_capture", "oom.graph_capture", "RuntimeError: CUDA error: out of memory: cannot go on while capturing the CUDA graph"),
    ("driver.absent", "starting", "/x/torch/__init__.py:1: UserWarning: CUDA unknown error - this may be due to an incorrectly set up environment"),
    ("model.gated", "illegal_memory", "RuntimeError: CUDA error: an illegal memory access was encountered. Access to model memory"),
    ("model.path_missing", "unknown", "ValueError: the model path of the adapter does not exist"),
    ("model.not_found", "starting", "'(MaxRetryError(Failed to resolve 'huggingface.co'))' thrown while requesting HEAD https://huggingface.co/m"),
    ("import.library", "starting", "ERROR: ld.so: object 'libjemalloc.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored."),
    ("model.disk_full", "nccl.shm", "OSError: [Errno 28] No space left on device: failed to extend /dev/shm/nccl-a to 7 bytes: No space left on device"),
    ("weights.missing", "starting", "Warning: norm.weight not found in the checkpoint and newly initialized"),
    ("model.architecture_not_supported", "unknown", "RuntimeError: compute architecture not supported by this build"),
    ("config.requires_value", "unknown", "ImportError: this NumPy is not compatible with the other one"),
    ("config.quantization", "unsupported.arch", "ValueError: quantization fp8 is not supported for the current GPU. Minimum capability: 89."),
    ("config.value_type", "unsupported.arch", "ValueError: block_size 16 is not supported on this GPU"),
    ("config.not_supported", "unsupported.model", "ValueError: Unsupported model type: new"),
    ("p2p.symmetric_memory", "unknown", "RuntimeError: symmetric memory failed: CUDA out of memory"),
    ("deepep", "import.abi", "ImportError: libnvshmem_host.so.3: cannot open shared object file: No such file or directory"),
    ("nccl.timeout", "hang.timeout", "TimeoutError: Timed out waiting for engine core processes to start"),
    ("gpu.out_of_memory", "starting", "set --mem-fraction-static lower to avoid CUDA out of memory"),
    ("numerics.nan", "starting", "pass --enable-nan-detection and look for: NaN detected"),
    ("gpu.device_assert", "numerics", "TensorCompare.cu:110: block: [0,0,0], thread: [0,0,0] Assertion `probability tensor contains either `inf`, `nan`"),
    ("gpu.illegal_memory", "starting", "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information."),
    ("nccl.error", "indeterminate.peer_died", "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"),
    ("peer.died", "starting", "Sending process group 77 the signal TERM"),
    ("sglang.watchdog", "starting", "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)"),
    ("p2p.ipc.line", "starting", "custom_all_reduce.cuh:455: WARN: two ranks share a switch"),
    ("nvshmem.line", "starting", "/x/nvshmem/transport.cpp:281: WARN: init failed for remote transport: ibrc"),
    ("nccl.warned", "starting", "node0:1:1 [0] misc/ibvwrap.cc:1 NCCL WARN Call to connect failed : Failed to open libibverbs.so"),
    ("native.crash", "starting", "Fatal Python error: none_dealloc: deallocating None"),
)  # fmt: skip


def of(example: Example) -> Signature:
    return SIGNATURES[example.signature]


def decisive_text(example: Example) -> str:
    """The decisive line without its prefix."""
    decisive = readings(example)[0].decisive
    assert decisive is not None
    return peel(decisive.text).body.strip()


def is_plain(example: Example) -> bool:
    """Whether the decisive line is one that nobody marked as an error or printed as an exception."""
    decisive = readings(example)[0].decisive
    assert decisive is not None
    line = peel(example.log.splitlines()[decisive.line - 1])
    announced = HEADER in example.log or "terminate called" in example.log
    return line.level == "" and not announced and not is_exception_line(line.body)


def name(example: Example) -> str:
    return example.signature


PLAIN = [example for example in EXAMPLES if of(example).hard and of(example).where == "exception" and is_plain(example)]


def test_every_signature_has_an_example_and_every_example_a_signature() -> None:
    assert set(SIGNATURES) - {example.signature for example in EXAMPLES} == set()
    assert {example.signature for example in EXAMPLES} - set(SIGNATURES) == set()
    assert len(set(EXAMPLES)) == len(EXAMPLES)


def test_every_hard_signature_has_an_example_on_a_plain_line() -> None:
    hard = {name for name, signature in SIGNATURES.items() if signature.hard and signature.where == "exception"}
    assert hard - {example.signature for example in PLAIN} == set()


def test_no_literal_of_a_signature_is_idle() -> None:
    idle = [
        (signature.id, literal)
        for signature in SIGNATURES.values()
        for literal in signature.any
        if any(other != literal and other in literal for other in signature.any)
        or any(word in literal for word in signature.exclude)
    ]
    idle += [
        (signature.id, word)
        for signature in SIGNATURES.values()
        for word in signature.exclude
        if any(other != word and other in word for other in signature.exclude)
    ]
    assert idle == []


@pytest.mark.parametrize("example", [one for one in EXAMPLES if of(one).frame is not None], ids=name)
def test_without_its_frame_an_exception_is_not_that_failure(example: Example) -> None:
    elsewhere = re.sub(
        r'File "[^"]+", line (\d+), in \S+\n[^\n]*', r'File "/x/other.py", line \1, in other', example.log
    )
    assert elsewhere != example.log
    for engine in (example.engine, None):
        assert classify_text(elsewhere, engine=engine).signature != example.signature


@pytest.mark.parametrize("example", [one for one in EXAMPLES if of(one).tier in LESSER], ids=name)
def test_a_symptom_and_a_consequence_lose_against_a_cause_printed_later(example: Example) -> None:
    for engine in (example.engine, None):
        reading = classify_text(example.log + (LATER.get(example.engine) or LATER[None]), engine=engine)
        assert (reading.signature, reading.outcome) == ("weights.truncated", "weights.mismatch"), reading


@pytest.mark.parametrize("example", [one for one in EXAMPLES if of(one).where == "warning"], ids=name)
def test_a_warning_alone_is_no_failure_of_a_server_that_goes_on(example: Example) -> None:
    decisive = readings(example)[0].decisive
    assert decisive is not None
    line = example.log.splitlines()[decisive.line - 1] + "\n"
    for before, after, engine in ((LOADING, SERVING, "sglang"), (V1_LOADING, V1_SERVING, "vllm")):
        assert classify_text(before + line + after, engine=engine).outcome == "ready"
        if of(example).tier != "consequence":
            assert classify_text(before + line, engine=engine).outcome == "starting"


@pytest.mark.parametrize("example", [one for one in EXAMPLES if of(one).fatal and of(one).where == "line"], ids=name)
def test_a_fatal_line_ends_a_server_that_was_ready(example: Example) -> None:
    decisive = readings(example)[0].decisive
    assert decisive is not None
    line = example.log.splitlines()[decisive.line - 1] + "\n"
    for engine in (example.engine, None):
        reading = classify_text((V1_SERVING if example.engine == "vllm" else SERVING) + line, engine=engine)
        assert (reading.signature, reading.fatal) == (example.signature, True), reading


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_the_words_of_a_failure_logged_as_information_or_warning_are_none(level: str, example: Example) -> None:
    text = decisive_text(example)
    logged = f"{CORE0}{level} 01-02 03:04:05 [x.py:1] {text}\n"
    expected = "indeterminate.peer_died" if any(one.matches(text) for one in HEARSAY) else "starting"
    for engine in ("vllm", None):
        assert classify_text(V1_LOADING + logged, engine=engine).outcome == expected


@pytest.mark.parametrize(("signature", "outcome", "text"), EXCLUDED)
def test_what_a_signature_excludes_is_something_else(signature: str, outcome: str, text: str) -> None:
    claimed = SIGNATURES[signature]
    assert not claimed.matches(text, "")
    assert dataclasses.replace(claimed, exclude=()).matches(text, "")
    reading = classify_text(text + "\n", engine=None)
    assert reading.outcome == outcome, reading


def test_every_signature_that_excludes_words_has_an_example_of_it() -> None:
    assert {one.id for one in SIGNATURES.values() if one.exclude} == {signature for signature, *_ in EXCLUDED}


@pytest.mark.parametrize("example", PLAIN, ids=name)
def test_a_plain_line_is_believed_only_where_the_engine_does_not_go_on(example: Example) -> None:
    line = decisive_text(example) + "\n"
    boot = V1_LOADING.splitlines(keepends=True)
    failed = classify_text(V1_LOADING + line, engine="vllm")
    assert failed.outcome == example.outcome or example.outcome.startswith("oom.")
    assert classify_text(boot[0] + line + boot[1], engine="vllm").outcome == "starting"
    assert classify_text(V1_LOADING + "falling back: " + line, engine="vllm").outcome == "starting"
    assert classify_text(LOADING + RANK0 + line, engine="sglang").outcome == "starting"


@pytest.mark.parametrize("text", HEALTHY)
@pytest.mark.parametrize("before", [INIT, LOADING, V1_LOADING, SERVING], ids=["init", "loading", "vllm", "serving"])
def test_what_healthy_boots_and_machines_say_is_no_failure(before: str, text: str) -> None:
    reading = classify_text(before + text, engine=None)
    assert reading.outcome in ("starting", "ready"), reading
