"""How Kimi-K2.6 is laid out over eight 96 GB cards without NVLink: what fits, and how fast it was said to be.

All the arithmetic is in one sentence: EP subdivides TP. ``TP8 EP4`` and ``TP8`` use eight GPUs and the same bytes on
each; ``--tp-size 4 --ep-size 2`` uses four GPUs, each of which must hold twice as much. Claims about memory load random
weights (``--load-format dummy``): no output is looked at, and no speed is measured with those.

The speeds are hearsay: neither the lengths nor the release nor, for the aggregate, the number of requests was recorded.
Where a number had to be chosen (64 requests), it is ours.
"""

from __future__ import annotations

from pytest_gpuguard import claim, expect_toks, fits, max_mem, needs_gpus, needs_package, needs_sm120, ooms, serves

NOTES = "field notes, 8x RTX PRO 6000 Blackwell, Kimi-K2.5 and K2.6 on SGLang"

eight = needs_gpus(8, vram="96GB", link="pcie")
#: The release that brought these models.
has_kimi = needs_package("sglang>=0.5.9")

#: Defaults drift from release to release, so everything that takes memory is said.
PINNED = (
    "--trust-remote-code --context-length 32768 --chunked-prefill-size 8192 "
    "--max-running-requests 128 --cuda-graph-max-bs 128"
)
DUMMY = "--load-format dummy"

tp8 = serves("sglang", "kimi-k2.6", PINNED, DUMMY, "--mem-fraction-static 0.90", layout="TP8", portable=True)
tp8_ep8 = serves("sglang", "kimi-k2.6", PINNED, DUMMY, "--mem-fraction-static 0.90", layout="TP8 EP8", portable=True)
tp8_ep4 = serves("sglang", "kimi-k2.6", PINNED, DUMMY, "--mem-fraction-static 0.90", layout="TP8 EP4", portable=True)
pp8 = serves("sglang", "kimi-k2.6", PINNED, DUMMY, "--mem-fraction-static 0.90", layout="PP8", portable=True)
dp8 = serves("sglang", "kimi-k2.6", PINNED, DUMMY, "--mem-fraction-static 0.93", layout="TP8 DP8 EP8", portable=True)

fast_tp8 = serves("sglang", "kimi-k2.6", PINNED, "--mem-fraction-static 0.90", layout="TP8", portable=True)
fast_pp8 = serves("sglang", "kimi-k2.6", PINNED, "--mem-fraction-static 0.90", layout="PP8", portable=True)
fast_dp8 = serves("sglang", "kimi-k2.6", PINNED, "--mem-fraction-static 0.93", layout="TP8 DP8 EP8", portable=True)
fast_ep4 = serves("sglang", "kimi-k2.6", PINNED, "--mem-fraction-static 0.90", layout="TP8 EP4", portable=True)


# ------------------------------------------------------------------------------------------------ what fits


@needs_sm120
@has_kimi
@eight
@tp8
@fits(margin="2GiB", kv_tokens=">=131072")
@max_mem("75GiB", of="weights")
@claim(id="tp8-fits", title="TP8 fits", source="weights by the sharding rules, 70 to 73 GiB per GPU", minutes=4)
def test_tp8_fits() -> None:
    """Every GPU holds an eighth of the experts, and all of the KV of every token: MLA is replicated over TP."""


@needs_sm120
@has_kimi
@eight
@tp8_ep8
@fits(margin="2GiB", kv_tokens=">=131072")
@max_mem("75GiB", of="weights")
@claim(id="tp8-ep8-fits", title="TP8 EP8 fits as TP8 does", source="the sharding rules: 3*E*I*h/tp bytes", minutes=4)
def test_tp8_ep8_fits() -> None:
    """Whole experts instead of eighths of all of them: the same bytes, so the same bounds as TP8 above."""


@needs_sm120
@has_kimi
@needs_gpus(4, vram="96GB", link="pcie")
@serves(
    "sglang",
    "kimi-k2.6",
    "--tp-size 4 --ep-size 2",
    PINNED,
    DUMMY,
    "--mem-fraction-static 0.90",
    portable=True,
)
@ooms("weights")
@claim(id="F5", title="'TP4 EP2' runs out of memory while loading", source=NOTES, minutes=4)
def test_tp4_ep2_ooms() -> None:
    """Read as eight GPUs, it is a riddle; it is four: EP subdivides TP, so each must hold about 140 GiB of weights.

    Seen then: "Tried to allocate 672.00 MiB. GPU 2 has a total capacity of 94.97 GiB of which 136.94 MiB is free".
    Four GPUs against eight is what the claim is about, not EP.
    """


@needs_sm120
@has_kimi
@eight
@dp8
@fits(kv_tokens=">=32768")
@claim(id="F4.fits", title="EP8 with attention on every GPU fits", source=NOTES, status="hearsay", minutes=4)
def test_tp8_dp8_ep8_fits() -> None:
    """Experts over all eight GPUs, attention replicated: no allreduce per layer over PCIe, at some 10 GiB more per GPU.

    The flags were not recorded. This fraction and context are ones that the predictor finds room in, for as many
    tokens as one full context takes; each GPU keeps the KV of its own requests.
    """


@needs_sm120
@has_kimi
@eight
@tp8_ep4
@fits(margin="2GiB", kv_tokens=">=131072")
@claim(id="F6.fits", title="EP4 boots", source=NOTES, status="hearsay", minutes=4)
def test_tp8_ep4_fits() -> None:
    """Noted as "TP2 EP4", which SGLang cannot be told: EP must divide TP.

    What was meant is EP4 on all eight GPUs: each expert shared by two of them, the experts spread over four such pairs.
    """


@needs_sm120
@has_kimi
@eight
@pp8
@fits(kv_tokens=">=131072")
@claim(id="F3.fits", title="PP8 fits", source=NOTES, status="hearsay", minutes=4)
def test_pp8_fits() -> None:
    """Sixty-one layers over eight stages: some hold eight layers, some seven, and each keeps the KV of its own only."""


# ---------------------------------------------------------------------------------------- how fast, as told


@needs_sm120
@has_kimi
@eight
@fast_tp8
@expect_toks(about=26, concurrency=1, input_len=1024, output_len=512)
@expect_toks(about=808, concurrency=64, input_len=1024, output_len=512)
@claim(id="F2", title="TP8: 26 tok/s alone, about 808 together", source=NOTES, status="hearsay", minutes=25)
def test_tp8_speed() -> None:
    """Two allreduces per layer cross the PCIe bus for every token."""


@needs_sm120
@has_kimi
@eight
@fast_pp8
@expect_toks(about=37, concurrency=1, input_len=1024, output_len=512)
@expect_toks(about=396, concurrency=64, input_len=1024, output_len=512)
@claim(id="F3", title="PP8: 37 tok/s alone, about 396 together", source=NOTES, status="hearsay", minutes=25)
def test_pp8_speed() -> None:
    """No allreduce, so one stream is faster than TP8; bubbles in the pipeline cost half of the aggregate."""


@needs_sm120
@has_kimi
@eight
@fast_dp8
@expect_toks(about=65, concurrency=1, input_len=1024, output_len=512)
@expect_toks(about=960, concurrency=64, input_len=1024, output_len=512)
@claim(id="F4", title="TP8 DP8 EP8: 65 tok/s alone, about 960 together", source=NOTES, status="hearsay", minutes=25)
def test_tp8_dp8_ep8_speed() -> None:
    """2.5 times TP8 for one stream, they said: attention stays on one GPU, only the experts talk."""


@needs_sm120
@has_kimi
@eight
@fast_ep4
@expect_toks(about=1531, concurrency=64, input_len=1024, output_len=512)
@claim(id="F6", title="EP4: about 1531 tok/s together, the best of all", source=NOTES, status="hearsay", minutes=25)
def test_tp8_ep4_speed() -> None:
    """With "a later configuration" that nobody wrote down."""
