"""How many bytes a matrix takes in a checkpoint's quantization, and which matrices a checkpoint leaves alone.

Pure. A method that is not known is taken for unquantized, and said so: that bounds the weights from above.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .config import Config, finite, whole

#: Prefixes that say in which part of a multimodal model a module is; patterns are compared without them.
_PREFIX: Final = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_METACHARACTER: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A storage format: ``bits`` an element, one scale of ``scale_bytes`` for each ``block`` of rows x columns.

    A block side of 0 means the whole side. ``zero_bits`` are those of a zero point with each scale. ``pad``: rows and
    columns are rounded up to these.
    """

    name: str
    bits: float
    block: tuple[int, int] = (0, 0)
    scale_bytes: float = 0.0
    zero_bits: float = 0.0
    pad: tuple[int, int] = (1, 1)

    def bytes(self, rows: float, columns: float) -> float:
        """Bytes of a matrix of ``rows`` outputs and ``columns`` inputs."""
        rows, columns = up(rows, self.pad[0]), up(columns, self.pad[1])
        found = rows * columns * self.bits / 8
        if self.scale_bytes or self.zero_bits:
            down = math.ceil(rows / self.block[0]) if self.block[0] else 1
            across = math.ceil(columns / self.block[1]) if self.block[1] else 1
            found += down * across * (self.scale_bytes + self.zero_bits / 8)
        return found


def up(number: float, step: int) -> float:
    """The next multiple of ``step``."""
    return math.ceil(number / step) * step if step > 1 else number


FULL: Final = Scheme("16 bit", 16)
FP8: Final = Scheme("fp8", 8, (1, 0), 4)
NVFP4: Final = Scheme("nvfp4", 4, (1, 16), 1)
MXFP4: Final = Scheme("mxfp4", 4, (1, 32), 1)
#: 4-bit experts of an fp8 checkpoint: which scales are kept depends on the kernel.
FP8_EXPERTS_4BIT: Final = Scheme("fp4 experts", 4, (1, 32), 1)
INT8: Final = Scheme("int8", 8, (1, 0), 4)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a checkpoint: ``linear`` and ``expert`` for what is not left alone or named.

    ``block_columns`` is the side by which experts must be divisible (block-wise fp8), or None.
    """

    linear: Scheme = FULL
    expert: Scheme = FULL
    head: Scheme = FULL
    left_alone: Callable[[str], bool] = field(default=lambda name: False)
    named: Mapping[str, Scheme] = field(default_factory=dict)
    only_named: bool = False
    block: tuple[int, int] | None = None
    method: str | None = None
    assumptions: tuple[str, ...] = ()

    def of(self, name: str, expert: bool = False) -> Scheme:
        """The scheme of the module called ``name``, such as "layers.3.self_attn.o_proj"."""
        if name in self.named:
            return self.named[name]
        if self.only_named or self.left_alone(name):
            return FULL
        return self.expert if expert else self.linear


def requantized(quantization: Quantization, asked: str | None) -> Quantization:
    """What a ``--quantization`` flag makes of a checkpoint: one in 16 bits is quantized while it is loaded."""
    if asked is None or quantization.method is not None:
        return quantization
    name = asked.lower()
    if name in ("fp8", "w8a8_fp8", "modelopt_fp8", "ptpc_fp8"):
        return Quantization(FP8, FP8, method=name)
    if name in ("w8a8_int8", "int8"):
        return Quantization(INT8, INT8, method=name)
    if name in ("modelopt_fp4", "nvfp4"):
        return Quantization(NVFP4, NVFP4, method=name)
    if name in ("mxfp4",):
        return Quantization(FULL, MXFP4, method=name)
    note = f"--quantization {asked}: what it does to a checkpoint in 16 bits is not known here: 16 bits are counted"
    return Quantization(assumptions=(note,))


def quantization_of(config: Config) -> Quantization:
    """The quantization that a checkpoint declares."""
    told = config.quantization
    if not told:
        return Quantization()
    method = str(told.get("quant_method") or told.get("quant_algo") or "").lower()
    alone = _left_alone(told)
    if method in ("fp8", "modelopt_fp8", "fbgemm_fp8") or (method == "modelopt" and told.get("quant_algo") == "FP8"):
        return _fp8(config, told, alone, method)
    if method in ("modelopt", "modelopt_fp4", "nvfp4"):
        return _modelopt(told, alone)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(told, alone)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round", "autoround"):
        bits = finite(told.get("bits")) or finite(told.get("w_bit")) or 4.0
        group = whole(told.get("group_size")) or 128
        symmetric = bool(told.get("sym", False)) and "gptq" in method
        scheme = Scheme(method, bits, (1, max(group, 0)), 2, 0 if symmetric else bits)
        return Quantization(scheme, scheme, left_alone=alone, method=method)
    if method == "mxfp4":
        return Quantization(FULL, MXFP4, left_alone=alone, method=method)
    if method in ("bitsandbytes", "bnb"):
        four = bool(told.get("load_in_4bit") or told.get("_load_in_4bit"))
        scheme = Scheme("bitsandbytes", 4 if four else 8, (1, 64) if four else (1, 0), 4)
        return Quantization(scheme, FULL, left_alone=alone, method=method)
    if method in ("w8a8_int8", "int8"):
        return Quantization(INT8, INT8, left_alone=alone, method=method)
    if method in ("w8a8_fp8",):
        return Quantization(FP8, FP8, left_alone=alone, method=method)
    note = f"quantization {method or 'without a name'!r} is not known here: weights are taken as 16 bits an element"
    return Quantization(assumptions=(note,), method=method or None)


def _fp8(config: Config, told: Mapping[str, Any], alone: Callable[[str], bool], method: str) -> Quantization:
    block = _block(told.get("weight_block_size"))
    scheme = Scheme("fp8 block", 8, block, 4) if block else FP8
    experts = scheme
    if str(config.text.get("expert_dtype", "")).lower() in ("fp4", "mxfp4"):
        experts = FP8_EXPERTS_4BIT
    return Quantization(scheme, experts, left_alone=alone, block=block, method=method)


def _block(value: object) -> tuple[int, int] | None:
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(side, int) and side > 0 for side in value)
    ):
        return int(value[0]), int(value[1])
    return None


def _modelopt(told: Mapping[str, Any], alone: Callable[[str], bool]) -> Quantization:
    algo = str(told.get("quant_algo") or "").upper()
    layers = told.get("quantized_layers")
    if isinstance(layers, Mapping) and layers:
        named = {
            bare(name): _algo(str(each.get("quant_algo", "")))
            for name, each in layers.items()
            if isinstance(each, Mapping)
        }
        return Quantization(
            named=named, only_named=True, head=named.get("lm_head", FULL), method="modelopt", left_alone=alone
        )
    scheme = _algo(algo)
    note = () if scheme is not FULL else (f"modelopt's {algo or 'unnamed'} format is not known here: 16 bits assumed",)
    return Quantization(scheme, scheme, left_alone=alone, method="modelopt", assumptions=note)


def _algo(algo: str) -> Scheme:
    if "NVFP4" in algo or "FP4" in algo:
        return NVFP4
    return FP8 if "FP8" in algo else INT8 if "INT8" in algo else FULL


def _compressed_tensors(told: Mapping[str, Any], alone: Callable[[str], bool]) -> Quantization:
    groups = told.get("config_groups")
    named: dict[str, Scheme] = {}
    default = FULL
    notes: list[str] = []
    block: tuple[int, int] | None = None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        scheme = _weights_scheme(weights)
        targets = group.get("targets")
        targets = targets if isinstance(targets, (list, tuple)) and targets else ["Linear"]
        if any(target in ("Linear", "RowParallelLinear", "ColumnParallelLinear", "FusedMoE") for target in targets):
            default, block = scheme, scheme.block if weights.get("strategy") == "block" else block
        else:
            named.update({bare(str(target)): scheme for target in targets if not str(target).startswith("re:")})
            for target in targets:
                if str(target).startswith("re:"):
                    default = scheme  # a pattern: what it leaves out is on the ignore list as a rule
                    notes.append(f"{target!r} is taken for every linear layer that is not ignored")
    return Quantization(
        default,
        default,
        left_alone=alone,
        named=named,
        block=block,
        method="compressed-tensors",
        assumptions=tuple(notes),
    )


def _weights_scheme(weights: Mapping[str, Any]) -> Scheme:
    bits = finite(weights.get("num_bits")) or 16.0
    group = whole(weights.get("group_size"))
    kind, strategy = str(weights.get("type", "int")), str(weights.get("strategy") or "")
    if kind == "float" and bits == 4:
        return NVFP4 if not group or group == 16 or group < 0 else Scheme("fp4", 4, (1, group), 1)
    if strategy == "block" and (block := _block(weights.get("block_structure"))):
        return Scheme("block", bits, block, 4)
    if group is not None and group > 0:
        symmetric = weights.get("symmetric", True)
        return Scheme(f"int{bits:g} g{group}", bits, (1, group), 2, 0 if symmetric else bits)
    return Scheme(f"{kind}{bits:g}", bits, (1, 0), 4)


def bare(name: str) -> str:
    """A module's name without the prefix that says in which part of the model it is."""
    return _PREFIX.sub("", name)


def _left_alone(told: Mapping[str, Any]) -> Callable[[str], bool]:
    found: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        value = told.get(key)
        if isinstance(value, (list, tuple)):
            found += [str(one) for one in value if one]
    return _matcher(found)


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module's name is on a list of names, prefixes, components, wildcards or "re:" expressions."""
    names: set[str] = set()
    components: set[str] = set()
    expressions: list[str] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error:
                continue
            expressions.append(f"(?:{pattern[3:]})")
        elif _METACHARACTER.search(pattern):
            expressions.append(f"(?:{fnmatch.translate(bare(pattern))})")
        elif "." in pattern:
            names.add(bare(pattern))
        else:
            components.add(pattern)
    joined = _compiled(expressions)

    def match(name: str) -> bool:
        parts = name.split(".")
        if not components.isdisjoint(parts):
            return True
        if any(".".join(parts[:end]) in names for end in range(2, len(parts) + 1)):
            return True
        return any(one.match(name) or one.match("model." + name) for one in joined)

    return match


def _compiled(expressions: list[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile("|".join(expressions))] if expressions else []
    except re.error:  # flags inside one of them: one by one then
        return [re.compile(one) for one in expressions]
