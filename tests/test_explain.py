"""``gpuguard explain``: what it reads, what it prints, and what it says of logs that it cannot read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .boot_logs import FAILED, FULL, READY, STAMP, arguments, dies, loaded, loading, tp
from .explained import KEYS, NUMBERS, Capture, explained, objects
from .gpuguard_command import RUN, on_a_terminal, ran
from .needs import need


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(FAILED)
    return path


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    path = tmp_path / "ready.log"
    path.write_text(READY)
    return path


# ------------------------------------------------------------------------------------------------------- what it prints


def test_a_pipe_gets_plain_lines_with_the_cause_the_memory_and_the_cure(failed: Path) -> None:
    done = ran("explain", failed)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert lines[0] == f"{failed}: oom.kv_pool in phase kv_pool (sglang)"
    assert lines[1].startswith("  line 21: RuntimeError: Not enough memory.")
    assert lines[3] == "  memory of TP0, the fullest of 8 ranks, in GiB (which engines print as GB)"
    assert [line.split() for line in lines[4:11]] == [
        ["free", "before", "the", "weights", "94.00"],
        ["weights", "77.70"],
        ["left", "after", "the", "weights", "16.30"],
        ["held", "back,", "free*(1", "-", "0.7787)", "20.80"],
        ["for", "the", "KV", "pool", "-4.50"],
        ["last", "free", "memory", "printed", "16.30"],
        ["least", "fraction", "(1", "-", "left/free)", "0.8266"],
    ]
    assert lines[11].startswith("  cure: --mem-fraction-static between 0.83 and 0.85: 0.84 gives a KV pool of 1.3 GiB")
    assert lines[12].startswith("  after it: Received sigquit")
    assert len(lines) == 13


def test_a_terminal_gets_colours_and_a_picture_of_the_memory(failed: Path) -> None:
    code, text = on_a_terminal("explain", failed)
    assert code == 0
    assert "\x1b[1;31m" in text
    bar = next(line for line in text.splitlines() if "█" in line)
    assert bar.count("█") == round(77.7 / 94 * 60)
    assert bar.count("▒") == 60 - bar.count("█")
    assert "94.0 GiB" in bar
    assert "held back by the fraction" in text


@pytest.mark.parametrize("whole", [5e-324, 1.0, 1e308, float("inf"), float("nan")])
def test_the_picture_of_odd_numbers_is_no_wider(whole: float) -> None:
    from pytest_gpuguard.claims.observation import MemoryTable
    from pytest_gpuguard.report.explained import _picture

    for size in (5e-324, 0.5, 1e308, float("inf")):
        table = MemoryTable(avail_before_gib=whole, weights_gib=size, kv_gib=size, reserved_gib=size, rest_gib=-1.0)
        picture = _picture(table, 40)
        if picture is not None:
            bar, _ = picture.plain.split("\n")
            assert sum(map(bar.count, "█░▒")) == 40


def test_the_picture_fits_a_narrow_terminal(failed: Path) -> None:
    _, text = on_a_terminal("explain", failed, columns=50)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    bar = next(line for line in plain.splitlines() if "█" in line)
    assert len(bar) <= 50
    assert "94.0 GiB" in bar


def test_the_keys_of_the_json_are_the_documented_ones_and_unknown_numbers_are_null(
    failed: Path, ready: Path, capsys: Capture
) -> None:
    document = (Path(__file__).parents[1] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    for said in objects(capsys, failed, ready):
        assert list(said) == KEYS.split()
        assert set(said["memory"]) == {*NUMBERS.split(), "margin_gib"}
        assert [key for key in [*KEYS.split(), *said["memory"], "line", "text"] if f"`{key}`" not in document] == []
    broken, healthy = objects(capsys, failed, ready)
    assert broken["decisive"]["line"] == 21
    assert broken["decisive"]["text"].startswith("RuntimeError: Not enough memory.")
    assert broken["memory"] == {
        "avail_before_gib": 94.0,
        "avail_after_weights_gib": 16.3,
        "weights_gib": 77.7,
        "mem_fraction_static": 0.778734296875,
        "reserved_gib": pytest.approx(20.799, abs=1e-3),
        "rest_gib": pytest.approx(-4.499, abs=1e-3),
        "f_min": pytest.approx(0.8266, abs=1e-4),
        "kv_tokens": None,
        "kv_gib": None,
        "graph_gib": None,
        "free_gib": 16.3,
        "total_gib": None,
        "gpu_memory_utilization": None,
        "margin_gib": pytest.approx(-4.499, abs=1e-3),
    }
    assert (broken["fullest_rank"], len(broken["ranks"]), broken["ranks"][7]["rank"]) == ("TP0", 8, "TP7")
    assert set(broken["ranks"][0]) == {"rank", *NUMBERS.split()}
    assert isinstance(broken["remedies"], list)
    assert broken["consequences"][0].startswith("Received sigquit")
    assert (healthy["decisive"], healthy["why"], healthy["signature"], healthy["engine_version"]) == (None,) * 4
    assert (healthy["outcome"], healthy["remedies"], healthy["fullest_rank"]) == ("ready", [], "")
    assert (healthy["memory"]["kv_tokens"], healthy["memory"]["margin_gib"]) == (399740, 3.31)
    assert healthy["lines"] == len(READY.splitlines())
    assert {one["name"] for one in healthy["resolved"]["settings"]} >= {"attention_backend", "radix_cache"}
    assert set(healthy["resolved"]["settings"][0]) == {"name", "asked", "runs", "evidence", "differs"}
    assert healthy["resolved"]["features"]


def test_a_log_that_is_no_engine_s_is_not_called_healthy(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.log"
    path.write_text("abc\n")
    assert explained(capsys, path).out == (
        f"{path}: starting: no failure in it, and nothing that an engine says as it starts (1 line)\n"
    )
    path.write_text(loading([""], 94.0))
    assert "starting: healthy so far, in phase weights (sglang, 1 line)" in explained(capsys, path).out


def test_secrets_are_masked_wherever_a_line_is_quoted(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.log"
    path.write_text(
        arguments(api_key="open sesame", tp_size=2)
        + loaded(tp(2), 94.0, 16.3)
        + dies("ValueError: cannot fetch https://me:hunter2secret@host/m with token hf_AbCdEfGhIjKlMnOp")
    )
    for form in ("", "--json"):
        done = explained(capsys, path, *filter(None, [form]))
        assert "***" in done.out
        assert [word for word in ("sesame", "hunter2secret", "hf_AbCd") if word in done.out] == []


# ------------------------------------------------------------------------------------------------------------- options


def test_flags_tell_what_runs_otherwise_than_asked(ready: Path, capsys: Capture) -> None:
    done = explained(capsys, ready, "--flags", "--attention-backend fa3 --disable-radix-cache")
    assert "  attention_backend: asked fa3, runs triton (line 1: server_args attention_backend)\n" in done.out
    assert "  radix_cache: asked off, runs on (line 1: " in done.out
    assert "asked" not in explained(capsys, ready, "--flags", "--attention-backend triton").out
    assert "asked" not in explained(capsys, ready).out
    (said,) = objects(capsys, ready, "--flags", "--attention-backend fa3")
    (row,) = (one for one in said["resolved"]["settings"] if one["name"] == "attention_backend")
    assert (row["asked"], row["runs"], row["differs"]) == ("fa3", "triton", True)
    done = explained(capsys, ready, "--flags", "--x 'never closed")
    assert (done.code, done.out) == (2, "")
    assert "--flags: No closing quotation" in done.err


def test_what_was_asked_is_quoted_no_longer_than_what_runs(ready: Path, capsys: Capture) -> None:
    long = "x" * 5000
    (said,) = objects(capsys, ready, "--flags", f"--attention-backend {long}")
    (row,) = (one for one in said["resolved"]["settings"] if one["name"] == "attention_backend")
    assert (row["asked"], row["differs"]) == ("x" * 240, True)
    assert "x" * 241 not in explained(capsys, ready, "--flags", f"--attention-backend {long}").out
    # Two that are as long and the same do not differ.
    ready.write_text(READY.replace("'triton'", f"'{long}'"))
    (said,) = objects(capsys, ready, "--flags", f"--attention-backend {long}")
    (row,) = (one for one in said["resolved"]["settings"] if one["name"] == "attention_backend")
    assert (row["asked"], row["runs"], row["differs"]) == ("x" * 240, "x" * 240, False)


def test_server_info_has_the_last_word_on_settings_and_fills_in_numbers(tmp_path: Path, capsys: Capture) -> None:
    log, info = tmp_path / "x.log", tmp_path / "info.json"
    log.write_text(
        arguments(tp_size=1) + loaded([""], 94.0, 30.0) + f"{STAMP}] The server is fired up and ready to roll!\n"
    )
    usage = {"weight": 60.0, "kvcache": 17.5, "graph": {"decode": 1.25, "prefill": None}, "token_capacity": 9000}
    info.write_text(
        json.dumps({"mem_fraction_static": 0.9, "api_key": "sesame", "internal_states": [{"memory_usage": usage}]})
    )
    (alone,) = objects(capsys, log)
    (said,) = objects(capsys, log, "--server-info", info)
    memory = said["memory"]
    assert (alone["memory"]["mem_fraction_static"], alone["memory"]["kv_gib"]) == (None, None)
    assert (memory["mem_fraction_static"], memory["kv_gib"], memory["graph_gib"]) == (0.9, 17.5, 1.25)
    assert (memory["weights_gib"], memory["kv_tokens"]) == (64.0, 9000)  # the log has every rank's weights
    assert memory["reserved_gib"] == pytest.approx(9.4)
    assert memory["rest_gib"] == pytest.approx(20.6)
    assert "sesame" not in json.dumps(said)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"[" * 100_000, "is not JSON: "),
        (b"\xff\xfe", "is not JSON: "),
        (b"[1]", "holds no object"),
        (b"", "is not JSON: "),
        (None, "No such file or directory"),
    ],
    ids=["cut", "deep", "no text", "a list", "empty", "missing"],
)
def test_server_info_that_cannot_be_read_is_a_usage_error_with_its_cause(
    content: bytes | None, cause: str, ready: Path, tmp_path: Path, capsys: Capture
) -> None:
    info = tmp_path / "info.json"
    if content is not None:
        info.write_bytes(content)
    done = explained(capsys, ready, "--server-info", info)
    assert (done.code, done.out) == (2, "")
    assert "--server-info: " in done.err
    assert cause in done.err


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + "0" * 400, "-1", '"many"', "[1]", "null", "true"])
def test_odd_numbers_in_server_info_are_left_out(number: str, ready: Path, tmp_path: Path, capsys: Capture) -> None:
    info = tmp_path / "info.json"
    state = f'[{{"memory_usage": {{"weight": {number}, "kvcache": {number}, "graph": {{"x": {number}}}}}}}]'
    info.write_text(
        f'{{"max_total_num_tokens": {number}, "mem_fraction_static": {number}, "internal_states": {state}}}'
    )
    (said,) = objects(capsys, ready, "--server-info", info)
    if number != "-1":
        assert (said["memory"]["kv_tokens"], said["memory"]["mem_fraction_static"]) == (399740, 0.8)
    assert said["memory"]["weights_gib"] == 5.98


def test_gpus_tell_what_is_leased_and_not_used(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "x.log"
    log.write_text(arguments(tp_size=4) + loading(tp(4), 94.0) + dies(FULL.format("672.00 MiB.", "136.94 MiB")))
    assert "  cure: 4 GPUs are used, 8 are leased: --tp-size 8\n" in explained(capsys, log, "--gpus", "8").out
    assert "cure" not in explained(capsys, log).out
    assert explained(capsys, log, "--gpus", "-1").code == 2


OWN = """[[signature]]
id = "acme.pool"
outcome = "unsupported.config"
any = ["Please try to increase"]
why = "our own build never fits"
cure = "ask the platform team"
"""


def test_a_signature_of_the_user_s_own_wins(failed: Path, tmp_path: Path, capsys: Capture) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    (said,) = objects(capsys, failed, "--signatures", own)
    assert (said["signature"], said["outcome"], said["why"]) == (
        "acme.pool",
        "unsupported.config",
        "our own build never fits",
    )
    assert said["remedies"][-1] == "ask the platform team"
    other = tmp_path / "other.toml"
    other.write_text(OWN.replace("acme.pool", "acme.other").replace("Please", "Pleese"))
    done = explained(capsys, failed, "--signatures", other, "--signatures", own)
    assert "unsupported.config" in done.out
    assert explained(capsys, failed, "--signatures", other).out == explained(capsys, failed).out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (OWN.replace("unsupported.config", "unsupported.konfig"), "own.toml:3: signature acme.pool: "),
        (OWN.replace("unsupported.config", "unsupported.konfig"), "did you mean 'unsupported.config'?"),
        (OWN + "pattern = 'a+'\n", "own.toml:7: signature acme.pool: an unbounded quantifier"),
        (OWN + "colour = 'red'\n", "own.toml:"),
        (OWN + "[[signature]\n", "own.toml: "),
        (None, "own.toml: No such file or directory"),
    ],
)
def test_a_signature_file_that_is_wrong_is_a_usage_error_with_file_and_line(
    content: str | None, said: str, failed: Path, tmp_path: Path, capsys: Capture
) -> None:
    own = tmp_path / "own.toml"
    if content is not None:
        own.write_text(content)
    done = explained(capsys, failed, "--signatures", own)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


VLLM = """\
INFO 01-02 03:04:01 [api_server.py:1034] vLLM API server version 0.11.0
(EngineCore_DP0 pid=1310) INFO 01-02 03:04:09 [gpu_model_runner.py:2653] Model loading took 65.9651 GiB and 8.1 seconds
(EngineCore_DP0 pid=1310) INFO 01-02 03:04:12 [gpu_worker.py:298] Available KV cache memory: -2.14 GiB
(EngineCore_DP0 pid=1310) ERROR 01-02 03:04:13 [core.py:708] EngineCore failed to start.
(EngineCore_DP0 pid=1310) ERROR 01-02 03:04:13 [core.py:708] Traceback (most recent call last):
(EngineCore_DP0 pid=1310) ERROR 01-02 03:04:13 [core.py:708]   File "/x/vllm/v1/engine/core.py", line 1, in __init__
(EngineCore_DP0 pid=1310) ERROR 01-02 03:04:13 [core.py:708] ValueError: No available memory for the cache blocks.
"""


def test_the_engine_is_found_out_or_given(failed: Path, tmp_path: Path, capsys: Capture) -> None:
    vllm = tmp_path / "vllm.log"
    vllm.write_text(VLLM)
    one, two = objects(capsys, failed, vllm)
    assert (one["engine"], two["engine"], two["engine_version"]) == ("sglang", "vllm", "0.11.0")
    assert (two["outcome"], two["memory"]["weights_gib"], two["memory"]["kv_gib"]) == ("oom.kv_pool", 65.9651, -2.14)
    assert objects(capsys, failed, "--engine", "sglang")[0] == one
    assert objects(capsys, vllm, "--engine", "vllm")[0] == two
    assert objects(capsys, vllm, "--engine", "sglang")[0]["outcome"] != "oom.kv_pool"
    assert explained(capsys, failed, "--engine", "trtllm").code == 2


def test_the_release_decides_where_the_log_does_not_say_it(tmp_path: Path, capsys: Capture) -> None:
    log = tmp_path / "x.log"
    begin = f"{STAMP}] Capture cuda graph begin. This can take up to several minutes. avail mem=9.71 GB\n"
    log.write_text(loaded([""], 94.0, 30.0) + f"{STAMP}] Memory pool end. avail mem=9.90 GB\n" + begin)
    with log.open("a") as stream:
        stream.write(dies(FULL.format("2.00 GiB.", "0 bytes"), ""))
    assert "a smaller --cuda-graph-max-bs\n" in explained(capsys, log).out
    done = explained(capsys, log, "--engine-version", "0.5.18")
    assert "(sglang 0.5.18)" in done.out
    assert "a smaller --cuda-graph-max-bs-decode\n" in done.out
    done = explained(capsys, log, "--engine-version", "newest")
    assert (done.code, done.out) == (2, "")
    assert "'newest' is no release" in done.err


def test_no_log_at_all_is_a_usage_error(capsys: Capture) -> None:
    assert explained(capsys).code == 2


# ------------------------------------------------------------------------------------------------------ large and long


def peak_kib(*arguments: str | Path) -> int:
    """The largest memory of a process that runs the command, in KiB."""
    source = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    words = [sys.executable, "-c", source, *RUN, *map(str, arguments)]
    return int(subprocess.run(words, capture_output=True, check=True, timeout=120).stdout)


def test_a_large_log_takes_no_more_memory_than_a_small_one(tmp_path: Path, failed: Path) -> None:
    """30 MB of lines of which no two are alike, and one line of 10 MB."""
    need(sys.platform == "linux", "ru_maxrss is in KiB on Linux")
    large = tmp_path / "large.log"
    with large.open("w") as stream:
        stream.write(READY)
        for number in range(20_000):
            stream.write(
                f"{STAMP} TP{number % 8}] step {number:x} of request {number * 7919:x}: {'abcdefghij' * 100}\n"
            )
        stream.write("x" * (10 << 20) + "\n")
        stream.write(dies(FULL.format("2.00 GiB.", "0 bytes"), ""))
    assert large.stat().st_size > 30_000_000
    small = peak_kib("explain", failed)
    assert peak_kib("explain", large) < small + 48 * 1024


def test_a_reader_that_has_enough_gets_no_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.log").write_text(FAILED)
    for option in ([], ["--json"]):
        words = [*RUN, "explain", *option, str(folder)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        process.wait(60)


def test_the_last_of_several_boots_is_explained_and_the_log_is_said_to_hold_more(
    capsys: Capture, tmp_path: Path
) -> None:
    boot = (
        "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', mem_fraction_static=0.5)\n"
        "[2026-01-02 03:04:05] Load weight begin. avail mem=94.00 GB\n"
    )
    ready = "[2026-01-02 03:04:05] The server is fired up and ready to roll!\n"
    log = tmp_path / "unit.log"
    log.write_text(boot + ready + boot)
    assert (
        explained(capsys, log)
        .out.splitlines()[0]
        .endswith("phase weights (sglang, the last of 2 boots in this log, 5 lines)")
    )
    assert objects(capsys, log)[0]["boots"] == 2
