"""Reference log-probs: how likely one stack, believed to be sound, finds fixed texts, and how far another is from it.

Speed and health do not show a broken kernel; the probabilities of the same tokens do. A file is read strictly: a
reference that is half understood would judge wrongly for years.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import exp, log, log1p
from pathlib import Path
from typing import Any, Final

from ..claims.answers import Check
from .ask import Asker
from .prompts import REFERENCE
from .replies import COMPLETIONS, NATIVE, Failed, base_name

FORMAT: Final = "gpuguard-reference"
VERSION: Final = 1
_KEYS: Final = frozenset({"format", "version", "model", "engine", "engine_version", "made", "passages"})
_PASSAGE: Final = frozenset({"text", "ids", "logprobs"})
#: Mean absolute difference in nats per token from which a stack is called broken. A known bad kernel moved the mean KL
#: divergence from 0.035 (FP4, sound) to 9.33; for differences spread like a normal distribution a divergence of K means
#: about sqrt(4 K / pi): 0.21 and over 3 nats. Sound stacks of other precision lie at 0.01 to 0.3. Between, in ratio:
LIMIT_NATS: Final = 0.85
#: Fewer tokens than this prove nothing.
_ENOUGH: Final = 20
#: No log-prob is beyond this; NaN and infinity are not within it.
_HUGE: Final = 1e6
_AGAIN: Final = "make it again with: gpuguard reference URL -o FILE"


class BadReference(ValueError):
    """A reference cannot be made, read, or compared; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One text as tokens; ``logprobs`` (nats) of each after those before it, None for the first."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """The log-probs of one stack; ``made`` is a date and time in UTC, and what is unknown of the stack is None."""

    model: str
    engine: str | None
    engine_version: str | None
    made: str
    passages: tuple[Passage, ...]

    @property
    def tokens(self) -> int:
        """How many tokens have a log-prob."""
        return sum(value is not None for one in self.passages for value in one.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean over all tokens, in nats: about -2 for a trained model, minus the log of the vocabulary for garbage."""
        return sum(value for one in self.passages for value in one.logprobs if value is not None) / self.tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a stack is from a reference, per token of the reference's texts.

    ``mean_abs``: mean of abs(ln p_ref - ln p_new), in nats. ``gain``: mean of ln p_new - ln p_ref, below 0 when the
    texts have become less likely (the rise of the cross-entropy, with its sign turned). ``kl_at_least``: mean of the
    Kullback-Leibler divergence between (p, 1 - p) of the text's own token by the reference and by the new stack: a
    lower bound of that over the whole vocabulary, for telling all other tokens apart can only add to it.
    """

    tokens: int
    mean_abs: float
    gain: float
    kl_at_least: float
    worst_text: str
    worst_mean_abs: float

    @property
    def sound(self) -> bool:
        """Whether other kernels or another precision explain it."""
        return self.mean_abs <= LIMIT_NATS

    def __str__(self) -> str:
        return (
            f"log-probs of {self.tokens} tokens differ by {self.mean_abs:.3f} nats in the mean (limit {LIMIT_NATS}), "
            f"KL at least {self.kl_at_least:.4f} per token, gain {self.gain:+.3f}; most in {self.worst_text[:32]!r}: "
            f"{self.worst_mean_abs:.3f}"
        )


def make(asker: Asker, texts: Sequence[str] = REFERENCE) -> Reference:
    """The reference of a server. Raises BadReference when it gives no log-probs of a prompt, or they are no numbers."""
    info = _askable(asker)
    passages = tuple(_passage(asker, text) for text in texts)
    model = asker.model_path(info)
    version = info.get("version")
    engine = "sglang" if info else None
    if not info:
        version = asker.get("/version").get("version")
        engine = "vllm" if version else None
    made = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = Reference(model, engine, str(version) if version else None, made, passages)
    if found.tokens < _ENOUGH:
        raise BadReference(
            f"{found.tokens} tokens are too few for a reference: {_ENOUGH} are needed, give longer texts"
        )
    return found


def write(reference: Reference, path: Path) -> None:
    """Write a reference; whoever reads the file meanwhile sees the old one or the new. Raises BadReference."""
    passages = [
        {"text": one.text, "ids": list(one.ids), "logprobs": [None if x is None else round(x, 6) for x in one.logprobs]}
        for one in reference.passages
    ]
    said = {
        "format": FORMAT,
        "version": VERSION,
        "model": reference.model,
        "engine": reference.engine,
        "engine_version": reference.engine_version,
        "made": reference.made,
        "passages": passages,
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(said, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except (OSError, UnicodeEncodeError) as error:
        beside.unlink(missing_ok=True)
        raise BadReference(f"{path}: the reference cannot be written: {error}") from None


def read(path: Path) -> Reference:
    """The reference in a file. Raises BadReference for anything that is not exactly one."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadReference(f"{path}: there is no such reference; {_AGAIN}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadReference(f"{path}: the reference cannot be read ({error}); {_AGAIN}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise BadReference(f'{path}: is no reference ("format" is not "{FORMAT}"); {_AGAIN}')
    if said.get("version") != VERSION:
        raise BadReference(f"{path}: has version {said.get('version')!r}, and {VERSION} is read here; {_AGAIN}")
    if said.keys() != _KEYS:
        odd = sorted(said.keys() ^ _KEYS)[0]
        raise BadReference(f"{path}: the key {odd!r} is {'unknown' if odd in said else 'missing'}; {_AGAIN}")
    for key in ("model", "made"):
        if not isinstance(said[key], str):
            raise BadReference(f"{path}: {key!r} is no text; {_AGAIN}")
    for key in ("engine", "engine_version"):
        if said[key] is not None and not isinstance(said[key], str):
            raise BadReference(f"{path}: {key!r} is neither text nor null; {_AGAIN}")
    if not isinstance(said["passages"], list) or not said["passages"]:
        raise BadReference(f"{path}: there are no passages; {_AGAIN}")
    passages = []
    for number, one in enumerate(said["passages"]):
        try:
            passages.append(_read_passage(one))
        except ValueError as error:
            raise BadReference(f"{path}: passage {number}: {error}; {_AGAIN}") from None
    found = Reference(said["model"], said["engine"], said["engine_version"], said["made"], tuple(passages))
    if found.tokens < _ENOUGH:
        raise BadReference(f"{path}: has only {found.tokens} log-probs, and {_ENOUGH} are needed; {_AGAIN}")
    return found


def _read_passage(said: object) -> Passage:
    if not isinstance(said, dict) or said.keys() != _PASSAGE:
        raise ValueError("is no object with text, ids and logprobs")
    text, ids, values = said["text"], said["ids"], said["logprobs"]
    if not isinstance(text, str) or not isinstance(ids, list) or not isinstance(values, list):
        raise ValueError("text is a text, ids and logprobs are lists")
    if len(ids) != len(values) or not ids:
        raise ValueError(f"has {len(ids)} ids and {len(values)} logprobs")
    return Passage(text, tuple(map(_id, ids)), _checked(values))


def _id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value


def _checked(values: Sequence[object]) -> tuple[float | None, ...]:
    """Log-probs of which the first may be unknown. Raises ValueError for one that is not a number."""
    found: list[float | None] = []
    for number, value in enumerate(values):
        if value is None and number == 0:
            found.append(None)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not -_HUGE < value < _HUGE:
            raise ValueError(f"the log-prob of token {number} is {'null' if value is None else value}, and no number")
        else:
            found.append(float(value))
    return tuple(found)


def compare(reference: Reference, passages: Sequence[Passage]) -> Difference:
    """How far these passages, of the same texts, are from the reference. Raises BadReference when tokens differ."""
    total: list[tuple[float, float, float]] = []
    means: list[tuple[float, str]] = []
    for old, new in zip(reference.passages, passages, strict=True):
        if old.ids != new.ids:
            raise BadReference(
                f"the server makes other tokens of {old.text[:32]!r} than the reference of {reference.model} has: "
                "another tokenizer or model, so log-probs cannot be compared; make a reference of this one"
            )
        pairs = [
            (before, now)
            for before, now in zip(old.logprobs, new.logprobs, strict=True)
            if before is not None and now is not None
        ]
        each = [(abs(before - now), now - before, _binary_kl(before, now)) for before, now in pairs]
        total += each
        if each:
            means.append((sum(one[0] for one in each) / len(each), old.text))
    if len(total) < _ENOUGH:
        raise BadReference(f"only {len(total)} tokens can be compared, and {_ENOUGH} are needed")
    mean_abs, gain, kl = (sum(one[at] for one in total) / len(total) for at in range(3))
    worst, text = max(means)
    return Difference(len(total), mean_abs, gain, kl, text, worst)


def _binary_kl(ref: float, new: float) -> float:
    """KL divergence of (q, 1 - q) from (p, 1 - p), in nats, from ln p and ln q."""
    p = exp(min(ref, 0.0))
    rest = 1 - p
    kl = p * (ref - new)
    if rest > 0:
        kl += rest * (log(rest) - log1p(-min(exp(min(new, 0.0)), 1 - 1e-12)))
    return max(kl, 0.0)


def agrees(asker: Asker, path: Path) -> Check:
    """Compare a server with a reference file. ``ok`` is None where they cannot be compared."""
    name = "reference"
    try:
        reference = read(path)
        info = _askable(asker)
        passages = [_passage(asker, one.text) for one in reference.passages]
        difference = compare(reference, passages)
    except _Broken as error:
        return Check(name, False, str(error), error.outcome)
    except BadReference as error:
        return Check(name, None, str(error))
    whose = f"{reference.model}, {reference.engine or 'engine unknown'} {reference.engine_version or ''}".rstrip()
    fact = f"{difference}; reference of {whose}, {reference.made}"
    served = asker.model_path(info)
    if base_name(served) != base_name(reference.model):
        # Weights of another model with the same tokenizer differ as much as a broken kernel does.
        if not difference.sound:
            return Check(name, None, f"the reference is made of {reference.model}, and this serves {served}: {fact}")
        fact += f"; this serves {served}"
    return Check(name, difference.sound, fact, "ready" if difference.sound else "numerics")


def _askable(asker: Asker) -> dict[str, Any]:
    """The ``server_info``. Raises BadReference where log-probs must not be asked for.

    Several releases of SGLang die when they are asked of speculative decoding (sglang#17349, #19761).
    """
    info = asker.server_info()
    no_text = asker.no_text(info)
    if no_text is not None:
        raise BadReference(f"{no_text}, so it has no log-probs of one")
    if info.get("speculative_algorithm"):
        raise BadReference(
            "the server decodes speculatively, and may die when log-probs are asked for; serve the same model without "
            "--speculative-algorithm for this: the target model's log-probs are the same"
        )
    return info


class _Broken(BadReference):
    """A server did not answer, or answered no numbers: not a matter of files and parameters."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def _passage(asker: Asker, text: str) -> Passage:
    """The tokens of a text and their log-probs, by the server."""
    said = asker.ask_raw(
        {
            NATIVE: {
                "text": text,
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            },
            # vLLM tells ids in the place of texts when asked so; the token that it adds comes last
            COMPLETIONS: {
                "prompt": text,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 1,
                "echo": True,
                "return_tokens_as_token_ids": True,
            },
        }
    )
    if isinstance(said, Failed):
        if said.refused:
            raise BadReference(f"the server gives no log-probs of a prompt: {said.fact}")
        raise _Broken(said.fact, said.outcome)
    ids, values = _native(said) if "meta_info" in said else _echoed(said)
    if not ids or len(ids) != len(values):
        raise BadReference(
            "the server gives no token ids with the log-probs of a prompt; SGLang's /generate does, and vLLM's "
            "/v1/completions with echo"
        )
    try:
        return Passage(text, tuple(map(_id, ids)), _checked(values))
    except ValueError as error:
        raise _Broken(f"{error} (in {text[:32]!r})", "numerics") from None


def _native(said: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    meta = said["meta_info"]
    pairs = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    pairs = [one for one in pairs if isinstance(one, list) and len(one) >= 2] if isinstance(pairs, list) else []
    return [one[1] for one in pairs], [one[0] for one in pairs]


def _echoed(said: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    choices = said.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    found = first.get("logprobs")
    found = found if isinstance(found, dict) else {}
    tokens, values = found.get("tokens"), found.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
        return [], []
    ids = [
        int(one[9:]) for one in tokens if isinstance(one, str) and one.startswith("token_id:") and one[9:].isdecimal()
    ]
    return (ids[:-1], values[:-1]) if len(ids) == len(tokens) else ([], [])
