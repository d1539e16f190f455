"""What the flags ask for, as numbers: the ones that memory depends on, in every spelling of any release.

Pure. A value that cannot be meant (negative, no number) is a PredictError; an unknown flag is not ours to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..claims.errors import ClaimError
from ..claims.layout import Layout, flag_value, layout_from_flags
from .argv import argv_number, argv_share, argv_text, argv_whole
from .values import PredictError

#: How the names of a cache's formats begin, in any release.
_DTYPES: Final = ("bf16", "bfloat16", "fp16", "float16", "half", "fp8", "float8", "fp4", "nvfp4", "mxfp", "int8")


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags that memory depends on; None where a flag is not given."""

    layout: Layout
    fraction: float | None = None
    context: int | None = None
    chunk: int | None = None
    prefill_tokens: int | None = None
    graph_bs: int | None = None
    graphs_off: bool = False
    decode_graphs_off: bool = False
    prefill_graphs: bool | None = None
    prefill_opted_in: bool = False
    prefill_graph_tokens: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    kv_dtype: str = "auto"
    page: int | None = None
    window_ratio: float | None = None
    state_ratio: float | None = None
    state_slots: int | None = None
    state_dtype: str | None = None
    radix_off: bool = False
    spec: str | None = None
    draft_tokens: int | None = None
    draft_model: str | None = None
    a2a: str | None = None
    runner: str = "auto"
    attention: str | None = None
    dense_tp: int | None = None
    dp_head: bool = False
    redundant: int = 0
    quantization: str | None = None
    role: str | None = None
    language_only: bool = False
    symmetric: bool = False
    feature_pool: bool = False


def settings_of(argv: Sequence[str], layout: Layout | None = None) -> Settings:
    """Read the flags. Raises PredictError."""
    try:
        resolved = layout or layout_from_flags(argv)
    except ClaimError as error:
        raise PredictError(str(error)) from None
    graphs = argv_whole(argv, 1, "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")
    sizes = _list(argv, "--cuda-graph-bs", "--cuda-graph-bs-decode")
    spec = argv_text(argv, "--speculative-algorithm", "--speculative-algo")
    return Settings(
        layout=resolved,
        fraction=argv_share(argv, "--mem-fraction-static"),
        context=argv_whole(argv, 1, "--context-length"),
        chunk=argv_whole(argv, -1, "--chunked-prefill-size"),
        prefill_tokens=argv_whole(argv, 1, "--max-prefill-tokens"),
        graph_bs=max(sizes) if sizes else graphs,
        graphs_off="--disable-cuda-graph" in argv,
        decode_graphs_off=_decode_graphs_off(argv),
        prefill_graphs=_prefill_graphs(argv),
        prefill_opted_in="--enable-piecewise-cuda-graph" in argv,
        prefill_graph_tokens=argv_whole(argv, 1, "--piecewise-cuda-graph-max-tokens", "--cuda-graph-max-bs-prefill"),
        max_requests=argv_whole(argv, 1, "--max-running-requests"),
        max_tokens=argv_whole(argv, 1, "--max-total-tokens"),
        kv_dtype=_dtype(argv),
        page=argv_whole(argv, 1, "--page-size"),
        window_ratio=argv_share(argv, "--swa-full-tokens-ratio"),
        state_ratio=argv_number(argv, 0, "--mamba-full-memory-ratio"),
        state_slots=argv_whole(argv, 1, "--max-mamba-cache-size"),
        state_dtype=argv_text(argv, "--mamba-ssm-dtype"),
        radix_off="--disable-radix-cache" in argv,
        spec=spec.upper() if spec is not None and spec.lower() != "none" else None,
        draft_tokens=argv_whole(argv, 1, "--speculative-num-draft-tokens"),
        draft_model=argv_text(argv, "--speculative-draft-model-path", "--speculative-draft-model"),
        a2a=_a2a(argv),
        runner=argv_text(argv, "--moe-runner-backend") or "auto",
        attention=argv_text(argv, "--attention-backend"),
        dense_tp=argv_whole(argv, 1, "--moe-dense-tp-size"),
        dp_head="--enable-dp-lm-head" in argv,
        redundant=argv_whole(argv, 0, "--ep-num-redundant-experts") or 0,
        quantization=argv_text(argv, "--quantization", "-q"),
        role=_role(argv),
        language_only="--language-only" in argv or "--language-model-only" in argv,
        symmetric="--enable-symm-mem" in argv,
        feature_pool=argv_text(argv, "--mm-feature-transport") in ("cuda_ipc", "cuda_vmm"),
    )


def _dtype(argv: Sequence[str]) -> str:
    name = argv_text(argv, "--kv-cache-dtype") or "auto"
    if name != "auto" and not name.lower().startswith(_DTYPES):
        raise PredictError(f"--kv-cache-dtype {name!r} is no format of a cache: write auto, bfloat16 or fp8_e4m3")
    return name


def _role(argv: Sequence[str]) -> str | None:
    name = argv_text(argv, "--disaggregation-mode")
    if name not in (None, "null", "prefill", "decode"):
        raise PredictError(f"--disaggregation-mode {name!r} is none of null, prefill, decode")
    return None if name == "null" else name


def _list(argv: Sequence[str], *names: str) -> list[int]:
    found: list[int] = []
    for position, word in enumerate(argv):
        if word.partition("=")[0] in names:
            tail = [word.partition("=")[2]] if "=" in word else list(argv[position + 1 :])
            count = len(found)
            for value in tail:
                if not value.isdecimal():
                    break
                found.append(int(value))
            if len(found) == count or not all(found):
                raise PredictError(f"{word.partition('=')[0]} needs sizes from 1 on, such as 1 2 4")
    return found


def _decode_graphs_off(argv: Sequence[str]) -> bool:
    backend = flag_value(argv, ("--cuda-graph-backend-decode",))
    if backend is not None:
        return backend == "disabled"
    return "--disable-cuda-graph" in argv or "--disable-decode-cuda-graph" in argv


def _prefill_graphs(argv: Sequence[str]) -> bool | None:
    backend = flag_value(argv, ("--cuda-graph-backend-prefill",))
    if "--disable-piecewise-cuda-graph" in argv or "--disable-prefill-cuda-graph" in argv or backend == "disabled":
        return False
    if "--enforce-piecewise-cuda-graph" in argv or backend is not None:
        return True
    return None


def _a2a(argv: Sequence[str]) -> str | None:
    if "--enable-deepep-moe" in argv:
        return "deepep"
    value = argv_text(argv, "--moe-a2a-backend")
    return value if value != "none" else None
