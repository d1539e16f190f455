"""The memory table: from ``/server_info`` of every release's shape, merged with the log; and secrets taken out."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.claims.observation import MemoryTable
from pytest_gpuguard.diagnose import from_server_info, merge_tables
from pytest_gpuguard.diagnose.memory import complete
from pytest_gpuguard.diagnose.redact import redact

ARGS: dict[str, Any] = {
    "model_path": "m",
    "mem_fraction_static": 0.88,
    "tp_size": 2,
    "api_key": "sesame",
    "version": "0.5.6",
}
USAGE: dict[str, Any] = {"weight": 15.5, "kvcache": 55.0, "token_capacity": 400000}

SHAPES: dict[str, tuple[dict[str, Any], tuple[float | None, ...]]] = {
    "0.4.6": (
        ARGS | {"max_total_num_tokens": 400000, "internal_states": [{"last_gen_throughput": 1.0}]},
        (None, None, None),
    ),
    "0.4.6, no states": (ARGS | {"scheduler_info": {"max_total_num_tokens": 400000}}, (None, None, None)),
    "0.4.10": (ARGS | {"internal_states": [{"memory_usage": USAGE | {"cuda_graph": 1.5}}]}, (15.5, 55.0, 1.5)),
    "0.5.6": (
        ARGS
        | {
            "scheduler_info": {"max_total_num_tokens": 400000, "max_req_input_len": 40954},
            "internal_states": [
                {"memory_usage": USAGE | {"graph": 1.0, "weight": 15.0, "token_capacity": 400100}},
                {"memory_usage": USAGE | {"graph": 1.5}},
            ],
        },
        (15.5, 55.0, 1.5),
    ),
    "0.5.18": (
        ARGS
        | {
            "internal_states": [
                {
                    "memory_usage": USAGE
                    | {"startup_available": 20.0, "graph": {"prefill": 0.5, "decode": 1.0, "draft_decode": None}},
                }
            ],
            "startup_time": {"load_weight": 1.0},
            "kv_events": {"x": [1]},
        },
        (15.5, 55.0, 1.5),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_server_info_is_read(shape: str) -> None:
    info, (weights, kv, graph) = SHAPES[shape]
    table, settings = from_server_info(info)
    assert (table.weights_gib, table.kv_gib, table.graph_gib) == (weights, kv, graph)
    assert (table.kv_tokens, table.mem_fraction_static) == (400000, 0.88)
    assert (settings["tp_size"], settings["version"], settings["model_path"]) == (2, "0.5.6", "m")
    assert "sesame" not in str(settings)
    assert table.free_gib == (20.0 if shape == "0.5.18" else None)


@pytest.mark.parametrize(
    "info",
    [{}, {"internal_states": None}, {"internal_states": [None, 3, {"memory_usage": [1]}]}, {"scheduler_info": 3}],
)
def test_unreadable_parts_are_left_out(info: dict[str, Any]) -> None:
    table, _ = from_server_info(info)
    assert table == MemoryTable()


def test_the_log_has_every_rank_and_the_server_has_the_last_word_on_settings() -> None:
    log = complete(
        MemoryTable(avail_before_gib=94.0, avail_after_weights_gib=78.5, weights_gib=15.6, mem_fraction_static=0.8)
    )
    info, _ = from_server_info(SHAPES["0.5.18"][0])
    merged = merge_tables(log, info)
    assert (merged.weights_gib, merged.mem_fraction_static, merged.kv_tokens) == (15.6, 0.88, 400000)
    assert merged.reserved_gib == pytest.approx(94 * 0.12)
    assert merged.rest_gib == pytest.approx(78.5 - 94 * 0.12)
    assert merged.f_min == pytest.approx(1 - 78.5 / 94, abs=1e-4)


def test_what_nobody_printed_stays_unknown() -> None:
    assert complete(MemoryTable(avail_before_gib=94.0)) == MemoryTable(avail_before_gib=94.0)
    assert complete(MemoryTable(avail_before_gib=0.0, avail_after_weights_gib=0.0)).f_min is None


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("token hf_AbCdEfGhIjKlMnOp in use", "AbCdEfGh"),
        ("server_args=ServerArgs(api_key='open sesame', port=1)", "sesame"),
        ("server_args={'admin_api_key': 'sesame', 'port': 1}", "sesame"),
        ("launch --api-key sesame --port 1", "sesame"),
        ("launch --api-key=sesame --port 1", "sesame"),
        ("Authorization: Bearer abc.def-ghi", "abc.def"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7", "wJalr"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN"),
        ("HF_TOKEN=sesameopen", "sesame"),
        ("https://user:sesame@host/x", "sesame"),
        ("OPENAI_API_KEY=sk-abcdefghijklmnopqrstuv", "abcdefgh"),
        ('{"password": "sesame"}', "sesame"),
    ],
)
def test_secrets_are_taken_out(text: str, secret: str) -> None:
    clean = redact(text)
    assert secret not in clean
    assert "***" in clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "max_total_num_tokens=4096, key: value",
        "[2026-01-02 03:04:05] server_args=ServerArgs(api_key=None, tokenizer_path='m', token_usage=0.5)",
        "AssertionError: basic keys of the tokenizer",
        "KeyError: 12",
        "http://127.0.0.1:30000/health",
        "Decode batch. #token: 812, token usage: 0.01",
    ],
)
def test_harmless_text_stays(text: str) -> None:
    assert redact(text) == text
