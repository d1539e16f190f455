"""Which set of GPUs a claim takes: against brute force, and on machines that somebody recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from pytest_gpuguard.claims.gpuset import FAR, GpuChoice, pair
from pytest_gpuguard.claims.needs import Needs, select_gpus
from pytest_gpuguard.facts.gpu import Gpu, Rig, arch_of
from pytest_gpuguard.facts.simulated import simulated_rig
from tests.laws import given, settings, st

NAMES = tuple("fcahbdge")  # no order of theirs is the order of preference


def choices(most: int = 8, strangers: bool = True) -> st.SearchStrategy[GpuChoice]:
    @st.composite
    def draw_one(draw: st.DrawFn) -> GpuChoice:
        names = draw(st.permutations(NAMES[: draw(st.integers(1, most))]))
        pairs = [pair(a, b) for a, b in combinations(names, 2)]
        few = st.sampled_from([0, 1, 4, 5, 32, 64, 200, None])
        far = {one: value for one in pairs if (value := draw(few)) is not None}
        apart = frozenset(one for one in pairs if strangers and draw(st.integers(0, 3)) == 0)
        last = frozenset(name for name in names if draw(st.integers(0, 4)) == 0)
        kept = draw(st.sets(st.sampled_from(names))) if draw(st.booleans()) else ()
        return GpuChoice(tuple(names), apart, far, last).keeping(kept)

    return draw_one()


def total(choice: GpuChoice, some: Sequence[str]) -> int:
    return sum(choice.distance.get(pair(a, b), FAR) for a, b in combinations(some, 2))


def brute(choice: GpuChoice, free: Sequence[str], n: int) -> tuple[str, ...] | None:
    """The best set by looking at all of them, straight from the definition."""
    names = [uuid for uuid in choice.uuids if uuid in free]
    allowed = [
        some for some in combinations(names, n) if not any(pair(a, b) in choice.apart for a, b in combinations(some, 2))
    ]

    def key(some: tuple[str, ...]) -> tuple[bool, int, int, list[int], list[int]]:
        rest = [uuid for uuid in names if uuid not in some]
        far = [choice.distance.get(pair(a, b), FAR).bit_length() for a, b in combinations(rest, 2)]
        kept = [-far.count(level) for level in range(FAR.bit_length())]  # nearest first
        ranks = [choice.uuids.index(uuid) for uuid in some]
        return choice.kept != set(some), total(choice, some), len(choice.last.intersection(some)), kept, ranks

    return min(allowed, key=key, default=None)


# ------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=400)
@given(choices(), st.sets(st.sampled_from(NAMES)), st.integers(1, 8))
def test_the_set_is_the_best_of_all_sets(choice: GpuChoice, free: set[str], n: int) -> None:
    assert choice.pick(free, n) == brute(choice, sorted(free), n)


@given(choices(), st.permutations(NAMES), st.integers(1, 8))
def test_the_order_in_which_the_free_ones_are_named_makes_no_difference(
    choice: GpuChoice, free: list[str], n: int
) -> None:
    assert choice.pick(free, n) == choice.pick(frozenset(free), n) == choice.pick([*free, "of another rig"], n)


BIG = tuple(f"GPU-{7 * i % 16:02d}" for i in range(16))


@st.composite
def big_choices(draw: st.DrawFn) -> GpuChoice:
    pairs = [pair(a, b) for a, b in combinations(BIG, 2)]
    values = draw(st.lists(st.integers(0, 9), min_size=len(pairs), max_size=len(pairs)))
    return GpuChoice(
        BIG,
        frozenset(one for one, value in zip(pairs, values, strict=True) if value == 9),
        {one: value * value for one, value in zip(pairs, values, strict=True)},
    )


@settings(max_examples=60)
@given(big_choices(), st.integers(1, 16), st.integers(0, 2**16 - 1))
def test_of_sixteen_gpus_a_set_that_is_possible_is_found_whatever_it_takes(
    choice: GpuChoice, n: int, busy: int
) -> None:
    free = [uuid for i, uuid in enumerate(BIG) if not busy >> i & 1]
    found = choice.pick(free, n)
    friends = {a: {b for b in free if a != b and pair(a, b) not in choice.apart} for a in free}

    def possible(some: int, left: set[str]) -> bool:
        return some == n or any(
            possible(some + 1, {b for b in left & friends[a] if b > a}) for a in sorted(left) if some + len(left) >= n
        )

    assert (found is not None) is possible(0, set(free))
    if found is not None:
        assert len(found) == n
        assert set(found) <= set(free)
        assert not any(pair(a, b) in choice.apart for a, b in combinations(found, 2))
        assert found == tuple(uuid for uuid in BIG if uuid in found)


@pytest.mark.parametrize("n", range(5, 12))
def test_where_sets_are_too_many_to_look_at_all_no_single_exchange_would_improve_the_one_taken(n: int) -> None:
    import random

    chance = random.Random(n)
    choice = GpuChoice(BIG, distance={pair(a, b): chance.randint(0, 64) for a, b in combinations(BIG, 2)})
    found = choice.pick(BIG, n)
    assert found is not None
    for old in found:
        for new in set(BIG) - set(found):
            assert total(choice, [*(one for one in found if one != old), new]) >= total(choice, found)


@pytest.mark.parametrize(("size", "limit_s"), [(8, 0.010), (16, 0.050)])
def test_a_choice_takes_milliseconds(size: int, limit_s: float) -> None:
    names = [f"GPU-{i:036d}" for i in range(size)]
    choice = GpuChoice(tuple(names), distance={pair(a, b): 1 for a, b in combinations(names, 2)})
    for n in range(1, size + 1):
        assert min(_seconds(choice, names, n) for _ in range(5)) < limit_s, n


def _seconds(choice: GpuChoice, names: list[str], n: int) -> float:
    start = time.perf_counter()
    choice.pick(names, n)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------- values and words


def test_nothing_is_wanted_nothing_is_taken_and_too_few_are_none() -> None:
    choice = GpuChoice(("b", "a"))
    assert choice.pick(["a", "b"], 0) == ()
    assert choice.pick(["a"], 2) is None
    assert choice.pick([], 1) is None
    assert choice.pick(["a", "b"], 2) == ("b", "a")


def test_a_set_to_keep_is_taken_whenever_it_is_free_and_only_as_a_whole() -> None:
    choice = GpuChoice(("a", "b", "c", "d"), distance={("a", "b"): 1, ("c", "d"): 9}).keeping(["d", "c"])
    assert choice.pick("abcd", 2) == ("c", "d")
    assert choice.pick("abc", 2) == ("a", "b")
    assert choice.pick("abcd", 1) == choice.keeping([]).pick("abcd", 1)
    assert choice.without(["c"]).kept == frozenset()
    assert choice.keeping(["c", "elsewhere"]).kept == frozenset()
    assert GpuChoice(("a", "b", "c"), apart=frozenset([("a", "b")])).keeping("ab").pick("abc", 2) == ("a", "c")


def test_a_gpu_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice: a, b, a"):
        GpuChoice(("a", "b", "a"))


@given(choices())
def test_a_choice_comes_back_from_json_and_hashes(choice: GpuChoice) -> None:
    again = GpuChoice.from_dict(json.loads(json.dumps(choice.to_dict())))
    assert again == choice
    assert hash(again) == hash(choice)


GARBAGE: list[Any] = [
    None,
    3,
    "GPU-a",
    [],
    {},
    {"uuids": 3},
    {"uuids": "abc"},
    {"uuids": {"a": 1}},
    {"uuids": [1, 2]},
    {"uuids": ["a", "a"]},
    {"uuids": ["a", "b"], "apart": [[0]]},
    {"uuids": ["a", "b"], "apart": [[0, 2]]},
    {"uuids": ["a", "b"], "apart": [[-1, 0]]},
    {"uuids": ["a", "b"], "apart": [["a", "b"]]},
    {"uuids": ["a", "b"], "apart": [[1, 1]]},
    {"uuids": ["a", "b"], "apart": 7},
    {"uuids": ["a", "b"], "distance": [[0, 1]]},
    {"uuids": ["a", "b"], "distance": [[0, 1, -1]]},
    {"uuids": ["a", "b"], "distance": [[0, 1, 1.5]]},
    {"uuids": ["a", "b"], "distance": [[0, 1, True]]},
    {"uuids": ["a", "b"], "distance": [[0, 1, [2]]]},
    {"uuids": ["a", "b"], "last": [2]},
    {"uuids": ["a", "b"], "last": ["a"]},
    {"uuids": ["a", "b"], "kept": [2]},
]


@pytest.mark.parametrize("data", GARBAGE, ids=repr)
def test_what_is_no_choice_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="no choice of GPUs: "):
        GpuChoice.from_dict(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["uuids", "apart", "distance", "last", "kept", "x"]), JSON) | JSON)
def test_any_json_is_a_choice_or_a_value_error(data: Any) -> None:
    try:
        choice = GpuChoice.from_dict(data)
    except ValueError:
        return
    assert choice.pick(choice.uuids, len(choice.uuids)) in (None, choice.uuids)


def test_a_record_without_links_is_read_too() -> None:
    assert GpuChoice.from_dict({"uuids": ["b", "a"], "of a later release": 1}) == GpuChoice(("b", "a"))


@given(choices(), st.sets(st.sampled_from(NAMES)), st.integers(1, 8))
def test_without_some_is_as_if_those_were_busy(choice: GpuChoice, gone: set[str], n: int) -> None:
    left = [uuid for uuid in choice.uuids if uuid not in gone]
    less = choice.without(gone)
    assert less.uuids == tuple(left)
    assert less.pick(choice.uuids, n) == choice.pick(left, n)
    assert {uuid for one in less.apart | set(less.distance) for uuid in one} | less.last <= set(left)


@given(choices(), st.lists(st.sampled_from((*NAMES, "z"))), st.integers(1, 8))
def test_preferring_changes_only_the_order_of_equals(choice: GpuChoice, first: list[str], n: int) -> None:
    other = choice.preferring(first)
    known = [uuid for uuid in dict.fromkeys(first) if uuid in choice.uuids]
    assert other.uuids == (*known, *(uuid for uuid in choice.uuids if uuid not in known))
    mine, theirs = choice.pick(NAMES, n), other.pick(NAMES, n)
    assert (mine is None) is (theirs is None)
    if mine is not None and theirs is not None:
        assert total(choice, mine) == total(choice, theirs)


def test_preferring_decides_between_equals() -> None:
    choice = GpuChoice(("a", "b", "c", "d"), distance={pair("a", "b"): 4, pair("c", "d"): 4})
    assert choice.pick("abcd", 2) == ("a", "b")
    assert choice.preferring("dc").pick("abcd", 2) == ("d", "c")
    assert choice.preferring("ac").pick("abcd", 2) == ("a", "b"), "not for a set that is worse connected"


@given(choices(), st.integers(1, 8))
def test_the_possible_ones_are_those_of_any_set(choice: GpuChoice, n: int) -> None:
    sets = [
        some
        for some in combinations(choice.uuids, n)
        if not any(pair(a, b) in choice.apart for a, b in combinations(some, 2))
    ]
    inside = {uuid for some in sets for uuid in some}
    assert choice.possible(n).uuids == tuple(uuid for uuid in choice.uuids if uuid in inside)


# ---------------------------------------------------------------------------------------------------------- machines


def matrix(text: str, links: int = 18, numa: Sequence[int] = ()) -> Rig:
    """A rig from the cells that ``nvidia-smi topo -m`` prints; NV# says nothing of the PCI level."""
    rows = [row.split() for row in text.strip().splitlines()]
    gpus = tuple(
        Gpu(i, f"g{i}", "a card", f"bus{i}", sm="100", numa=numa[i] if numa else None) for i in range(len(rows))
    )
    cells = {(f"g{i}", f"g{j}"): cell for i, row in enumerate(rows) for j, cell in enumerate(row) if i != j}
    return Rig(
        gpus,
        topology={one: cell if not cell.startswith("NV") else "SYS" for one, cell in cells.items()},
        nvlink={one: links for one, cell in cells.items() if cell.startswith("NV")},
    )


def index_sets(rig: Rig, n: int, busy: Sequence[int] = (), needs: Needs | None = None) -> list[int] | None:
    """Indices of the GPUs that a claim on ``n`` takes while these are busy."""
    choice = select_gpus(needs or Needs(), n, rig, arch_of).choice
    found = choice.pick([gpu.uuid for gpu in rig.gpus if gpu.index not in busy], n)
    return [rig.gpu(uuid).index for uuid in found] if found is not None else None


@pytest.mark.parametrize(
    ("n", "busy", "taken"),
    [
        (1, [], [0]),
        (1, [0], [1]),  # its partner is busy: the pair is split already
        (1, [3], [2]),
        (1, [0, 1, 2], [3]),
        (1, [2, 3, 7], [6]),  # and not one of the pair that is left on the other socket
        (1, [2, 3], [0]),  # two whole pairs of one socket stay for a claim on four
        (2, [], [0, 1]),
        (2, [0], [2, 3]),
        (2, [0, 1], [2, 3]),
        (2, [0, 2], [4, 5]),
        (2, [0, 2, 4, 6], [1, 3]),  # one node before across sockets
        (3, [], [0, 1, 2]),
        (4, [], [0, 1, 2, 3]),
        (4, [0], [4, 5, 6, 7]),
        (4, [0, 5], [1, 2, 3, 4]),  # three of one node cross sockets less than two pairs do; 6 and 7 stay a pair
        (8, [], list(range(8))),
        (8, [4], None),
    ],
)
def test_two_sockets_with_pairs_on_a_switch(n: int, busy: list[int], taken: list[int] | None) -> None:
    assert index_sets(simulated_rig("sim:rtx-pro-6000-server:8"), n, busy) == taken


def test_of_switch_and_node_the_nearest_is_taken() -> None:
    rig = simulated_rig("sim:rtx-pro-6000-server:8")
    near = select_gpus(Needs(gpus=2, link="pix"), 2, rig, arch_of).choice
    names = [gpu.uuid for gpu in rig.gpus]
    assert near.pick(names, 2) == (names[0], names[1])
    assert near.pick([names[i] for i in (0, 2, 3, 4)], 2) == (names[2], names[3]), "the first pair is half busy"
    assert near.pick([names[i] for i in (0, 2, 4, 6)], 2) is None


ALL_18 = "\n".join(" ".join("X" if i == j else "NV18" for j in range(8)) for i in range(8))
SOCKETS = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("n", "busy", "taken"),
    [
        (1, [], [0]),
        (2, [], [0, 1]),
        (2, [0, 1, 2], [4, 5]),  # all are joined: those that one socket's CPUs are near to
        (3, [3], [0, 1, 2]),
        (4, [2], [4, 5, 6, 7]),
        (6, [], [0, 1, 2, 3, 4, 5]),
        (8, [], list(range(8))),
    ],
)
def test_eight_gpus_on_nvlink_switches(n: int, busy: list[int], taken: list[int]) -> None:
    for needs in (Needs(), Needs(link="nvlink")):
        assert index_sets(matrix(ALL_18, numa=SOCKETS), n, busy, needs) == taken


def test_without_anything_known_of_the_machine_the_order_decides() -> None:
    assert index_sets(simulated_rig("sim:24GiB:4"), 2, [1]) == [0, 2]
    assert index_sets(matrix(ALL_18), 3, [0]) == [1, 2, 3]


#: As reported with a vLLM run that hung: the other seven reach each other over NVLink, GPU 2 reaches them over PCIe.
DEAD_LINK = """
X NV18 NODE NV18 NV18 NV18 NV18 NV18
NV18 X NODE NV18 NV18 NV18 NV18 NV18
NODE NODE X NODE SYS SYS SYS SYS
NV18 NV18 NODE X NV18 NV18 NV18 NV18
NV18 NV18 SYS NV18 X NV18 NV18 NV18
NV18 NV18 SYS NV18 NV18 X NV18 NV18
NV18 NV18 SYS NV18 NV18 NV18 X NV18
NV18 NV18 SYS NV18 NV18 NV18 NV18 X
"""


@pytest.mark.parametrize("numa", [(), SOCKETS], ids=["", "numa"])
@pytest.mark.parametrize("n", range(1, 5))
def test_a_gpu_whose_links_are_down_is_taken_last(n: int, numa: tuple[int, ...]) -> None:
    rig, busy = matrix(DEAD_LINK, numa=numa), list[int]()
    while len(busy) + n <= 7:
        taken = index_sets(rig, n, busy)
        assert taken is not None
        assert 2 not in taken
        busy += taken
    rest = [i for i in range(8) if i not in busy]
    assert index_sets(rig, len(rest), busy) == rest, "it is taken when there is no other"
    assert index_sets(rig, 8) == list(range(8))
    assert index_sets(rig, 8, needs=Needs(link="nvlink")) is None
    assert index_sets(rig, 7, needs=Needs(link="nvlink")) == [0, 1, 3, 4, 5, 6, 7]


#: Two bridges and two GPUs without one, as with 2080 Ti, 3090 and A6000 cards.
BRIDGES = """
X NV2 PHB PHB SYS SYS
NV2 X PHB PHB SYS SYS
PHB PHB X PHB SYS SYS
PHB PHB PHB X SYS SYS
SYS SYS SYS SYS X NV2
SYS SYS SYS SYS NV2 X
"""


@pytest.mark.parametrize(
    ("n", "busy", "taken"),
    [
        (1, [], [2]),  # no bridge is left with one end
        (1, [2, 3], [0]),
        (1, [0, 2, 3], [1]),
        (2, [], [4, 5]),  # the four of the other socket stay together
        (2, [1], [4, 5]),
        (2, [1, 4], [0, 2]),
        (3, [], [0, 1, 2]),
    ],
)
def test_pairs_with_bridges_are_not_split_for_one(n: int, busy: list[int], taken: list[int]) -> None:
    assert index_sets(matrix(BRIDGES, links=2), n, busy) == taken


#: One socket with a switch for four each.
FOURS = "\n".join(
    " ".join("X" if i == j else "PIX" if i // 4 == j // 4 else "NODE" for j in range(8)) for i in range(8)
)
FLAT = "\n".join(" ".join("X" if i == j else "PHB" if i // 2 == j // 2 else "SYS" for j in range(4)) for i in range(4))


@pytest.mark.parametrize(
    ("text", "n", "busy", "taken"),
    [
        (FOURS, 4, [0], [4, 5, 6, 7]),
        (FOURS, 1, [0, 1], [2]),  # the whole four are left for whoever needs four
        (FOURS, 2, [0, 1], [2, 3]),
        (FOURS, 1, [4], [5]),
        (FLAT, 2, [], [0, 1]),
        (FLAT, 2, [1], [2, 3]),
        (FLAT, 1, [2], [3]),
        (FLAT, 3, [], [0, 1, 2]),
        (FLAT, 4, [], [0, 1, 2, 3]),
    ],
)
def test_fours_on_a_switch_and_a_box_of_four(text: str, n: int, busy: list[int], taken: list[int]) -> None:
    assert index_sets(matrix(text), n, busy) == taken


def test_where_only_the_numa_nodes_are_known_one_node_is_nearer() -> None:
    gpus = tuple(Gpu(i, f"g{i}", "a card", "bus", numa=i % 2) for i in range(4))
    assert index_sets(Rig(gpus), 2) == [0, 2]
    virtual = {(f"g{i}", f"g{j}"): "SYS" for i in range(4) for j in range(4) if i != j}
    assert index_sets(Rig(gpus, topology=virtual), 2) == [0, 2], "a virtual machine says SYS of all pairs"


def test_the_callers_order_is_the_last_thing_that_decides(fake_rig: Any) -> None:
    """GPUs 4 and 5 share a switch; 6 is on their socket."""
    from pytest_gpuguard.facts.nvml import query_rig

    fake = fake_rig(n=8)
    rig = query_rig(fake.environ(CUDA_VISIBLE_DEVICES="6,4,5"))
    assert index_sets(rig, 2) == [4, 5], "nearest before first named"
    assert index_sets(rig, 1) == [6], "its partner is not ours"
    assert index_sets(query_rig(fake.environ(CUDA_VISIBLE_DEVICES="6,4")), 2) == [6, 4], "machine indices"
    assert index_sets(query_rig(fake.environ(CUDA_VISIBLE_DEVICES="5,4,3,2")), 2) == [5, 4]
