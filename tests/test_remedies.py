# ruff: noqa: E501  (log lines are as long as they are)
"""What would cure a boot that ran out of memory: laws that no advice may break, and boots whose cure is known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.claims.resolved import LogEvidence
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.allocation import allocation, size
from pytest_gpuguard.diagnose.remedies import Setup, remedies, setup_of
from pytest_gpuguard.diagnose.resolved import resolve
from pytest_gpuguard.diagnose.slack import Window, defaults, own_reserve_gib, window

from .boot_logs import (
    F7,
    FULL,
    KIMI,
    NO_ROOM,
    STAMP,
    arguments,
    cure,
    dies,
    failed,
    graph_capture,
    loaded,
    loading,
    table,
    tp,
)
from .laws import example, given, settings, st

# ------------------------------------------------------------------------------------------------ slack and allocation


def test_sglang_s_own_reserve_is_its_formula() -> None:
    """97887 MiB, chunk 8192, 128 captured requests, TP8: 14080 MiB, which makes the printed fraction 0.856."""
    reserve = own_reserve_gib(8192, 128, 8)
    assert reserve * 1024 == 14080
    assert round(1 - reserve * 1024 / 97887, 3) == 0.856
    assert own_reserve_gib(1024, 0, 8) == own_reserve_gib(2048, 0, 8)
    assert own_reserve_gib(8192, 256, 8, 8) == pytest.approx(own_reserve_gib(8192, 256, 8) + 256 * 8 * 3 / 1024)
    assert own_reserve_gib(8192, 512, 8, 8) == pytest.approx(own_reserve_gib(8192, 512, 8) + 512 * 8 * 4.5 / 1024)


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
