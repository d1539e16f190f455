"""Laws of the remedies: whatever the numbers are, no advice contradicts them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from pytest_gpuguard.claims.observation import LogReading, MemoryTable
from pytest_gpuguard.diagnose.allocation import allocation, size
from pytest_gpuguard.diagnose.memory import complete
from pytest_gpuguard.diagnose.remedies import Setup, remedies
from pytest_gpuguard.diagnose.slack import above, below, down, own_reserve_gib, up

from .boot_logs import FULL, NO_ROOM, failed, table
from .laws import example, given, settings, st

# ------------------------------------------------------------------------------------------------------------ the laws

#: Every fraction that a remedy tells somebody to use.
_NAMED = re.compile(
    r"--mem-fraction-static (?:of at least |of at most |up to |between )?(-?\d+(?:\.\d+)?)(?: and (-?\d+(?:\.\d+)?))?"
    r"|(-?\d+\.\d+),? (?:which )?gives"
)


def named(advice: tuple[str, ...]) -> list[float]:
    found = [float(number) for text in advice for groups in _NAMED.findall(text) for number in groups if number]
    return [one for one in found if one]


befores = st.floats(2, 280).map(lambda one: round(one, 2))
shares = st.floats(0.0, 1.0)
fractions = st.floats(0.05, 0.99).map(lambda one: round(one, 4))
chunks = st.sampled_from([None, 512, 2048, 4096, 8192, 16384])
graphs = st.sampled_from([None, 1, 8, 80, 128, 256, 512])
tps = st.sampled_from([None, 1, 2, 4, 8, 16])


def hundredths(low: float, high: float) -> list[float]:
    return [one / 100 for one in range(1, 100) if low <= one / 100 <= high]


@given(befores, shares, fractions, chunks, graphs, tps)
@example(94.0, 1 - 16.3 / 94, 0.7787, 8192, 128, 8)
@example(94.0, 0.5, 0.84999, 8192, 128, 8)
@example(20.0, 0.0, 0.99, None, None, None)
@settings(max_examples=400)
def test_a_window_for_the_pool_holds_weights_pool_and_the_rest(
    before: float, share: float, fraction: float, chunk: int | None, graph_bs: int | None, tp: int | None
) -> None:
    """And where there is a fraction that does, it is named; where there is none, none is."""
    after = round(before * (1 - share), 2)
    memory = table(before, after, fraction)
    advice = remedies(
        failed("oom.kv_pool", memory), Setup("sglang", tp, chunked_prefill_size=chunk, cuda_graph_max_bs=graph_bs)
    )
    true_f_min = 1 - after / before
    least = own_reserve_gib(2048, 8, tp or 1)
    possible = hundredths(max(true_f_min, memory.f_min or 0) + 0.0021, 1 - least / before)
    possible = [one for one in possible if one > fraction + 1e-9]
    fractions = named(advice)
    assert all(max(true_f_min, fraction) < one < 1 for one in fractions), advice
    assert all(before * (1 - one) >= least - 1e-6 for one in fractions), advice
    assert bool(fractions) >= bool(possible), (advice, possible)
    assert advice


@given(befores, shares, fractions, st.floats(1e-6, 40), graphs, st.sampled_from(["oom.graph_capture", "oom.runtime"]))
@example(94.0, 0.8266, 0.85, 1e-6, 128, "oom.graph_capture")
@settings(max_examples=400)
def test_a_lower_fraction_frees_what_was_missing_and_leaves_a_pool(
    before: float, share: float, fraction: float, short: float, graph_bs: int | None, outcome: str
) -> None:
    memory = table(before, round(before * (1 - share), 2), fraction)
    text = FULL.format(f"{(short + 1) * 1024:.2f} MiB.", "1024.00 MiB")
    missing = allocation(text).short_gib or 0.0
    advice = remedies(failed(outcome, memory, text), Setup("sglang", 8, cuda_graph_max_bs=graph_bs))
    f_min = memory.f_min or 0.0
    fractions = named(advice)
    if missing:
        assert all(f_min < one < fraction for one in fractions), advice
        assert all((fraction - one) * before >= missing - 1e-5 for one in fractions if one == max(fractions)), advice
        possible = hundredths(f_min + 0.0021, fraction - missing / before - 1e-9)
        assert bool(fractions) >= bool(possible), (advice, possible)
        assert f"short by at least {size(missing)}" in advice[0]
    assert all(re.fullmatch(r".*--cuda-graph-max-bs \d+", one) is None or graph_bs for one in advice)
    smaller = [int(number) for one in advice for number in re.findall(r"--cuda-graph-max-bs (\d+)", one)]
    assert all(0 < one < (graph_bs or 0) for one in smaller)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2, 4, 8, 16]),
    befores,
    st.floats(0.01, 1.0),
    st.floats(0, 1),
    st.sampled_from(["sglang", "vllm", None]),
)
@settings(max_examples=300)
def test_a_tp_size_that_is_named_holds_the_weights(
    tp: int, pp: int, leased: int, room: float, loaded: float, free: float, engine: str | None
) -> None:
    text = FULL.format("672.00 MiB.", f"{free * 1024:.2f} MiB")
    memory = MemoryTable(avail_before_gib=room)
    known = allocation(text)
    reading = replace(failed("oom.weights", memory, text, "sglang", loaded=loaded), engine=engine)
    with_foreign = (known.total_gib or 0) - room > max(4.0, 0.1 * (known.total_gib or 0))
    advice = remedies(reading, Setup(engine, tp, pp, leased=leased, loaded=loaded))
    need = (room - (known.free_gib or 0)) / loaded if 0.1 <= loaded < 1 else None
    sizes = [int(number) for one in advice for number in re.findall(r"--(?:tp|tensor-parallel)-size (\d+)", one)]
    if with_foreign:
        assert not sizes
    for one in sizes:
        assert one > tp
        assert one % tp == 0
        assert need is None or need <= room or need * tp / one < room
        assert leased > tp * pp or need is not None
        assert leased <= tp * pp or leased % (tp * pp) or one * pp == leased
    assert all(("--tp-size" in one) <= (engine == "sglang") for one in advice)


@given(befores, shares, fractions, st.integers(1, 10**7), st.integers(1, 10**7), chunks)
@example(36.0, 0.9921875, 0.5, 127, 126, None)
@settings(max_examples=300)
def test_what_holds_more_tokens_is_a_fraction_that_holds_them(
    before: float, share: float, fraction: float, asked: int, granted: int, chunk: int | None
) -> None:
    memory = table(before, round(before * (1 - share), 2), fraction)
    memory = replace(memory, kv_gib=max(memory.rest_gib or 0, 0.1), kv_tokens=granted)
    reading = LogReading("ready", "ready", "sglang", memory=memory, clipped=(asked, granted))
    advice = remedies(reading, Setup("sglang", 8, chunked_prefill_size=chunk))
    cell = (memory.kv_gib or 0) / granted
    f_min = memory.f_min or 0.0
    for one in named(advice):
        assert max(f_min, fraction) < one < 1, advice
        assert (one - f_min) * before >= asked * cell - 1e-4, advice
        if "holds them" in advice[0]:
            assert before * (1 - one) >= own_reserve_gib(chunk or 2048, 8, 8) - 1e-6
    assert not advice or asked > granted


@given(st.floats(0.1, 0.99), st.floats(8, 190), st.floats(0.01, 60))
def test_a_utilization_that_is_named_gives_what_is_missing(current: float, total: float, short: float) -> None:
    memory = MemoryTable(gpu_memory_utilization=current, total_gib=total, kv_gib=-short)
    (text,) = remedies(failed("oom.kv_pool", memory, "No available memory for the cache blocks.", "vllm"), Setup())
    found = re.search(r"of at least (\d\.\d+)", text)
    assert (found is None) == ("no --gpu-memory-utilization helps" in text)
    if found is not None:
        assert current + short / total < float(found[1]) < 1


numbers = st.none() | st.floats(-5, 300) | st.sampled_from([0.0, 1.0])


@given(
    st.sampled_from(["oom.weights", "oom.kv_pool", "oom.graph_capture", "oom.runtime", "ready", "unknown", "oom.host"]),
    st.builds(
        MemoryTable,
        avail_before_gib=numbers,
        avail_after_weights_gib=numbers,
        mem_fraction_static=st.none() | st.floats(0, 1),
        f_min=st.none() | st.floats(0, 1.2),
        kv_tokens=st.none() | st.integers(0, 10**9),
        kv_gib=numbers,
        total_gib=numbers,
        gpu_memory_utilization=st.none() | st.floats(0, 1),
    ),
    st.builds(
        Setup,
        engine=st.sampled_from(["sglang", "vllm", None]),
        tp=tps,
        ep=st.sampled_from([1, 8]),
        chunked_prefill_size=chunks,
        cuda_graph_max_bs=graphs,
        leased=st.sampled_from([0, 3, 8]),
        loaded=st.none() | st.floats(0, 1),
    ),
    st.sampled_from(["", NO_ROOM, FULL.format("2.00 GiB.", "0 bytes"), "Prefill out of memory."]),
    st.none() | st.tuples(st.integers(0, 10**7), st.integers(-(10**7), 10**7)),
    st.sampled_from([None, "sglang.batch_oom"]),
)
@settings(max_examples=500)
def test_whatever_is_missing_or_odd_no_impossible_fraction_is_named(
    outcome: str,
    memory: MemoryTable,
    setup: Setup,
    text: str,
    clipped: tuple[int, int] | None,
    signature: str | None,
) -> None:
    memory = complete(memory)
    reading = failed(outcome, memory, text, clipped=clipped, signature=signature)
    advice = remedies(replace(reading, engine=setup.engine), setup)
    assert all((memory.f_min or 0) < one < 1 for one in named(advice)), advice
    assert all("None" not in one and "nan" not in one and "inf" not in one.split() for one in advice)
    if outcome in ("unknown", "oom.host"):
        assert advice == ()


#: Whatever a float can be, and whole numbers that none can hold.
anything = st.none() | st.floats() | st.sampled_from([5e-324, 1e308, -1e308, 10**400, -(10**400)])
whole = st.none() | st.integers() | st.sampled_from([10**400, -(10**400)])
whole_not_none = st.integers() | st.sampled_from([10**400, -(10**400)])


@given(
    st.sampled_from(["oom.weights", "oom.kv_pool", "oom.graph_capture", "oom.runtime", "ready", "infra.dirty_gpu"]),
    st.builds(
        MemoryTable,
        **dict.fromkeys(
            [
                "avail_before_gib",
                "avail_after_weights_gib",
                "weights_gib",
                "reserved_gib",
                "rest_gib",
                "kv_gib",
                "graph_gib",
                "free_gib",
                "total_gib",
            ],
            anything,
        ),
        mem_fraction_static=anything | st.floats(0, 1),
        f_min=anything | st.floats(0, 1),
        gpu_memory_utilization=anything | st.floats(0, 1),
        kv_tokens=whole,
    ),
    st.builds(
        Setup,
        engine=st.sampled_from(["sglang", "vllm", None]),
        **dict.fromkeys(["tp", "chunked_prefill_size", "cuda_graph_max_bs", "max_total_tokens"], whole),
        **dict.fromkeys(["pp", "ep", "replicas", "leased"], whole_not_none),
        loaded=anything,
        gpu_memory_utilization=anything,
    ),
    st.sampled_from(["", NO_ROOM, FULL.format("2.00 GiB.", "0 bytes"), "Prefill out of memory."]),
    st.none() | st.tuples(whole_not_none, whole_not_none),
    st.sampled_from([None, "sglang.batch_oom"]),
)
@example(
    "ready",
    MemoryTable(avail_before_gib=5e-324, f_min=0.0, kv_gib=1.0, kv_tokens=1),
    Setup("sglang"),
    "",
    (10**7, 0),
    None,
)
@settings(max_examples=300)
def test_no_number_at_all_makes_it_raise_or_say_what_is_no_fraction(
    outcome: str,
    memory: MemoryTable,
    setup: Setup,
    text: str,
    clipped: tuple[int, int] | None,
    signature: str | None,
) -> None:
    reading = failed(outcome, memory, text, clipped=clipped, signature=signature)
    advice = remedies(replace(reading, engine=setup.engine), setup)
    assert all(0 < one < 1 for one in named(advice)), advice
    assert all("None" not in one and "nan" not in one and "inf" not in one.split() for one in advice)


@given(st.floats())
def test_hundredths_of_any_number_are_numbers(fraction: float) -> None:
    assert all(math.isfinite(rounded(fraction)) for rounded in (up, down, above, below))
    if math.isnan(fraction):
        assert up(fraction) > 1
        assert down(fraction) < 0


@given(st.floats(0, 1))
@example(0.85)
@example(0.29)
def test_hundredths_are_found_on_the_right_side(fraction: float) -> None:
    assert down(fraction) - 1e-7 <= fraction <= up(fraction) + 1e-7
    assert below(fraction) < fraction < above(fraction) + 1e-7
    assert math.isclose(above(fraction) - down(fraction), 0.01)
