"""Which GPUs a claim had on the first of several stacks, so that it can have the same ones on the others.

A wish and no more: it must never keep a claim from GPUs that are free, and it says where a claim had others.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .claims.gpuset import GpuChoice
from .files import read_json, write_json

_Had = tuple[str, tuple[str, ...]]
_NONE: Final[_Had] = ("", ())


class SameGpus:
    """Of a whole run: claim, number of GPUs and how many such boots it had → the stack that was first, and its GPUs.

    ``share`` is the folder of all xdist workers; what runs on two of them at once knows nothing of each other.
    """

    def __init__(self, share: Path | None) -> None:
        self._share = share
        self._had: dict[str, _Had] = {}

    def of(self, claim: str, stack: str, shown: Callable[[Sequence[str]], str]) -> Place:
        """For one claim, named without its stack, on one. ``shown`` names GPUs for a person."""
        return Place(self, claim, stack, shown)

    def had(self, key: str) -> _Had:
        """The first stack and its GPUs; nothing where none had any."""
        if key not in self._had and self._share is not None:
            found = read_json(self._file(self._share, key))
            if found is not None:
                self._had[key] = (str(found[0]), tuple(map(str, found[1])))
        return self._had.get(key, _NONE)

    def note(self, key: str, stack: str, uuids: Sequence[str]) -> None:
        """Those of the first one stay."""
        if self.had(key) == _NONE:
            self._had[key] = (stack, tuple(uuids))
            if self._share is not None:
                with suppress(OSError):  # the others then do without
                    write_json(self._file(self._share, key), [stack, list(uuids)])

    @staticmethod
    def _file(share: Path, key: str) -> Path:
        return share / f"same-gpus-{hashlib.sha256(key.encode(errors='replace')).hexdigest()[:24]}.json"


class Place:
    """Of one evaluation: what to prefer, and what is to be told.

    A claim may boot several servers, one beside the other: each has the place of its like.
    """

    def __init__(self, run: SameGpus, claim: str, stack: str, shown: Callable[[Sequence[str]], str]) -> None:
        self._run = run
        self._claim = claim
        self._stack = stack
        self._shown = shown
        self._told: dict[str, None] = {}
        self._boots: Counter[int] = Counter()

    @property
    def told(self) -> tuple[str, ...]:
        """Where its GPUs were not those of the first stack, one line each."""
        return tuple(self._told)

    def preferring(self, choice: GpuChoice, count: int) -> GpuChoice:
        """The choice, with the GPUs of the first stack before all others while they are free."""
        return choice.keeping(self._run.had(self._key(count))[1])

    def took(self, uuids: Sequence[str]) -> None:
        """What it got."""
        if not uuids:
            return
        key = self._key(len(uuids))
        self._boots[len(uuids)] += 1
        self._run.note(key, self._stack, uuids)
        stack, first = self._run.had(key)
        if stack != self._stack and set(first) != set(uuids):
            self._told[f"on {self._shown(uuids)}, and not on {self._shown(first)} as on {stack}"] = None

    def _key(self, count: int) -> str:
        return f"{count} {self._boots[count]} {self._claim}"
