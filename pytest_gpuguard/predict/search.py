"""Every layout of a box, ranked by the KV tokens that the whole box would hold; the ones that cannot boot, and why.

Pure: the model is read before. A layout is judged by the same prediction as a single one, never by a shortcut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from ..claims.errors import ClaimError
from ..claims.layout import DP_ATTENTION_FLAG, SIZE_FLAGS, Layout, sizes_from_flags
from .budget import predict_sglang
from .facts import Facts
from .settings import settings_of
from .values import PredictError, Prediction

_ALL: Final = "sglang", "vllm"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A layout that fits. ``kv_tokens`` is what one attention replica holds, ``box_tokens`` what all of them do.

    ``whole``: it uses every GPU of the box. ``close``: the room for its pool is less than the error of that number.
    """

    prediction: Prediction
    replicas: int
    whole: bool

    @property
    def kv_tokens(self) -> int:
        """Tokens of one replica: the longest that one request could be."""
        return self.prediction.kv_tokens or 0

    @property
    def box_tokens(self) -> int:
        """Tokens of all replicas together."""
        return self.kv_tokens * self.replicas

    @property
    def close(self) -> bool:
        """Whether only a boot tells."""
        return abs(self.prediction.rest_gib or 0.0) < self.prediction.bars.get("rest_gib", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The keys of a prediction, and those of its place in the search (docs/prediction.md)."""
        return self.prediction.to_dict() | {
            "replicas": self.replicas,
            "box_kv_tokens": self.box_tokens,
            "uses_all_gpus": self.whole,
            "close": self.close,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that cannot boot, with the first reason."""

    layout: str
    gpus_used: int
    verdict: str
    phase: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``refused`` in ``gpuguard predict --search --json``."""
        return {
            "layout": self.layout,
            "gpus_used": self.gpus_used,
            "verdict": self.verdict,
            "phase": self.phase,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Found:
    """A search: what fits, the most tokens first, and what does not. ``notes`` say what was set aside."""

    layouts: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """``{"layouts": […], "refused": […]}``."""
        return {
            "layouts": [one.to_dict() for one in self.layouts],
            "refused": [one.to_dict() for one in self.refused],
        }

    def reasons(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Verdict, reason, and the layouts that it keeps from booting; the reason of the most layouts first."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for one in self.refused:
            grouped.setdefault((one.verdict, one.reason), []).append(one.layout)
        ordered = sorted(grouped.items(), key=lambda item: -len(item[1]))
        return [(verdict, reason, tuple(names)) for (verdict, reason), names in ordered]


def search(
    facts: Facts,
    engine: str = "sglang",
    version: str | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Found:
    """Try all layouts of the facts' box. The other flags stay; parallel sizes among them are set aside, with a note.

    Takes some milliseconds a layout. Raises PredictError.
    """
    if engine not in _ALL:
        raise PredictError(f"{engine!r} is none of {', '.join(_ALL)}")
    notes = tuple(_set_aside(flags))
    rest = [word for word in flags if word != DP_ATTENTION_FLAG]
    fitting: list[Ranked] = []
    refused: list[Refused] = []
    seen: set[Layout] = set()
    for layout in layouts_of(facts.box.count, engine):
        one = _predicted(facts, engine, version, rest, env, layout)
        if one.layout in seen:  # such as an all-to-all that sets ep itself: the same server, once
            continue
        seen.add(one.layout)
        if one.fits:
            ran = one.layout
            fitting.append(Ranked(one, ran.dp if ran.dp > 1 else 1, one.gpus_used == facts.box.count))
        else:
            refused.append(Refused(str(one.layout), one.gpus_used, one.verdict, one.phase, reason_of(one)))
    return Found(tuple(sorted(fitting, key=_rank)), tuple(refused), notes)


def layouts_of(gpus: int, engine: str = "sglang") -> Iterator[Layout]:
    """The layouts of up to so many GPUs: sizes are divisors of their number, or powers of two. The widest come first.

    In SGLang ep and dp-attention subdivide tp. In vLLM experts are split over all ranks or over none, and attention
    replicas are servers of their own, which hold nothing together.
    """
    sizes = [size for size in range(gpus, 0, -1) if not gpus % size or not size & (size - 1)]
    for tp in sizes:
        for pp in reversed(sizes):
            if tp * pp > gpus:
                continue
            inner = [size for size in range(1, tp + 1) if not tp % size]
            if engine == "vllm":
                yield from (Layout(tp=tp, pp=pp, ep=ep) for ep in sorted({1, tp}))
            else:
                yield from (Layout(tp=tp, dp=dp, ep=ep, pp=pp) for dp in inner for ep in inner)


def reason_of(prediction: Prediction) -> str:
    """Why a prediction that does not fit does not, in a few words."""
    if prediction.rejections:
        return prediction.rejections[0].text
    if prediction.verdict == "oom.weights":
        return f"{prediction.weights_gib:.1f} GiB of weights a rank, {prediction.avail_before_gib:.1f} free"
    if prediction.verdict == "oom.kv_pool":
        rest = prediction.rest_gib or 0.0
        held = f"{prediction.reserved_gib or 0.0:.1f} GiB held back"
        if rest > 0:
            return f"{rest:.1f} GiB left for the KV pool, too little for it ({held})"
        return f"{-rest:.1f} GiB short of any KV pool ({held})"
    return f"nothing left for {prediction.phase.replace('_', ' ')}"


def _predicted(
    facts: Facts, engine: str, version: str | None, flags: Sequence[str], env: Mapping[str, str], layout: Layout
) -> Prediction:
    if engine == "sglang":
        return predict_sglang(facts, version, replace(settings_of(flags, layout), layout=layout), env)
    from .vllm import predict_vllm

    return predict_vllm(facts, version, flags, layout)


def _set_aside(flags: Sequence[str]) -> Iterator[str]:
    """The parallel sizes among the flags. Raises PredictError for one that is no size."""
    try:
        sizes = sizes_from_flags(flags)
    except ClaimError as error:
        raise PredictError(str(error)) from None
    given = [f"{SIZE_FLAGS[name][0]} {size}" for name, size in sizes.items()]
    given += [DP_ATTENTION_FLAG] if DP_ATTENTION_FLAG in flags else []
    if given:
        yield f"{', '.join(given)}: set aside, a search tries all layouts"


def _rank(one: Ranked) -> tuple[int, int, int, int, int, int]:
    """Most tokens first; among equals the fewer GPUs, and the plainer layout."""
    layout = one.prediction.layout
    return (-one.box_tokens, one.prediction.gpus_used, layout.pp, layout.dp, layout.ep, layout.tp)
