"""Output tokens per second over SGLang's ``/generate``, counted by our own small streaming client.

The first form of the meter: one warm-up, then a few equal rounds of ``concurrency`` requests with fixed lengths.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from ..claims.expect import ExpectToks
from ..engines.base import BootSpec
from ..engines.sglang import headers

if TYPE_CHECKING:
    import httpx

ROUNDS: Final = 3
#: Token ids of prompts, which every tokenizer has: low ids beyond the usual special tokens.
_FIRST_ID: Final = 10
_LAST_ID: Final = 250
_TIMEOUT_S: Final = 600.0


def measure_toks(url: str, spec: BootSpec, load: ExpectToks, rounds: int = ROUNDS) -> tuple[float, ...]:
    """One figure in tok/s per round, all requests together or per request as the expectation says.

    A round in which a request fails, or returns another number of tokens than asked for, gives no figure.
    """
    import httpx

    shape = random.Random(0)
    figures = []
    with (
        httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False, headers=headers(spec)) as client,
        ThreadPoolExecutor(load.concurrency) as pool,
    ):
        for number in range(rounds + 1):
            prompts = [
                [shape.randint(_FIRST_ID, _LAST_ID) for _ in range(load.input_len)] for _ in range(load.concurrency)
            ]
            started = time.perf_counter()
            done = list(pool.map(lambda prompt: _generate(client, prompt, load.output_len), prompts))
            elapsed = time.perf_counter() - started
            if number == 0 or any(tokens != load.output_len for tokens, _ in done):
                continue  # the first round warms up
            if load.per == "request":
                figures.append(sum(tokens / seconds for tokens, seconds in done) / len(done))
            else:
                figures.append(sum(tokens for tokens, _ in done) / elapsed)
    return tuple(figures)


def _generate(client: httpx.Client, prompt: list[int], output_len: int) -> tuple[int, float]:
    """(output tokens, seconds) of one streamed request; (0, seconds) when it failed."""
    import httpx

    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": output_len, "temperature": 0.0, "ignore_eos": True},
    }
    started = time.perf_counter()
    tokens = 0
    try:
        with client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                return 0, time.perf_counter() - started
            for line in answer.iter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    event: dict[str, Any] = json.loads(line[5:])
                    tokens = int(event.get("meta_info", {}).get("completion_tokens", tokens))
    except (httpx.HTTPError, ValueError):
        tokens = 0
    return tokens, time.perf_counter() - started
