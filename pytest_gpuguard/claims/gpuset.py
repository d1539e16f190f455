"""Which set of GPUs a claim takes: the best connected one of those that are free, and the same one every time.

Pure: it never asks a device, and never returns GPUs that may not be together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb, inf
from typing import Any, Final

Pair = tuple[str, str]
#: The distance of two GPUs of which nothing is known.
FAR: Final = 128
#: So many sets are all looked at (about a millisecond); of more, the best that is found from every GPU as a start.
_ALL: Final = 2000
#: Of the sets that were found from every start, so many are improved by exchanges.
_IMPROVED: Final = 4


def pair(a: str, b: str) -> Pair:
    """Two UUIDs as ``apart`` and ``distance`` are keyed: the smaller one first."""
    return (a, b) if a < b else (b, a)


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """The GPUs that a claim would take, in order of preference; which of them may be together, and how near they are.

    ``apart``: pairs (a < b) that may not be in one set (``link=`` is not met). ``distance``: (a < b) → an integer
    ≥ 0, smaller is better connected; a pair that is missing is ``FAR``. ``last``: GPUs to take only where no others
    do as well (their links are down). ``kept``: the set to take whenever all of it is free, whatever another one would
    be worth, because results are compared with those of these GPUs. Raises ValueError when a GPU is named twice.
    """

    uuids: tuple[str, ...]
    apart: frozenset[Pair] = frozenset()
    distance: Mapping[Pair, int] = field(default_factory=dict, hash=False)
    last: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(set(self.uuids)) < len(self.uuids):
            raise ValueError(f"a GPU is named twice: {', '.join(self.uuids)}")

    def pick(self, free: Collection[str], n: int) -> tuple[str, ...] | None:
        """The best set of ``n`` GPUs among ``free``, in the order of ``uuids``; None when there is none.

        Best is the smallest total distance inside the set; of equals, the one that leaves the other free GPUs best
        connected: the most of the nearest pairs, then of the next nearer ones (a GPU whose partner is busy goes before
        one of a pair); of equals, the first in the order of ``uuids``. Distances count as alike for this within a
        power of two. ``kept``, where it is such a set, is before all others. The order of ``free`` makes no difference,
        and names outside ``uuids`` are ignored.
        """
        wanted = set(free)
        names = [uuid for uuid in self.uuids if uuid in wanted]
        if n <= 0:
            return ()
        if len(names) < n:
            return None
        if n == len(self.kept) and self.kept.issubset(names) and self._together(self.kept):
            return tuple(uuid for uuid in names if uuid in self.kept)
        if not (self.apart or self.distance or self.last):
            return tuple(names[:n])  # all sets are alike
        best = _Graph(self, names).best(n)
        return None if best is None else tuple(names[i] for i in best)

    def possible(self, n: int) -> GpuChoice:
        """Only the GPUs that are in some set of ``n``."""
        graph = _Graph(self, self.uuids)
        return self._of(uuid for i, uuid in enumerate(self.uuids) if graph.clique(n, i) is not None)

    def without(self, uuids: Collection[str]) -> GpuChoice:
        """The same without these GPUs."""
        return self._of(uuid for uuid in self.uuids if uuid not in uuids)

    def preferring(self, uuids: Sequence[str]) -> GpuChoice:
        """The same sets, with these GPUs first in the order; names that are no candidates are ignored."""
        first = [uuid for uuid in dict.fromkeys(uuids) if uuid in self.uuids]
        return self._of(dict.fromkeys([*first, *self.uuids]))

    def keeping(self, uuids: Collection[str]) -> GpuChoice:
        """The same, with the set to take whenever it is free; one that is no set of candidates is ignored."""
        kept = frozenset(uuids)
        return replace(self, kept=kept if kept.issubset(self.uuids) else frozenset())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, read back by ``from_dict``: pairs are positions in ``uuids``, then the distance."""
        place = {uuid: i for i, uuid in enumerate(self.uuids)}
        known = self._of(self.uuids)
        return {
            "uuids": list(self.uuids),
            "apart": sorted(sorted((place[a], place[b])) for a, b in known.apart),
            "distance": sorted([*sorted((place[a], place[b])), far] for (a, b), far in known.distance.items()),
            "last": sorted(place[uuid] for uuid in known.last),
            "kept": sorted(place[uuid] for uuid in known.kept),
        }

    @staticmethod
    def from_dict(data: Any) -> GpuChoice:
        """The choice that ``to_dict`` wrote; raises ValueError for anything else."""
        try:
            named = data["uuids"]
            if not isinstance(named, list) or not all(isinstance(uuid, str) for uuid in named):
                raise ValueError("uuids is no list of texts")
            uuids: tuple[str, ...] = tuple(named)

            def at(i: object) -> str:
                if type(i) is not int or not 0 <= i < len(uuids):
                    raise ValueError(f"there is no GPU {i!r}")
                return uuids[i]

            def joined(i: object, j: object) -> Pair:
                if i == j:
                    raise ValueError(f"GPU {i!r} is no pair")
                return pair(at(i), at(j))

            distance = {joined(i, j): far for i, j, far in data.get("distance", ())}
            if not all(type(far) is int and far >= 0 for far in distance.values()):
                raise ValueError("a distance is no count")
            apart = frozenset(joined(i, j) for i, j in data.get("apart", ()))
            last, kept = (frozenset(at(i) for i in data.get(name, ())) for name in ("last", "kept"))
            return GpuChoice(uuids, apart, distance, last, kept)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"no choice of GPUs: {error}") from error

    def _of(self, uuids: Iterable[str]) -> GpuChoice:
        order = tuple(uuids)
        kept = set(order)
        return GpuChoice(
            order,
            frozenset(one for one in self.apart if kept.issuperset(one)),
            {one: far for one, far in self.distance.items() if kept.issuperset(one)},
            self.last & kept,
            self.kept if kept.issuperset(self.kept) else frozenset(),
        )

    def _together(self, uuids: Iterable[str]) -> bool:
        return self.apart.isdisjoint(pair(a, b) for a, b in combinations(sorted(uuids), 2))


class _Graph:
    """The free GPUs by position: what a set of them costs, and which may be together. Sets are masks or lists.

    A set costs what its members cost alone and in pairs, as one number: distances inside it; after those, how many
    of ``last``; after those, the near pairs that others lose by it.
    """

    def __init__(self, choice: GpuChoice, names: Sequence[str]) -> None:
        size = len(names)
        self.friends = [(1 << size) - 1 ^ (1 << i) for i in range(size)]
        far = [[0] * size for _ in names]
        near = [[0] * size for _ in names]
        for i, j in combinations(range(size), 2):
            key = pair(names[i], names[j])
            far[i][j] = far[j][i] = choice.distance.get(key, FAR)
            if key in choice.apart:
                self.friends[i] ^= 1 << j
                self.friends[j] ^= 1 << i
            # one pair of a level is worth more than all pairs of the levels after it
            rank = FAR.bit_length() - far[i][j].bit_length()
            near[i][j] = near[j][i] = size ** (2 * rank) if rank > 0 else 0
        lost = [sum(row) for row in near]
        per_last = sum(lost) + 1
        per_step = (size + 1) * per_last
        self.alone = [per_last * (names[i] in choice.last) + lost[i] for i in range(size)]
        # a pair inside the set is lost once, and both members have counted it
        self.pairs = [[per_step * a - b for a, b in zip(*rows, strict=True)] for rows in zip(far, near, strict=True)]

    def best(self, n: int) -> list[int] | None:
        """The best ``n`` positions, ascending."""
        here = self._able(n)
        if len(here) < n:
            return None
        fewer = min(n, len(here) - n)
        if comb(len(here), fewer) > _ALL:
            return self._search(here, n)
        if fewer == 0:
            return here  # each has n - 1 friends: all the others
        return self._look(here, fewer, out=fewer < n)

    def clique(self, n: int, member: int | None = None) -> list[int] | None:
        """Any ``n`` positions that may all be together, ``member`` among them; None when there is no such set."""

        def extend(some: list[int], left: int) -> list[int] | None:
            if len(some) >= n:
                return some
            while len(some) + left.bit_count() >= n:
                i = (left & -left).bit_length() - 1
                left ^= 1 << i
                found = extend([*some, i], left & self.friends[i])
                if found is not None:
                    return found
            return None

        return extend([], (1 << len(self.friends)) - 1) if member is None else extend([member], self.friends[member])

    def _able(self, n: int) -> list[int]:
        """Positions that have friends enough to be in a set of ``n``."""
        left = (1 << len(self.friends)) - 1
        while True:
            here = [i for i in range(len(self.friends)) if left >> i & 1]
            lonely = [i for i in here if (self.friends[i] & left).bit_count() < n - 1]
            if not lonely:
                return here
            for i in lonely:
                left ^= 1 << i

    def _look(self, here: list[int], k: int, out: bool) -> list[int] | None:
        """Look at every set of ``k`` positions, the ones to take or (``out``) the fewer ones to leave.

        Taken sets come in order, so the first of the best counts; what leaves the first of equal sets comes last.
        """
        mask = sum(1 << i for i in here)
        alone, friends = self.alone, self.friends
        strangers: list[int] = []
        if out:  # leaving one saves what it costs alone and with all; what two that are left cost is saved once
            alone = [-one - sum(row[j] for j in here) for one, row in zip(alone, self.pairs, strict=True)]
            friends = [mask] * len(friends)
            strangers = [1 << i | 1 << j for i, j in combinations(here, 2) if not self.friends[i] >> j & 1]
        low: float = inf
        best: int | None = None

        def extend(bits: int, left: int, allowed: int, cost: int, sums: list[int], start: int) -> None:
            nonlocal low, best
            for at in range(start, len(here) - left + 1):
                i = here[at]
                total = cost + sums[i]
                # whoever joins a set that is taken costs something, so one that is too dear stays so
                if not allowed >> i & 1 or (total > low and (left == 1 or not out)):
                    continue
                if left > 1:
                    more = [a + b for a, b in zip(sums, self.pairs[i], strict=True)]
                    extend(bits | 1 << i, left - 1, allowed & friends[i], total, more, at + 1)
                elif total < low or out:
                    some = bits | 1 << i
                    if all(some & two for two in strangers):  # of two that may not be together, one must be left
                        low, best = total, some

        extend(0, k, mask, 0, alone, 0)
        if best is None:
            return None
        chosen = mask & ~best if out else best
        return [i for i in here if chosen >> i & 1]

    def _search(self, here: list[int], n: int) -> list[int] | None:
        """Where the sets are too many: grow one from every GPU, and exchange members as long as that helps."""
        grown = [found for i in here if (found := self._grow(here, i, n)) is not None]
        if not grown:
            found = self.clique(n)
            if found is None:
                return None
            grown = [found]
        unlike = sorted({tuple(sorted(one)) for one in grown}, key=self._key)
        best = min((self._exchange(here, one) for one in unlike[:_IMPROVED]), key=self._key)
        return list(best)

    def _key(self, some: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        cost = sum(self.alone[i] for i in some) + sum(self.pairs[i][j] for i, j in combinations(some, 2))
        return cost, some

    def _grow(self, here: list[int], seed: int, n: int) -> list[int] | None:
        some, allowed, sums = [seed], self.friends[seed], self.alone
        while len(some) < n:
            sums = [a + b for a, b in zip(sums, self.pairs[some[-1]], strict=True)]
            able = [i for i in here if allowed >> i & 1]
            if not able:
                return None
            some.append(min(able, key=sums.__getitem__))
            allowed &= self.friends[some[-1]]
        return some

    def _exchange(self, here: list[int], start: tuple[int, ...]) -> tuple[int, ...]:
        some = set(start)
        while True:  # every exchange lowers the key, so this ends
            sums = {i: self.alone[i] + sum(self.pairs[i][j] for j in some) for i in here}
            bits = sum(1 << i for i in some)
            change = min(
                (
                    (sums[new] - self.pairs[new][old] - sums[old], new - old, new)
                    for old in some
                    for new in here
                    if not bits >> new & 1 and not bits & ~(1 << old) & ~self.friends[new]
                ),
                default=(0, 0, 0),
            )
            if change >= (0, 0, 0):
                return tuple(sorted(some))
            some.remove(change[2] - change[1])
            some.add(change[2])
