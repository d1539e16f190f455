# ruff: noqa: E501  (log lines are as long as they are)
"""``gpuguard judge``: a log that is there already, judged as if the claim had just booted the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .boot_logs import FAILED, FULL, READY, STAMP, arguments, dies, loading
from .gpuguard_command import Done, called, ran

Capture = pytest.CaptureFixture[str]

#: What SGLang says of any SIGKILL.
DIED = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If you see SIGKILL (-9), it may be OOM.\n"

PICKED = f"{STAMP}] Attention backend not specified. Use triton backend by default.\n"

LOGS = {
    "failed": FAILED,
    "ready": READY,
    "picked": READY + PICKED,
    "loading": arguments(tp_size=1) + loading([""], 15.24),
    "weights": loading([" TP0"], 94.0) + dies(FULL.format("672.00 MiB.", "136.94 MiB")),
    "rejected": READY.rsplit(STAMP, 2)[0]
    + dies("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", ""),
    "unknown": loading([" TP0"], 94.0) + dies("KeyError: 12"),
    "killed": loading([" TP0"], 94.0) + DIED,
    "out of memory": loading([" TP0"], 94.0)
    + "[  123.456789] Memory cgroup out of memory: Killed process 1004 (python3) total-vm:181200000kB, anon-rss:62914560kB\n"
    + DIED,
    "clipped": READY.replace(
        f"{STAMP}] KV Cache",
        f"{STAMP}] max_total_tokens=500000 is larger than the profiled value 399740. Use the profiled value instead.\n{STAMP}] KV Cache",
    ),
}


@pytest.fixture
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "server.log"
    path.write_text(LOGS[getattr(request, "param", "failed")])
    return path


def judged(capsys: Capture, log: str | Path, *expectations: str, options: tuple[str, ...] = ()) -> Done:
    words = [word for one in expectations for word in ("--expect", one)]
    return called(capsys, "judge", log, *words, *options)


@pytest.mark.parametrize(
    ("log", "expectation", "verdict", "said"),
    [
        ("failed", "ooms", "HOLDS", "oom.kv_pool: RuntimeError: Not enough memory."),
        ("failed", "ooms()", "HOLDS", "oom.kv_pool"),
        ("failed", ' ooms("kv_pool") ', "HOLDS", "oom.kv_pool"),
        ("failed", 'ooms("kv_pool", when="sglang<0.1")', "HOLDS", "oom.kv_pool"),  # windows are not asked
        ("failed", 'fails("oom.kv_pool", match="increase --mem")', "HOLDS", "oom.kv_pool"),
        ("failed", 'fails("oom.kv_pool", match="something else")', "CHANGED", "claimed: a line with 'something else'"),
        ("failed", 'ooms("weights")', "CHANGED", "(claimed: ooms(weights))"),
        ("failed", "fits", "CONTRADICTED (worse)", "oom.kv_pool"),
        ("failed", 'uses("custom_allreduce")', "CONTRADICTED (worse)", "oom.kv_pool"),
        ("weights", 'ooms("weights")', "HOLDS", "oom.weights"),
        ("weights", 'ooms("kv_pool")', "CHANGED", "oom.weights"),
        ("rejected", 'unsupported("fusion", how="rejected", match="requires SM90")', "HOLDS", "unsupported.arch"),
        ("rejected", 'unsupported("fusion", how="rejected", match="requires SM80")', "CHANGED", "unsupported.arch"),
        ("unknown", "ooms", "INCONCLUSIVE", "unknown: KeyError: 12"),
        ("unknown", 'unsupported("symm mem", how="crashes", match="KeyError: 12")', "HOLDS", "unknown"),
        ("ready", "fits", "HOLDS", "ready"),
        ("ready", "ooms", "CONTRADICTED (better)", "ready, against the claim that it runs out of memory"),
        ("ready", 'fits(margin="3.31GiB", kv_tokens=">=399740")', "HOLDS", "ready, 399740 KV tokens, 3.31 GiB free"),
        ("ready", 'fits(margin="3.5GiB")', "CONTRADICTED (worse)", "3.31 GiB free, claimed a margin of 3.5 GiB"),
        ("ready", 'fits(kv_tokens=">=400000")', "CONTRADICTED (worse)", "399740 KV tokens, claimed >=400000"),
        ("clipped", 'fits(kv_tokens=">=500000")', "CONTRADICTED (worse)", "(asked for 500000, silently clipped)"),
        ("ready", 'max_mem("6GiB", of="weights")', "HOLDS", "weights memory 5.98 GiB"),
        ("ready", 'max_mem("5GiB", of="weights")', "CONTRADICTED (worse)", "weights memory 5.98 GiB"),
        ("ready", 'max_mem("0.1GiB", of="graph")', "HOLDS", "graph memory 0.09 GiB"),
        ("ready", 'max_mem("9GiB", of="static")', "CONTRADICTED (worse)", "static memory 9.02 GiB"),
        ("ready", 'max_mem("9GiB", of="peak")', "NOT_EVALUATED", "a log alone does not show a peak of memory"),
        ("ready", "expect_toks(min=60)", "NOT_EVALUATED", "a log alone does not show tok/s: run the claim"),
        ("failed", "expect_toks(min=60)", "CONTRADICTED (worse)", "oom."),
        ("ready", "works", "NOT_EVALUATED", "a log alone does not show answers"),
        ("ready", 'uses("attention_backend=triton")', "HOLDS", "runs triton"),
        ("ready", 'uses("radix_cache")', "HOLDS", "disable_radix_cache is False"),
        ("ready", 'uses("custom_allreduce")', "INCONCLUSIVE", "nothing the server said shows"),
        ("loading", "fits", "INFRA", "starting: healthy so far, the log ends in phase weights"),
        ("loading", "ooms", "INFRA", "starting: healthy so far, the log ends in phase weights"),
        ("killed", 'ooms("host")', "INCONCLUSIVE", "indeterminate.peer_died: RuntimeError: Rank 0 scheduler died"),
        ("killed", "fits", "CONTRADICTED (worse)", "indeterminate.peer_died"),
        ("killed", 'fails("oom.host")', "INCONCLUSIVE", "indeterminate.peer_died"),
        ("out of memory", 'ooms("host")', "HOLDS", "oom.host"),
    ],
    indirect=["log"],
)
def test_a_log_is_judged_by_its_reason(log: Path, expectation: str, verdict: str, said: str, capsys: Capture) -> None:
    done = judged(capsys, log, expectation)
    assert done.out.startswith(f"{verdict}: "), done.out
    assert said in done.out.splitlines()[0]
    assert (done.code, done.err) == (0 if verdict == "HOLDS" else 1, "")


@pytest.mark.parametrize("log", ["ready"], indirect=True)
@pytest.mark.parametrize(
    ("expectation", "verdict"),
    [
        ('uses("fa3")', "CONTRADICTED (worse)"),
        ('unsupported("fa3", how="falls_back")', "HOLDS"),
        ('ignores("--disable-radix-cache")', "HOLDS"),
        ('unsupported("attention_backend=triton", how="falls_back")', "INCONCLUSIVE"),  # it was not asked
    ],
)
def test_flags_tell_what_was_asked(log: Path, expectation: str, verdict: str, capsys: Capture) -> None:
    flags = ("--flags", "--attention-backend fa3 --disable-radix-cache")
    done = judged(capsys, log, expectation, options=flags)
    assert done.out.startswith(f"{verdict}: "), done.out


@pytest.mark.parametrize("log", ["ready", "picked"], indirect=True)
@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ('unsupported("attention_backend=triton", how="falls_back")', "CONTRADICTED (better): "),
        ('uses("attention_backend=triton")', "HOLDS: "),
    ],
)
def test_an_argument_that_is_handed_back_shows_nothing_and_a_line_that_names_it_does(
    log: Path, claim: str, verdict: str, capsys: Capture
) -> None:
    done = judged(capsys, log, claim, options=("--flags", "--attention-backend triton"))
    picked = "Use triton backend" in log.read_text()
    assert done.out.startswith(verdict if picked else "INCONCLUSIVE: ")
    assert ("only repeats the argument that it was given" in done.out) is not picked
    assert ("Use triton backend by default" in done.out) is picked


@pytest.mark.parametrize("log", ["killed"], indirect=True)
def test_an_engine_s_guess_from_an_exit_code_is_no_evidence(log: Path, capsys: Capture) -> None:
    lines = judged(capsys, log, 'ooms("host")').out.splitlines()
    note = "  a rank was killed by SIGKILL; only the kernel's log can say whether the OOM killer did it"
    assert note in lines
    assert not any("most likely" in line for line in lines)
    done = called(capsys, "explain", log)
    assert "oom.host in phase" in done.out
    said = "a guess from the exit code: only the kernel's log can say whether its OOM killer ended the rank"
    assert f"\n  {said}\n" in done.out
    assert json.loads(called(capsys, "explain", "--json", log).out)["note"] == said


def test_a_claim_that_does_not_hold_is_told_with_what_helps(log: Path, capsys: Capture) -> None:
    lines = judged(capsys, log, "fits").out.splitlines()
    assert lines[0].startswith("CONTRADICTED (worse): fits: oom.kv_pool: RuntimeError: Not enough memory.")
    assert lines[1].startswith("  line 21: RuntimeError: Not enough memory.")
    assert (
        lines[3] == "  memory of TP0, the fullest rank (GiB): 94.00 free before the weights, 77.70 weights, 16.30 left"
    )
    assert (
        lines[4] == "    20.80 held back at --mem-fraction-static 0.778734, short by 4.50, the least fraction is 0.8266"
    )
    assert lines[5].startswith("  cure: --mem-fraction-static between 0.83 and 0.85")
    assert lines[6] == f"  log: {log}"
    assert len(lines) == 7
    assert len(judged(capsys, log, "ooms").out.splitlines()) == 1  # a claim that holds needs no more


def test_every_expectation_is_judged_and_one_that_does_not_hold_decides(log: Path, capsys: Capture) -> None:
    done = judged(capsys, log, "ooms", 'ooms("kv_pool")', 'fails("oom.kv_pool")')
    assert (done.code, len(done.out.splitlines())) == (0, 3)
    done = judged(capsys, log, "ooms", 'ooms("weights")')
    assert done.code == 1
    assert [line.partition(":")[0] for line in done.out.splitlines() if line[:1] != " "] == ["HOLDS", "CHANGED"]
    done = judged(capsys, log, "ooms", "expect_toks(min=1)")
    assert done.code == 1  # what was not evaluated does not hold


def test_json_is_the_explanation_with_the_verdicts(log: Path, capsys: Capture) -> None:
    done = judged(capsys, log, "ooms", "fits", options=("--json",))
    (line,) = done.out.splitlines()
    said = json.loads(line)
    assert done.code == 1
    (plain,) = called(capsys, "explain", "--json", log).out.splitlines()
    assert set(said) - {"verdict", "judgements"} == set(json.loads(plain))
    assert said["verdict"] == "CONTRADICTED (worse)"
    assert [(one["expectation"], one["verdict"], one["outcome"]) for one in said["judgements"]] == [
        ("ooms", "HOLDS", "oom.kv_pool"),
        ("fits", "CONTRADICTED (worse)", "oom.kv_pool"),
    ]
    assert all(set(one) == {"expectation", "verdict", "outcome", "fact"} for one in said["judgements"])
    document = (Path(__file__).parents[1] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    assert [key for key in ("verdict", "judgements", "expectation", "fact") if f"`{key}`" not in document] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('oms("weights")', "'oms' is no expectation; did you mean 'ooms'?"),
        ("fit", "'fit' is no expectation; did you mean 'fits'?"),
        ("needs_gpus(2)", "'needs_gpus' is no expectation; known are expect_toks, fails, fits"),
        ('ooms("wieghts")', "did you mean 'weights'?"),
        ("ooms(1)", "phase 1 is not known"),
        ('fits(margn="2GiB")', "unknown argument 'margn'; did you mean 'margin'?"),
        ('fits(margin="2GiB", margin="3GiB")', "margin is given twice"),
        ('fits(**{"margin": "2GiB"})', "arguments are plain values: texts, numbers"),
        ('ooms(*["weights"])', "arguments are plain values: texts, numbers"),
        ('ooms(open("x"))', "arguments are plain values: texts, numbers"),
        ('unsupported("x", how="rejectd")', "did you mean 'rejected'?"),
        ('unsupported("x", match="(")', "is not a regular expression"),
        ('fails("oom.kvpool")', "did you mean 'oom.kv_pool'?"),
        ('max_mem("75GB", of="weights")', "engines print GiB and call it GB"),
        ('compare(ratio=">2")', "compare needs two servers, and a log tells of one: run the claim"),
        ('ooms("weights"', "is not written like an expectation"),
        ('pytest.mark.ooms("weights")', "is not written like an expectation"),
        ("fits; ooms", "is not written like an expectation"),
        ("", "is not written like an expectation"),
        ("(" * 5000 + ")" * 5000, "is not written like an expectation"),
        ("fits" + "(" * 90 + ")" * 90, "too many positional arguments"),
    ],
)
def test_an_expectation_that_is_written_wrongly_is_a_usage_error(
    text: str, said: str, log: Path, capsys: Capture
) -> None:
    done = judged(capsys, log, "ooms", text)
    assert (done.code, done.out) == (2, "")
    message = " ".join(done.err.split())
    assert said in message
    assert len(message) < 600


def test_an_expectation_is_never_evaluated(log: Path, tmp_path: Path, capsys: Capture) -> None:
    proof = tmp_path / "evaluated"
    for text in (
        f"__import__('pathlib').Path({str(proof)!r}).touch()",
        f"ooms(__import__('pathlib').Path({str(proof)!r}).touch())",
        f"(lambda: __import__('pathlib').Path({str(proof)!r}).touch())()",
        f"fits(margin=[__import__('pathlib').Path({str(proof)!r}).touch() for _ in 'x'])",
        f"fits(margin=f\"{{__import__('pathlib').Path({str(proof)!r}).touch()}}\")",
    ):
        assert judged(capsys, log, text).code == 2
    assert not proof.exists()


def test_what_cannot_be_read_exits_2_with_the_cause(tmp_path: Path, capsys: Capture) -> None:
    missing = tmp_path / "x.log"
    done = judged(capsys, missing, "ooms")
    assert (done.code, done.out, done.err) == (2, "", f"{missing}: No such file or directory\n")
    assert judged(capsys, tmp_path, "ooms").err == f"{tmp_path}: Is a directory\n"
    missing.write_bytes(bytes(range(256)) * 20)
    assert judged(capsys, missing, "ooms").code == 2
    missing.write_text("")
    assert judged(capsys, missing, "ooms").err == f"{missing}: the log is empty\n"


def test_without_an_expectation_it_is_a_usage_error(log: Path, capsys: Capture) -> None:
    done = called(capsys, "judge", log)
    assert done.code == 2
    assert "--expect" in done.err


def test_standard_input_is_judged_too() -> None:
    done = ran("judge", "-", "--expect", 'ooms("kv_pool")', input=FAILED.encode())
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("HOLDS: ooms(kv_pool)")


def test_own_signatures_and_server_info_count_as_in_explain(log: Path, tmp_path: Path, capsys: Capture) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[signature]]\nid = "acme"\noutcome = "weights.mismatch"\nany = ["Please try to increase"]\n')
    assert judged(capsys, log, 'fails("weights.mismatch")', options=("--signatures", str(own))).code == 0
    log.write_text(READY)
    info = tmp_path / "info.json"
    info.write_text('{"max_total_num_tokens": 1000}')
    done = judged(capsys, log, 'fits(kv_tokens=">=399740")', options=("--server-info", str(info)))
    assert done.out.startswith("CONTRADICTED (worse): fits(kv_tokens>=399740): ready with 1000 KV tokens")
