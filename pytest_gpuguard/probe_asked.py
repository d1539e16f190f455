"""One question to a stack, as a value: which script, with what, where, for how long. Starts nothing.

It must never be equal to a question that may have another answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .probes.launch import ORDER, ProbeError, Script, command, find_script, order

#: Variables that say which GPUs are leased, and ours.
LEASES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", ORDER})
Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: a script with its arguments. ``gpus`` None stands for all that meet the claim's needs."""

    script: Script
    args: str = "{}"
    gpus: int | None = 0
    deadline_s: float = 60.0
    env: Variables = ()
    contrast: Variables = ()

    def texts(self) -> Iterator[dict[str, str]]:
        """Everything that a user gave which may be secret, by its name."""
        yield dict(self.env)
        yield dict(self.contrast)
        yield dict(_texts("", json.loads(self.args)))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe answered: ``data`` is what its script said, ``seconds`` what it took, ``log`` its whole output."""

    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    log: str | None = None


def read_asked(
    script: str | Path,
    folder: Path,
    *,
    args: Mapping[str, Any] | None = None,
    gpus: int | str | None = None,
    deadline: str | float = "60s",
    env: Mapping[str, str] | None = None,
    contrast: Mapping[str, str] | None = None,
    needed: int = 0,
) -> Asked:
    """A question in a user's words. Raises TypeError for what is no question; ``needed`` is what @needs_gpus says."""
    from .claims.units import parse_duration

    try:
        found = find_script(script, folder)
        seconds = parse_duration(deadline)
        text = json.dumps(dict(args or {}), sort_keys=True)
        command("python", found)
        order(json.loads(text), (), (), None, None, "")
    except (ProbeError, ValueError, TypeError) as error:
        raise TypeError(f"probe: {error}") from None
    wanted = needed if gpus is None else gpus
    if wanted != "all" and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
        raise TypeError(f'probe: gpus={gpus!r}: write a number, "all", or leave it to @needs_gpus')
    if wanted and not needed:
        raise TypeError("probe: it is to lease GPUs: add @needs_gpus(n) to the test, so that it is not run without")
    if isinstance(wanted, int) and wanted > needed:
        raise TypeError(f"probe: gpus={wanted} are more than the test needs: write @needs_gpus({wanted})")
    count = None if isinstance(wanted, str) else wanted
    return Asked(found, text, count, seconds, _variables("env", env), _variables("contrast", contrast))


def _variables(what: str, given: Mapping[str, str] | None) -> Variables:
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise TypeError(f"probe: {what} has {name!r}: {value!r}, and variables are texts")
        if name in LEASES:
            raise TypeError(f"probe: {what} sets {name}, which belongs to the lease")
    return tuple(sorted((given or {}).items()))


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text in JSON data, with the name of the key that it stands under."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(key, one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(name, one)
