"""What vLLM's flags ask for, as numbers: the ones that memory depends on, in the spellings of its releases.

Pure. A value that cannot be meant is a PredictError; an unknown flag is not ours to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..claims.layout import Layout, flag_value
from .argv import argv_number, argv_share, argv_text
from .values import PredictError

_HUMAN: Final = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT]?)$")
_OFF: Final = ("--no-enable-chunked-prefill", "--enable-chunked-prefill=False", "--enable-chunked-prefill=false")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The flags that memory depends on; None where a flag is not given. Sizes in tokens, bytes and GiB by their names.

    ``context`` -1 asks for the longest that fits.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    dcp: int = 1
    utilization: float | None = None
    context: int | None = None
    seqs: int | None = None
    batched: int | None = None
    chunked: bool | None = None
    kv_dtype: str = "auto"
    block: int | None = None
    kv_bytes: int | None = None
    blocks: int | None = None
    eager: bool = False
    capture_sizes: tuple[int, ...] = ()
    capture_max: int | None = None
    offload_gib: float = 0.0
    spec: str | None = None
    draft_tokens: int = 0
    draft_model: bool = False
    redundant: int = 0
    a2a: str = "allgather_reducescatter"
    prefix_caching: bool = False
    hybrid_off: bool = False
    state_dtype: str | None = None
    quantization: str | None = None
    float32: bool = False
    language_only: bool = False
    lora: bool = False
    overrides: bool = False
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """The layout that runs: ep is all ranks or none, and dp multiplies them."""
        ranks = self.tp * self.dp
        return Layout(self.tp, self.dp, ranks if self.expert_parallel else 1, self.pp, dp_attention=self.dp == 1)


def vllm_settings_of(flags: Sequence[str], layout: Layout | None = None) -> VllmSettings:
    """Read the flags; a declared layout goes before their sizes. Raises PredictError."""
    argv = [_dashes(word) for word in flags]
    tp, pp, dp, expert_parallel, notes = _sizes(argv, layout)
    spec = _mapping(argv, "--speculative-config", "-sc")
    compiled = _mapping(argv, "--compilation-config", "-cc", "-O")
    sizes = _list(argv, "--cudagraph-capture-sizes", "--cuda-graph-sizes") or compiled.get("cudagraph_capture_sizes")
    capture_max = _whole(argv, 1, "--max-cudagraph-capture-size") or compiled.get("max_cudagraph_capture_size")
    eplb = _mapping(argv, "--eplb-config")
    eager = "--enforce-eager" in argv or str(compiled.get("cudagraph_mode", "")).upper() == "NONE"
    method = spec.get("method") or ("draft" if spec.get("model") else None)
    dtype = argv_text(argv, "--dtype") or "auto"
    return VllmSettings(
        tp,
        pp,
        dp,
        expert_parallel,
        dcp=_whole(argv, 1, "--decode-context-parallel-size", "-dcp") or 1,
        utilization=argv_share(argv, "--gpu-memory-utilization", "--device-memory-utilization"),
        context=_context(argv),
        seqs=_whole(argv, 1, "--max-num-seqs"),
        batched=_whole(argv, 1, "--max-num-batched-tokens"),
        chunked=_chunked(argv),
        kv_dtype=argv_text(argv, "--kv-cache-dtype") or "auto",
        block=_whole(argv, 1, "--block-size"),
        kv_bytes=_whole(argv, 1, "--kv-cache-memory-bytes", "--kv-cache-memory"),
        blocks=_whole(argv, 1, "--num-gpu-blocks-override"),
        eager=eager,
        capture_sizes=tuple(one for one in sizes if isinstance(one, int) and one > 0) if sizes else (),
        capture_max=capture_max if isinstance(capture_max, int) else None,
        offload_gib=argv_number(argv, 0, "--cpu-offload-gb") or 0.0,
        spec=str(method).lower() if method is not None else argv_text(argv, "--speculative-model"),
        draft_tokens=_count(spec.get("num_speculative_tokens")) or _whole(argv, 1, "--num-speculative-tokens") or 0,
        draft_model=bool(spec.get("model")) or argv_text(argv, "--speculative-model") is not None,
        redundant=_count(eplb.get("num_redundant_experts")) or _whole(argv, 0, "--num-redundant-experts") or 0,
        a2a=argv_text(argv, "--all2all-backend") or "allgather_reducescatter",
        prefix_caching="--enable-prefix-caching" in argv,
        hybrid_off="--disable-hybrid-kv-cache-manager" in argv,
        state_dtype=argv_text(argv, "--mamba-ssm-cache-dtype"),
        quantization=argv_text(argv, "--quantization", "-q"),
        float32=dtype in ("float", "float32"),
        language_only="--language-model-only" in argv,
        lora="--enable-lora" in argv,
        overrides=any(word.partition("=")[0] in ("--hf-overrides", "--rope-scaling") for word in argv),
        notes=tuple(notes),
    )


def _dashes(word: str) -> str:
    """The parser of vLLM takes underscores for dashes in a flag's name."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _sizes(argv: Sequence[str], layout: Layout | None) -> tuple[int, int, int, bool, list[str]]:
    notes: list[str] = []
    if layout is None:
        return (
            _whole(argv, 1, "--tensor-parallel-size", "-tp", "--tp") or 1,
            _whole(argv, 1, "--pipeline-parallel-size", "-pp", "--pp") or 1,
            _whole(argv, 1, "--data-parallel-size", "-dp", "--dp") or 1,
            "--enable-expert-parallel" in argv or "-ep" in argv,
            notes,
        )
    tp, dp = layout.tp, layout.dp
    if layout.dp_attention and dp > 1 and not tp % dp:
        tp //= dp
        notes.append(f"{layout}: attention replicas inside of TP are -tp {tp} -dp {dp} in vLLM")
    if layout.ep not in (1, tp * dp):
        notes.append(f"EP{layout.ep}: vLLM splits experts over all {tp * dp} ranks or over none: EP{tp * dp} is taken")
    return tp, layout.pp, dp, layout.ep > 1 or "--enable-expert-parallel" in argv, notes


def _whole(argv: Sequence[str], least: int, *names: str) -> int | None:
    """A whole number; 32k is 32000 and 32K is 32768, as vLLM reads them."""
    value = argv_text(argv, *names)
    if value is None:
        return None
    human = _HUMAN.match(value)
    if human is None:
        found = argv_number(argv, least, *names)
        if found is not None and found != int(found):
            raise PredictError(f"{names[0]} {found:g} is not a whole number")
        return int(found) if found is not None else None
    letter = human[2]
    step = (1000 if letter.islower() else 1024) ** ("kmgt".index(letter.lower()) + 1) if letter else 1
    number = float(human[1]) * step
    if number != int(number):
        raise PredictError(f"{names[0]} {value} is not a whole number")
    if number < least:
        raise PredictError(f"{names[0]} {value} is impossible: it is at least {least:g}")
    return int(number)


def _context(argv: Sequence[str]) -> int | None:
    if argv_text(argv, "--max-model-len") in ("auto", "-1"):
        return -1
    return _whole(argv, 1, "--max-model-len")


def _chunked(argv: Sequence[str]) -> bool | None:
    value = flag_value(argv, ("--enable-chunked-prefill",))
    if any(word in _OFF for word in argv) or (value is not None and value.lower() == "false"):
        return False
    return True if any(word.partition("=")[0] == "--enable-chunked-prefill" for word in argv) else None


def _mapping(argv: Sequence[str], *names: str) -> Mapping[str, Any]:
    """A flag whose value is JSON, or the same in dotted flags (``--speculative-config.method mtp``)."""
    found: dict[str, Any] = {}
    value = argv_text(argv, *names)
    if value is not None and value.lstrip().startswith("{"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise PredictError(f"{names[0]} is no JSON: {error}") from None
    for word in argv:
        name = word.partition("=")[0]
        head, dot, key = name.partition(".")
        if dot and head in names:
            text = flag_value(argv, (name,))
            found[key.replace("-", "_")] = int(text) if text is not None and text.isdecimal() else text
    return found


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _list(argv: Sequence[str], *names: str) -> list[int]:
    found: list[int] = []
    for position, word in enumerate(argv):
        if word.partition("=")[0] in names:
            tail = [word.partition("=")[2]] if "=" in word else list(argv[position + 1 :])
            for value in tail:
                if not value.isdecimal():
                    break
                found.append(int(value))
    return found
