"""A stand-in for SGLang that boots like 0.5.23, answers as answers_server, and has one of the known breakages, or none.

``BREAKAGE`` names what goes wrong; the messages are those of the reports. It never looks at what is claimed, and
nothing of a GPU is shown by it.
``BREAKAGE_INFO`` is more of its server_info and ``BREAKAGE_REPLIES`` what it answers in chats, by the question, both
as JSON; ``BREAKAGE_TOKS`` are the tokens that it streams per request and second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .answers_server import AnswersServer, _Handler, ids_of, noise

SGLANG = "/opt/venv/lib/python3.11/site-packages/sglang/srt"
_ADVICE = (
    "Possible solutions:",
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)",
)
#: Breakages of a boot: the phase that they end, (file, function) of the frame, and the message.
BOOTS: dict[str, tuple[str, tuple[str, str], tuple[str, ...]]] = {
    # sgl-project/sglang#15650
    "fusion": (
        "capture",
        ("model_executor/model_runner.py", "init_device_graphs"),
        (
            "Exception: Capture cuda graph failed: No supported CUDA architectures found for major versions [9, 10].",
            *_ADVICE,
        ),
    ),
    # sgl-project/sglang#29562, #40628
    "fused_shared_experts": (
        "weights",
        ("layers/moe/fused_moe_triton/layer.py", "_load_w13"),
        (
            "RuntimeError: The size of tensor a (3072) must match the size of tensor b (6144) at non-singleton "
            "dimension 1",
        ),
    ),
    # sgl-project/sglang#35080
    "gdn_gate": (
        "capture",
        ("layers/attention/attention_registry.py", "attn_backend_wrapper"),
        (
            "AssertionError: Only {'trtllm_mha', 'triton', 'fa4'} backends are supported on Blackwell GPUs for hybrid "
            "GDN models. Got prefill=flashinfer, decode=flashinfer.",
        ),
    ),
}
#: Breakages of a request: the frame, and the message.
REQUESTS: dict[str, tuple[tuple[str, str], str]] = {
    # sgl-project/sglang#24633
    "first_prefill": (
        ("layers/attention/trtllm_mla_backend.py", "forward_extend"),
        "RuntimeError: Error in function 'run' at fmhaRunner.cuh:30: Unsupported architecture",
    ),
    # sgl-project/sglang#14311
    "cached_prefill": (
        ("layers/attention/triton_ops/extend_attention.py", "extend_attention_fwd"),
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
        "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    ),
    # local-inference-lab/rtx6kpro
    "speculation": (
        ("speculative/eagle_worker_v2.py", "forward_batch_generation"),
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
}
#: Faults of answers_server: NaN, and log-probs of another model.
FAULTS = {"nan": "nan", "wrong_kernel": "garbage"}
#: Other ways to answer wrongly: rambling behind so many tokens; wrong but fluent.
LONG = 32_000
WORDS = ("rambles", "keeps_repeating", "wrong_answers", "")
_STREAMS_AT_ONCE = 12


def log(message: str) -> None:
    """One line of SGLang's log."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {message}\n")
    sys.stderr.flush()


def die(frame: tuple[str, str], *message: str) -> None:
    """The end of a scheduler, and of the server with it."""
    log("Scheduler hit an exception: Traceback (most recent call last):")
    sys.stderr.write(f'  File "{SGLANG}/{frame[0]}", line 1, in {frame[1]}\n' + "\n".join(message) + "\n\n")
    log("Received sigquit from a child process. It usually means the child failed.")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


class Server(AnswersServer):
    """The made-up model, and what goes wrong in it."""

    def __init__(self, symptom: str, toks: float, **info: Any) -> None:
        super().__init__(FAULTS.get(symptom), **info)
        self.symptom, self.toks, self.streams = symptom, toks, 0

    def output(self, prompt: str, count: int, again: bool, burst: bool) -> list[tuple[float | None, int, str]]:
        """What follows the prompt: where its end stood in it before, what came then, as an induction head copies."""
        if len(ids_of(prompt)) > LONG and self.symptom == "rambles":
            return [(-1.0 - noise((at, prompt[-40:])), 50 + at, f"so{int(noise(at) * 50)} ") for at in range(count)]
        end = prompt.rstrip().rpartition("\n")[2]
        before = prompt.find(end) if len(end) > 12 else -1
        if 0 <= before < len(prompt.rstrip()) - len(end):
            words = prompt[before + len(end) :].split()[:count]
            return [(-0.1 - noise(word), ids_of(word)[0], f" {word}") for word in words]
        return super().output(prompt, count, again, burst)


class Handler(_Handler):
    """SGLang's HTTP."""

    state: Server

    def do_GET(self) -> None:
        """Health too."""
        if self.path == "/health":
            return self.reply({})
        return super().do_GET()

    def post(self, body: dict[str, Any]) -> None:
        """One request, unless it is the one that kills."""
        state = self.state
        if self.path == "/v1/chat/completions":
            return self.chat(body)
        if state.symptom == "first_prefill":
            die(*REQUESTS["first_prefill"])
        if state.symptom == "cached_prefill" and body.get("text") in state.seen:
            die(*REQUESTS["cached_prefill"])
        if body.get("stream"):
            return self.stream(body)
        return super().post(body)

    def chat(self, body: dict[str, Any]) -> None:
        """A reply that was given, or fluent words: other ones at each place, or the same over and over."""
        state, asked = self.state, str(body["messages"][0]["content"])
        count = int(body.get("max_tokens") or 16)
        if asked in state.replies:
            text = "The answer is 7." if state.symptom == "wrong_answers" else state.replies[asked]
        elif len(ids_of(asked)) > LONG and state.symptom == "keeps_repeating":
            text = "and then the keeper climbed the stairs " * (count // 7)
        else:
            text = " ".join(f"w{int(noise((asked[-40:], at)) * 4000)}" for at in range(count))
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": len(ids_of(asked))}})

    def stream(self, body: dict[str, Any]) -> None:
        """Tokens as they are due, counted from when the request came."""
        state, came = self.state, time.monotonic()
        count, prompt = int(body["sampling_params"]["max_new_tokens"]), len(body["input_ids"])
        with state.lock:
            state.streams += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for at in range(1, count + 1):
            if state.symptom == "speculation" and state.streams >= _STREAMS_AT_ONCE:
                die(*REQUESTS["speculation"])
            time.sleep(max(0.0, came + at / state.toks - time.monotonic()))
            meta: dict[str, Any] = {
                "completion_tokens": at,
                "prompt_tokens": prompt,
                "cached_tokens": 0,
                "finish_reason": None,
            }
            if at == count:
                meta["finish_reason"] = {"type": "length", "length": count}
            self.wfile.write(f"data: {json.dumps({'text': 'word ' * at, 'meta_info': meta})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        with state.lock:
            state.streams -= 1


def _help() -> str:
    """The flags of 0.5.23, by the table."""
    table = json.loads((Path(__file__).parents[1] / "pytest_gpuguard/facts/sglang_flags.json").read_text())
    known = {name: one["takes"] for name, one in table["flags"].items() if one["in"][-1][1] is None}
    lines = [f"  {name}{'' if takes == 'nothing' else ' VALUE'}\n" for name, takes in sorted(known.items())]
    return "usage: launch_server.py\n\noptions:\n" + "".join(lines)


def main() -> None:
    """Serve until stopped, or until the breakage."""
    if "--help" in sys.argv:
        print(_help())
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    parser.add_argument("--mem-fraction-static", type=float, default=0.8)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--chunked-prefill-size", type=int, default=4096)
    args, flags = parser.parse_known_args()
    symptom = os.environ.get("BREAKAGE", "")
    assert symptom in {*BOOTS, *REQUESTS, *FAULTS, *WORDS}, symptom
    phase, *failure = BOOTS.get(symptom, ("", (), ()))
    if symptom == "fused_shared_experts" and "--disable-shared-experts-fusion" in flags:
        phase = ""
    log(f"server_args={{'model_path': {args.model_path!r}, 'mem_fraction_static': {args.mem_fraction_static}}}")
    log("Load weight begin. avail mem=94.00 GB")
    if phase == "weights":
        die(failure[0], *failure[1])  # type: ignore[arg-type]
    log("Load weight end. elapsed=0.01 s, type=Model, avail mem=92.50 GB, mem usage=1.50 GB.")
    log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 1.00 GB, V size: 1.00 GB")
    log("Memory pool end. avail mem=10.50 GB")
    log("Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2], avail mem=10.40 GB")
    if phase == "capture":
        die(failure[0], *failure[1])  # type: ignore[arg-type]
    log("Capture target decode CUDA graph end. bs=[1, 2], elapsed=0.01 s, mem usage=0.15 GB, avail mem=10.25 GB.")
    info: dict[str, Any] = {
        "version": "0.5.23",
        "chunked_prefill_size": args.chunked_prefill_size,
        "max_total_num_tokens": 400_000,
        "mem_fraction_static": args.mem_fraction_static,
        "device": "cuda",
        "internal_states": [{}],
        **({"speculative_algorithm": "EAGLE"} if "--speculative-algorithm" in flags else {}),
        **json.loads(os.environ.get("BREAKAGE_INFO", "{}")),
        "context": args.context_length,
        "model_info": {"model_path": args.model_path},
        "replies": json.loads(os.environ.get("BREAKAGE_REPLIES", "{}")),
    }
    Handler.state = Server(symptom, float(os.environ.get("BREAKAGE_TOKS", "1000")), **info)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    log(f"max_total_num_tokens=400000, chunked_prefill_size={args.chunked_prefill_size}, available_gpu_mem=10.25 GB")
    log(f"Uvicorn running on http://127.0.0.1:{args.port} (Press CTRL+C to quit)")
    log("The server is fired up and ready to roll!")
    server.serve_forever(0.02)
