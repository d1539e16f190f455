"""The decorators: what each takes, what it refuses and with which words, and that all lists of names agree."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

import pytest_gpuguard
from pytest_gpuguard import names
from pytest_gpuguard.claims.architectures import SM_ARCHITECTURES
from pytest_gpuguard.claims.claim import About, Serves
from pytest_gpuguard.claims.errors import ClaimError, suggest
from pytest_gpuguard.claims.expect import (
    Compare,
    ExpectToks,
    Fails,
    Fits,
    Ignores,
    MaxMem,
    Ooms,
    Unsupported,
    Uses,
    Works,
)
from pytest_gpuguard.claims.layout import Layout
from pytest_gpuguard.claims.markers import MARKERS, architectures
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.outcome import HOST_FAULTS, OOM_PHASES, STACK_FAILURES
from pytest_gpuguard.claims.units import Comparison
from pytest_gpuguard.claims.window import parse_window
from pytest_gpuguard.facts.gpu import known_sms

WHEN = parse_window("sglang>=0.5.15")


def parse(name: str, *args: Any, **kwargs: Any) -> Any:
    """What ``@name(*args, **kwargs)`` declares."""
    return MARKERS[name].parse(getattr(pytest_gpuguard, name)(*args, **kwargs).mark)


# ---------------------------------------------------------------------------------------------------- lists of names


def test_every_list_of_decorators_is_the_same() -> None:
    assert set(MARKERS) == names.MARKS == set(pytest_gpuguard.__all__)
    assert len(pytest_gpuguard.__all__) == len(MARKERS)
    assert all(name == marker.name for name, marker in MARKERS.items())


def test_every_exported_name_is_its_decorator() -> None:
    assert all(getattr(pytest_gpuguard, name) is MARKERS[name] for name in pytest_gpuguard.__all__)


def test_the_names_that_type_checkers_see_are_the_exported_ones() -> None:
    with open(pytest_gpuguard.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(set(imported) - {"annotations", "TYPE_CHECKING", "Any"} - {"markers"}) == sorted(
        pytest_gpuguard.__all__
    )


def test_a_name_that_is_not_exported_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pytest_gpuguard' has no attribute 'needs_sm121a'"):
        _ = pytest_gpuguard.needs_sm121a


def test_every_known_family_has_its_own_decorator() -> None:
    explicit = {name.removeprefix("needs_sm") for name in MARKERS if name.startswith("needs_sm") and name != "needs_sm"}
    assert explicit == set(SM_ARCHITECTURES) == set(names.SMS)
    assert {sm: parse(f"needs_sm{sm}") for sm in explicit} == {sm: Needs(sms=(sm,)) for sm in explicit}


def test_the_tables_of_architectures_agree() -> None:
    assert known_sms() == SM_ARCHITECTURES
    assert list(dict.fromkeys(SM_ARCHITECTURES.values())) == list(names.ARCHITECTURES)


def test_architecture_marks_follow_from_the_needs() -> None:
    assert list(architectures(Needs(sms=("120", "90")))) == ["blackwell", "hopper"]
    assert list(architectures(Needs(archs=("ada",)))) == ["ada"]
    assert list(architectures(Needs(gpus=2))) == []


# ------------------------------------------------------------------------------------------------ what makes a mark


def test_bare_and_called_are_the_same_mark() -> None:
    @pytest_gpuguard.ooms
    def bare() -> None: ...

    @pytest_gpuguard.ooms()
    def called() -> None: ...

    assert bare.pytestmark == called.pytestmark  # type: ignore[attr-defined]
    assert MARKERS["ooms"].parse(bare.pytestmark[0]) == Ooms()  # type: ignore[attr-defined]


def test_a_class_can_be_marked_bare() -> None:
    @pytest_gpuguard.needs_sm120
    class Cases: ...

    assert [mark.name for mark in Cases.pytestmark] == ["needs_sm120"]  # type: ignore[attr-defined]


def test_pytestmark_takes_decorators_bare_and_called(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_gpuguard import needs_gpus, needs_sm120
        pytestmark = [needs_sm120, needs_gpus(2)]
        def test_marks(request):
            assert [mark.name for mark in request.node.iter_markers()] == ["needs_sm120", "needs_gpus"]
        """
    )
    pytester.runpytest("-p", "no:gpuguard", "-W", "ignore").assert_outcomes(passed=1)


def test_a_typed_mark_equals_its_decorator() -> None:
    typed = pytest.mark.fits(margin="2GiB", kv_tokens=">=262144")
    ours = pytest_gpuguard.fits(margin="2GiB", kv_tokens=">=262144")
    assert typed == ours
    assert MARKERS["fits"].parse(typed.mark) == parse("fits", margin="2GiB", kv_tokens=">=262144")


def test_a_wrong_argument_is_no_error_before_collection() -> None:
    assert pytest_gpuguard.needs_gpus(-1).mark.args == (-1,)


def test_equal_marks_are_parsed_once() -> None:
    assert parse("fits", margin="3GiB") is parse("fits", margin="3GiB")


def test_what_is_equal_to_a_valid_argument_is_not_taken_for_it() -> None:
    assert parse("needs_gpus", 1) == Needs(gpus=1)
    for other in (True, 1.0):
        with pytest.raises(ClaimError, match="is not a count of GPUs"):
            parse("needs_gpus", other)


def test_help_shows_how_a_decorator_is_written_and_its_first_sentence() -> None:
    assert MARKERS["needs_gpus"].help() == (
        "needs_gpus(n, vram=None, link=None, exclusive=False): "
        'Needs ``n`` GPUs: ``needs_gpus(8, vram="96GB", link="pcie")``.'
    )
    assert MARKERS["ooms"].help().startswith("ooms(*phases, when=None): Memory runs out")


@pytest.mark.parametrize("name", sorted(MARKERS))
def test_help_is_one_line_that_pytest_reads_as_that_mark(name: str) -> None:
    line = MARKERS[name].help()
    assert "\n" not in line
    assert line.partition(":")[0].partition("(")[0] == name
    assert line.partition(": ")[2]


# ------------------------------------------------------------------------------------------------- valid arguments

VALID: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
    ("needs_sm", ("120", "SM121", "sm_90", "12.0"), {}, Needs(sms=("120", "121", "90"))),
    ("needs_arch", ("Blackwell",), {}, Needs(archs=("blackwell",))),
    ("needs_gpus", (8,), {}, Needs(gpus=8)),
    (
        "needs_gpus",
        (),
        {"n": 2, "vram": "96GB", "link": "pcie", "exclusive": True},
        Needs(gpus=2, vram_text="96GB", vram_bytes=96 * 10**9, link="pcie", exclusive=True),
    ),
    ("needs_driver", (">= 580",), {}, Needs(versions=(("driver", "driver", ">=580"),))),
    ("needs_cuda", (">=13,<14",), {}, Needs(versions=(("cuda", "cuda", ">=13,<14"),))),
    (
        "needs_package",
        ("Flashinfer_Python>=0.6.9",),
        {},
        Needs(versions=(("package", "flashinfer-python", ">=0.6.9"),)),
    ),
    ("needs_package", ("sglang",), {}, Needs(versions=(("package", "sglang", ""),))),
    ("serves", ("sglang", "m"), {}, Serves("sglang", "m")),
    (
        "serves",
        ("sglang", "m", "--tp-size 8 --served-model-name 'a b'", "--ep-size=8"),
        {
            "layout": "TP8 EP8",
            "env": {"A": "1"},
            "wrapper": "numactl -m 0",
            "boot_timeout": "40m",
            "portable": True,
            "measured": {"weights_gib": 77.7},
        },
        Serves(
            "sglang",
            "m",
            ("--tp-size", "8", "--served-model-name", "a b", "--ep-size=8"),
            Layout(8, 1, 8),
            {"A": "1"},
            ("numactl", "-m", "0"),
            2400.0,
            True,
            {"weights_gib": 77.7},
        ),
    ),
    ("fits", (), {}, Fits()),
    (
        "fits",
        (),
        {"margin": "2GiB", "kv_tokens": ">=262144", "when": "sglang>=0.5.15"},
        Fits(2.0, Comparison(">=", 262144), when=WHEN),
    ),
    ("fits", (), {"kv_tokens": 4096}, Fits(None, Comparison(">=", 4096))),
    ("works", (), {}, Works()),
    (
        "works",
        ("full",),
        {"accuracy": ">=0.85", "questions": "q.jsonl"},
        Works("full", Comparison(">=", 0.85), "q.jsonl"),
    ),
    ("ooms", ("weights", "host", "weights"), {"when": "sglang>=0.5.15"}, Ooms(("weights", "host"), when=WHEN)),
    ("unsupported", ("fp8",), {"how": "crashes", "match": "no kernel"}, Unsupported("fp8", "crashes", "no kernel")),
    ("fails", ("hang.timeout",), {"match": "watchdog"}, Fails("hang.timeout", "watchdog")),
    ("uses", ("custom_allreduce",), {}, Uses("custom_allreduce")),
    ("ignores", ("--enable-x",), {}, Ignores("--enable-x")),
    ("max_mem", ("75GiB",), {}, MaxMem(75.0, "static")),
    ("max_mem", ("512MiB",), {"of": "graph"}, MaxMem(0.5, "graph")),
    ("expect_toks", (60,), {}, ExpectToks(60)),
    (
        "expect_toks",
        (),
        {"about": 65, "tolerance": "10%", "concurrency": 8, "input_len": 1024, "output_len": 512, "per": "request"},
        ExpectToks(None, 65, 0.1, concurrency=8, input_len=1024, output_len=512, per="request"),
    ),
    (
        "expect_toks",
        (),
        {"min": {"NVIDIA H200": 120, "l4": 9.5}, "limit": "90s"},
        ExpectToks(cards=(("NVIDIA H200", 120), ("l4", 9.5)), by="min", limit_s=90.0),
    ),
    ("expect_toks", (), {"about": {"h200": 120}}, ExpectToks(cards=(("h200", 120),), by="about")),
    ("works", (), {"reference": "r.json"}, Works("full", reference="r.json")),
    (
        "claim",
        (),
        {"status": "hearsay", "recheck": "2027-03-01", "minutes": 12},
        About(None, None, None, "2027-03-01", 12, "hearsay"),
    ),
    ("claim", (), {"title": "t", "id": "i", "source": "s"}, About("t", "i", "s")),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "value"), VALID)
def test_valid_arguments_declare_a_value(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
    assert parse(name, *args, **kwargs) == value


def test_every_decorator_has_a_valid_example() -> None:
    assert {name for name, *_ in VALID} | {f"needs_sm{sm}" for sm in names.SMS} | {"compare"} == set(MARKERS)


@pytest.mark.parametrize("phase", OOM_PHASES)
def test_every_phase_of_memory_can_be_claimed(phase: str) -> None:
    assert parse("ooms", phase) == Ooms((phase,))


@pytest.mark.parametrize("outcome", sorted(STACK_FAILURES))
def test_every_failure_of_the_stack_can_be_claimed(outcome: str) -> None:
    assert parse("fails", outcome) == Fails(outcome)


@pytest.mark.parametrize("outcome", sorted(HOST_FAULTS))
def test_no_fault_of_the_host_can_be_claimed(outcome: str) -> None:
    with pytest.raises(ClaimError, match="is a fault of the host or the test, which no claim can be about"):
        parse("fails", outcome)


def test_a_comparison_takes_the_other_server_as_a_decorator_or_a_mark() -> None:
    other = pytest_gpuguard.serves("sglang", "m", "--tp 2")
    expected = Compare(Serves("sglang", "m", ("--tp", "2")), Comparison(">", 2), limit_s=600.0)
    assert parse("compare", other=other, ratio=">2") == expected
    assert parse("compare", other.mark, ">2") == expected


# ----------------------------------------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize(("word", "hint"), [("kv_token", "; did you mean 'kv_tokens'?"), ("zzz", ""), ("", "")])
def test_only_a_near_word_is_suggested(word: str, hint: str) -> None:
    assert suggest(word, ["margin", "kv_tokens"]) == hint


def test_an_endless_number_is_no_number() -> None:
    for name, kwargs in (("expect_toks", {"min": math.nan}), ("claim", {"minutes": math.inf})):
        with pytest.raises(ClaimError):
            parse(name, **kwargs)
