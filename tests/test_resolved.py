"""What was asked against what runs: lines of each release, dumped arguments, server_info, and how they are joined."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.claims.resolved import LogEvidence, Term
from pytest_gpuguard.diagnose.classify import classify_text
from pytest_gpuguard.diagnose.dump import DUMP_LIMIT, fields, look_up
from pytest_gpuguard.diagnose.features import TABLES, FeatureError, load_features, parse_features
from pytest_gpuguard.diagnose.lines import peel
from pytest_gpuguard.diagnose.resolved import Collector, off_gpus, resolve
from tests.laws import given, settings, st

from .log_evidence import STAMP, join, on_off, read

# --------------------------------------------------------------------------------------------------------- the tables


def _examples() -> list[Any]:
    rules = [(engine, rule) for engine in TABLES for rule in load_features(engine).lines]
    return [pytest.param(engine, rule, id=f"{engine}-{rule.starts[:40]}") for engine, rule in rules]


@pytest.mark.parametrize(("engine", "rule"), _examples())
def test_every_entry_finds_its_own_example(engine: str, rule: Any) -> None:
    evidence = read(rule.example, engine=engine, majors=sorted(rule.majors))
    if rule.feature is not None:
        assert (rule.feature, rule.on) in on_off(evidence)
    else:
        assert rule.setting in {pick.setting for pick in evidence.picks}
    if rule.value is not None:
        assert rule.value in {pick.value for pick in evidence.picks}


@pytest.mark.parametrize("engine", TABLES)
def test_every_dump_finds_its_own_example(engine: str) -> None:
    for rule in load_features(engine).dumps:
        assert read(rule.example, engine=engine).dump


@pytest.mark.parametrize("engine", TABLES)
def test_every_feature_and_setting_can_be_shown_by_something(engine: str) -> None:
    table = load_features(engine)
    shown = {rule.feature for rule in table.lines} | {rule.setting for rule in table.lines}
    for feature in table.features:
        assert feature.name in shown or feature.on or feature.off, feature.name
    for setting in table.settings:
        assert setting.name in shown or setting.keys or not setting.flags or engine == "vllm", setting.name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[feature]]\nname = "x"\nsource = "f.py"\ncolour = 1', r"feature x: unknown keys \['colour'\]"),
        ('[[feature]]\nname = "x"', "feature x: no source"),
        ('[[resolved]]\nname = "x"\nsource = "f"\ncompare = "taste"', "compare is one of"),
        ('[[evidence]]\nstarts = "Ab"\nfeature = "x"\nsource = "f"\nexample = "e"', "x is not in this table"),
        (
            '[[feature]]\nname = "x"\nsource = "f"\n'
            '[[evidence]]\nstarts = "Ab"\nfeature = "x"\non = true\nsource = "f"\nexample = "e"',
            "at least 4 characters",
        ),
        (
            '[[feature]]\nname = "x"\nsource = "f"\n'
            '[[evidence]]\nstarts = "Abcd"\nfeature = "x"\nsource = "f"\nexample = "e"',
            "`on` is true or false",
        ),
        (
            '[[resolved]]\nname = "x"\nsource = "f"\n'
            '[[evidence]]\nstarts = "Abcd"\nsetting = "x"\npattern = "(.*)"\nsource = "f"\nexample = "e"',
            "unbounded quantifier",
        ),
        (
            '[[feature]]\nname = "x"\naliases = ["why"]\nsource = "f"\n[[feature]]\nname = "Why"\nsource = "f"',
            "means both",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_entry(text: str, problem: str) -> None:
    with pytest.raises(FeatureError, match=problem):
        parse_features(text, "t.toml")


@pytest.mark.parametrize(
    ("words", "term"),
    [
        ("custom_allreduce", Term("feature", "custom_allreduce")),
        ("Custom all-reduce", Term("feature", "custom_allreduce")),
        ("flashinfer allreduce fusion", Term("feature", "flashinfer_allreduce_fusion")),
        ("--enable-torch-symm-mem", Term("feature", "torch_symm_mem")),
        ("--disable-cuda-graph", Term("feature", "cuda_graph", want=False)),
        ("--flashinfer-allreduce-fusion-backend trtllm", Term("feature", "flashinfer_allreduce_fusion")),
        ("attention_backend=fa3", Term("setting", "attention_backend", "fa3")),
        ("--attention-backend fa3", Term("setting", "attention_backend", "fa3")),
        ("--attention-backend=fa3", Term("setting", "attention_backend", "fa3")),
        ("--tp 4", Term("setting", "tp_size", "4")),
        ("fa3", Term("setting", "attention_backend", "fa3")),
        ("trtllm_mla attention backend", Term("setting", "attention_backend", "trtllm_mla")),
        ("TRTLLM-MLA backend", Term("setting", "attention_backend", "trtllm_mla")),
        ("EAGLE3", Term("setting", "speculative_algorithm", "EAGLE3")),
        ("--attention-backend", Term("setting", "attention_backend")),
    ],
)
def test_the_words_of_a_claim_find_what_they_mean(words: str, term: Term) -> None:
    assert load_features("sglang").vocabulary.find(words) == term


def test_words_that_mean_nothing_or_two_things_say_so() -> None:
    find = load_features("sglang").vocabulary.find
    unknown = find("warp drive")
    assert isinstance(unknown, str)
    assert "'warp drive' is no feature that evidence is known of" in unknown
    assert "custom_allreduce" in unknown
    assert "attention_backend=…" in unknown
    ambiguous = find("triton")
    assert isinstance(ambiguous, str)
    assert "write attention_backend=triton or moe_runner_backend=triton" in ambiguous


# ------------------------------------------------------------------------------------------------------------ the log


@pytest.mark.parametrize(
    ("version", "line", "backend"),
    [
        ("0.4.6", "Attention backend not set. Use triton backend by default.", "triton"),
        ("0.4.10", "Attention backend not explicitly specified. Use flashinfer backend by default.", "flashinfer"),
        ("0.5.10", "Attention backend not specified. Use fa3 backend by default.", "fa3"),
        ("0.5.23", "Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", "trtllm_mla"),
        ("0.5.23", "Use dsa attention backend for DeepSeek with DSA.", "dsa"),
        ("0.5.23", "Use triton as default attention backend for EmbeddingGemma2Model", "triton"),
        ("0.5.18", "Attention backend not specified. Falling back to 'triton' for deterministic inference.", "triton"),
    ],
)
def test_the_backend_that_was_picked_is_read_in_every_spelling(version: str, line: str, backend: str) -> None:
    setting = join(STAMP + line, version=version).setting("attention_backend")
    assert (setting.runs, setting.evidence) == (backend, f"line 1: {line}")


def test_a_difference_is_what_was_asked_and_what_runs_with_its_evidence() -> None:
    found = join(flags="--attention-backend trtllm_mla", info={"attention_backend": "triton"}).differences()
    (setting,) = found
    assert str(setting) == "asked trtllm_mla, runs triton (server_info attention_backend)"


def test_a_multimodal_backend_is_not_the_attention_backend() -> None:
    assert not read(STAMP + "Multimodal attention backend not set. Use triton_attn.").picks


OLD = (
    "server_args=ServerArgs(model_path='a, b', attention_backend='fa3', kv_cache_dtype='auto', tp_size=2, "
    'json_model_override_args=\'{"attention_backend": "triton", "device": "cpu"}\', device=\'cuda\', '
    "cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend=<Backend.DISABLED: 'disabled'>, bs=[1, 2])), "
    "chat='it\\'s device=\\'cpu\\', yes', ep_size=2)"
)
NEW = (
    "server_args={'model_path': 'a, b', 'attention_backend': 'fa3', 'kv_cache_dtype': 'auto', 'tp_size': 2, "
    "'json_model_override_args': '{\"attention_backend\": \"triton\", \"device\": \"cpu\"}', 'device': 'cuda', "
    "'cuda_graph_config': {'decode': {'backend': 'disabled', 'bs': [1, 2]}}, \"chat\": \"it's 'device': 'cpu'\", "
    "'ep_size': 2}"
)


@pytest.mark.parametrize("dump", [OLD, NEW], ids=["repr", "dict"])
def test_dumped_arguments_are_read_without_being_fooled_by_what_they_quote(dump: str) -> None:
    resolved = join(STAMP + dump, flags="--ep-size 1")
    runs = {one.name: one.runs for one in resolved.settings if one.runs is not None}
    assert runs["attention_backend"] == "fa3"
    assert runs["device"] == "cuda"
    assert (runs["tp_size"], runs["ep_size"]) == ("2", "2")
    assert "kv_cache_dtype" not in runs
    assert [str(one) for one in resolved.differences()] == ["asked 1, runs 2 (line 1: server_args ep_size)"]
    assert resolved.evidence("cuda_graph", False)[0].text == (
        "line 1: server_args cuda_graph_config.decode.backend is disabled"
    )


def test_a_dump_that_is_cut_off_gives_its_whole_fields_only() -> None:
    text = "{'device': 'cpu', 'blob': '" + "x" * DUMP_LIMIT + "', 'tp_size': 2}"
    assert fields(text, {"device", "blob", "tp_size"}) == {"device": "'cpu'"}


@given(st.text(alphabet="ab'\"\\(){}[],:= ", max_size=60))
@settings(max_examples=200)
def test_any_text_can_be_taken_for_a_dump(text: str) -> None:
    found = fields("{" + text, {"a", "b"})
    assert set(found) <= {"a", "b"}
    assert look_up(found, "a.b") is None or isinstance(look_up(found, "a.b"), str)


@given(st.dictionaries(st.sampled_from(["device", "tp_size", "x"]), st.text(max_size=20) | st.integers() | st.none()))
@settings(max_examples=200)
def test_what_python_prints_of_a_dictionary_is_read_back(values: dict[str, Any]) -> None:
    assert fields(repr(values), values.keys()) == {key: repr(value) for key, value in values.items()}


@pytest.mark.parametrize(
    "line",
    [
        "server_args={'device': 'cpu'}",  # no logger: a request's own lines
        STAMP + "Receive: obj=GenerateReqInput(text=\"server_args={'device': 'cpu'}\")",
        STAMP + "Receive: obj=GenerateReqInput(text='Custom allreduce is disabled because I say so')",
        "Custom allreduce is disabled because I say so",
        STAMP + "Auto-enabling FlashInfer AllReduce Fusion (trtllm) for DeepseekV3ForCausalLM",
        STAMP + "Registering 0 cuda graph addresses",
        STAMP + "Decode batch, #running-req: 1, token usage: 0.00, cpu graph: False, gen throughput (token/s): 6.37",
        STAMP + "Prefill batch, #new-seq: 1, #running-req: 0, cuda graph: False, input throughput (token/s): 1.0",
    ],
)
def test_what_a_client_says_or_what_only_sounds_alike_is_no_evidence(line: str) -> None:
    evidence = read(line)
    assert (evidence.picks, evidence.features, evidence.dump) == ((), (), ())


def test_only_the_first_dump_counts() -> None:
    resolved = join(STAMP + "server_args={'device': 'cuda'}", STAMP + "server_args={'device': 'cpu'}")
    assert resolved.setting("device").runs == "cuda"


def test_another_boot_in_the_same_log_begins_with_nothing_known() -> None:
    collector = Collector("sglang", "0.5.23")
    first = [
        STAMP + "Attention backend not specified. Use fa3 backend by default.",
        STAMP + "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 4096, K size: 0.10 GB, V size: 0.10 GB",
        STAMP + BROKEN,
        STAMP + "server_args={'device': 'cuda'}",
    ]
    for number, line in enumerate(first, start=1):
        collector.line(number, peel(line))
    before = collector.evidence()
    assert before.picks
    assert before.features
    revision = collector.revision
    collector.reset()
    assert collector.evidence() == LogEvidence()
    assert collector.revision > revision
    second = [
        STAMP + "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.10 GB, V size: 0.10 GB",
        STAMP + FUSED.format(0),
        STAMP + "server_args={'device': 'cpu'}",
    ]
    for number, line in enumerate(second, start=11):
        collector.line(number, peel(line))
    after = collector.evidence()
    assert {(pick.setting, pick.value) for pick in after.picks} >= {("kv_cache_dtype", "torch.bfloat16")}
    assert on_off(after) == {("flashinfer_allreduce_fusion", True)}
    assert (dict(after.dump), after.line) == ({"device": "'cpu'"}, 13)


FUSED = "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank={}, world_size=2"
BROKEN = (
    "Failed to initialize FlashInfer workspace (backend=trtllm): no. Disabling flashinfer allreduce fusion permanently."
)


def test_a_feature_that_one_rank_lost_for_good_is_off_on_all() -> None:
    lines = [STAMP + FUSED.format(0), STAMP + BROKEN, STAMP + FUSED.format(2)]
    evidence = read(*lines, version="0.5.23")
    assert on_off(evidence) == {("flashinfer_allreduce_fusion", False)}


@pytest.mark.parametrize(
    ("version", "majors", "shown"),
    [("0.5.12", (9,), True), ("0.5.12", (12,), False), ("0.5.12", (), False), ("0.5.23", (12,), True)],
)
def test_a_workspace_that_no_layer_uses_on_these_gpus_shows_nothing(
    version: str, majors: tuple[int, ...], shown: bool
) -> None:
    assert bool(read(STAMP + FUSED.format(0), version=version, majors=majors).features) is shown


def test_memory_is_bounded_whatever_the_log_says() -> None:
    lines = [
        f"{STAMP}Custom allreduce is disabled because of reason {'y' * number} {'x' * 9000}" for number in range(500)
    ]
    evidence = read(*lines)
    assert len(evidence.features) == 4
    assert all(len(one.text) < 300 for one in evidence.features)


def test_evidence_holds_no_secrets() -> None:
    line = STAMP + "Custom allreduce is disabled because of token hf_abcdefghijklmnopqrstuvwxyz012345"
    assert "hf_abcdefghijkl" not in read(line).features[0].text


def test_the_classifier_hands_its_lines_on_with_their_numbers() -> None:
    text = f"some line\n{STAMP}Attention backend not specified. Use fa3 backend by default.\n"
    (pick,) = classify_text(text).evidence.picks
    assert (pick.setting, pick.value) == ("attention_backend", "fa3")
    assert pick.text.startswith("line 2: ")


def test_vllms_own_words_are_read() -> None:
    evidence = read(
        "INFO 01-02 03:04:05 [__init__.py:244] Automatically detected platform cuda.",
        "(APIServer pid=1) INFO 01-02 03:04:05 [model.py:1685] Using max model len 32768",
        "(APIServer pid=1) INFO 01-02 03:04:05 [cache.py:247] Using fp8 data type to store kv cache. It reduces",
        "(EngineCore pid=2) INFO 01-02 03:04:05 [core.py:105] Initializing a V1 LLM engine (v0.19.1) with config: "
        "model='m', max_seq_len=32768, tensor_parallel_size=4, disable_custom_all_reduce=True, quantization=None, "
        "kv_cache_dtype=auto, device_config=cuda, structured_outputs_config=Config(backend='auto', device_config=cpu)",
        "(Worker_TP0 pid=3) INFO 01-02 03:04:05 [cuda.py:221] Using Flash Attention backend on V1 engine.",
        "(Worker_TP0 pid=3) INFO 01-02 03:04:05 [kv_cache_utils.py:1314] GPU KV cache size: 188,640 tokens",
        engine="vllm",
    )
    flags = ["--attention-backend", "FLASHINFER", "--kv-cache-dtype", "fp8_e4m3", "--tensor-parallel-size", "8"]
    resolved = resolve("vllm", flags, evidence)
    runs = {one.name: one.runs for one in resolved.settings}
    assert runs == {
        "device": "cuda",
        "attention_backend": "FLASH_ATTN",
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": "32768",
        "max_total_num_tokens": "188640",
        "tp_size": "4",
        "allreduce": "nccl",
    }
    assert {one.name for one in resolved.differences()} == {"attention_backend", "tp_size"}
    assert resolved.evidence("custom_allreduce", False)[0].requested


# ------------------------------------------------------------------------------------------------------------- on CPU

SUMMARY = "max_total_num_tokens=4096, max_running_requests=2048, context_len=2048, available_{}_mem=21.07 GB"


@pytest.mark.parametrize(
    ("lines", "info", "flags", "gpus", "outcome", "seen"),
    [
        ([], {"device": "cpu"}, "", 1, "ready", "infra.device"),
        ([SUMMARY.format("cpu")], None, "", 2, "ready", "infra.device"),
        ([SUMMARY.format("gpu")], None, "", 2, "ready", "ready"),
        (["server_args={'device': 'cpu'}"], None, "", 1, "oom.host", "infra.device"),
        (["server_args={'device': 'cpu'}"], None, "", 1, "unknown", "infra.device"),
        (["server_args={'device': 'cpu'}"], None, "", 1, "port.in_use", "port.in_use"),
        ([], {"device": "cpu"}, "--device cuda", 1, "ready", "infra.device"),
        ([], {"device": "cpu"}, "--device cpu", 1, "ready", "ready"),
        ([], {"device": "cpu"}, "", 0, "ready", "ready"),
        ([], {"device": "cuda"}, "", 1, "ready", "ready"),
        ([], {"attention_backend": "torch_native"}, "", 1, "ready", "ready"),
    ],
)
def test_a_server_that_runs_on_the_cpu_of_leased_gpus_is_no_observation_of_them(
    lines: list[str], info: dict[str, Any] | None, flags: str, gpus: int, outcome: str, seen: str
) -> None:
    resolved = join(*(STAMP + line for line in lines), flags=flags, info=info)
    found, note = off_gpus(outcome, "as it was", resolved, gpus)
    assert found == seen
    if seen == "infra.device":
        assert note is not None
        assert "the server runs on the CPU although" in note
        assert "torch is a CPU build, or sees no CUDA device" in note
        assert (outcome in note) is (outcome != "ready")
    else:
        assert note == "as it was"
