"""What the meter asks of a server (`Load`) and what it gives back (`Window`), and the prompts of a load.

Pure values: the meter's child imports this module too, so it must import nothing beyond the standard library.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, fsum, nan
from typing import Any, Final

APIS: Final = {"generate": "/generate", "completions": "/v1/completions"}
#: Token ids of prompts: low ones beyond the usual special tokens, which every tokenizer has.
FIRST_ID: Final = 10
LAST_ID: Final = 250
_IDS: Final = LAST_ID - FIRST_ID + 1
#: As many tokens tell one prompt from the others: 241³ prompts until they repeat.
_DIGITS: Final = 3
_STRIDE: Final = 100_003  # coprime to 241: neighbours differ in the first digit


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: ``concurrency`` requests always in flight, each of fixed lengths in tokens.

    ``cached=False``: every prompt is new and differs from the others in its first tokens, so that a prefix cache has
    nothing to give. A second meter on the same server needs another ``seed`` for that. ``cached=True``: all prompts
    are equal but for their last tokens, so that the cache is used. ``api`` is ``"generate"`` (SGLang's) or
    ``"completions"`` (OpenAI's). Raises ValueError.
    """

    concurrency: int = 1
    input_len: int = 128
    output_len: int = 64
    seed: int = 0
    cached: bool = False
    api: str = "generate"

    def __post_init__(self) -> None:
        for name in ("concurrency", "input_len", "output_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1: {value!r}")
        if self.api not in APIS:
            raise ValueError(f"api must be one of {', '.join(sorted(APIS))}: {self.api!r}")


class Prompts:
    """The prompts of a load by number: the same for the same load and seed, in every process."""

    def __init__(self, load: Load) -> None:
        chance = random.Random(f"{load.seed} {load.concurrency} {load.input_len} {load.output_len}")
        self._digits = min(_DIGITS, load.input_len)
        self._offset = chance.randrange(_IDS**_DIGITS)
        common = chance.choices(range(FIRST_ID, LAST_ID + 1), k=load.input_len - self._digits)
        self._common = json.dumps(common)[1:-1]  # written once: long prompts must not cost time between tokens
        self._cached = load.cached

    def text(self, number: int) -> str:
        """Prompt ``number`` as a JSON array of token ids."""
        rest = number * _STRIDE + self._offset
        digits = []
        for _ in range(self._digits):
            rest, digit = divmod(rest, _IDS)
            digits.append(str(FIRST_ID + digit))
        own = ", ".join(digits)
        if not self._common:
            return f"[{own}]"
        return f"[{self._common}, {own}]" if self._cached else f"[{own}, {self._common}]"

    def ids(self, number: int) -> list[int]:
        """Prompt ``number`` as token ids."""
        ids: list[int] = json.loads(self.text(number))
        return ids


class Bodies:
    """The requests of a load by number, as they go over the wire."""

    def __init__(self, load: Load, model: str | None = None) -> None:
        self._prompts = Prompts(load)
        options: dict[str, Any]
        if load.api == "generate":
            sampling = {"max_new_tokens": load.output_len, "temperature": 0.0, "ignore_eos": True}
            self._key, options = "input_ids", {"stream": True, "sampling_params": sampling}
        else:
            self._key, options = (
                "prompt",
                {
                    "model": model or "default",
                    "max_tokens": load.output_len,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "stream": True,
                    # Both engines know the second one; where it is unknown, events are counted instead.
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                },
            )
        self._options = json.dumps(options)[1:]

    def body(self, number: int) -> bytes:
        """Request ``number`` as JSON."""
        return f'{{"{self._key}": {self._prompts.text(number)}, {self._options}'.encode()


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 99th percentile, in seconds."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[tuple[float, int]]) -> Spread | None:
        """The spread of (seconds, how often); None when there are none. Percentiles are values that occurred."""
        ordered = sorted(values)
        total = sum(often for _, often in ordered)
        if total == 0:
            return None
        middle, high, seen = nan, nan, 0
        for value, often in ordered:
            if seen < ceil(total * 0.5) <= seen + often:
                middle = value
            if seen < ceil(total * 0.99) <= seen + often:
                high = value
            seen += often
        return cls(fsum(value * often for value, often in ordered) / total, middle, high)


#: How a doubt ends that says that the true rate may be higher.
LOWER_BOUND: Final = "figures are a lower bound"


@dataclass(frozen=True, slots=True)
class Window:
    """One steady window of a closed loop; times are in seconds, figures in tokens per second.

    ``output_toks`` counts the output tokens of all requests that arrived within the window, ``total_toks`` also the
    input tokens of the requests whose first token did; ``request_toks`` is the mean, over the requests that ended in
    the window, of output tokens by end-to-end seconds. All are nan when ``failed`` says why there is no figure.
    ``started`` and ``ended`` are ``time.monotonic()``. ``doubts`` are reasons not to trust the figures, one line each.
    """

    output_toks: float
    total_toks: float
    request_toks: float
    ttft_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    requests: int
    tokens: int
    seconds: float
    started: float
    ended: float
    failed: str | None = None
    doubts: tuple[str, ...] = ()
    #: It failed for the meter's own sake, which says nothing of the server.
    ours: bool = False

    @property
    def understated(self) -> bool:
        """Whether the meter was short of CPU, so that the true rate may be higher."""
        return any(doubt.endswith(LOWER_BOUND) for doubt in self.doubts)

    @classmethod
    def failure(cls, why: str, started: float, ended: float, ours: bool = False) -> Window:
        """A window without figures."""
        return cls(nan, nan, nan, None, None, None, 0, 0, ended - started, started, ended, why, ours=ours)
