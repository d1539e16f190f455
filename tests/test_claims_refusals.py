"""Every wrong argument of every decorator, with the words that say what would be right."""

from __future__ import annotations

import re
from typing import Any

import pytest

import pytest_gpuguard
from pytest_gpuguard.claims.errors import ClaimError
from pytest_gpuguard.claims.markers import MARKERS

KNOWN_SMS = "(70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)"

REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    # needs
    ("needs_sm120", (1,), {}, "too many positional arguments; it is written needs_sm120()"),
    ("needs_sm120", (), {"exact": True}, "unknown argument 'exact'; it takes no arguments"),
    ("needs_sm", (), {}, 'name at least one, such as needs_sm("120")'),
    ("needs_sm", ("122",), {}, f"'122' is no compute capability that is known; did you mean '121'? {KNOWN_SMS}"),
    ("needs_sm", ("hopper",), {}, f"'hopper' is no compute capability that is known {KNOWN_SMS}"),
    ("needs_sm", (), {"sms": "120"}, "it is written needs_sm(*sms)"),
    ("needs_arch", ("blackwel",), {}, "'blackwel' is no architecture that is known; did you mean 'blackwell'?"),
    ("needs_arch", (120,), {}, "(ada, ampere, blackwell, hopper, turing, volta)"),
    ("needs_gpus", (), {}, "missing a required argument: 'n'; it is written needs_gpus(n, vram=None"),
    ("needs_gpus", (0,), {}, "0 is not a count of GPUs"),
    ("needs_gpus", ("8",), {}, "'8' is not a count of GPUs"),
    ("needs_gpus", (True,), {}, "True is not a count of GPUs"),
    ("needs_gpus", (2,), {"vrm": "96GB"}, "unknown argument 'vrm'; did you mean 'vram'?"),
    ("needs_gpus", (2,), {"vram": "96"}, "vram='96' is not a size: write a number and a unit"),
    ("needs_gpus", (2,), {"vram": 96}, "vram=96 is not a size"),
    ("needs_gpus", (2,), {"link": "nvlnk"}, "link='nvlnk' is none of nvlink, pcie, pix; did you mean 'nvlink'?"),
    ("needs_gpus", (2,), {"exclusive": "yes"}, "exclusive='yes' is neither True nor False"),
    ("needs_driver", (580,), {}, '580 is not a version range: write ">=13"'),
    ("needs_driver", ("580",), {}, "'580' is not a version range: write ranges such as '>=0.5.6,<0.5.8'"),
    ("needs_cuda", ("",), {}, "'' is not a version range"),
    ("needs_cuda", ("===13",), {}, "cannot be compared by release"),
    ("needs_package", ("",), {}, "'' is not a requirement: write needs_package(\"flashinfer-python>=0.6.9\")"),
    ("needs_package", ("a b",), {}, "'a b' is not a requirement"),
    ("needs_package", ("sglang>=new",), {}, "'>=new' is not a version range"),
    # server
    ("serves", (), {}, "missing a required argument: 'engine'; it is written serves(engine, model, *flags, "),
    ("serves", ("sglan", "m"), {}, "'sglan' is no engine that is known; did you mean 'sglang'? (sglang, vllm)"),
    ("serves", ("sglang", ""), {}, "'' is not a model: give a folder, a hub id or a name from gpuguard_models"),
    ("serves", ("sglang", "--tp 2"), {}, "the model comes before the flags, got '--tp 2'"),
    ("serves", ("sglang", "m", ["--tp", "2"]), {}, "flags: ['--tp', '2'] is not a string"),
    ("serves", ("sglang", "m", "--a 'b"), {}, "cannot be split as a shell would: No closing quotation"),
    ("serves", ("sglang", "m", "--tp two"), {}, "--tp-size 'two' is not a count of ranks"),
    ("serves", ("sglang", "m", "--tp 4"), {"layout": "TP8"}, "layout TP8 says TP8, but the flags say --tp-size 4"),
    ("serves", ("sglang", "m"), {"layout": "TP2 EP4"}, 'for 8 GPUs write "TP8 EP4"'),
    ("serves", ("sglang", "m"), {"layuot": "TP2"}, "unknown argument 'layuot'; did you mean 'layout'?"),
    ("serves", ("sglang", "m"), {"boot_timeout": "soon"}, 'boot_timeout=\'soon\' is not a duration: write "90s"'),
    ("serves", ("sglang", "m"), {"env": "A=1"}, "env='A=1' is not a dictionary: write env={\"NAME\": \"value\"}"),
    ("serves", ("sglang", "m"), {"env": {"A": 1}}, "env={'A': 1}: names and values are strings"),
    ("serves", ("sglang", "m"), {"env": {"A=B": "1"}}, "names and values are strings"),
    ("serves", ("sglang", "m"), {"wrapper": ["numactl"]}, "wrapper: ['numactl'] is not a string"),
    ("serves", ("sglang", "m"), {"portable": 1}, "portable=1 is neither True nor False"),
    ("serves", ("sglang", "m"), {"measured": 77.7}, 'measured=77.7 is not a dictionary: write measured={"weights_gib"'),
    ("serves", ("sglang", "m"), {"measured": {"weights": "77"}}, "measured={'weights': '77'}: values are numbers"),
    ("serves", ("sglang", "m"), {"measured": {"weights_gib": -1}}, "values are numbers above zero"),
    # expectations
    ("fits", ("2GiB",), {}, "too many positional arguments; it is written fits(*, margin=None, kv_tokens=None, "),
    ("fits", (), {"kv_token": ">=1"}, "unknown argument 'kv_token'; did you mean 'kv_tokens'?"),
    ("fits", (), {"zzz": 1}, "unknown argument 'zzz'; it takes margin, kv_tokens, when"),
    ("fits", (), {"margin": "2GB"}, "margin='2GB': engines print GiB and call it GB"),
    ("fits", (), {"margin": 2}, "margin=2 is not a size"),
    ("fits", (), {"kv_tokens": "=>9"}, "kv_tokens='=>9' is not a bound: write \">=262144\""),
    ("fits", (), {"when": "0.5"}, "when='0.5': '0.5' is not a term; write when=\"sglang>=0.5.15,<0.6\""),
    ("fits", (), {"when": ["sglang>=1"]}, "when=['sglang>=1'] is not a window"),
    ("works", ("ful",), {}, "level 'ful' is not known; did you mean 'full'?"),
    ("works", (), {"accuracy": ">=0.85"}, "accuracy needs questions=FILE to be measured on"),
    ("works", (), {"accuracy": "high", "questions": "q"}, "accuracy='high' is not a bound"),
    ("works", (), {"questions": 3}, "questions=3 is not text"),
    ("ooms", ("wieghts",), {}, "phase 'wieghts' is not known; did you mean 'weights'?"),
    ("ooms", ("disk",), {}, "it is one of weights, kv_pool, graph_capture, runtime, host"),
    ("ooms", (["weights"],), {}, "phase ['weights'] is not known"),
    ("unsupported", (" ",), {}, "say what is unsupported, in a few words"),
    ("unsupported", ("x",), {"how": "crash"}, "how 'crash' is not known; did you mean 'crashes'?"),
    ("unsupported", ("x",), {"match": "("}, "match='(' is not a regular expression: "),
    ("unsupported", ("x",), {"match": 3}, "match=3 is not a regular expression"),
    ("unsupported", ("x",), {"match": ""}, "match='' is found in every line: name words of the message"),
    ("unsupported", ("x",), {"match": ".*"}, "match='.*' is found in every line"),
    ("fails", ("hang.timout",), {}, "outcome 'hang.timout' is not known; did you mean 'hang.timeout'?"),
    ("fails", ("unknown",), {}, "outcome 'unknown' is not known"),
    ("fails", ("ready",), {}, "outcome 'ready' is not known"),
    ("fails", (["perf"],), {}, "outcome ['perf'] is not known"),
    ("fails", ("perf",), {"match": "["}, "is not a regular expression"),
    ("uses", ("",), {}, "feature='' is not text"),
    ("ignores", ("enable-x",), {}, "'enable-x' is not a flag"),
    ("ignores", (1,), {}, "1 is not a flag"),
    ("max_mem", ("75GB",), {}, "limit='75GB': engines print GiB and call it GB"),
    ("max_mem", ("75GiB",), {"of": "weight"}, "of 'weight' is not known; did you mean 'weights'?"),
    ("expect_toks", (), {}, "give either min=… or about=…"),
    ("expect_toks", (60,), {"about": 65}, "give either min=… or about=…"),
    ("expect_toks", (0,), {}, "min=0 is not a rate in tokens per second"),
    ("expect_toks", (), {"about": "65"}, "about='65' is not a rate in tokens per second"),
    ("expect_toks", (60,), {"concurrency": 0}, "concurrency=0 must be a whole number of at least 1"),
    ("expect_toks", (60,), {"input_len": 1.5}, "input_len=1.5 must be a whole number of at least 1"),
    ("expect_toks", (60,), {"output_len": True}, "output_len=True must be a whole number of at least 1"),
    ("expect_toks", (60,), {"per": "requests"}, "per 'requests' is not known; did you mean 'request'?"),
    ("expect_toks", (), {"about": 65, "tolerance": "5"}, "tolerance='5' is not a tolerance: write \"5%\" or 0.05"),
    ("works", ("full",), {}, 'level "full" needs a file'),
    ("expect_toks", (), {"min": {}}, "min={} names no card"),
    ("expect_toks", (), {"about": {"h200": "fast"}}, "about={'h200': 'fast'}: values are numbers above zero"),
    ("expect_toks", (), {"min": {"h200": 1, "NVIDIA H200": 2}}, "min: 'h200' is there twice"),
    ("expect_toks", (60,), {"limit": "soon"}, "limit='soon' is not a duration"),
    ("compare", (), {"other": pytest.mark.serves("sglang", "m"), "ratio": "==1"}, "no measured ratio is exact"),
    ("compare", (), {"other": pytest.mark.serves("sglang", "m"), "ratio": "<0"}, "no measured ratio is exact"),
    ("compare", (), {"other": pytest.mark.serves("sglang", "m"), "ratio": ">2", "concurrency": 0}, "concurrency=0"),
    ("compare", (), {"other": pytest.mark.serves("sglang", "m"), "ratio": ">2", "together": 1}, "together=1"),
    ("compare", (), {"other": "sglang", "ratio": ">2"}, 'other must be a server: compare(other=serves("sglang", …)'),
    ("compare", (), {"other": pytest.mark.fits(), "ratio": ">2"}, "other must be a server"),
    ("compare", (), {"other": pytest.mark.serves(), "ratio": ">2"}, "missing a required argument: 'engine'"),
    ("compare", (), {"other": pytest.mark.serves("sglang", "m"), "ratio": "2x"}, "ratio='2x' is not a bound"),
    ("claim", (), {"status": "hersay"}, "status 'hersay' is not known; did you mean 'hearsay'?"),
    ("claim", (), {"titel": "x"}, "unknown argument 'titel'; did you mean 'title'?"),
    ("claim", (), {"title": ""}, "title='' is not text"),
    ("claim", (), {"id": 7}, "id=7 is not text"),
    ("claim", (), {"source": " "}, "source=' ' is not text"),
    ("claim", (), {"recheck": "2027-13-01"}, "recheck='2027-13-01' is not a date: write \"2027-03-01\""),
    ("claim", (), {"recheck": "20270301"}, "recheck='20270301' is not a date"),
    ("claim", (), {"recheck": 2027}, "recheck=2027 is not a date"),
    ("claim", (), {"minutes": 0}, "minutes=0 is not a time"),
    ("claim", (), {"minutes": "12"}, "minutes='12' is not a time"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "kwargs", "said"), REFUSED)
def test_a_wrong_argument_is_refused_with_a_suggestion(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    mark = getattr(pytest_gpuguard, name)(*args, **kwargs).mark
    with pytest.raises(ClaimError, match=re.escape(said)):
        MARKERS[name].parse(mark)


def test_every_decorator_refuses_something() -> None:
    exact = {name for name in MARKERS if name.startswith("needs_sm") and name not in ("needs_sm", "needs_sm120")}
    assert {name for name, *_ in REFUSED} | exact == set(MARKERS)


@pytest.mark.parametrize("name", ["fits", "works", "ooms", "uses", "ignores", "max_mem", "unsupported", "fails"])
def test_every_expectation_checks_its_window(name: str) -> None:
    first: dict[str, tuple[str, ...]] = {
        "uses": ("x",), "ignores": ("--x",), "max_mem": ("1GiB",), "unsupported": ("x",), "fails": ("perf",)
    }  # fmt: skip
    mark = getattr(pytest_gpuguard, name)(*first.get(name, ()), when="sglang").mark
    with pytest.raises(ClaimError, match="'sglang' is not a term"):
        MARKERS[name].parse(mark)
