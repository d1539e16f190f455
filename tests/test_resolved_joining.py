"""What was asked, joined with what the log and the server say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_gpuguard.claims.resolved import LogEvidence, Resolved, Setting, Term, normal
from pytest_gpuguard.diagnose.features import load_features
from pytest_gpuguard.diagnose.resolved import resolve

from .log_evidence import STAMP, join

FUSED = "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank={}, world_size=2"

# ------------------------------------------------------------------------------------------------------------ joining


def test_the_scheduler_has_the_last_word_then_the_log_then_the_main_process() -> None:
    line = STAMP + "Attention backend not set. Use triton backend by default."
    info = {"attention_backend": "flashinfer", "internal_states": [{"attention_backend": "fa3"}]}
    assert join(line, info=info).setting("attention_backend").runs == "fa3"
    info["internal_states"] = [{"attention_backend": None}]
    assert join(line, info=info).setting("attention_backend").runs == "triton"
    assert join(info=info).setting("attention_backend").runs == "flashinfer"


@pytest.mark.parametrize(
    ("flags", "info", "runs", "differs"),
    [
        ("--mem-fraction-static 0.90", {"mem_fraction_static": 0.9}, "0.9", False),
        ("--mem-fraction-static 0.90", {"mem_fraction_static": 0.855}, "0.855", True),
        ("--kv-cache-dtype bf16", {"kv_cache_dtype": "bfloat16"}, "bfloat16", False),
        ("--kv-cache-dtype auto", {"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3", False),
        ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "auto"}, None, False),
        ("--speculative-algorithm NEXTN", {"speculative_algorithm": "EAGLE"}, "EAGLE", False),
        ("--max-total-tokens 4100", {"max_total_num_tokens": 4096, "page_size": 64}, "4096", False),
        ("--max-total-tokens 4100", {"max_total_num_tokens": 4096, "page_size": 1}, "4096", True),
        ("--max-total-tokens 4096", {"max_total_num_tokens": 5000}, "5000", False),
        ("--dp-size 8", {"dp_size": 1, "attn_dp_size": 8}, "8", False),
        ("--ep 2", {"ep_size": 4}, "4", True),
        ("--attention-backend nsa", {"attention_backend": "dsa"}, "dsa", False),
        ("--cuda-graph-max-bs-decode 64", {"cuda_graph_config": {"decode": {"max_bs": 32}}}, "32", True),
    ],
)
def test_asked_and_running_are_compared_by_what_they_mean(
    flags: str, info: dict[str, Any], runs: str | None, differs: bool
) -> None:
    resolved = join(flags=flags, info=info)
    name = load_features("sglang").vocabulary.find(flags.split()[0])
    assert isinstance(name, Term)
    setting = resolved.setting(name.name)
    assert (setting.runs, setting.differs) == (runs, differs)


def test_the_kv_dtype_is_the_pools_where_auto_was_resolved() -> None:
    line = STAMP + "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 4096, K size: 0.10 GB, V size: 0.10 GB"
    draft = STAMP + "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.10 GB, V size: 0.10 GB"
    setting = join(line, draft, version="0.5.23", info={"kv_cache_dtype": "auto"}).setting("kv_cache_dtype")
    assert (setting.runs, setting.evidence[:7]) == ("fp8_e4m3", "line 1:")


def test_two_backends_for_prefill_and_decode_are_both_told() -> None:
    info = {"attention_backend": "fa3", "decode_attention_backend": "triton"}
    setting = join(flags="--attention-backend fa3", info=info).setting("attention_backend")
    assert (setting.runs, setting.differs) == ("fa3 (prefill), triton (decode)", True)
    flags = "--attention-backend fa3 --decode-attention-backend triton"
    assert not join(flags=flags, info=info).differences()
    same = {"attention_backend": "fa3", "decode_attention_backend": "fa3"}
    assert join(info=same).setting("attention_backend").runs == "fa3"


@pytest.mark.parametrize(
    ("flags", "info", "requested"),
    [
        ("--enable-torch-symm-mem", {"enable_torch_symm_mem": False}, False),
        ("", {"enable_torch_symm_mem": False}, True),
    ],
)
def test_a_resolved_value_shows_a_fall_back_only_where_it_was_asked_for(
    flags: str, info: dict[str, Any], requested: bool
) -> None:
    (one,) = join(flags=flags, info=info).evidence("torch_symm_mem", False)
    assert one.text == "server_info enable_torch_symm_mem is False"
    assert one.requested is requested


def test_an_argument_that_was_kept_is_no_evidence_that_it_works() -> None:
    resolved = join(flags="--enable-torch-symm-mem", info={"enable_torch_symm_mem": True})
    assert not resolved.features
    assert resolved.setting("torch_symm_mem") == Setting("torch_symm_mem", "on")


FA3, DUMPED = "--attention-backend fa3", STAMP + "server_args={'attention_backend': 'fa3'}"
PICKED = STAMP + "Attention backend not set. Use fa3 backend by default."


@pytest.mark.parametrize(
    ("name", "lines", "flags", "info", "echo"),
    [
        ("attention_backend", [DUMPED], FA3, None, True),
        ("attention_backend", [], FA3, {"attention_backend": "fa3"}, True),
        ("attention_backend", [DUMPED], "", None, False),
        ("attention_backend", [DUMPED], "--attention-backend auto", None, False),
        ("attention_backend", [DUMPED], "--attention-backend triton", None, False),
        ("attention_backend", [DUMPED], FA3, {"attention_backend": "triton"}, False),
        ("attention_backend", [DUMPED], FA3, {"internal_states": [{"attention_backend": "fa3"}]}, False),
        ("attention_backend", [DUMPED, PICKED], FA3, None, False),
        ("mem_fraction_static", [], "--mem-fraction-static 0.90", {"mem_fraction_static": 0.9}, True),
        ("dp_size", [], "--dp-size 8", {"dp_size": 1, "attn_dp_size": 8}, True),
        ("dp_size", [], "--dp 8", {"dp_size": 1, "internal_states": [{"dp_size": 8}]}, False),
        ("max_total_num_tokens", [], "--max-total-tokens 4096", {"max_total_num_tokens": 4096}, False),
    ],
)  # fmt: skip
def test_an_argument_that_is_only_handed_back_is_marked_as_an_echo(
    name: str, lines: list[str], flags: str, info: dict[str, Any] | None, echo: bool
) -> None:
    setting = join(*lines, flags=flags, info=info).setting(name)
    assert setting.runs is not None
    assert setting.echo is echo
    assert "echo" not in setting.as_dict()


def test_two_backends_that_were_asked_for_are_an_echo_too() -> None:
    info = {"attention_backend": "fa3", "decode_attention_backend": "triton"}
    assert join(flags=f"{FA3} --decode-attention-backend triton", info=info).setting("attention_backend").echo
    assert not join(flags=FA3, info=info).setting("attention_backend").echo
    assert not join(info=info).setting("attention_backend").echo


@pytest.mark.parametrize(
    ("feature", "on", "flags", "info", "echo"),
    [
        ("dp_attention", True, "--enable-dp-attention", {"enable_dp_attention": True}, True),
        ("dp_attention", True, "", {"enable_dp_attention": True}, False),
        ("dp_attention", True, "--enable-dp-attention", {"internal_states": [{"enable_dp_attention": True}]}, False),
        ("cuda_graph", False, "--disable-cuda-graph", {"disable_cuda_graph": True}, True),
        ("cuda_graph", False, "", {"disable_cuda_graph": True}, False),
        ("radix_cache", True, "", {"disable_radix_cache": False}, False),
    ],
)
def test_a_feature_that_only_the_asked_argument_shows_is_an_echo(
    feature: str, on: bool, flags: str, info: dict[str, Any], echo: bool
) -> None:
    (one,) = join(flags=flags, info=info).evidence(feature, on)
    assert one.echo is echo


def test_a_deprecated_flag_whose_successor_is_set_is_not_off() -> None:
    info = {"enable_flashinfer_allreduce_fusion": False, "flashinfer_allreduce_fusion_backend": "auto"}
    assert not join(flags="--enable-flashinfer-allreduce-fusion", info=info).features
    info = {"enable_flashinfer_allreduce_fusion": False}
    assert join(flags="--enable-flashinfer-allreduce-fusion", info=info).features


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("--disable-cuda-graph", "off"),
        ("--cuda-graph-backend-decode disabled", "off"),
        ("--cuda-graph-backend-decode full", "on"),
        ("", None),
        ("-- --disable-cuda-graph", None),
    ],
)
def test_what_was_asked_of_a_feature_is_read_from_the_command_line(flags: str, asked: str | None) -> None:
    assert join(flags=flags).setting("cuda_graph").asked == asked


def test_a_variable_can_ask_too() -> None:
    line = STAMP + "FlashInfer PCIe-IPC workspace (max_numel=9) failed: no; reductions stay on NCCL"
    (setting,) = join(line, SGLANG_ENABLE_PCIE_IPC_ALLREDUCE="1").differences()
    assert (setting.name, setting.asked, setting.runs) == ("pcie_ipc_allreduce", "on", "off")


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        (["Registering 1032 cuda graph addresses"], "custom_allreduce"),
        (["Custom allreduce is disabled because your platform lacks GPU P2P capability"], "nccl"),
        ([FUSED.format(0), "Custom allreduce is disabled because of it"], "flashinfer_allreduce_fusion"),
        (["Registering 9 cuda graph addresses", "Custom allreduce is disabled because of another group"], None),
        ([], None),
    ],
)
def test_one_line_says_what_sums_over_the_gpus(lines: list[str], runs: str | None) -> None:
    assert join(*(STAMP + line for line in lines), version="0.5.23").setting("allreduce").runs == runs


def test_on_the_cpu_nothing_is_said_of_nccl() -> None:
    line = STAMP + "Setup Custom allreduce failed with . To silence this warning, specify --disable-custom-all-reduce"
    assert join(line).setting("allreduce").runs == "nccl"
    assert join(line, info={"device": "cpu"}).setting("allreduce").runs is None


def test_the_json_form_has_stable_keys_and_leaves_out_what_nobody_asked_for() -> None:
    info = {"tp_size": 1, "enable_mscclpp": False, "enable_eplb": False}
    data = join(flags="--tp 2 --enable-mscclpp", info=info).as_dict()
    assert set(data) == {"settings", "features"}
    assert json.loads(json.dumps(data)) == data
    first = {"name": "tp_size", "asked": "2", "runs": "1", "evidence": "server_info tp_size", "differs": True}
    assert data["settings"][0] == first
    assert data["features"] == [{"feature": "mscclpp", "on": False, "evidence": "server_info enable_mscclpp is False"}]


def test_nothing_said_is_nothing_known() -> None:
    assert join() == Resolved()
    assert resolve("some-engine", ["--attention-backend", "fa3"], LogEvidence()) == Resolved()


@pytest.mark.parametrize("name", ["Custom all-reduce", "--custom_ALLREDUCE", "custom.all/reduce"])
def test_names_are_compared_without_case_and_separators(name: str) -> None:
    assert normal(name) == "customallreduce"
