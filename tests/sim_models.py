"""Small model configurations for rehearsals, numbers only, and one boot of the stand-in as the classifier reads it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.engines.log import LogReader
from pytest_gpuguard.sim import engine as sim_engine

STAND_IN = Path(sim_engine.__file__).with_name("__main__.py")

#: 16 GiB of weights in bf16, with grouped-query attention.
DENSE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: A mixture of experts with latent attention, 8-bit weights: 80 GiB a card on eight.
LATENT: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def write_model(folder: Path, config: Mapping[str, Any] = DENSE, **changes: Any) -> Path:
    """A model folder with this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@dataclass(frozen=True)
class Booted:
    """One boot: how it ended (None: still up), and what its log says."""

    code: int | None
    log: str
    reading: LogReading

    @property
    def line(self) -> str:
        """The decisive line."""
        return self.reading.decisive.text if self.reading.decisive is not None else ""


def command(model: Path, memory: Path, rig: str, stack: str, *flags: str, own: Sequence[str] = ()) -> list[str]:
    """The stand-in's command line."""
    memory.mkdir(exist_ok=True)
    words = ["--rig", rig, "--stack", stack, "--config", str(model), "--memory", str(memory), *own]
    return [sys.executable, str(STAND_IN), *words, "--", "--model-path", str(model), *flags]


def free_port() -> int:
    """A port that nobody listens on now, out of the system's own range: those of leases are below it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(argv: Sequence[str], log: Path, gpus: int, env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The stand-in's process, its output in ``log``; whatever happens, it is gone afterwards."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, env={**os.environ, **visible, **(env or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(60)


def boot(
    folder: Path, model: Path, rig: str, release: str, *flags: str, env: Mapping[str, str] | None = None, **more: Any
) -> Booted:
    """Boot until it is ready or has ended; a server that is up is stopped with SIGTERM, which must end it."""
    gpus = int(rig.rpartition(":")[2])
    port = free_port()
    own = [word for name in env or {} for word in ("--env", name)] + list(more.get("own", ()))
    stack = more.get("stack", f"sim:sglang=={release}")
    argv = command(model, folder / "memory", rig, stack, "--port", str(port), *flags, own=own)
    log = folder / "server.log"
    with running(argv, log, gpus, env) as process:
        deadline = time.monotonic() + 30
        while process.poll() is None and b"ready to roll" not in log.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.02)
        code = process.poll()
        if code is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    majors = more.get("majors", (12,))
    reader = LogReader("sglang", release, majors)
    reader.feed(log.read_bytes())
    reading = reader.closed() if code is not None else reader.reading()
    return Booted(code, log.read_text(), reading)
