# ruff: noqa: E501  (log lines are as long as they are)
"""What would cure a boot that ran out of memory: laws that no advice may break, and boots whose cure is known."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpuguard.claims.observation import Decisive, LogReading, MemoryTable
from pytest_gpuguard.claims.resolved import LogEvidence
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.allocation import allocation, size
from pytest_gpuguard.diagnose.memory import complete
from pytest_gpuguard.diagnose.remedies import Setup, remedies, setup_of
from pytest_gpuguard.diagnose.resolved import resolve
from pytest_gpuguard.diagnose.slack import Window, above, below, defaults, down, own_reserve_gib, up, window

from .boot_logs import F7, FULL, KIMI, NO_ROOM, STAMP, arguments, dies, graph_capture, loaded, loading, tp
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


def table(before: float, after: float, fraction: float | None, **more: Any) -> MemoryTable:
    numbers = {"avail_before_gib": before, "avail_after_weights_gib": after, "mem_fraction_static": fraction}
    return complete(MemoryTable(**{**numbers, **more}))


def failed(outcome: str, memory: MemoryTable, text: str = NO_ROOM, engine: str = "sglang", **more: Any) -> LogReading:
    return LogReading(outcome, "x", engine, decisive=Decisive(9, text), memory=memory, **more)


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


# ------------------------------------------------------------------------------------------------ slack and allocation


def test_sglang_s_own_reserve_is_its_formula() -> None:
    """97887 MiB, chunk 8192, 128 captured requests, TP8: 14080 MiB, which makes the printed fraction 0.856."""
    reserve = own_reserve_gib(8192, 128, 8)
    assert reserve * 1024 == 14080
    assert round(1 - reserve * 1024 / 97887, 3) == 0.856
    assert own_reserve_gib(1024, 0, 8) == own_reserve_gib(2048, 0, 8)


@pytest.mark.parametrize(
    ("card", "tp", "chunk", "graph_bs"),
    [
        (15, 1, 2048, 8),
        (23, 2, 2048, 24),
        (31, 4, 2048, 80),
        (47, 1, 4096, 32),
        (94, 8, 8192, 512),
        (180, 1, 16384, 512),
    ],
)
def test_defaults_go_by_the_card(card: float, tp: int, chunk: int, graph_bs: int) -> None:
    assert defaults(card, tp) == (chunk, graph_bs)


def test_a_window_says_itself() -> None:
    usual = window(94, 0.8266, 8192, 128, 8)
    assert (str(usual), usual.empty, usual.slack_gib) == ("between 0.83 and 0.85", False, 13.75)
    assert str(usual.over(0.84)) == "0.85"
    assert usual.over(0.85).empty
    assert window(94, 0.5, 2048, 8, 1).slack_gib == 10  # of a large card
    assert window(40, 0.5, 2048, 8, 1).slack_gib < 5
    assert Window(0.8, 0.83).middle == 0.82


@pytest.mark.parametrize(
    ("text", "tried", "free", "total", "short"),
    [
        (
            "CUDA out of memory. Tried to allocate 672.00 MiB. GPU 2 has a total capacity of 94.97 GiB of which 136.94 "
            "MiB is free. Including non-PyTorch memory, this process has 94.83 GiB memory in use.",
            (672, 1024),
            (136.94, 1024),
            94.97,
            "535 MiB",
        ),
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 77.02 GiB already "
            "allocated; 512.00 KiB free; 78.16 GiB reserved in total by PyTorch)",
            (2, 1),
            (512, 1 << 20),
            79.15,
            "2.0 GiB",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty of 23.65 GiB of which 0 bytes "
            "is free.",
            (20, 1024),
            (0, 1),
            23.65,
            "20 MiB",
        ),
        (
            "CUDA out of memory. Tried to allocate 96.00 KiB. GPU 0 has a total capacity of 1.00 GiB of which 6.00 KiB is free.",
            (96, 1 << 20),
            (6, 1 << 20),
            1.0,
            "90 KiB",
        ),
    ],
    ids=["new", "old", "nothing free", "KiB"],
)
def test_torch_s_numbers_are_read_in_every_spelling_and_unit(
    text: str, tried: tuple[float, int], free: tuple[float, int], total: float, short: str
) -> None:
    found = allocation(text)
    assert (found.tried_gib, found.free_gib, found.total_gib) == (tried[0] / tried[1], free[0] / free[1], total)
    assert found.short_gib is not None
    assert size(found.short_gib) == short


def test_a_fragmented_gpu_lacks_nothing_that_can_be_named() -> None:
    found = allocation(FULL.format("1.00 GiB.", "3.00 GiB"))
    assert found.short_gib is None
    memory = table(94, 20, 0.85)
    advice = remedies(failed("oom.graph_capture", memory, FULL.format("1.00 GiB.", "3.00 GiB")), Setup("sglang", 8))
    assert advice == ("a smaller --cuda-graph-max-bs",)
    assert allocation("KeyError: 12") == allocation("")


# ----------------------------------------------------------------------------------------------------- boots from logs


def cure(
    log: str, flags: str = "", gpus: int = 0, version: str | None = None, engine: str = "sglang"
) -> tuple[str, ...]:
    """The remedies for a log, as ``gpuguard explain`` gives them."""
    reading = classify_text(log, engine, version)
    resolved = resolve(engine, flags.split(), reading.evidence)
    return remedies(reading, setup_of(resolved, reading, gpus))


def test_an_expert_parallel_boot_without_room_for_the_pool_gets_its_window() -> None:
    """94 GiB free, 16.3 left: the least fraction is 0.8266, and 13.75 GiB must stay free."""
    (text,) = cure(KIMI + dies(F7))
    assert text.startswith("--mem-fraction-static between 0.83 and 0.85: 0.84 gives a KV pool of 1.3 GiB (above, ")
    assert "less than the 13.8 GiB that SGLang itself keeps" in text


def test_tokens_are_told_where_the_log_says_how_many_too_few_there_were() -> None:
    """4.499 GiB short is 561,981 tokens short: (0.84 - 0.7787) * 94 = 5.76 GiB more hold 719,370 of them."""
    clipped = f"{STAMP} TP0] max_total_tokens=20000 is larger than the profiled value -561981. Use the profiled value instead.\n"
    (text,) = cure(KIMI + clipped + dies(F7))
    assert "0.84 gives a KV pool of 1.3 GiB (157,386 tokens)" in text


def test_where_the_window_is_empty_smaller_graphs_and_chunks_open_one() -> None:
    """Eight GPUs of 140 GiB with 12.25 left, as measured: the release itself prints 0.9113 as the least."""
    log = arguments(mem_fraction_static=0.88, tp_size=8) + loaded(tp(8), 138.1, 12.25)
    said = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise "
    said += "--mem-fraction-static above 0.912 (minimum viable = 1 - available/pre = 0.9113)."
    first, second = cure(log + dies(said), version="0.5.15")
    assert first.startswith(
        "--mem-fraction-static between 0.92 and 0.96, together with a smaller --chunked-prefill-size and "
        "--cuda-graph-max-bs-decode: at 0.92 11.0 GiB are left for graphs and activations"
    )
    assert "14.5 GiB at 8192 and 512, 4.5 GiB at 2048 and 8" in first
    assert (
        second == "16 GPUs would hold the weights: --tp-size 16 (about 63 GiB of each then); the weights need about "
        "126 GiB of each now"
    )


def test_only_what_can_shrink_is_to_be_made_smaller() -> None:
    log = arguments(mem_fraction_static=0.5, chunked_prefill_size=2048, cuda_graph_max_bs=4, tp_size=1)
    (first, *_) = cure(log + loaded([""], 94.0, 9.0) + dies(NO_ROOM, ""))
    assert first == (
        "--mem-fraction-static between 0.91 and 0.96: at 0.91 8.5 GiB are left for graphs and activations, less than "
        "the 10.0 GiB that SGLang itself keeps"
    )


def test_where_no_fraction_works_it_says_so_and_how_many_gpus_would() -> None:
    """Four GPUs of 94 GiB filled up to the last half GiB, of eight that are leased."""
    log = arguments(mem_fraction_static=0.98, tp_size=4) + loaded(tp(4), 94.0, 0.5)
    assert cure(log + dies(NO_ROOM), gpus=8) == (
        "no fraction works: the weights take 93.50 of the 94.00 GiB that were free",
        "4 GPUs are used, 8 are leased: --tp-size 8; the weights need about 94 GiB of each now, about 47 GiB of each then",
    )
    log = arguments(mem_fraction_static=0.9, tp_size=4) + loaded(tp(4), 94.0, 4.0)
    first, second = cure(log + dies(NO_ROOM))
    assert first.startswith("hardly any fraction works: beside the weights (90.00 GiB) only 4.00 of 94.00 GiB are left")
    assert second.startswith("8 GPUs would hold the weights: --tp-size 8 (about 45 GiB of each then)")


def test_a_fraction_that_is_high_already_is_not_advised_again() -> None:
    log = arguments(mem_fraction_static=0.97, tp_size=1, max_total_tokens=1) + loaded([""], 94.0, 40.0)
    (first, *_) = cure(log + dies("ValueError: SWA pool (12 tokens) cannot hold even one request of 40960 tokens", ""))
    assert first.startswith("a higher --mem-fraction-static would leave less than the 3.6 GiB that SGLang itself keeps")


def test_without_the_free_memory_before_the_weights_only_the_least_is_told() -> None:
    said = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88. Raise "
    said += "--mem-fraction-static above 0.912 (minimum viable = 1 - available/pre = {})."
    tail = f"{STAMP} TP0] Load weight end. type=M, avail mem=12.25 GB, mem usage=125.65 GB.\n"
    assert cure(tail + dies(said.format("0.9113"))) == (
        "--mem-fraction-static of at least 0.92 (the least that holds the weights is 0.9113)",
    )
    assert cure(tail + dies(said.format("0.9990"))) == (
        "no --mem-fraction-static works: the weights alone take 99.90% of what was free",
    )
    assert cure(tail + dies(said.format("0.8790"))) == (
        "--mem-fraction-static of at least 0.89 (the least that holds the weights is 0.8790)",
    )
    high = arguments(mem_fraction_static=0.995, tp_size=1)
    assert cure(high + tail + dies(said.format("0.5000"))) == ()
    assert cure(dies(NO_ROOM)) == ()


def test_a_pool_that_torch_could_not_allocate_wants_a_lower_fraction_not_a_higher_one() -> None:
    log = arguments(mem_fraction_static=0.9, tp_size=1) + loaded([""], 94.0, 60.0)
    said = FULL.format("3.00 GiB.", "1.00 GiB")
    (text,) = cure(log + dies(said, "", frame="_create_buffers"))
    assert text == "the KV pool was short by at least 2.0 GiB: --mem-fraction-static between 0.37 and 0.87"


@pytest.mark.parametrize(
    ("version", "said", "short"),
    [
        ("0.5.7", FULL.format("672.00 MiB.", "136.94 MiB"), "535 MiB"),
        ("0.5.7", FULL.format("2.00 GiB.", "0 bytes"), "2.0 GiB"),
        ("0.5.15", FULL.format("2.00 GiB.", "512.00 KiB"), "2.0 GiB"),
        (
            "0.4.6",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; 79.15 GiB total capacity; "
            "77.02 GiB already allocated; 18.88 MiB free; 78.16 GiB reserved in total by PyTorch)",
            "237 MiB",
        ),
    ],
)
def test_graph_capture_says_how_much_was_missing_and_the_release_s_own_flag(
    version: str, said: str, short: str
) -> None:
    wrapped = f"Exception: Capture cuda graph failed: {said.removeprefix('torch.OutOfMemoryError: ')}\nPossible solutions:\n1. x"
    flag = "--cuda-graph-max-bs-decode" if version == "0.5.15" else "--cuda-graph-max-bs"
    for known in (version, None):
        first, second = cure(graph_capture(version) + dies(wrapped, ""), version=known)
        assert first == f"graph capture was short by at least {short}: {flag} 128"
        high = "0.82" if short == "2.0 GiB" else "0.84"
        assert second.startswith(f"or --mem-fraction-static between 0.69 and {high} ({high} gives ")


def test_the_tokens_of_a_lower_fraction_are_those_of_its_pool() -> None:
    """15.9 GiB hold 160,000 tokens; 0.82 leaves (0.82 - 0.6809) * 94 = 13.07 GiB."""
    wrapped = "Exception: Capture cuda graph failed: " + FULL.format("2.00 GiB.", "0 bytes")
    _, second = cure(graph_capture("0.5.7") + dies(wrapped, ""))
    tokens = re.search(r"0\.82 gives ([\d,]+) tokens", second)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) == pytest.approx((0.82 - 64 / 94) * 94 / (15.9 / 160000), rel=1e-5)


@given(st.floats(0.3, 0.6), st.floats(0.62, 0.95), st.integers(1, 10**6), st.floats(0.9, 1.1), st.floats(0.01, 5))
@example(0.5, 0.85, 100_000, 0.8, 0.5)
@settings(max_examples=300)
def test_a_lower_fraction_never_gives_more_tokens_than_there_are(
    f_min: float, fraction: float, tokens: int, share: float, short: float
) -> None:
    """Also where the printed pool is not what the fraction gives: then no number is told."""
    memory = table(94.0, round(94 * (1 - f_min), 2), fraction, kv_tokens=tokens)
    memory = replace(memory, kv_gib=(memory.rest_gib or 0) * share)
    said = FULL.format(f"{short + 1:.2f} GiB.", "1.00 GiB")
    for outcome in ("oom.graph_capture", "oom.runtime", "oom.kv_pool"):
        advice = " ".join(remedies(failed(outcome, memory, said), Setup("sglang", 1)))
        given_tokens = [int(number.replace(",", "")) for number in re.findall(r"gives ([\d,]+) tokens", advice)]
        assert all(0 < one < tokens for one in given_tokens), advice
        assert not given_tokens or abs(share - 1) < 0.06


def test_a_pool_that_the_states_of_a_model_share_promises_no_tokens() -> None:
    """16.3 of 94 GiB left at 0.88 are 5.02 for the pool, of which the KV cache has 4.0."""
    log = arguments(mem_fraction_static=0.88, tp_size=1, cuda_graph_max_bs=128) + loaded([""], 94.0, 16.3)
    log += f"{STAMP}] Mamba Cache is allocated. max_mamba_cache_size: 36, conv_state size: 0.10GB, ssm_state size: 0.92GB\n"
    log += f"{STAMP}] KV Cache is allocated. #tokens: 100000, K size: 2.00 GB, V size: 2.00 GB\n"
    log += f"{STAMP}] Memory pool end. avail mem=10.00 GB\n"
    begin = f"{STAMP}] Capture cuda graph begin. This can take up to several minutes. avail mem=9.50 GB\n"
    said = "Exception: Capture cuda graph failed: " + FULL.format("256.00 MiB.", "12.94 MiB")
    assert cure(log + begin + dies(said, "")) == (
        "graph capture was short by at least 243 MiB: --cuda-graph-max-bs 64",
        "or --mem-fraction-static between 0.83 and 0.87",
    )
    ready = f"{STAMP}] The server is fired up and ready to roll!\n"
    assert cure(log + ready + dies("RuntimeError: Prefill out of memory. Try to lower your batch size.", "")) == (
        "the KV pool of 100,000 tokens was full: a smaller --max-running-requests",
    )
    clipped = LogReading("ready", "ready", "sglang", memory=classify_text(log).memory, clipped=(110_000, 100_000))
    assert remedies(clipped, Setup("sglang", 1)) == ()


def test_where_one_request_is_captured_no_smaller_graph_is_advised() -> None:
    wrapped = "Exception: Capture cuda graph failed: " + FULL.format("2.00 GiB.", "0 bytes")
    log = graph_capture("0.5.7", graphs=1).replace("bs [1, 2, 1]", "bs [1]")
    first, second = cure(log + dies(wrapped, ""), "--cuda-graph-max-bs 1")
    assert first.startswith("graph capture was short by at least 2.0 GiB: --mem-fraction-static between 0.69 and 0.82")
    assert second == "or --disable-cuda-graph"
    small = log.replace("=0.85,", "=0.69,")
    assert cure(small + dies(wrapped, ""), "--cuda-graph-max-bs 1")[-1] == "or --disable-cuda-graph"


def test_a_pool_smaller_than_what_is_missing_is_not_to_be_made_smaller() -> None:
    log = graph_capture("0.5.7").replace("=0.85,", "=0.69,")
    wrapped = "Exception: Capture cuda graph failed: " + FULL.format("2.00 GiB.", "0 bytes")
    assert cure(log + dies(wrapped, "")) == (
        "graph capture was short by at least 2.0 GiB: --cuda-graph-max-bs 128",
        "or a lower --mem-fraction-static does not help: the KV pool has only 876 MiB",
    )


def test_the_user_s_own_limit_of_tokens_makes_the_fraction_no_cure() -> None:
    wrapped = "Exception: Capture cuda graph failed: " + FULL.format("2.00 GiB.", "0 bytes")
    log = graph_capture("0.5.7").replace("160000, K size: 7.95 GB, V size: 7.95", "4096, K size: 0.20 GB, V size: 0.20")
    assert cure(log + dies(wrapped, ""), "--max-total-tokens 4096") == (
        "graph capture was short by at least 2.0 GiB: --cuda-graph-max-bs 128",
    )


def test_a_forward_pass_that_ran_out_wants_a_smaller_chunk() -> None:
    log = graph_capture("0.5.7").replace("mem_fraction_static", "chunked_prefill_size=8192, mem_fraction_static")
    ready = f"{STAMP}] The server is fired up and ready to roll!\n"
    first, second = cure(log + ready + dies(FULL.format("1.00 GiB.", "24.00 MiB"), ""))
    assert first == "the forward pass was short by at least 1000 MiB: --chunked-prefill-size 4096"
    assert second.startswith("or --mem-fraction-static between 0.69 and 0.83")
    unchunked = log.replace("chunked_prefill_size=8192", "chunked_prefill_size=-1")
    assert "--chunked-prefill-size 8192" in cure(unchunked + ready + dies(FULL.format("1.00 GiB.", "24.00 MiB"), ""))[0]


def test_a_full_pool_wants_fewer_requests_or_a_larger_pool() -> None:
    log = graph_capture("0.5.7") + f"{STAMP}] The server is fired up and ready to roll!\n"
    said = "RuntimeError: Prefill out of memory. Try to lower your batch size."
    assert cure(log + dies(said, "")) == (
        "the KV pool of 160,000 tokens was full: a smaller --max-running-requests",
        "or --mem-fraction-static up to 0.86, which gives 169,459 tokens",
    )


# ---------------------------------------------------------------------------------------------------------- the weights

BAR = "Loading safetensors checkpoint shards:  {}% Completed | {}/64 [00:40<00:20,  1.60it/s]\r"
FIVE = FULL.format("672.00 MiB.", "136.94 MiB")


def test_four_gpus_of_eight_that_are_leased_are_told_with_what_the_weights_need() -> None:
    """ "TP4 EP2" of a model of 560 GiB: at 67 % of the shards 93.9 of 94 GiB are full."""
    log = arguments(tp_size=4, ep_size=2) + loading(tp(4, " EP0"), 94.0) + BAR.format(67, 43) + "\n"
    first, second = cure(log + dies(FIVE, " TP2 EP0"), gpus=8)
    assert (
        first == "4 GPUs are used, 8 are leased: --tp-size 8; the weights need about 140 GiB of each now, about 70 GiB "
        "of each then"
    )
    assert (
        second
        == "--ep-size 2 adds no GPU: it divides the same 4 of --tp-size, and the experts take as much of each at "
        "any --ep-size"
    )
    (alone, _) = cure(log + dies(FIVE, " TP2 EP0"))
    assert (
        alone == "8 GPUs would hold the weights: --tp-size 8 (about 70 GiB of each then); the weights need about 140 "
        "GiB of each now"
    )


def test_leased_gpus_that_do_not_hold_the_weights_either_are_not_advised() -> None:
    log = arguments(tp_size=4) + loading(tp(4), 94.0) + BAR.format(20, 13) + "\n"
    (text,) = cure(log + dies(FIVE, " TP2"), gpus=8)
    assert (
        text == "4 GPUs are used, 8 are leased, and even those do not hold the weights; the weights need about 462 GiB "
        "of each now"
    )


def test_without_a_bar_only_what_is_leased_and_unused_is_told() -> None:
    log = arguments(tp_size=4) + loading(tp(4), 94.0)
    assert cure(log + dies(FIVE), gpus=8) == ("4 GPUs are used, 8 are leased: --tp-size 8",)
    assert cure(log + dies(FIVE), gpus=4) == ()
    assert cure(log + dies(FIVE), gpus=6) == ()
    assert cure(loading([""], 94.0) + dies(FIVE, ""), gpus=8) == ()  # how many are used is not known


def test_copies_of_the_model_use_gpus_too_but_dp_attention_does_not() -> None:
    log = loading(tp(4), 94.0) + dies(FIVE)
    assert cure(log, "--tp-size 4 --dp-size 2", gpus=8) == ()
    assert cure(log, "--tp-size 4 --dp-size 4 --enable-dp-attention", gpus=8) == (
        "4 GPUs are used, 8 are leased: --tp-size 8",
    )
    assert cure(log, "--tp-size 2 --pp-size 2", gpus=8) == ("4 GPUs are used, 8 are leased: --tp-size 4",)


def test_memory_that_somebody_else_holds_comes_before_all_other_advice() -> None:
    log = arguments(tp_size=4) + loading(tp(3), 94.0) + loading([" TP3"], 61.5)
    expected = ("only 61.50 of 94.97 GiB were free before the weights: something else holds 33.5 GiB of this GPU",)
    assert cure(log + dies(FIVE, " TP3"), gpus=8) == expected
    # Also when the others got on before they were ended.
    others = loaded(tp(3), 94.0, 20.0)
    assert cure(arguments(tp_size=4) + others + loading([" TP3"], 61.5) + dies(FIVE, " TP3"), gpus=8) == expected


def test_weights_that_would_have_fitted_do_not_ask_for_more_gpus() -> None:
    """Half of the shards took 30 GiB of 94: what failed was something else than their size."""
    log = arguments(tp_size=4) + loading(tp(4), 94.0) + BAR.format(50, 32) + "\n"
    assert cure(log + dies(FULL.format("70.00 GiB.", "64.00 GiB"))) == ()


def test_ranks_tell_the_tp_size_only_when_all_are_there() -> None:
    assert cure(loading(tp(4), 94.0) + dies(FIVE), gpus=8) == ("4 GPUs are used, 8 are leased: --tp-size 8",)
    assert cure(loading([" TP1", " TP3"], 94.0) + dies(FIVE, " TP1"), gpus=8) == ()


# ------------------------------------------------------------------------------------------------------ clipped tokens


def test_tokens_that_were_cut_get_the_fraction_that_holds_them() -> None:
    memory = table(94.0, 78.5, 0.5, kv_gib=31.5, kv_tokens=400_000)
    reading = LogReading("ready", "ready", "sglang", memory=memory, clipped=(600_000, 400_000))
    assert remedies(reading, Setup("sglang", 1)) == (
        "600,000 tokens were asked, 400,000 granted: --mem-fraction-static 0.67 holds them",
    )
    (text,) = remedies(replace(reading, clipped=(900_000, 400_000)), Setup("sglang", 1))
    assert "they would need --mem-fraction-static 0.92, which leaves less than the 13.1 GiB" in text
    (text,) = remedies(replace(reading, clipped=(5_000_000, 400_000)), Setup("sglang", 1))
    assert text == (
        "5,000,000 tokens were asked, 400,000 granted: they would take 393.8 of the 78.5 GiB beside the weights"
    )
    assert remedies(replace(reading, clipped=None), Setup("sglang", 1)) == ()
    other = replace(memory, mem_fraction_static=0.9)
    assert remedies(replace(reading, memory=other), Setup("sglang", 1)) == ()


# ----------------------------------------------------------------------------------------------------------------- vLLM

CORE = "(EngineCore_DP0 pid=1310) "


def vllm(text: str, kv: str = "", more: str = "") -> str:
    lines = [
        "INFO 01-02 03:04:01 [gpu_model_runner.py:2602] Starting to load model m...",
        "INFO 01-02 03:04:09 [gpu_model_runner.py:2653] Model loading took 65.9651 GiB and 8.1 seconds",
        *([f"INFO 01-02 03:04:12 [gpu_worker.py:298] Available KV cache memory: {kv} GiB"] if kv else []),
        *([more] if more else []),
        "ERROR 01-02 03:04:13 [core.py:708] EngineCore failed to start.",
        "ERROR 01-02 03:04:13 [core.py:708] Traceback (most recent call last):",
        'ERROR 01-02 03:04:13 [core.py:708]   File "/x/vllm/v1/engine/core.py", line 1, in __init__',
        f"ERROR 01-02 03:04:13 [core.py:708] {text}",
    ]
    return "".join(f"{CORE}{line}\n" for line in lines)


TOO_LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.71 GiB). Based on the available memory, the estimated maximum "
    "model length is 13984. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
    "engine."
)
TOTAL = "INFO 01-02 03:04:12 [worker.py:1] the current vLLM instance can use total_gpu_memory (79.11GiB) x gpu_memory_utilization (0.70) = 55.38GiB"


def test_vllm_gets_the_length_that_fits_and_the_share_that_would_hold_the_one_asked_for() -> None:
    assert cure(vllm(TOO_LONG, "1.71"), engine="vllm") == (
        "--max-model-len 13984 or less",
        "or a higher --gpu-memory-utilization: 14.3 GiB are missing",
    )
    assert cure(vllm(TOO_LONG, "1.71", TOTAL), engine="vllm")[1] == (
        "or --gpu-memory-utilization of at least 0.89 (14.3 GiB are missing at 0.70)"
    )
    assert cure(vllm(TOO_LONG, "1.71", TOTAL.replace("0.70", "0.90")), engine="vllm")[1] == (
        "or no --gpu-memory-utilization helps: 14.3 GiB more than at 0.90 is not on the card"
    )


def test_vllm_s_share_and_card_are_taken_from_wherever_they_are_said() -> None:
    """0.70 + 14.29 / 79.11 is 0.881; the share may stand among the arguments, the card in torch's report."""
    dumped = "INFO 01-02 03:04:00 [utils.py:326] non-default args: {'model': 'm', 'gpu_memory_utilization': 0.7}\n"
    assert cure(dumped + vllm(TOO_LONG, "1.71"), engine="vllm")[1] == (
        "or a higher --gpu-memory-utilization than 0.7: 14.3 GiB are missing"
    )
    assert cure(vllm(TOO_LONG, "1.71"), "--gpu-memory-utilization 0.6", engine="vllm")[1] == (
        "or a higher --gpu-memory-utilization than 0.6: 14.3 GiB are missing"
    )
    card = TOTAL.replace(" x gpu_memory_utilization (0.70)", "")
    assert cure(dumped + vllm(TOO_LONG, "1.71", card), engine="vllm")[1] == (
        "or --gpu-memory-utilization of at least 0.89 (14.3 GiB are missing at 0.70)"
    )
    memory = MemoryTable(gpu_memory_utilization=None, total_gib=79.11)
    reading = failed("oom.kv_pool", memory, TOO_LONG, "vllm")
    reading = replace(reading, evidence=LogEvidence(dump=(("gpu_memory_utilization", "0.7"),), line=1))
    found = setup_of(resolve("vllm", ["--gpu-memory-utilization", "0.6"], reading.evidence), reading)
    assert found.gpu_memory_utilization == 0.7
    assert "of at least 0.89 (14.3 GiB are missing at 0.70)" in remedies(reading, found)[1]
    for odd in ("0.9.1", "nan", "inf", "-0.5", "1e400", "x", "7", "9" * 400):
        found = setup_of(resolve("vllm", ["--gpu-memory-utilization", odd], LogEvidence()), failed("oom.kv_pool", memory, TOO_LONG, "vllm"))  # fmt: skip
        assert (
            "a higher --gpu-memory-utilization: 14.3 GiB"
            in remedies(replace(reading, evidence=LogEvidence()), found)[1]
        )


OLD = (
    "INFO 12-02 03:04:05 model_runner.py:1077] Loading model weights took 14.9888 GB\n"
    "INFO 12-02 03:04:05 worker.py:232] Memory profiling results: total_gpu_memory=79.11GiB initial_memory_usage=15.37GiB "
    "peak_torch_memory=16.19GiB memory_usage_post_profile=15.46GiB non_torch_memory=0.46GiB kv_cache_size=4.68GiB "
    "gpu_memory_utilization=0.30\n"
    "ERROR 12-02 03:04:05 engine.py:366] ValueError: The model's max seq len (131072) is larger than the maximum number of "
    "tokens that can be stored in KV cache (38304). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
    "when initializing the engine.\n"
)


def test_an_older_vllm_s_numbers_tell_the_share_too() -> None:
    """131,072 tokens at 4.68 GiB for 38,304 are 16.01 GiB: 11.33 more of 79.11 is 0.1433."""
    reading = classify_text(OLD, "vllm")
    assert (reading.memory.total_gib, reading.memory.kv_gib, reading.memory.gpu_memory_utilization) == (
        79.11,
        4.68,
        0.3,
    )
    assert cure(OLD, engine="vllm") == (
        "--max-model-len 38304 or less",
        "or --gpu-memory-utilization of at least 0.45 (11.3 GiB are missing at 0.30)",
    )
    assert cure(OLD.replace("79.11", "23.69").replace("0.30", "0.90"), engine="vllm")[1] == (
        "or no --gpu-memory-utilization helps: 11.3 GiB more than at 0.90 is not on the card"
    )


def test_a_profiling_run_that_fills_the_gpu_is_not_cured_by_a_lower_share() -> None:
    said = FULL.format("2.32 GiB.", "1.05 GiB")
    profiling = vllm(said).replace('core.py", line 1, in __init__', 'gpu_model_runner.py", line 1, in profile_run')
    assert classify_text(profiling, "vllm").outcome == "oom.runtime"
    assert cure(profiling, engine="vllm") == (
        "the forward pass was short by at least 1.3 GiB: a smaller --max-num-batched-tokens or --max-num-seqs",
    )
    lower = ("the forward pass was short by at least 1.3 GiB: a lower --gpu-memory-utilization",)
    for more in ({"memory": MemoryTable(kv_gib=5.0)}, {"memory": MemoryTable(kv_tokens=9)}, {"ready_line": True}, {"phase": "serving"}):  # fmt: skip
        assert remedies(replace(failed("oom.runtime", MemoryTable(), said, "vllm"), **more), Setup("vllm")) == lower


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        (
            "10.2/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28",
            (
                "10.2 of 23.64 GiB are free: something else holds 13.4 GiB",
                "or --gpu-memory-utilization of at most 0.43",
            ),
        ),
        (
            "22.9/23.64 GiB) on startup is less than desired GPU memory utilization (0.98, 23.17",
            ("22.9 of 23.64 GiB are free: --gpu-memory-utilization of at most 0.96",),
        ),
        (
            "0.1/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28",
            ("0.1 of 23.64 GiB are free: something else holds 23.5 GiB",),
        ),
        ("0.0/0.0 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28", ()),
        ("none of it", ()),
    ],
)
def test_a_gpu_that_is_not_free_is_told_with_the_share_that_would_do(numbers: str, advice: tuple[str, ...]) -> None:
    text = f"ValueError: Free memory on device ({numbers} GiB). Decrease GPU memory utilization."
    assert remedies(failed("infra.dirty_gpu", MemoryTable(), text, "vllm"), Setup("vllm")) == advice
    device = text.replace("on device (", "on device cuda:0 (")
    assert remedies(failed("infra.dirty_gpu", MemoryTable(), device, "vllm"), Setup("vllm")) == advice


def test_vllm_without_any_room_is_told_what_is_missing() -> None:
    said = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
    assert cure(vllm(said, "-2.14"), engine="vllm") == ("a higher --gpu-memory-utilization: 2.1 GiB are missing",)
    assert cure(vllm(said), engine="vllm") == ()


def test_vllm_that_fills_the_gpu_itself_wants_a_lower_share_and_its_own_flags() -> None:
    memory = MemoryTable()
    said = FULL.format("2.00 GiB.", "1.00 GiB")
    assert remedies(failed("oom.graph_capture", memory, said, "vllm"), Setup("vllm")) == (
        "graph capture was short by at least 1.0 GiB: a smaller --max-num-seqs or fewer --cuda-graph-sizes",
        "or a lower --gpu-memory-utilization",
    )
    assert remedies(failed("oom.kv_pool", memory, said, "vllm"), Setup("vllm")) == (
        "the KV cache was short by at least 1.0 GiB: a lower --gpu-memory-utilization",
    )
    assert remedies(failed("oom.weights", memory, said, "vllm"), Setup("vllm", 2, leased=4)) == (
        "2 GPUs are used, 4 are leased: --tensor-parallel-size 4",
    )


# ---------------------------------------------------------------------------------------------------- ranks and setup


@pytest.mark.parametrize(
    ("ranks", "fullest"),
    [
        ([" TP0", " TP1", " TP2", " TP3"], "TP3"),
        ([" DP0 TP0", " DP0 TP1", " DP1 TP2", " DP1 TP3"], "DP1 TP3"),
        ([" TP0 EP0", " TP1 EP0", " TP2 EP1", " TP3 EP1"], "TP3 EP1"),
        ([" PP0 TP0", " PP0 TP1", " PP1 TP0", " PP1 TP1"], "PP1 TP1"),
    ],
    ids=["tp", "dp", "ep", "pp"],
)
def test_the_fullest_rank_is_named_with_its_prefix_and_every_rank_has_a_table(ranks: list[str], fullest: str) -> None:
    log = "".join(loaded([rank], 94.0, 20.0 - number) for number, rank in enumerate(ranks))
    reading = classify_text(log + dies(NO_ROOM, ranks[0]))
    assert reading.fullest_rank == fullest
    assert reading.memory.avail_after_weights_gib == 17.0
    assert [name for name, _ in reading.ranks] == [rank.strip() for rank in ranks]
    assert [one.avail_after_weights_gib for _, one in reading.ranks] == [20.0, 19.0, 18.0, 17.0]
    assert reading.memory.f_min == pytest.approx(1 - 17 / 94, abs=1e-4)


def test_the_setup_is_what_runs_else_what_was_asked() -> None:
    reading = LogReading("oom.weights", "weights", "sglang", evidence=LogEvidence(dump=(("tp_size", "4"),), line=1))
    resolved = resolve("sglang", ["--tp-size", "8", "--pp-size", "2", "--chunked-prefill-size", "-1"], reading.evidence)
    found = setup_of(resolved, reading, 16)
    assert (found.tp, found.pp, found.gpus, found.chunked_prefill_size, found.leased) == (4, 2, 8, 16384, 16)
    assert found.graph_flag == "--cuda-graph-max-bs"
    dumped = LogEvidence(dump=(("cuda_graph_config", "{'decode': {'max_bs': 128}}"),), line=1)
    newer = replace(reading, evidence=dumped)
    found = setup_of(resolve("sglang", [], dumped), newer)
    assert (found.graph_flag, found.cuda_graph_max_bs) == ("--cuda-graph-max-bs-decode", 128)
    old = replace(newer, engine_version="0.5.10")
    assert setup_of(resolve("sglang", [], dumped), old).graph_flag == "--cuda-graph-max-bs"
