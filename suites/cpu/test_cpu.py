"""Claims about a real SGLang server on this machine's CPU: nothing here is simulated but the device kernels.

Every boot takes the host's one server slot, so that two of them never fill the memory of a small machine at once.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard import claim, compare, expect_toks, fails, fits, ooms, serves, works

#: Always bounded: SGLang's own default takes most of the machine's memory for the KV pool.
tiny = serves("sglang", "tiny", "--device cpu --max-total-tokens 4096", boot_timeout="5m")


@pytest.mark.premerge
@tiny
@fits(kv_tokens=">=4096")
@claim(minutes=1)
def test_a_tiny_model_fits() -> None:
    """Boot, ready line, HTTP, our process on the port, our model, and the tokens that were asked for."""


@tiny
@fits
@expect_toks(min=5, concurrency=2, input_len=16, output_len=16)
@claim(minutes=1)
def test_a_tiny_model_makes_five_tokens_per_second() -> None:
    """A floor that also a busy machine meets; two idle cores make some hundreds."""


@pytest.mark.premerge
@tiny
@works
@claim(minutes=1)
def test_a_tiny_model_works() -> None:
    """A prefill, the same again from the cache, a long one, a burst. The weights are random: it need not make sense."""


@pytest.mark.premerge
@tiny
@fits
@claim(minutes=1)
def test_the_same_prompt_answers_the_same(server: Any) -> None:
    """Greedy, twice: the second time from the prefix cache."""
    first = server.generate("The quick brown fox", max_new_tokens=16)
    assert first
    assert server.generate("The quick brown fox", max_new_tokens=16) == first


@serves("sglang", "tiny", "--device cpu --max-total-tokens 4096 --disable-radix-cache", boot_timeout="5m")
@compare(other=tiny, ratio=">0.5", concurrency=1, input_len=16, output_len=16, limit="1m")
@claim(minutes=3)
def test_the_prefix_cache_costs_little() -> None:
    """The same speed with and without, for prompts that are never asked twice: one server after the other, A B A."""


@serves(
    "sglang",
    "tiny",
    "--device cpu --max-total-tokens 4096",
    layout="TP2",
    env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    boot_timeout="8m",
)
@fits(kv_tokens=">=4096")
@claim(minutes=2)
def test_tp2_fits() -> None:
    """Two scheduler ranks, one core each."""


@pytest.mark.premerge
@serves(
    "sglang",
    "mid",
    "--device cpu --load-format dummy --max-total-tokens 20000 --mem-fraction-static 0.0001",
    boot_timeout="5m",
)
@ooms("kv_pool")
@claim(minutes=1, source="sglang 0.5.23 kv_cache_configurator: weights must fit into pre-load memory x fraction")
def test_a_tiny_fraction_leaves_no_kv_pool() -> None:
    """0.47 GiB of weights never fit into a ten-thousandth of the machine (that would take 4.7 TiB of free memory)."""


@serves(
    "sglang",
    "mid",
    "--device cpu --load-format dummy --mem-fraction-static 1000 --max-total-tokens 100000000",
    wrapper="prlimit --as=34359738368",
    boot_timeout="5m",
)
@ooms("host")
@claim(minutes=1)
def test_an_address_space_limit_makes_the_pool_allocation_fail() -> None:
    """A pool of 190 GiB against a limit of 32 GiB; the boot itself maps about 4.3 GiB."""


@serves(
    "sglang",
    "tiny",
    "--device cpu --mem-fraction-static 0.02 --max-total-tokens 500000000",
    boot_timeout="5m",
)
@fits(kv_tokens="<500000000")
@claim(minutes=1)
def test_more_tokens_than_memory_are_silently_clipped() -> None:
    """SGLang serves with a smaller pool and a warning; fits(kv_tokens=">=500000000") would be contradicted."""


@pytest.mark.premerge
@serves("sglang", "tiny", "--device cpu --max-total-tokens 4096 --enable-ep-moe", boot_timeout="5m")
@fails("args.removed", when="sglang>=0.5.5")
@claim(minutes=1, source="flag table, sglang 0.4.6 to 0.5.23: replaced by --ep-size")
def test_enable_ep_moe_is_gone() -> None:
    """A flag of an older release is a finding about this one, told before anything is booted."""
