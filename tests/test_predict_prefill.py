"""Which releases reserve for prefill graphs, and what else their default fraction depends on.

The fractions are those that SGLang's own argument resolution returned for such a model on such a card.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.predict import Box, predict
from tests.predict_models import DENSE, H100, HYBRID, LATENT, RTX, changed

TEXT: dict[str, Any] = LATENT["text_config"]
SPARSE = changed(TEXT, index_head_dim=128, index_n_heads=32, index_topk=2048)
TOWER = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2}
B200 = Box("b200", 8, 183359, None, "100", True)
DP8 = "--tp-size 8 --dp-size 8 --enable-dp-attention"
#: Enough KV heads and experts for eight ranks.
WIDE = changed(DENSE, num_key_value_heads=8, num_experts=64, moe_intermediate_size=1024)


def fraction(model: dict[str, Any], box: Box, version: str, flags: str) -> float | None:
    return predict(model, box, version=version, flags=flags.split()).mem_fraction_static


@pytest.mark.parametrize(
    ("version", "model", "box", "flags", "resolved"),
    [
        # Prefill that is not chunked captures nothing.
        ("0.5.10", WIDE, RTX, "--tp-size 8 --chunked-prefill-size -1", 0.723),
        ("0.5.23", WIDE, H100, "--tp-size 8 --chunked-prefill-size -1", 0.667),
        # Speculation kept it off in 0.5.10, and no longer.
        ("0.5.10", WIDE, RTX, "--tp-size 8 --speculative-algorithm EAGLE --speculative-num-draft-tokens 4", 0.806),
        # An expert kernel that ends it later does so after the reserve.
        ("0.5.10", WIDE, RTX, "--tp-size 8 --moe-runner-backend flashinfer_trtllm", 0.844),
        ("0.5.12", TEXT, H100, "--tp-size 8 --moe-runner-backend flashinfer_trtllm", 0.799),
        # Latent attention: not from 0.5.15 to 0.5.17, sparse latent attention from 0.5.17 on.
        ("0.5.15", TEXT, H100, "--tp-size 8", 0.818),
        ("0.5.17", TEXT, H100, "--tp-size 8", 0.818),
        ("0.5.18", TEXT, H100, "--tp-size 8", 0.799),
        ("0.5.12", SPARSE, H100, "--tp-size 8", 0.818),
        ("0.5.14", SPARSE, H100, "--tp-size 8", 0.799),
        ("0.5.16", SPARSE, H100, "--tp-size 8", 0.818),
        ("0.5.17", SPARSE, H100, "--tp-size 8", 0.799),
        # Stages and symmetric memory.
        ("0.5.15", WIDE, H100, "--tp-size 4 --pp-size 2", 0.812),
        ("0.5.19", WIDE, H100, "--tp-size 4 --pp-size 2", 0.818),
        ("0.5.15", WIDE, H100, "--tp-size 8 --enable-symm-mem", 0.812),
        # Attention replicas and all-to-alls since 0.5.17.
        ("0.5.16", WIDE, H100, DP8, 0.592),
        ("0.5.17", WIDE, H100, DP8, 0.586),
        ("0.5.16", WIDE, H100, "--tp-size 8 --moe-a2a-backend deepep", 0.793),
        ("0.5.23", WIDE, H100, "--tp-size 8 --moe-a2a-backend deepep", 0.777),
        ("0.5.23", TEXT, H100, "--tp-size 8 --moe-a2a-backend deepep", 0.761),
        ("0.5.23", WIDE, H100, "--tp-size 8 --moe-a2a-backend mooncake", 0.818),
        # The half that a role does not run.
        ("0.5.15", WIDE, H100, "--tp-size 8 --disaggregation-mode prefill", 0.831),
        ("0.5.23", WIDE, H100, "--tp-size 8 --disaggregation-mode prefill", 0.825),
        ("0.5.23", TEXT, H100, "--tp-size 8 --disaggregation-mode prefill", 0.812),
        ("0.5.23", WIDE, H100, f"{DP8} --disaggregation-mode prefill", 0.825),
        ("0.5.23", WIDE, H100, "--tp-size 8 --disaggregation-mode null", 0.812),
        # A tower keeps it off, but for one on latent or on linear attention since 0.5.16.
        ("0.5.16", LATENT, H100, "--tp-size 8", 0.726879326171875),
        ("0.5.16", LATENT, H100, "--tp-size 8 --enable-symm-mem", 0.7441643164062499),
        ("0.5.18", LATENT, H100, "--tp-size 8 --enable-symm-mem", 0.726879326171875),
        ("0.5.15", LATENT, H100, "--tp-size 8", 0.7441643164062499),
    ],
)
def test_the_fraction_is_the_one_that_the_engine_resolves(
    version: str, model: dict[str, Any], box: Box, flags: str, resolved: float
) -> None:
    assert fraction(model, box, version, flags) == resolved


def test_a_tower_on_linear_attention_captures_prefill_since_0_5_16() -> None:
    model = HYBRID | {"vision_config": TOWER}
    without = fraction(model, H100, "0.5.15", "--tp-size 4")
    assert fraction(model, H100, "0.5.16", "--tp-size 4") != without
    assert fraction(model, H100, "0.5.16", "--tp-size 4 --disable-prefill-cuda-graph") == without
    assert fraction(DENSE | {"vision_config": TOWER}, H100, "0.5.16", "--tp-size 4") == without
    said = predict(model, H100, version="0.5.16").assumptions
    assert any("a list of multimodal models: by its structure this one is" in note for note in said)


def test_graphs_that_were_only_opted_into_are_none_since_they_are_the_default() -> None:
    flags = "--tp-size 8 --enable-piecewise-cuda-graph"
    assert fraction(LATENT, B200, "0.5.10", flags) == fraction(LATENT, B200, "0.5.10", "--tp-size 8")
    assert fraction(TEXT, H100, "0.5.9", flags) == 0.814  # 2048 tokens of a latent, whatever the chunk
    assert fraction(TEXT, H100, "0.5.9", "--tp-size 8") == 0.818


def test_a_prefill_server_captures_no_decode_graphs() -> None:
    found = predict(WIDE, H100, version="0.5.23", flags=["--tp-size", "8", "--disaggregation-mode", "prefill"])
    assert found.resolved["disable_cuda_graph"]
    kept = predict(WIDE, H100, version="0.5.12", flags=["--tp-size", "8", "--disaggregation-mode", "prefill"])
    assert not kept.resolved["disable_cuda_graph"]
    off = predict(WIDE, H100, version="0.5.23", flags=["--tp-size", "8", "--cuda-graph-backend-decode", "disabled"])
    assert off.resolved["disable_cuda_graph"]


@pytest.mark.parametrize(("version", "requests"), [("0.4.4", 32), ("0.5.7", 48), ("0.5.23", 48)])
def test_speculation_limits_the_requests_in_every_release(version: str, requests: int) -> None:
    flags = "--tp-size 4 --speculative-algorithm EAGLE --speculative-num-draft-tokens 4"
    found = predict(DENSE, H100, version=version, flags=flags.split())
    assert found.resolved["max_running_requests"] == requests


@pytest.mark.parametrize(
    ("model", "flags", "page"),
    [
        (DENSE, "", 64),
        (TEXT, "--tp-size 8", 64),
        (HYBRID, "", 1),
        (DENSE, "--attention-backend flashinfer", 1),
        (DENSE, "--page-size 16", 16),
    ],
)
def test_the_default_attention_of_sm100_has_pages_of_64(model: dict[str, Any], flags: str, page: int) -> None:
    assert predict(model, B200, version="0.5.23", flags=flags.split()).resolved["page_size"] == page
    assert predict(DENSE, H100, version="0.5.23").resolved["page_size"] == 1
