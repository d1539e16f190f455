"""What upgrades have broken on SM120 without an error at boot: wrong numbers, wrong answers, a death under load.

A server that is ready and healthy is what all of them had in common. They take real weights, so they are slow; what
they are held against (questions, a needle, log-probs of a good stack) must not come from the stack that is judged.
"""

from __future__ import annotations

import collections
import pathlib
import random
from typing import Any

import pytest

from pytest_gpuguard import claim, expect_toks, needs_gpus, needs_package, needs_sm120, serves, works

two_large = needs_gpus(2, vram="48GB", link="pcie")
eight = needs_gpus(8, vram="96GB", link="pcie")
#: The release that brought these models.
has_model = needs_package("sglang>=0.5.9")

SMALL = (
    "--context-length 8192 --chunked-prefill-size 4096 --max-running-requests 64 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 32"
)
LONG = (
    "--context-length 49152 --chunked-prefill-size 8192 --max-running-requests 8 "
    "--mem-fraction-static 0.80 --cuda-graph-max-bs 8"
)
#: The model's own prediction head drafts.
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
glm = serves("sglang", "glm-5.2-nvfp4", SMALL, layout="TP8", portable=True)

#: Made with ``gpuguard reference`` on a stack that was good: nobody else's would be of your checkpoint.
REFERENCE = "glm-5.2-nvfp4.ref.json"
has_reference = pathlib.Path(__file__).with_name(REFERENCE).exists() or pathlib.Path(REFERENCE).exists()
without_reference = pytest.mark.skipif(
    not has_reference,
    reason=f"no {REFERENCE} here: serve the model on a good stack, and run gpuguard reference URL -o {REFERENCE}",
)


# ------------------------------------------------------------------------------------------------------ under load


@needs_sm120
@eight
@has_model
@serves("sglang", "glm-5.2-nvfp4", SMALL, MTP, layout="TP8", portable=True)
@works
@expect_toks(min=1, concurrency=16, input_len=1024, output_len=128)
@claim(
    id="rtx6kpro.mtp",
    title="multi-token prediction survives a load",
    source="local-inference-lab/rtx6kpro (summaries of a chat; second-hand)",
    minutes=20,
)
def test_mtp_under_load() -> None:
    """Images that moved to another CUDA died of an illegal memory access in the draft worker, once requests came.

    Any speed will do: the load is the point, and a request that fails contradicts the claim.
    """


# ------------------------------------------------------------------------------------------------------ long contexts

_PLACES = ("harbour", "library", "station", "market", "school", "bakery", "museum", "mill")
_THINGS = ("ships", "books", "trains", "apples", "letters", "loaves", "coins", "lamps")
#: Tokens of the long prompt: those of the report.
_LENGTH = 40_000
_NEEDLES = ("lighthouse", "windmill", "observatory")


def _chronicle(chars: int, seed: int) -> list[str]:
    """Plain sentences of about so many characters together; they differ by seed, so that no cache knows them."""
    draw = random.Random(seed)
    found = [f"Chronicle number {seed}."]
    size = len(found[0])
    while size < chars:
        found.append(
            f"On day {draw.randint(1, 9999)} somebody went to the {draw.choice(_PLACES)} and counted "
            f"{draw.randint(2, 99)} {draw.choice(_THINGS)}."
        )
        size += len(found[-1]) + 1
    return found


def _with_needles(sentences: list[str], codes: dict[str, int]) -> str:
    """The sentences with a code for each place in them: near the beginning, in the middle and near the end."""
    found = list(sentences)
    for number, (place, code) in enumerate(codes.items()):
        at = len(sentences) * (2 * number + 1) // (2 * len(codes))
        found.insert(at + number, f"The secret code of the {place} is {code}.")
    return " ".join(found)


def _repeats(text: str) -> float:
    """The share of a text that its commonest run of four words makes up, from 0 to 1."""
    words = text.split()
    runs = collections.Counter(tuple(words[at : at + 4]) for at in range(len(words) - 3))
    return 4 * max(runs.values(), default=0) / max(len(words), 1)


@needs_sm120
@two_large
@has_model
@serves("sglang", "qwen3.6-27b", LONG, layout="TP2", portable=True)
@works
@claim(
    id="rtx6kpro.long",
    title="40,000 tokens of context are read, and answered without rambling",
    source="local-inference-lab/rtx6kpro (summaries of a chat; second-hand)",
    minutes=8,
)
def test_a_long_context_is_read(server: Any) -> None:
    """After an upgrade of driver and CUDA a model rambled at some 40,000 tokens; short prompts were as good as ever.

    So the same is asked twice, after a short text and after a long one: a model that cannot do it at all is not blamed
    on the length.
    """
    codes = dict(zip(_NEEDLES, random.Random(40).sample(range(1000, 9999), len(_NEEDLES)), strict=True))
    sample = " ".join(_chronicle(8000, seed=1))
    asked = {"text": sample, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    tokens = server.post("/generate", asked)["meta_info"]["prompt_tokens"]
    short = _with_needles(_chronicle(2000, seed=2), codes)
    long = _with_needles(_chronicle(int(len(sample) / tokens * _LENGTH), seed=3), codes)

    for length, text in (("short", short), ("long", long)):
        for place, code in codes.items():
            said = server.generate(f"{text}\n\nThe secret code of the {place} is", max_new_tokens=8)
            assert str(code) in said, (
                f"after a {length} text the code of the {place} is said to be {said!r}, not {code}"
            )

    shares = {}
    for length, text in (("short", short), ("long", long)):
        question = f"{text}\n\nLeave these notes aside. Tell a story about a lighthouse keeper in 150 words."
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 300,
            "temperature": 0,
        }
        message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
        told = " ".join(filter(None, (message.get("reasoning_content"), message.get("content"))))
        assert told.split(), f"after a {length} text nothing is told"
        shares[length] = _repeats(told)
    assert shares["long"] < 0.5 or shares["short"] >= 0.5, (
        f"after a long text one run of four words makes up {shares['long']:.0%} of the story, "
        f"after a short one {shares['short']:.0%}"
    )


# ------------------------------------------------------------------------------------------------------ numbers


@needs_sm120
@eight
@has_model
@without_reference
@glm
@works("full", reference=REFERENCE)
@claim(
    id="rtx6kpro.kld",
    title="GLM-5.2 NVFP4 finds texts as likely as it used to",
    source="local-inference-lab/rtx6kpro (summaries of a chat; second-hand)",
    minutes=15,
)
def test_log_probs_are_those_of_the_reference() -> None:
    """A new package of FP4 kernels moved the mean divergence from 0.035 to 9.33, and the server was healthy."""


@needs_sm120
@eight
@has_model
@glm
@works("full", accuracy=">=0.6", questions="questions.jsonl")
@claim(
    id="sglang-34629.accuracy",
    title="GLM-5.2 NVFP4 answers twenty questions",
    source="sgl-project/sglang#34629 (seen on B200)",
    minutes=18,
)
def test_twenty_questions() -> None:
    """The same new FlashInfer, where NaN are not looked for: no error at all, and 0 of GSM8K's answers right.

    Twenty right answers prove more than 0.83, seventeen more than 0.63: a floor for broken kernels, not for models.
    """
