"""``gpuguard predict``: what it prints, how it ends, and what it says of input that nothing can be predicted from."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.cli_predict import engine_of, finite, flags_of, measured_of
from pytest_gpuguard.predict import PredictError, predict
from pytest_gpuguard.predict.facts import MEASURED
from tests.gpuguard_command import Done, called, on_a_terminal, ran
from tests.predict_models import DENSE, FP8_EXPERTS, LATENT, RTX, changed

RIG = ("--rig", "sim:rtx-pro-6000-server:8")
OLD = ("--engine", "sglang==0.5.7")
CONTRACT = {
    "gpus_used",
    "mem_fraction_static",
    "weights_gib",
    "avail_before_gib",
    "reserved_gib",
    "rest_gib",
    "kv_tokens",
    "f_min",
    "f_max",
    "verdict",
    "explanation",
    "assumptions",
}
FakeRigs = Any
Predict = Callable[..., Done]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config.json of a large model of latent attention and many experts."""
    return written(tmp_path, LATENT)


def written(tmp_path: Path, config: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.fixture(autouse=True)
def _a_terminal_of_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def gpuguard(capsys: pytest.CaptureFixture[str], file: Path) -> Predict:
    """``gpuguard predict`` in this process, of that model and on eight cards unless told otherwise."""

    def run(*arguments: str | Path, model: Path | str = file, rig: tuple[str, ...] = RIG) -> Done:
        return called(capsys, "predict", "--model", str(model), *rig, *arguments)

    return run


def refused(done: Done) -> str:
    """What stands on stderr of a command that could predict nothing: one line."""
    assert done.code == 2, done
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("gpuguard predict: ")
    assert "Traceback" not in line
    return line.removeprefix("gpuguard predict: ")


# --------------------------------------------------------------------------------------------------------------- output


def test_json_has_the_keys_of_the_contract_and_of_the_prediction(gpuguard: Predict) -> None:
    done = gpuguard(*OLD, "--json", "--", "--tp-size", "8", "--mem-fraction-static", "0.9")
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    assert set(data) >= CONTRACT
    flags = ("--tp-size", "8", "--mem-fraction-static", "0.9")
    assert data == json.loads(json.dumps(predict(LATENT, RTX, "sglang", "0.5.7", flags).to_dict()))
    assert data["verdict"] == "fits"


def test_every_key_of_the_json_is_documented(gpuguard: Predict) -> None:
    text = (Path(__file__).parents[1] / "docs" / "prediction.md").read_text(encoding="utf-8")
    one = json.loads(gpuguard("--json", "--", "--tp-size", "3").out)
    many = json.loads(gpuguard("--search", "--json", "--", "--mem-fraction-static", "0.93").out)
    keys = {*one, *one["rejections"][0], *many, *many["layouts"][0], *many["refused"][0], *MEASURED}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_the_document_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    text = (root / "docs" / "prediction.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```console\n\$ gpuguard (predict .*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    assert len(shown) >= 3
    for command, printed in shown:
        words, _, first = command.partition(" | head -n ")
        lines = called(capsys, *shlex.split(words)).out.splitlines(keepends=True)
        assert "".join(lines[: int(first)] if first else lines) == printed


def test_the_default_fraction_of_a_release_is_exact(gpuguard: Predict) -> None:
    done = gpuguard(*OLD, "--json", "--", "--tp-size", "8", "--cuda-graph-max-bs", "128")
    assert json.loads(done.out)["mem_fraction_static"] == 0.778734296875
    assert "0.778734296875" in gpuguard(*OLD, "--", "--tp-size", "8", "--cuda-graph-max-bs", "128").out


def test_a_measured_number_takes_the_place_of_a_rule(gpuguard: Predict) -> None:
    flags = ("--", "--tp-size", "8", "--cuda-graph-max-bs", "128")
    done = gpuguard(*OLD, "--measured", "weights_gib=77.7", "--measured", "avail_before_gib=94", "--json", *flags)
    data = json.loads(done.out)
    assert done.code == 1
    assert (data["verdict"], data["weights_gib"], data["avail_before_gib"]) == ("oom.kv_pool", 77.7, 94)
    assert data["rest_gib"] == pytest.approx(16.3 - 94 * (1 - 0.778734296875), abs=0.001)


def test_text_tells_the_verdict_first_then_why_then_the_numbers(gpuguard: Predict) -> None:
    done = gpuguard(*OLD, "--", "--tp-size", "4", "--ep-size", "2", "--mem-fraction-static", "0.9")
    lines = done.out.splitlines()
    assert done.code == 1
    assert lines[:2] == [
        "oom.weights: TP4 EP2 on 4 GPUs, in phase weights",
        "  sglang 0.5.7 on 8x NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ]
    text = " ".join(line.strip() for line in lines)
    assert "TP4 EP2 uses 4 of 8 GPUs: EP subdivides TP and adds none." in text
    assert re.search(r"weights +14\d\.\d\d +\d\.\d\d  GiB", done.out)
    assert "parts of the weights (GiB): experts" in text
    assert all(len(line) <= 100 for line in lines)


def test_what_fits_leads_with_its_tokens(gpuguard: Predict) -> None:
    done = gpuguard("--", "--tp-size", "8", "--mem-fraction-static", "0.93")
    assert done.code == 0
    assert re.match(r"fits: TP8 on 8 GPUs, [\d,]+ KV tokens\n", done.out)


def test_assumptions_and_refusals_are_printed(gpuguard: Predict) -> None:
    done = gpuguard("--engine", "sglang==99.0", "--", "--tp-size", "3")
    assert done.code == 1
    text = re.sub(r"\s+", " ", done.out)
    assert "assumed: sglang 99.0 is newer than what is known" in text
    assert "sglang 99.0, by the rules of 0." in done.out
    assert "refused: phase weights: 64 attention heads are not divisible" in text


def test_stages_are_told_apart(gpuguard: Predict) -> None:
    assert re.search(r"weights of the stages \(GiB\): \d+\.\d+, \d+\.\d+\n", gpuguard("--layout", "TP4 PP2").out)


def test_vllms_share_of_the_card_is_called_by_its_flag(gpuguard: Predict) -> None:
    done = gpuguard("--engine", "vllm==0.11.0", "--layout", "TP8", "--", "--max-model-len", "8192")
    assert done.code == 0
    assert re.search(r"gpu-memory-utilization +0\.9\n", done.out)
    assert "mem-fraction-static" not in done.out


def test_a_layout_stands_for_its_flags(gpuguard: Predict) -> None:
    declared = gpuguard("--layout", "TP8 DP8 EP8", "--json")
    flags = ("--tp-size", "8", "--dp-size", "8", "--enable-dp-attention", "--ep-size", "8")
    assert declared.out == gpuguard("--json", "--", *flags).out
    assert json.loads(declared.out)["layout"] == "TP8 DP8 EP8"


def test_several_flags_may_stand_in_one_word_as_in_a_claim(gpuguard: Predict) -> None:
    assert gpuguard("--json", "--", "--tp-size 8 --ep-size 8").out == gpuguard("--json", "--layout", "TP8 EP8").out


def test_a_word_with_blanks_that_is_a_value_stays_one() -> None:
    assert flags_of(["--json-model-override-args", '{"a": 1}', '--x={"b": 2}']) == (
        "--json-model-override-args",
        '{"a": 1}',
        '--x={"b": 2}',
    )


def test_a_folder_is_as_good_as_its_file(gpuguard: Predict, file: Path) -> None:
    assert gpuguard("--json", model=file.parent).out.replace(str(file.parent), "") == gpuguard("--json").out


def test_a_hub_id_stands_for_its_newest_snapshot(gpuguard: Predict, tmp_path: Path, monkeypatch: Any) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    written(snapshot, DENSE)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert gpuguard(model="org/name").code == 0
    assert "no model of that name is in the hub cache" in refused(gpuguard(model="org/other"))


def test_a_search_is_a_table_with_reasons(gpuguard: Predict) -> None:
    done = gpuguard("--search", "--", "--mem-fraction-static", "0.93")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert re.match(r"30 of 50 layouts fit; the most KV tokens: PP8, [\d,]+$", lines[0])
    assert lines[1] == "  sglang on 8x NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert re.split(r"  +", lines[2].strip()) == [
        "layout",
        "GPUs",
        "weights",
        "rest",
        "KV tokens of the box",
        "a replica",
        "verdict",
    ]
    assert any(re.match(r"  TP8 DP8 +8 +\d+\.\d+ +\d+\.\d+ +[\d,]+ +8 x [\d,]+  fits", line) for line in lines)
    assert "20 cannot boot:" in lines
    assert re.search(r"3 oom.weights: 14\d\.\d GiB of weights a rank, 94\.\d free \(TP4, TP4 EP2, TP4 EP4\)", done.out)
    assert all(len(line) <= 100 for line in lines)


def test_a_search_in_json_has_all_layouts(gpuguard: Predict) -> None:
    data = json.loads(gpuguard("--search", "--json", "--", "--mem-fraction-static", "0.93").out)
    assert set(data) == {"layouts", "refused"}
    assert (len(data["layouts"]), len(data["refused"])) == (30, 20)
    assert set(data["layouts"][0]) > CONTRACT


def test_a_search_that_finds_nothing_exits_1(gpuguard: Predict) -> None:
    done = gpuguard("--search", rig=("--rig", "sim:rtx-5090:2"))
    assert done.code == 1
    assert done.out.startswith("0 of 6 layouts fit")


def test_sizes_among_the_flags_of_a_search_are_noted(gpuguard: Predict) -> None:
    done = gpuguard("--search", "--json", "--", "--tp-size", "8")
    assert done.err == "note: --tp-size 8: set aside, a search tries all layouts\n"
    json.loads(done.out)


def test_a_terminal_gets_colours(file: Path) -> None:
    code, text = on_a_terminal("predict", "--model", file, *RIG, "--layout", "TP4", columns=90)
    assert code == 1
    assert text.startswith("\x1b[31m\x1b[1moom.weights: ")
    assert max(map(len, re.sub(r"\x1b\[\d+m", "", text).splitlines()[1:])) <= 90


def test_the_real_gpus_are_asked_of_the_driver(file: Path, fake_rig: FakeRigs) -> None:
    done = ran("predict", "--model", file, "--json", "--", "--tp-size", "8", env=fake_rig(8).environ())
    data = json.loads(done.out)
    same = json.loads(ran("predict", "--model", file, "--json", *RIG, "--", "--tp-size", "8").out)
    assert (data["gpus_used"], data["weights_gib"]) == (8, same["weights_gib"])
    assert data["mem_fraction_static"] == same["mem_fraction_static"]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_machine_without_gpus_is_told_how_to_name_some(file: Path, nvml_library: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "GPUGUARD_FAKE_RIG"}
    env["LD_LIBRARY_PATH"] = str(nvml_library.parent)
    line = refused(ran("predict", "--model", file, env=env))
    assert "no GPUs" in line
    assert "--rig sim:rtx-pro-6000-server:8" in line


@pytest.mark.parametrize(
    ("rig", "said"),
    [
        ("sim:rtx-pro-6000-server:0", "a rig with 0 GPUs cannot be simulated"),
        ("sim:rtx-pro-6000-servr:8", "did you mean rtx-pro-6000-server"),
        ("sim:rtx-pro-6000-server", "is no rig"),
        ("sim:0GiB:2", "without memory"),
        ("replay:here", "replayed rigs are not available"),
        ("8", "is no rig"),
    ],
)
def test_rigs_that_cannot_be_are_refused(gpuguard: Predict, rig: str, said: str) -> None:
    assert said in refused(gpuguard(rig=("--rig", rig)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no config.json"),
        ("{", "is no config.json"),
        ("not json", "is no config.json"),
        ("[1, 2]", "holds a list, not an object"),
        ("null", "not an object"),
        ("{}", "hidden_size"),
        ('{"weights": 1}', "hidden_size (or n_embd, d_model, dim) is missing"),
        ("[" * 100_000, "is no config.json"),
    ],
)
def test_what_is_no_configuration_is_refused(gpuguard: Predict, tmp_path: Path, text: str, said: str) -> None:
    line = refused(gpuguard(model=written(tmp_path, text)))
    assert said in line
    assert "config.json" in line


def test_bytes_that_are_no_text_are_refused(gpuguard: Predict, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00\x80{}")
    assert "is no config.json" in refused(gpuguard(model=file))


def test_a_missing_file_and_a_folder_without_one_are_refused(gpuguard: Predict, tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory" in refused(gpuguard(model=tmp_path / "absent.json"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "this folder has no config.json, so it is no model" in refused(gpuguard(model=empty))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_field_that_is_missing_is_named(gpuguard: Predict, tmp_path: Path, field: str) -> None:
    line = refused(gpuguard(model=written(tmp_path, changed(DENSE, **{field: None}))))
    assert re.search(rf"\b{field}\b.*missing", line)


@pytest.mark.parametrize("value", [-1, "many", [1], True, 2.5])
def test_a_size_that_is_none_is_named(gpuguard: Predict, tmp_path: Path, value: Any) -> None:
    assert "hidden_size is " in refused(gpuguard(model=written(tmp_path, changed(DENSE, hidden_size=value))))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": float("inf")},
        {"vocab_size": 10**400},
        {"rope_parameters": [1]},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": 4}}}},
        {"quantization_config": {"quant_method": "modelopt", "quantized_layers": {"a.b": [1]}}},
        {"quantization_config": {"quant_method": 7, "ignore": 3}},
    ],
)
def test_no_configuration_ends_in_a_traceback(gpuguard: Predict, tmp_path: Path, changes: dict[str, Any]) -> None:
    done = gpuguard("--json", model=written(tmp_path, changed(DENSE, **changes)))
    if done.code == 2:
        refused(done)
    else:
        json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_an_unknown_quantization_is_said_and_widens_the_bars(gpuguard: Predict, tmp_path: Path) -> None:
    known = json.loads(gpuguard("--json", model=written(tmp_path, DENSE)).out)
    odd = changed(DENSE, quantization_config={"quant_method": "q9000"})
    unknown = json.loads(gpuguard("--json", model=written(tmp_path, odd)).out)
    assert any("q9000" in note and "not known" in note for note in unknown["assumptions"])
    assert unknown["weights_gib"] == known["weights_gib"]
    assert unknown["bars"]["weights_gib"] > 2 * known["bars"]["weights_gib"]
    assert unknown["bars"]["kv_tokens"] > known["bars"]["kv_tokens"]
    assert "q9000" in gpuguard(model=written(tmp_path, odd)).out


def test_layers_of_an_unknown_kind_are_said_and_widen_the_bars(gpuguard: Predict, tmp_path: Path) -> None:
    odd = changed(DENSE, layer_types=["mamba", "full_attention"] * 8, architectures=["NobodyForCausalLM"])
    one = json.loads(gpuguard("--json", model=written(tmp_path, odd)).out)
    assert any("not known" in note for note in one["assumptions"])
    plain = json.loads(gpuguard("--json", model=written(tmp_path, DENSE)).out)
    assert one["bars"]["weights_gib"] / one["weights_gib"] > 2 * plain["bars"]["weights_gib"] / plain["weights_gib"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static 1.5 is impossible"),
        (["--mem-fraction-static", "-0.1"], "--mem-fraction-static -0.1 is impossible"),
        (["--mem-fraction-static", "most"], "'most' is not a number"),
        (["--mem-fraction-static"], "--mem-fraction-static needs a value"),
        (["--tp-size", "0"], "--tp-size '0' is not a count of ranks"),
        (["--tp-size", "-8"], "--tp-size '-8' is not a count of ranks"),
        (["--tp-size"], "--tp-size has no value"),
        (["--context-length", "-5"], "--context-length -5 is impossible"),
        (["--context-length", "1.5"], "is not a whole number"),
        (["--max-total-tokens", "0"], "is impossible"),
        (["--page-size", "nan"], "--page-size nan is impossible"),
        (["--tp-size 8 --served-model-name 'x"], "No closing quotation"),
    ],
)
def test_impossible_flags_are_refused(gpuguard: Predict, flags: list[str], said: str) -> None:
    assert said in refused(gpuguard("--", *flags))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--measured", "weights_gib"], "is no NAME=NUMBER"),
        (["--measured", "weights_gib=lots"], "is no NAME=NUMBER"),
        (["--measured", "weights_gib=nan"], "is no NAME=NUMBER"),
        (["--measured", "weights_gib=-3"], "which is no size"),
        (["--measured", "weight=3"], "'weight' is none of weights_gib,"),
        (["--measured", "weights_gib=1", "--measured", "weights_gib=2"], "gives weights_gib twice"),
        (["--engine", "llamacpp==1"], "is none of sglang, vllm"),
        (["--engine", "sglang>=0.5"], "is none of sglang, vllm"),
        (["--layout", "TP8 XP2"], "'XP2' is none of TPn"),
        (["--layout", "TP8 EP3"], "EP3 must divide TP8"),
        (["--layout", "TP8", "--", "--tp-size", "4"], "says TP8, but the flags say --tp-size 4"),
        (["--layout", "TP8", "--search"], "leave --layout out"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(gpuguard: Predict, options: list[str], said: str) -> None:
    assert said in refused(gpuguard(*options))


def test_a_boot_that_the_engine_refuses_is_an_answer_and_no_usage_error(gpuguard: Predict) -> None:
    for flags in (["--tp-size", "16"], ["--tp-size", "8", "--ep-size", "3"]):
        done = gpuguard("--json", "--", *flags)
        assert (done.code, done.err) == (1, "")
        assert json.loads(done.out)["verdict"] == "rejected"
        assert json.loads(done.out)["rejections"]


def test_a_name_that_a_terminal_would_act_on_is_spelt_out(gpuguard: Predict, tmp_path: Path) -> None:
    odd = changed(DENSE, quantization_config={"quant_method": "\x1b[31mred\n"})
    done = gpuguard(model=written(tmp_path, odd))
    assert "\x1b" not in done.out


# --------------------------------------------------------------------------------------------------------------- pieces


def test_an_engine_may_be_named_without_its_release() -> None:
    assert engine_of("sglang") == ("sglang", None)
    assert engine_of("SGLang == 0.5.7") == ("sglang", "0.5.7")
    assert engine_of("vllm==0.11.0") == ("vllm", "0.11.0")


def test_measured_numbers_are_read() -> None:
    assert measured_of(["weights_gib=77.7", "graph_gib=1e0"]) == {"weights_gib": 77.7, "graph_gib": 1.0}
    with pytest.raises(PredictError):
        measured_of(["=3"])


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert finite({"a": float("nan"), "b": [float("inf"), 1.5, "x"], "c": (1,)}) == {
        "a": None,
        "b": [None, 1.5, "x"],
        "c": [1],
    }


def test_the_command_takes_half_a_second_and_no_engine(file: Path) -> None:
    best = min(timed("predict", "--model", file, *RIG, *OLD, "--", "--tp-size", "8") for _ in range(3))
    assert best < 1.0  # half a second on an idle machine: benchmarks/predict.py measures it


def timed(*arguments: str | Path) -> float:
    start = time.perf_counter()
    assert ran(*arguments).code in (0, 1)
    return time.perf_counter() - start


def test_the_command_is_registered_without_loading_the_arithmetic() -> None:
    code = (
        "import sys; import pytest_gpuguard.cli; "
        "print([name for name in sys.modules if name.startswith('pytest_gpuguard.predict') or name == 'rich'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_experts_split_by_blocks_are_refused_in_the_engines_words(gpuguard: Predict, tmp_path: Path) -> None:
    done = gpuguard("--json", "--", "--tp-size", "8", model=written(tmp_path, FP8_EXPERTS))
    assert json.loads(done.out)["rejections"][0]["text"].startswith("The output_size of gate's and up's weight = 96")
