"""Reading what servers answer to a prompt: ``/generate``, ``/v1/completions`` and ``/v1/chat/completions``.

Anything may stand in an answer: what is not understood is left out or becomes a failure, and nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from .sanity import Answer

NATIVE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
#: Why nothing is judged of such a server.
EMBEDS: Final = "an embedding or reward server generates no text"
_HUGE: Final = 10**300
#: "nan" as a word: not in "nano", not in "finance".
_NAN: Final = re.compile(r"(?<![A-Za-z])nan(?![A-Za-z])|not JSON compliant", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failed:
    """A request without an answer; ``refused`` when the server declined it, which is no failure of the model."""

    fact: str
    refused: bool = False
    outcome: str = "unknown"
    status: int | None = None


Reply = Answer | Failed


def mentions_nan(message: str) -> bool:
    """Whether a message of a server is about NaN."""
    return _NAN.search(message) is not None


def read_native(prompt: str, said: Mapping[str, Any]) -> Reply:
    """What an answer of SGLang's ``/generate`` says."""
    text, meta = said.get("text"), said.get("meta_info")
    if text is None and "embedding" in said:
        return Failed(EMBEDS, refused=True)
    if not isinstance(text, str):
        return Failed(f"{NATIVE} answered without a text: {str(dict(said))[:80]}")
    meta = meta if isinstance(meta, dict) else {}
    finish = meta.get("finish_reason")
    finish = finish if isinstance(finish, dict) else {"type": finish}
    if finish.get("type") == "abort":
        message = str(finish.get("message") or "no reason given")
        return Failed(
            f"{NATIVE} aborted the request: {one_line(message)}",
            refused=finish.get("status_code") == 400,
            outcome="numerics" if mentions_nan(message) else "unknown",
        )
    pairs = meta.get("output_token_logprobs")
    pairs = [one for one in pairs if isinstance(one, list) and len(one) >= 2] if isinstance(pairs, list) else []
    ids = said.get("output_ids")
    ids = ids if isinstance(ids, list) else [one[1] for one in pairs]
    return Answer(
        prompt,
        text,
        ids=tuple(one for one in ids if isinstance(one, int)),
        logprobs=tuple(_number(one[0]) for one in pairs),
        prompt_tokens=_count(meta.get("prompt_tokens")),
        cached_tokens=_count(meta.get("cached_tokens")),
        cut=finish.get("type") == "length",
    )


def read_openai(prompt: str, said: Mapping[str, Any]) -> Reply:
    """What an answer of ``/v1/completions`` or ``/v1/chat/completions`` says; tokens are told by their text."""
    choices, usage = said.get("choices"), said.get("usage")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    text = message.get("content") if isinstance(message, dict) else first.get("text")
    if text is None and isinstance(message, dict):
        text = ""  # all of it was reasoning, or a call of a tool
    if not isinstance(text, str):
        return Failed(f"the answer has no text: {str(dict(said))[:80]}")
    logprobs = first.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    values, tokens = logprobs.get("token_logprobs"), logprobs.get("tokens")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    return Answer(
        prompt,
        text,
        ids=tuple(map(str, tokens)) if isinstance(tokens, list) else (),
        logprobs=tuple(_number(one) for one in values) if isinstance(values, list) else (),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        cut=first.get("finish_reason") == "length",
    )


def message_of(said: object) -> str:
    """The message in an error object, however deep it lies."""
    while isinstance(said, dict):
        inner = next((said[name] for name in ("error", "message", "detail") if said.get(name)), None)
        if inner is None:
            return ""
        said = inner
    return one_line(str(said)) if said is not None else ""


def base_name(model: str) -> str:
    """What two paths to one model share; in the hub's cache the folder's name is a commit."""
    cached = re.search(r"models--(?:[^/]+--)?([^/]+?)/snapshots/", model)
    return (cached[1] if cached else model.rstrip("/").rpartition("/")[2]).casefold()


def one_line(text: str) -> str:
    """One line of it, for a fact."""
    return " ".join(text.split())[:200]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return (
        float(value) if not isinstance(value, int) or abs(value) < _HUGE else inf
    )  # a whole number may be too large for a float


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
