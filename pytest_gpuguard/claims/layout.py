"""Layouts, ``"TP8 DP8 EP8"``: which ranks share what, and how many GPUs that takes.

The rules are SGLang's (server_args, 0.5.3–0.5.23): ``ep`` *subdivides* ``tp`` and adds no GPUs, dp-attention lives
inside ``tp``, and only ``pp`` multiplies. ``TP4 EP2`` therefore uses four GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .errors import ClaimError

_TOKEN = re.compile(r"^([A-Za-z]+)(\d+)$")
#: What argparse takes for a value although it begins with a dash.
NEGATIVE_NUMBER: Final = re.compile(r"^-(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?$")
_NAMES: Final = ("TP", "DP", "EP", "PP")

#: Every spelling of the parallel sizes in any release.
SIZE_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "tp": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "pp": ("--pp-size", "--pipeline-parallel-size", "--pp"),
    "dp": ("--dp-size", "--data-parallel-size", "--dp", "--attn-dp-size"),
    "ep": ("--ep-size", "--expert-parallel-size", "--ep"),
}
DP_ATTENTION_FLAG: Final = "--enable-dp-attention"


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of one replica set. ``dp_attention`` False with ``dp`` > 1 means whole replicas."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    dp_attention: bool = True

    @property
    def gpus(self) -> int:
        """GPUs used: tp·pp, times the replicas where ``dp`` is not dp-attention."""
        return self.tp * self.pp * (1 if self.dp_attention else self.dp)

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert's weights: tp / ep."""
        return self.tp // self.ep

    @property
    def attention_tp(self) -> int:
        """Ranks that share one attention shard set: tp / dp under dp-attention."""
        return self.tp // (self.dp if self.dp_attention else 1)

    def groups(self) -> dict[str, list[list[int]]]:
        """Rank groups of the first pipeline stage: ``attention_tp``, ``moe_tp`` (contiguous), ``moe_ep`` (strided)."""
        ranks = list(range(self.tp))

        def contiguous(size: int) -> list[list[int]]:
            return [ranks[i : i + size] for i in range(0, self.tp, size)]

        return {
            "attention_tp": contiguous(self.attention_tp),
            "moe_tp": contiguous(self.moe_tp),
            "moe_ep": [ranks[offset :: self.moe_tp] for offset in range(self.moe_tp)],
        }

    def describe(self) -> str:
        """One line for ``-v``: ``TP4 EP2 = 4 GPUs: experts split over [0 2] [1 3], each expert over [0 1] [2 3]``."""

        def show(groups: Sequence[Sequence[int]]) -> str:
            return " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)

        found = self.groups()
        text = f"{self} = {self.gpus} GPU{'s' if self.gpus != 1 else ''}"
        parts = []
        if self.ep > 1:
            parts.append(f"experts split over {show(found['moe_ep'])}")
            parts.append(f"each expert over {show(found['moe_tp'])}" if self.moe_tp > 1 else "whole experts per rank")
        if self.dp > 1 and self.dp_attention:
            parts.append(f"attention replicas on {show(found['attention_tp'])}")
        elif self.dp > 1:
            parts.append(f"{self.dp} whole replicas")
        return f"{text}: {', '.join(parts)}" if parts else text

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("DP", self.dp), ("EP", self.ep), ("PP", self.pp))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "TP1"


def check(layout: Layout) -> Layout:
    """The same layout, or ClaimError with the rule that it breaks."""
    if layout.tp % layout.ep:
        raise ClaimError(
            f"layout {layout}: EP{layout.ep} must divide TP{layout.tp}, because in SGLang EP subdivides TP and adds "
            f'no GPUs; for {layout.tp * layout.ep} GPUs write "TP{layout.tp * layout.ep} EP{layout.ep}"'
        )
    if layout.dp_attention and layout.tp % layout.dp:
        raise ClaimError(
            f"layout {layout}: DP{layout.dp} is dp-attention and must divide TP{layout.tp}; whole replicas are no "
            f"layout: give --dp-size {layout.dp} as a flag"
        )
    return layout


def parse_layout(text: str) -> Layout:
    """``"TP8 DP8 EP8"`` → Layout(tp=8, dp=8 as dp-attention, ep=8). Raises ClaimError."""
    sizes: dict[str, int] = {}
    for token in text.replace(",", " ").split() if isinstance(text, str) else ():
        match = _TOKEN.match(token)
        name = match[1].upper() if match else ""
        if match is None or name not in _NAMES:
            raise ClaimError(f"layout {text!r}: {token!r} is none of TPn, DPn, EPn, PPn")
        if name in sizes:
            raise ClaimError(f"layout {text!r} names {name} twice")
        if int(match[2]) < 1:
            raise ClaimError(f"layout {text!r}: {name} must be at least 1")
        sizes[name] = int(match[2])
    if not sizes:
        raise ClaimError(f'layout {text!r} is empty: write "TP8 EP8"')
    return check(Layout(sizes.get("TP", 1), sizes.get("DP", 1), sizes.get("EP", 1), sizes.get("PP", 1)))


def flag_value(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """The value given to the last of these flags, ``--tp 8`` or ``--tp=8``; None when it is not given.

    As argparse reads it: another flag is no value, a negative number or words with a space are; nothing counts after a
    bare ``--``. Names are exact.
    """
    found = None
    for position, word in enumerate(argv):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        elif position + 1 < len(argv):
            following = argv[position + 1]
            if not following.startswith("-") or NEGATIVE_NUMBER.match(following) or " " in following:
                found = following
    return found


def sizes_from_flags(argv: Sequence[str]) -> dict[str, int]:
    """The parallel sizes that the flags give, by name; a size that is not given is absent. Raises ClaimError."""
    found = {}
    for name, spellings in SIZE_FLAGS.items():
        value = flag_value(argv, spellings)
        if value is None:
            if any(word in spellings for word in argv):
                raise ClaimError(f"{spellings[0]} has no value, which is not a count of ranks")
            continue
        if not value.isdecimal() or int(value) < 1:
            raise ClaimError(f"{spellings[0]} {value!r} is not a count of ranks")
        found[name] = int(value)
    return found


def layout_from_flags(argv: Sequence[str]) -> Layout:
    """The layout that the flags alone ask for. Divisibility is the engine's to refuse. Raises ClaimError."""
    sizes = sizes_from_flags(argv)
    dp_attention = DP_ATTENTION_FLAG in argv or flag_value(argv, ("--attn-dp-size",)) is not None
    return Layout(
        tp=sizes.get("tp", 1),
        dp=sizes.get("dp", 1),
        ep=sizes.get("ep", 1),
        pp=sizes.get("pp", 1),
        dp_attention=dp_attention or sizes.get("dp", 1) == 1,
    )


def resolve(layout: Layout | None, argv: Sequence[str]) -> Layout:
    """The layout that will run: the declared one and the flags together. Raises ClaimError where they conflict."""
    from_flags = layout_from_flags(argv)
    if layout is None:
        return from_flags
    for name, given in sizes_from_flags(argv).items():
        declared = getattr(layout, name)
        if given != declared:
            raise ClaimError(
                f"layout {layout} says {name.upper()}{declared}, but the flags say {SIZE_FLAGS[name][0]} {given}: "
                f"drop one of them"
            )
    return layout
