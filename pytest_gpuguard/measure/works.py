"""Whether a server that says "ready" really answers: the probe behind ``works``, and behind ``fits`` in its short form.

Kernels of a model are reached by the shape of a request: a plain prefill, a prefill on top of a cached prefix, a
prefill in chunks and a batch of mixed lengths each run different ones, of whichever attention the model has (MLA, MHA,
linear or GDN). So the same four requests are one prefill per attention path for every model, and nothing here knows
models.
A failed request proves no cause: the log and the process do. Nothing is claimed from what the server merely refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final

from ..claims.answers import Answers, Check
from .ask import Asker
from .prompts import SHORT, storied
from .replies import Failed, Reply
from .sanity import Answer, broken, changed, degenerate, doubtful, repetitive

#: Output tokens per answer: enough to see a habit, and a blink of any GPU.
_TOKENS: Final = 16
#: The prefix cache holds whole pages (of 64 tokens with some backends) and hybrid models keep states by 256, so the
#: prompt that is asked twice is longer: about 400 tokens.
_PLAIN_CHARS: Final = 1600
#: The longest prompt, in tokens.
_LONGEST: Final = 20_000
#: How much longer than one chunk a prompt is made: the second chunk attends to the first, which is another kernel.
_CHUNKS: Final = 1.5
_DEFAULT_LONG: Final = 4000
#: Characters of the concurrent prompts, those longer than the beginning of a text included.
_BURST: Final = (0, 200, 0, 1600, 400, 800, 0, 3200)
#: A slow server gets shorter prompts, so that those of a check take about so long, in seconds.
_MOST_PREFILL_S: Final = 20.0
#: So many data-parallel ranks may take turns before the same prompt comes to one that has it in its cache.
_MOST_RANKS: Final = 16
#: So often may a server be probed and still get texts that are new to it; so many texts lie between two probes.
_MOST_PROBES: Final = 8
_PROBE_SEEDS: Final = 100


def works(
    url: str,
    headers: Mapping[str, str],
    level: str = "short",
    *,
    context: int | None,
    model: str | None,
    alive: Callable[[], bool],
    questions: Path | None = None,
    reference: Path | None = None,
    deadline_s: float = 300,
    prefill: int | None = None,
    kv_tokens: int | None = None,
    judged: bool = True,
) -> Answers:
    """Ask a server, and say what it answered; it ends at the first check that fails.

    ``context``, ``prefill`` (one chunk of a chunked prefill) and ``kv_tokens`` (what the KV pool holds) are in tokens;
    what is None is asked of the server. ``level="full"`` adds the accuracy over a file of ``questions`` and the
    comparison with a ``reference``, where given. ``deadline_s`` is for everything together. ``judged=False``: the
    weights are dummies, so that it answers at all is what counts, and nothing of what.

    Never raises for what a server does. A server without an endpoint for completions, or that embeds, gives
    checks with ``ok=None``.
    """
    if level not in ("short", "full"):
        raise ValueError(f'level is "short" or "full", not {level!r}')
    with Asker(url, headers, model=model, alive=alive, deadline_s=deadline_s) as asker:
        info = asker.server_info()
        no_text = asker.no_text(info)
        if no_text is not None:
            return Answers(level, (Check("prefill", None, no_text),), judged=judged)
        probe = _Probe(asker, _Limits.of(asker, info, context, prefill, kv_tokens), judged)
        checks = probe.run()
        score: tuple[int, int] | None = None
        sound = not any(check.ok is False for check in checks)
        if level == "full" and judged and sound and questions is not None:
            from .questions import accuracy

            check, score = accuracy(asker, questions)
            checks.append(check)
            sound = check.ok is not False
        if level == "full" and judged and sound and reference is not None:
            from .reference import agrees

            checks.append(agrees(asker, reference))
    correct, total = score or (None, None)
    return Answers(level, tuple(checks), correct, total, judged)


class _Limits:
    """What the server takes, in tokens, and how it runs; None where nobody says."""

    def __init__(self, info: Mapping[str, Any], context: int | None, prefill: int | None, kv: int | None) -> None:
        self.context = context or _size(info.get("context_length")) or _size(info.get("max_req_input_len"))
        self.prefill = prefill or _size(info.get("chunked_prefill_size"))
        self.kv = kv or _size(info.get("max_total_num_tokens"))
        self.ranks = min(_size(info.get("dp_size")) or 1, _MOST_RANKS)
        self.cache = False if info.get("disable_radix_cache") is True else None
        self.speculative = bool(info.get("speculative_algorithm"))

    @classmethod
    def of(
        cls, asker: Asker, info: Mapping[str, Any], context: int | None, prefill: int | None, kv: int | None
    ) -> _Limits:
        if context is None and not info:  # not SGLang
            data = asker.get("/v1/models").get("data")
            first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
            context = _size(first.get("max_model_len"))
        return cls(info, context, prefill, kv)

    @property
    def room(self) -> int:
        """The longest prompt with its answer that is worth asking for, with a margin for special tokens."""
        most = min(self.context or _LONGEST, self.kv or _LONGEST, _LONGEST)
        return max(int(most * 0.95) - _TOKENS - 8, 1)


class _Probe:
    """The short form, check by check; what was answered is kept, for habits show only over different prompts."""

    def __init__(self, asker: Asker, limits: _Limits, judged: bool) -> None:
        self._asker, self._limits, self._means_something = asker, limits, judged
        self._seen: list[Answer] = []
        self._texts = 0
        # Until an answer tells how many tokens a character is, one each: no tokenizer makes more of plain English.
        self._chars_per_token = 1.0
        self._pace, self._warm = inf, False  # tokens prefilled in a second
        if limits.speculative:
            # Asking for log-probs has killed speculative servers that are sound otherwise (sglang#17349, #19761).
            asker.logprobs = False
            asker.note = "; log-probs not asked for, as speculative decoding may not give them"

    def run(self) -> list[Check]:
        """The checks up to the first that fails."""
        checks: list[Check] = []
        for one in (self._plain, self._again, self._long, self._burst):
            checks.append(one())
            if checks[-1].ok is False or (checks[-1].ok is None and not self._seen):
                break
        return checks

    def _plain(self) -> Check:
        """A prompt that is in no cache: other texts when this server was probed with these before."""
        reply: Reply = Failed("not asked")
        for _ in range(_MOST_PROBES):
            prompt = self._prompt(_PLAIN_CHARS, 1, SHORT[0])
            began = time.monotonic()
            reply = self._asker.answer(prompt, _TOKENS)
            self._note_pace(reply, time.monotonic() - began)
            if isinstance(reply, Failed) or (reply.cached_tokens or 0) * 2 < (reply.prompt_tokens or 1):
                break
            self._texts += _PROBE_SEEDS
        if isinstance(reply, Answer) and reply.prompt_tokens:
            self._chars_per_token = max(len(prompt) / reply.prompt_tokens, 0.25)
        return self._judged("prefill", [reply], f"{_tokens(reply)} prefilled")

    def _note_pace(self, reply: Reply, seconds: float) -> None:
        """How fast it prefills, at least: its output tokens are in the time too."""
        if isinstance(reply, Answer) and reply.prompt_tokens:
            self._pace = reply.prompt_tokens / max(seconds, 1e-3)

    def _affordable(self, tokens: int) -> int:
        """So many tokens, or what a slow server prefills in 20 seconds. The first answer may have compiled kernels."""
        if self._pace * _MOST_PREFILL_S < tokens and not self._warm:
            self._warm = True
            began = time.monotonic()
            reply = self._asker.answer(self._prompt(_PLAIN_CHARS, 20, SHORT[0]), _TOKENS)
            self._note_pace(reply, time.monotonic() - began)
        return max(int(min(tokens, self._pace * _MOST_PREFILL_S)), 1)

    def _again(self) -> Check:
        """The same prompt until a rank has it in its cache: a broken cached prefill dies or changes the answer."""
        name, first = "same prompt again", self._seen[0]
        told = first.cached_tokens is not None and self._limits.cache is not False
        reply: Reply = first
        for _ in range(self._limits.ranks if told else 1):
            reply = self._asker.answer(first.prompt, _TOKENS)
            if isinstance(reply, Failed) or reply.cached_tokens:
                break
        if isinstance(reply, Failed):
            return _failed(name, [reply])
        hit = f"{reply.cached_tokens} tokens came from the prefix cache" if reply.cached_tokens else _no_hit(reply)
        why = broken(reply) or changed(first, reply) if self._means_something else None
        if why is not None:
            return Check(name, False, f"{why}; {hit}", "numerics")
        same = (reply.ids or reply.text) == (first.ids or first.text)
        differs = "" if same else "; the answer differs, within what another kernel's rounding does"
        if not same and not (first.logprobs and reply.logprobs):
            differs = "; the answer differs, and without log-probs a tie cannot be told from an error"
        return Check(name, True, f"{hit}{differs or '; the same answer'}", "ready")

    def _long(self) -> Check:
        """A prompt of more than one chunk where the server takes such; shorter when it says that it is too long."""
        chunk = self._limits.prefill
        wanted = int(chunk * _CHUNKS) + 64 if chunk and chunk > 0 else _DEFAULT_LONG
        wanted = self._affordable(min(max(wanted, _DEFAULT_LONG), self._limits.room))
        reply: Reply = Failed("not asked")
        for _ in range(3):
            reply = self._asker.answer(self._prompt(int(wanted * self._chars_per_token), 2, SHORT[3]), _TOKENS)
            if not (isinstance(reply, Failed) and reply.refused):
                break
            wanted = max(wanted // 2, 1)
        fact = f"{_tokens(reply)} prefilled"
        if chunk and isinstance(reply, Answer) and reply.prompt_tokens:
            beyond = reply.prompt_tokens > chunk
            fact += f" in chunks of {chunk}" if beyond else f", not more than one chunk of {chunk}"
        return self._judged("long prompt", [reply], fact)

    def _burst(self) -> Check:
        total = int(sum(_BURST) / self._chars_per_token)
        share = self._affordable(total) / total
        prompts = [
            self._prompt(int(size * share), 3 + at, SHORT[1 + at % (len(SHORT) - 1)]) for at, size in enumerate(_BURST)
        ]
        replies = self._asker.answers(prompts, _TOKENS)
        return self._judged("burst", replies, f"{len(prompts)} requests of mixed lengths at once", last=True)

    def _prompt(self, chars: int, seed: int, ending: str) -> str:
        """A prompt that is sure to fit, however short the context is."""
        room = int(self._limits.room * self._chars_per_token)
        return storied(min(chars, room), self._texts + seed, ending)

    def _judged(self, name: str, replies: Sequence[Reply], fact: str, last: bool = False) -> Check:
        bad = _failed(name, replies)
        answers = [one for one in replies if isinstance(one, Answer)]
        for one in answers:
            why = broken(one) if self._means_something else None
            if why is not None:
                return Check(name, False, f"{why} (prompt {one.prompt[-24:]!r})", "numerics")
        self._seen += answers
        if bad.ok is False:
            return bad
        why = degenerate(self._seen) if self._means_something else None
        if why is not None:
            return Check(name, False, why, "numerics")
        if bad.fact:
            return bad
        doubt = doubtful(self._seen) if last and self._means_something else None
        if doubt is not None:
            return Check(name, None, doubt)
        stuck = sum(map(repetitive, answers))
        more = f"; {stuck} of {len(answers)} answers repeat themselves" if stuck else ""
        return Check(name, True, f"{fact}{more}{self._asker.note}")


def _failed(name: str, replies: Sequence[Reply]) -> Check:
    """The first that failed, else the first that was refused, else a check with an empty fact."""
    failed = [one for one in replies if isinstance(one, Failed)]
    real = [one for one in failed if not one.refused]
    if not failed:
        return Check(name, True, "")
    first = (real or failed)[0]
    count = len(real or failed)
    of = f" ({count} of {len(replies)} requests)" if len(replies) > 1 else ""
    if not real:
        return Check(name, None, f"the server refused{of}: {first.fact}")
    first = next((one for one in real if one.outcome == "numerics"), first)
    return Check(name, False, f"{first.fact}{of}", first.outcome)


def _no_hit(reply: Answer) -> str:
    return (
        "the server reports no prefix-cache hit" if reply.cached_tokens is not None else "cache hits are not reported"
    )


def _tokens(reply: Reply) -> str:
    count = reply.prompt_tokens if isinstance(reply, Answer) else None
    return f"{count} tokens" if count is not None else "a prompt"


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
