"""Boots like SGLang 0.5.23 as far as a watcher can see: argv, log lines, HTTP, and ways to die.

What goes wrong is told by the environment: FAKE_SGLANG is one of the words in ``main``; FAKE_SGLANG_DELAY is the
time between phases in seconds. FAKE_SGLANG_SAYS are more messages of its log, one a line; FAKE_SGLANG_DEVICE is the
device that it comes to run on; FAKE_SGLANG_INFO is more of its server_info, as JSON; FAKE_SGLANG_LOG is a file with the
whole log of a boot that fails (``log``). FAKE_SGLANG_MEMORY is the GiB that the server, and its child, come to have on
each GPU of the NVML stand-in (which FAKE_SGLANG_STICKY=1 keeps after their death). Nothing real is allocated.
FAKE_SGLANG_TOKS are the tokens that it streams per request and second; FAKE_SGLANG_EAGER=1 says that it decodes without
CUDA graphs.

FAKE_SGLANG_ANSWERS is how it answers once it is ready: "nan" or "null" log-probs, "zeros" (token 0 alone), "repeat" (the
same token whatever is asked), "nan_500" (status 500), "first_dies" (at the first prefill), "second_dies" (at a prompt that
is in the prefix cache), "burst_dies" (at the third request that runs at once).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = os.environ.get("FAKE_SGLANG", "ready")
DELAY = float(os.environ.get("FAKE_SGLANG_DELAY", "0.02"))
DEVICE = os.environ.get("FAKE_SGLANG_DEVICE")
TOKS = float(os.environ.get("FAKE_SGLANG_TOKS", "1000"))
ANSWERS = os.environ.get("FAKE_SGLANG_ANSWERS")
WORDS = ["alpha", "beta", "gamma", "delta"]


def log(message, rank=""):
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stderr.write(f"[{stamp}{rank}] {message}\n")
    sys.stderr.flush()


def die(*traceback):
    log("Scheduler hit an exception: Traceback (most recent call last):")
    sys.stderr.write(
        '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 1, in run\n'
    )
    for line in traceback:
        sys.stderr.write(line + "\n")
    sys.stderr.write("\n")
    sys.stderr.flush()
    log("Received sigquit from a child process. It usually means the child failed.")
    os.kill(os.getpid(), signal.SIGKILL)


def allocate(pid):
    """Give a process memory on the GPUs that this server may use, on the machine that the NVML stand-in shows."""
    gib = float(os.environ.get("FAKE_SGLANG_MEMORY", "0"))
    if not gib:
        return
    sys.path.insert(0, os.path.abspath(os.path.join(__file__, *[os.pardir] * 4)))
    from pathlib import Path

    from tests.standin import standin

    rig = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"]))
    for index in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        slot = next(one for one in rig.gpu[int(index)].process if one.pid == 0)
        slot.start, slot.bytes = standin.start_time(pid), int(gib * (1 << 30))
        slot.sticky = int(os.environ.get("FAKE_SGLANG_STICKY", "0"))
        slot.pid = pid


def kernel(*messages):
    """Add messages to the file that stands in for /dev/kmsg."""
    with open(os.environ["FAKE_SGLANG_KMSG"], "a") as file:
        for number, message in enumerate(messages):
            file.write(f"4,{number},{time.monotonic_ns() // 1000},-;{message}\n SUBSYSTEM=fake\n")


def parse():
    parser = argparse.ArgumentParser(prog="launch_server.py")
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "--pp-size", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--dp-size", type=int, default=1)
    parser.add_argument("--expert-parallel-size", "--ep-size", "--ep", type=int, default=1)
    parser.add_argument("--attn-dp-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float, default=0.8)
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--api-key")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--flashinfer-allreduce-fusion-backend", default=None)
    parser.add_argument("--attention-backend")
    parser.add_argument("--enable-torch-symm-mem", action="store_true")
    parser.add_argument("--enable-mscclpp", action="store_true")
    parser.add_argument("--json-model-override-args", default="{}")
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    args = None
    tokens = 0
    asked = 0
    prompts = frozenset()
    running = 0

    def log_message(self, *words):
        pass

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        key = self.args.api_key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            return self.reply({"error": "unauthorized"}, 401)
        if self.path == "/health":
            return self.reply({}, 503 if MODE == "never_healthy" else 200)
        if self.path in ("/model_info", "/get_model_info"):
            return self.reply({"model_path": "/somebody/else" if MODE == "foreign" else self.args.model_path})
        if self.path in ("/server_info", "/get_server_info"):
            return self.reply(
                {
                    "model_path": self.args.model_path,
                    "mem_fraction_static": self.args.mem_fraction_static,
                    "max_total_num_tokens": self.tokens,
                    "version": "0.5.23",
                    "device": DEVICE or self.args.device,
                    "disable_cuda_graph": self.args.disable_cuda_graph,
                    "internal_states": [
                        {
                            "memory_usage": {
                                "weight": 1.5,
                                "kvcache": 2.0,
                                "graph": {"decode": 0.25},
                                "token_capacity": self.tokens,
                            }
                        }
                    ],
                    **json.loads(os.environ.get("FAKE_SGLANG_INFO", "{}")),
                }
            )
        return self.reply({"error": "not found"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path != "/generate":
            return self.reply({"error": "not found"}, 404)
        # Long texts are those that every new server is asked: what goes wrong later goes wrong with a test's own.
        later = len(str(body.get("text", ""))) < 20
        if MODE == "runtime_oom" and later:
            die(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.97 GiB"
            )
        if MODE == "vanish" and later:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "flaky" and later:
            Handler.asked += 1
            if Handler.asked == 3:
                return self.reply({"error": "internal"}, 500)
        if MODE == "blocks" and later:
            time.sleep(3600)
        count = int(body.get("sampling_params", {}).get("max_new_tokens", 4))
        first = sum(map(ord, str(body.get("text", ""))))  # another prompt, another answer
        text = " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))
        if ANSWERS and not body.get("stream"):
            return self.answer(body, count)
        if not body.get("stream"):
            return self.reply({"text": text, "meta_info": {"completion_tokens": count}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if os.environ.get("FAKE_SGLANG_EAGER"):
            log(
                "Decode batch. #running-req: 1, #token: 16, token usage: 0.00, cuda graph: False, gen throughput (token/s): 20.03, #queue-req: 0, "
            )
        for i in range(1, count + 1):
            event = {"text": text, "meta_info": {"completion_tokens": i}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(1 / TOKS)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, body, count):
        prompt = str(body.get("text") or body.get("input_ids"))
        again = prompt in Handler.prompts
        Handler.prompts = {*Handler.prompts, prompt}
        if ANSWERS == "nan_500":
            return self.reply({"error": {"message": "NaN detected! sampler: next_token_logits"}}, 500)
        if ANSWERS == "first_dies":
            die("RuntimeError: Error in function 'run' at fmhaRunner.cuh:30: Unsupported architecture")
        if ANSWERS == "second_dies" and again:
            die(
                "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376."
            )
        Handler.running += 1
        if ANSWERS == "burst_dies":
            time.sleep(0.3)
            if Handler.running > 2:
                die("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
        Handler.running -= 1
        ids = [0] * count if ANSWERS == "zeros" else [7] * count if ANSWERS == "repeat" else list(range(20, 20 + count))
        bad = {"nan": float("nan"), "null": None}.get(ANSWERS, -1.0)
        self.reply(
            {
                "text": " ".join(f"t{one}" for one in ids),
                "output_ids": ids,
                "meta_info": {
                    "completion_tokens": count,
                    "prompt_tokens": len(prompt.split()),
                    "cached_tokens": len(prompt.split()) - 1 if again else 0,
                    "finish_reason": {"type": "length", "length": count},
                    "output_token_logprobs": [[bad, one, None] for one in ids],
                },
            }
        )


def main():
    args = parse()
    if os.environ.get("FAKE_SGLANG_BOOTS"):
        with open(os.environ["FAKE_SGLANG_BOOTS"], "a") as boots:
            cuda = [f"{name}={os.environ.get(name)}" for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]
            boots.write(f"{os.getpid()} {' '.join([*sys.argv[1:], *cuda])}\n")
    if MODE == "proof":  # proof against TERM, with a child in a session of its own that is too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hold = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        allocate(subprocess.Popen([sys.executable, "-c", hold], start_new_session=True).pid)
    if MODE == "log":
        with open(os.environ["FAKE_SGLANG_LOG"]) as said:
            sys.stderr.write(said.read())
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    device = DEVICE or args.device
    log(
        f"server_args={{'model_path': {args.model_path!r}, 'mem_fraction_static': {args.mem_fraction_static}, 'device': {device!r}}}"
    )
    if MODE == "silent_exit":
        sys.exit(0)
    if MODE == "noise":
        sys.stderr.buffer.write(b"\xff\xfe\x80 not utf-8 \xc3\x28\n")
        sys.stderr.buffer.write(b"x" * (1 << 20) + b"\n")
        for i in range(20):
            sys.stderr.write(
                f"Loading safetensors checkpoint shards: {i * 5}% Completed | {i}/20 [00:0{i % 10}<00:01]\r"
            )
        sys.stderr.write("\n")
        sys.stderr.flush()
        log("Consider lowering --mem-fraction-static to avoid out of memory errors.")
    if MODE == "stubborn":  # fails, prints it, and stays
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log("Load weight end. elapsed=0.01 s, type=LlamaForCausalLM, avail mem=92.50 GB, mem usage=1.50 GB.")
        log("Scheduler hit an exception: Traceback (most recent call last):")
        sys.stderr.write(
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1.\n"
        )
        sys.stderr.flush()
        time.sleep(3600)
    if MODE == "burst":
        for number in range(40000):
            sys.stderr.write(f"a line of no meaning, number {number}, {'x' * 60}\n")
        log("Load weight end. elapsed=0.01 s, type=LlamaForCausalLM, avail mem=92.50 GB, mem usage=1.50 GB.")
        die("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1.")
    if MODE == "rank_died":
        log(
            "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."
        )
        sys.exit(1)
    time.sleep(DELAY)
    log("Load weight begin. avail mem=94.00 GB")
    allocate(os.getpid())
    if MODE == "hang":
        time.sleep(3600)
    if MODE == "chatty":
        while True:
            log("Still loading.")
            time.sleep(0.05)
    if MODE == "weights_oom":
        die(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 672.00 MiB. GPU 2 has a total capacity of "
            "94.97 GiB of which 136.94 MiB is free. Including non-PyTorch memory, this process has 94.83 GiB memory in use."
        )
    if MODE == "killed":  # as the kernel's OOM killer does it: two messages, then SIGKILL
        kernel(
            f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=python,pid={os.getpid()},uid=0",
            f"Out of memory: Killed process {os.getpid()} (python) total-vm:181200000kB, anon-rss:62914560kB, file-rss:0kB",
        )
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "xid":  # FAKE_SGLANG_XID: "0000:16:00 79"
        bus, number = os.environ["FAKE_SGLANG_XID"].split()
        kernel(f"NVRM: Xid (PCI:{bus}): {number}, pid={os.getpid()}, name=python, Ch 00000008")
        die("RuntimeError: CUDA error: an illegal memory access was encountered")
    if MODE == "keyerror":
        die("KeyError: 12")
    time.sleep(DELAY)
    log("Load weight end. elapsed=0.01 s, type=LlamaForCausalLM, avail mem=92.50 GB, mem usage=1.50 GB.")
    if MODE == "kv_pool" or args.mem_fraction_static < 0.01:
        die(
            f"ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static="
            f"{args.mem_fraction_static}. Raise --mem-fraction-static above 0.016 (minimum viable = 1 - available/pre = 0.0160)."
        )
    if MODE == "host_oom":
        die(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 9068871296 bytes. Error code 12 (Cannot allocate memory)"
        )
    profiled = 1_000_000
    tokens = min(args.max_total_tokens, profiled)
    if args.max_total_tokens > profiled:
        log(
            f"max_total_tokens={args.max_total_tokens} is larger than the profiled value {profiled}. Use the profiled value instead."
        )
    log(f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 1.00 GB, V size: 1.00 GB")
    log("Memory pool end. avail mem=90.50 GB")
    for message in os.environ.get("FAKE_SGLANG_SAYS", "").splitlines():
        log(message)
    if args.flashinfer_allreduce_fusion_backend and args.tensor_parallel_size > 1:
        die("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.")
    log(
        f"max_total_num_tokens={tokens}, chunked_prefill_size=4096, max_prefill_tokens=16384, "
        f"max_running_requests=2048, context_len=2048, available_gpu_mem=90.25 GB"
    )
    time.sleep(DELAY)
    if MODE == "port":
        log("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use")
        time.sleep(3600)
    Handler.args, Handler.tokens = args, tokens
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    if MODE != "proof":
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    log(f"Uvicorn running on http://{args.host}:{args.port} (Press CTRL+C to quit)")
    if MODE != "never_ready":
        log("The server is fired up and ready to roll!")
    server.serve_forever(0.02)


if __name__ == "__main__":
    main()
