"""What is left for the KV cache: the arithmetic of one number, 0.778734296875, and of the 5.4 GiB that EP cost.

SGLang gives weights and KV cache together the fraction f of the memory that was free before loading, so the cache gets
``94.0 * f - weights`` GiB here. With the default f a whole boot of Kimi-K2.5 ended in "Not enough memory. Please try to
increase --mem-fraction-static", because that difference was negative.

EP itself changes no weight bytes. The all-to-all backend does: with it every rank holds the shared experts whole, 4.9
GiB of them and not 0.6, and its buffers took about one more of the 5.4 GiB that were seen. What was measured comes in
as ``measured``, which replaces the predictor's own figure; without it the predictor says 76.7 of 77.7 GiB.

The flag ``--moe-a2a-backend flashinfer`` and the model came with SGLang 0.5.9, where rule and words are those of 0.5.7.
"""

from __future__ import annotations

from pytest_gpuguard import claim, fails, fits, needs_gpus, needs_package, needs_sm120, ooms, serves, unsupported

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 on SGLang"

eight = needs_gpus(8, vram="96GB", link="pcie")
#: The release that brought these models.
has_kimi = needs_package("sglang>=0.5.9")
#: Since 0.5.13 this all-to-all backend also wants attention replicated on every rank, which is another layout.
takes_ep = needs_package("sglang>=0.5.9,<0.5.13")

#: The fraction is left to SGLang's rule, so all that the rule looks at is said.
PINNED = (
    "--trust-remote-code --context-length 32768 --chunked-prefill-size 8192 "
    "--max-running-requests 128 --cuda-graph-max-bs 128"
)
DUMMY = "--load-format dummy"
EP = "--moe-a2a-backend flashinfer --moe-runner-backend flashinfer_cutlass"
#: GiB: 94.0 free before loading; 16.3 left after it with EP, 21.7 without.
WITH_EP = {"avail_before_gib": 94.0, "weights_gib": 77.7}
WITHOUT_EP = {"avail_before_gib": 94.0, "weights_gib": 72.3}

ep_by_default = serves("sglang", "kimi-k2.5", PINNED, DUMMY, EP, layout="TP8 EP8", portable=True, measured=WITH_EP)


@needs_sm120
@has_kimi
@eight
@ep_by_default
@ooms("kv_pool", when="sglang<0.5.13")
@unsupported(
    "FlashInfer's all-to-all without replicated attention",
    how="rejected",
    match="only supported with dp_size == tp_size|--attn-dp-size equal to --tp-size",
    when="sglang>=0.5.13",
)
@claim(id="F7", title="EP over flashinfer leaves no KV pool by default", source=NOTES, minutes=4)
def test_ep_by_default_leaves_no_kv_pool() -> None:
    """94.0 x 0.7787 = 73.2 GiB may be used, 77.7 are: the pool would have -4.5 GiB."""


@needs_sm120
@takes_ep
@eight
@ep_by_default
@fails("oom.kv_pool", match=r"mem.fraction.static=0\.778734296875")
@claim(id="F7.number", title="the default fraction is 0.778734296875", source=NOTES, minutes=1)
def test_the_default_fraction_is_the_rules_own_number() -> None:
    """512 + 8192 x 1.5 + 128 x 2 + 8/8 x 1024 = 14080 MiB are reserved of 97887: 0.856, to three digits.

    Times 0.95 x (1 - 0.1 x (27 x 1152^2 / (24 x 1024^2) - 1)) for the vision tower's 27 layers of width 1152.
    """


@needs_sm120
@takes_ep
@eight
@serves(
    "sglang",
    "kimi-k2.5",
    PINNED,
    DUMMY,
    EP,
    "--mem-fraction-static 0.85",
    layout="TP8 EP8",
    portable=True,
    measured=WITH_EP,
)
@fits(kv_tokens=">=16384")
@claim(id="F8", title="a higher fraction is the cure: 0.85 boots", source=NOTES, minutes=4)
def test_ep_boots_at_085() -> None:
    """94.0 x 0.85 - 77.7 = 2.2 GiB, some 33 thousand tokens of 70272 bytes.

    Every step up also takes from what graphs and activations live in: the answer is a window, and it may be empty.
    """


@needs_sm120
@takes_ep
@eight
@serves(
    "sglang",
    "kimi-k2.5",
    PINNED,
    DUMMY,
    EP,
    "--mem-fraction-static 0.83",
    layout="TP8 EP8",
    portable=True,
    measured=WITH_EP,
)
@fits(kv_tokens="<8192")
@claim(id="F8.low", title="just above the limit the pool is tiny: 0.83", source=NOTES, minutes=4)
def test_ep_boots_at_083_with_a_tiny_pool() -> None:
    """94.0 x 0.83 - 77.7 = 0.3 GiB: it boots, and holds less than one prefill chunk."""


@needs_sm120
@takes_ep
@eight
@serves(
    "sglang",
    "kimi-k2.5",
    PINNED,
    DUMMY,
    EP,
    "--mem-fraction-static 0.82",
    layout="TP8 EP8",
    portable=True,
    measured=WITH_EP,
)
@ooms("kv_pool")
@claim(id="F8.below", title="below 1 - 16.3/94 = 0.827 nothing is left: 0.82", source=NOTES, minutes=4)
def test_ep_at_082_leaves_no_kv_pool() -> None:
    """The other edge of the window: 94.0 x 0.82 - 77.7 = -0.6 GiB."""


@needs_sm120
@has_kimi
@eight
@serves("sglang", "kimi-k2.5", PINNED, DUMMY, layout="TP8", portable=True, measured=WITHOUT_EP)
@fits(kv_tokens=">=8192", when="sglang<0.5.16")
@ooms("kv_pool", when="sglang>=0.5.16,<0.5.18")
@fails("oom.kv_pool", match=r"mem.fraction.static=0\.76417851562", when="sglang>=0.5.18")
@claim(id="F8.without-ep", title="without EP the default leaves about 1 GiB", source=NOTES, minutes=4)
def test_without_ep_the_default_leaves_one_gib() -> None:
    """94.0 x 0.7787 - 72.3 = 0.9 GiB: it boots, with room for less than half of one context.

    Since 0.5.16 the default reserves 1.5 GiB for graphs of prefill, and by the same arithmetic nothing is left: 0.840
    to three digits, times the same for the tower, is 0.76418.
    """
