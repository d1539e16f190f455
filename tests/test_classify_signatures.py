"""The signature files: checked when loaded, with the id and the line of what is wrong."""

from __future__ import annotations

import pytest

from pytest_gpuguard.claims.outcome import OUTCOMES
from pytest_gpuguard.diagnose.data import PatternError, compile_bounded
from pytest_gpuguard.diagnose.signature import BY_PHASE, SignatureSet
from pytest_gpuguard.diagnose.signatures import SignatureError, load_signatures, parse_signatures

GOOD = """\
[[signature]]
id = "one"
any = ["it broke"]
outcome = "illegal_memory"
why = "it broke"
sources = ["program/file.py"]
"""


@pytest.mark.parametrize("engine", ["sglang", "vllm", None])
def test_the_shipped_files_load_and_say_where_they_are_from(engine: str | None) -> None:
    signatures = load_signatures(engine).all()
    assert len(signatures) > 40
    assert len({signature.id for signature in signatures}) == len(signatures)
    for signature in signatures:
        assert signature.outcome in OUTCOMES or signature.outcome == BY_PHASE
        assert signature.sources
        assert not signature.why.endswith(".")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('"illegal_memory"', '"illegal_mem"'), "'illegal_mem' is not an outcome"),
        (('any = ["it broke"]\n', ""), "`any` must list literals"),
        (('["it broke"]', '["x"]'), "`any` must list literals"),
        (('["it broke"]', '"it broke"'), "`any` must list literals"),
        (('why = "it broke"\n', ""), "no why"),
        (('"program/file.py"', '"a/b#1"'), "two independent public reports"),
        (('"program/file.py"', '"someone said so", "and someone else"'), "two independent public reports"),
        (("why =", 'tier = "maybe"\nwhy ='), "tier is one of cause"),
        (("why =", 'where = "dream"\nwhy ='), "where is one of"),
        (("why =", 'phase = "lunch"\nwhy ='), "'lunch' is not a phase"),
        (("why =", 'versions = "newest"\nwhy ='), "'newest' is not a version window"),
        (("why =", "severity = 3\nwhy ="), "unknown key 'severity'"),
        (("why =", "pattern = '('\nwhy ="), "not a regular expression"),
        (("why =", "pattern = 'it .*'\nwhy ="), "an unbounded quantifier"),
        (("why =", "pattern = '(?:a{1,30}){1,30}'\nwhy ="), "nested quantifiers"),
        (("why =", "frame = '(?:x+)+'\nwhy ="), "an unbounded quantifier"),
        (("why =", "pattern = '.{0,400}a.{0,400}b'\nwhy ="), "too much backtracking"),
    ],
)
def test_what_is_wrong_is_named_with_file_line_and_id(change: tuple[str, str], problem: str) -> None:
    text = "# a comment\n" + GOOD.replace(*change)
    with pytest.raises(SignatureError, match=problem) as caught:
        parse_signatures({"x.toml": text})
    # The line of the key that is wrong, or of the id where the key is not there at all.
    new = [n for n, line in enumerate(text.splitlines()[1:], 2) if line not in GOOD.splitlines()]
    assert str(caught.value).startswith(f"x.toml:{new[0] if new else 3}: signature one: ")


def test_a_missing_id_a_double_id_and_broken_toml_are_refused() -> None:
    with pytest.raises(SignatureError, match=r"x\.toml: a signature without id"):
        parse_signatures({"x.toml": GOOD.replace('id = "one"\n', "")})
    with pytest.raises(SignatureError, match=r"y\.toml:2: signature one: the id is used twice"):
        parse_signatures({"x.toml": GOOD, "y.toml": GOOD})
    with pytest.raises(SignatureError, match=r"x\.toml: .*line 1"):
        parse_signatures({"x.toml": "= 3"})


def test_two_public_reports_are_enough() -> None:
    signatures = parse_signatures({"x.toml": GOOD.replace('"program/file.py"', '"a/b#1", "c/d#2"')})
    assert signatures.exceptions[0].id == "one"


@pytest.mark.parametrize(
    ("window", "version", "applies"),
    [
        (">=0.5.15", "0.5.15.dev1", True),
        (">=0.5.15", "0.5.14", False),
        ("<0.5.8", "0.5.7.post2", True),
        (">=0.5.15", None, True),
        (">=0.5.15", "not a version", True),
    ],
)
def test_a_signature_of_other_releases_is_left_out(window: str, version: str | None, applies: bool) -> None:
    text = GOOD.replace("why =", f'versions = "{window}"\nwhy =')
    found: SignatureSet = parse_signatures({"x.toml": text}, version)
    assert (len(found.exceptions) == 1) is applies


@pytest.mark.parametrize("pattern", [r"a{0,500}b", r"^[\w.]{1,80}: x", r"(?i)is (?:not|no) y", r"(?!.{0,40}x)y"])
def test_bounded_patterns_compile(pattern: str) -> None:
    assert compile_bounded(pattern).pattern == pattern


@pytest.mark.parametrize("pattern", [r"a+", r"a*?", r"(a|b)*", r"a{3,}", r"a{0,9000}", r"(?:a?b?){0,400}", r"[("])
def test_patterns_that_could_take_long_do_not(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_bounded(pattern)


def test_importing_the_reader_pulls_in_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, pytest_gpuguard.engines.log, pytest_gpuguard.engines.flags, pytest_gpuguard.diagnose;"
        "print([m for m in ('httpx', 'rich', 'pynvml', 'psutil', 'filelock', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
