"""Output tokens per second over SGLang's ``/generate``, counted by our own small streaming client.

The first form of the meter: one warm-up, then a few equal rounds of ``concurrency`` requests with fixed lengths.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import nan
from typing import TYPE_CHECKING, Any, Final

from ..claims.expect import ExpectToks

if TYPE_CHECKING:
    import httpx

ROUNDS: Final = 3
#: Token ids of prompts, which every tokenizer has: low ids beyond the usual special tokens.
_FIRST_ID: Final = 10
_LAST_ID: Final = 250
#: A server that sends nothing for so long has hung; all rounds together may take so long.
_SILENCE_S: Final = 60.0
_DEADLINE_S: Final = 600.0


def measure_toks(
    url: str,
    headers: Mapping[str, str],
    load: ExpectToks,
    alive: Callable[[], bool] = lambda: True,
    rounds: int = ROUNDS,
) -> tuple[float, ...]:
    """One figure in tok/s per round, all requests together or per request as the expectation says.

    A round in which a request fails is nan; one that returns another number of tokens than asked for gives no figure.
    Ends early when the server is no longer ``alive``, or the deadline has passed.
    """
    import httpx

    shape = random.Random(0)
    figures: list[float] = []
    deadline = time.monotonic() + _DEADLINE_S
    client = httpx.Client(base_url=url, timeout=_SILENCE_S, trust_env=False, verify=False, headers=dict(headers))
    pool = ThreadPoolExecutor(load.concurrency)
    try:
        for number in range(rounds + 1):
            if not alive() or time.monotonic() > deadline:
                break
            prompts = [
                [shape.randint(_FIRST_ID, _LAST_ID) for _ in range(load.input_len)] for _ in range(load.concurrency)
            ]
            started = time.perf_counter()
            asked = [pool.submit(_generate, client, prompt, load.output_len, deadline) for prompt in prompts]
            done = [one.result() for one in asked]
            elapsed = time.perf_counter() - started
            if any(tokens is None for tokens, _ in done):
                figures.append(nan)
            elif number > 0 and all(tokens == load.output_len for tokens, _ in done):  # the first round warms up
                total = sum(tokens or 0 for tokens, _ in done)
                each = sum((tokens or 0) / seconds for tokens, seconds in done) / len(done)
                figures.append(each if load.per == "request" else total / elapsed)
    finally:
        client.close()  # wakes requests that are still waiting when we are interrupted
        pool.shutdown(wait=False, cancel_futures=True)
    return tuple(figures)


def _generate(client: httpx.Client, prompt: list[int], output_len: int, deadline: float) -> tuple[int | None, float]:
    """(output tokens, seconds) of one streamed request; None tokens when it failed."""
    import httpx

    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": output_len, "temperature": 0.0, "ignore_eos": True},
    }
    started = time.perf_counter()
    tokens: int | None = None
    try:
        with client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code == 200:
                for line in answer.iter_lines():
                    if time.monotonic() > deadline:
                        return None, time.perf_counter() - started
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        event: dict[str, Any] = json.loads(line[5:])
                        tokens = int(event.get("meta_info", {}).get("completion_tokens", tokens or 0))
    except (httpx.HTTPError, ValueError, RuntimeError):  # RuntimeError: the client was closed under it
        tokens = None
    return tokens, time.perf_counter() - started
