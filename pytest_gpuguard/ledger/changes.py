"""What two judgements were made on, side by side: a fingerprint as flat components, and which of them differ.

It must never take what only one side knows of for a change.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from ..claims.account import printable
from ..facts.named import NAMED_PACKAGES

if TYPE_CHECKING:
    from ..facts.gpu import Rig

#: What people suspect first, first. ``claim`` is what was claimed, ``suite`` the revision of the claims.
FIRST: Final = (
    "claim", "driver", "torch_cuda", "torch", "sglang", "vllm", "sgl_kernel", "flashinfer_python", "flashinfer_cubin",
    "flashinfer_jit_cache", "triton", "nccl", "cudnn", "transformers", "python", "nvcc", "kernel", "libcuda", "gpus",
    "suite",
)  # fmt: skip
ENV: Final = "env "
PACKAGE: Final = "package "
CACHE: Final = "jit_cache "
#: A list that is complete where this component is known: what it does not name is not there. Its value is a digest.
COMPLETE: Final[Mapping[str, str]] = {ENV: "environment", PACKAGE: "packages"}
_LISTS: Final = frozenset(COMPLETE.values())

#: What is shown of a value, in characters.
_WIDTH: Final = 80
_POSITION: Final[Mapping[str, int]] = {name: at for at, name in enumerate(FIRST)}
#: Distributions that a fingerprint names by a label: their component, were they not, and the label.
_LABELS: Final[Mapping[str, str]] = {
    f"{PACKAGE}{name}": label for label, names in {**NAMED_PACKAGES, "torch": ("torch",)}.items() for name in names
}
_GROUPS: Final = {ENV: ("variable", "variables"), PACKAGE: ("package", "packages"), CACHE: ("cache", "caches")}


class Unknown(Enum):
    """Nobody looked: neither a value, nor known to be absent."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN
Components = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Change:
    """One component that differs. None is "not there"."""

    component: str
    before: str | None
    now: str | None

    def __str__(self) -> str:
        """``torch 2.9.1 → 2.13.0``. Of long values that differ late, what is around the difference."""
        before, now = shown(self.before), shown(self.now)
        if before == now and self.before is not None and self.now is not None:
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(self.before, self.now, strict=False))
            at = max(sum(1 for _ in shared) - _WIDTH // 4, 0)
            before, now = (f"…{shown(one[at:])}" for one in (self.before, self.now))
        return f"{shown(self.component)} {before} → {now}"


def flatten(fingerprint: Mapping[str, Any], rig: Components | None = None) -> dict[str, str | None]:
    """The flat components of ``Stack.fingerprint()``, and those of ``rig`` (``driver``, ``gpus``) as they are.

    Named ones keep their name; the others are ``env NAME``, ``package NAME`` and ``jit_cache NAME``. Where several
    distributions of one label are installed (two CUDAs' NCCL), its value names the others too. ``packages`` and
    ``environment`` are digests: they say that all of these are listed.
    """
    flat: dict[str, str | None] = {}
    for name, value in fingerprint.items():
        if name not in ("packages", "environment", "jit_caches"):
            flat[name] = None if value is None else str(value)
    packages = fingerprint.get("packages")
    if packages is not None:
        flat.update(_packages(packages, flat))
        flat["packages"] = _digest(packages)
    environment = fingerprint.get("environment")
    if environment is not None:
        flat.update({f"{ENV}{name}": str(value) for name, value in environment.items()})
        flat["environment"] = _digest(environment)
    flat.update({f"{CACHE}{name}": str(state) for name, state in (fingerprint.get("jit_caches") or {}).items()})
    flat.update(rig or {})
    return flat


def components_of(fingerprint: Mapping[str, Any], rig: Rig | None, simulated: bool) -> dict[str, str | None]:
    """The flat components that a verdict is kept with. ``fingerprint`` is the stack's, empty where none matters;
    ``rig`` is None where no GPU does; ``simulated``: the stack is, so that what nobody said of it is unknown.
    """
    if rig is None:
        flat = flatten({name: one for name, one in fingerprint.items() if name != "driver"})
    else:
        gpus = ", ".join(sorted({gpu.name for gpu in rig.usable})) or None
        flat = flatten(fingerprint, {"driver": rig.driver, "gpus": gpus})
    return {name: one for name, one in flat.items() if one is not None and name not in _LISTS} if simulated else flat


def value_of(components: Components, component: str) -> str | Unknown | None:
    """Its value; None where it is known to be absent; UNKNOWN where nobody looked."""
    if component in components:
        return components[component]
    group = _group(component)
    if _LABELS.get(component, "") in components:
        return UNKNOWN  # it stands there under its label
    return None if group in COMPLETE and COMPLETE[group] in components else UNKNOWN


def changes(before: Components, now: Components) -> tuple[Change, ...]:
    """What differs, in the order in which people suspect it: ``FIRST``, other facts, variables, packages, caches."""
    found = []
    for name in before.keys() | now.keys():
        if name in _LISTS or (name in before and name in now and before[name] == now[name]):
            continue
        old, new = value_of(before, name), value_of(now, name)
        if not isinstance(old, Unknown) and not isinstance(new, Unknown) and old != new:
            found.append(Change(name, old, new))
    return tuple(sorted(found, key=position))


def position(change: Change) -> tuple[int, int, str]:
    """The place of a change among others."""
    name = change.component
    if name in _POSITION:
        return 0, _POSITION[name], name
    return {"": 1, ENV: 2, PACKAGE: 3, CACHE: 4}[_group(name)], 0, name


def told(changes: Sequence[Change], most: int = 8) -> list[str]:
    """A line for each, such as ``torch 2.9.1 → 2.13.0``; after ``most`` of them ``and 57 other packages``."""
    most = max(most, 0)
    if len(changes) <= most + 1:  # the line that would say "and 1 other" can as well say which
        return [str(one) for one in changes]
    kinds = Counter(_group(one.component) for one in changes[most:])
    words = [
        f"{kinds[group]} {'other ' if most else ''}{names[kinds[group] > 1]}"
        for group, names in {"": ("component", "components"), **_GROUPS}.items()
        if kinds[group]
    ]
    rest = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return [*(str(one) for one in changes[:most]), f"and {rest}" if most else rest]


@lru_cache(maxsize=4096)
def shown(value: str | None) -> str:
    """A value on one line, without control characters, clipped: it comes from anybody's environment."""
    if value is None:
        return "not there"
    text = " ".join(printable(value[: 4 * _WIDTH]).split())
    return (text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…") or '""'


def _packages(packages: Mapping[str, str], named: Components) -> dict[str, str | None]:
    """Distributions that have no label of their own, and labels whose several distributions are all installed."""
    labelled = {"torch": "torch"} if named.get("torch") is not None else {}
    found: dict[str, str | None] = {}
    for label, names in NAMED_PACKAGES.items():
        if label not in named:
            continue
        labelled.update(dict.fromkeys(names, label))
        installed = [name for name in names if name in packages]
        if len(installed) > 1:
            rest = ", ".join(f"{name} {packages[name]}" for name in installed[1:])
            found[label] = f"{packages[installed[0]]} ({rest})"
    found.update({f"{PACKAGE}{name}": str(one) for name, one in packages.items() if name not in labelled})
    return found


def _group(component: str) -> str:
    return next((prefix for prefix in _GROUPS if component.startswith(prefix)), "")


def _digest(listed: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(listed), sort_keys=True).encode()).hexdigest()[:12]
