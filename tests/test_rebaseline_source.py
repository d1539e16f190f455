"""How ``rebaseline`` edits source: many forms of decorators, and nothing else changed by a byte."""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuguard.rebaseline import patch, propose
from pytest_gpuguard.rebaseline.diff import difference, edited
from pytest_gpuguard.rebaseline.source import parse, place_of
from pytest_gpuguard.rebaseline.statements import literal, words_of
from tests import rebaselines
from tests.rebaselines import FILE, OLD, apply, failed, flip, git, judged, put, ready, refused, verdict_of

OOM = failed("oom.kv_pool")
OURS = "from pytest_gpuguard import fits, ooms\n"
OLD_WINDOW, NEW_WINDOW = 'when="sglang<0.5.9"', 'when="sglang>=0.5.9"'


def divided(root: Path, text: str, test: str = "test_it") -> str:
    """The file after ``ooms`` began to fit with sglang 0.5.9."""
    before, now = judged(text, OOM, OLD, run="r1", test=test), judged(text, ready(), test=test)
    found = rebaselines.edited(root, text, now, [flip(before, now)])
    assert verdict_of(found, ready(), test=test) == verdict_of(found, OOM, OLD, test=test) == "HOLDS"
    return found


FORMS = [
    (OURS, '@ooms("kv_pool")', f'@ooms("kv_pool", {OLD_WINDOW})', "fits"),
    (OURS, '@ooms("kv_pool",)', f'@ooms("kv_pool", {OLD_WINDOW})', "fits"),
    (OURS, "@ooms", f"@ooms({OLD_WINDOW})", "fits"),
    (OURS, "@ooms()  # any phase", f"@ooms({OLD_WINDOW})  # any phase", "fits"),
    (OURS, '@ooms(("kv_pool"))', f'@ooms(("kv_pool"), {OLD_WINDOW})', "fits"),
    (OURS, '@ooms(  # a\n    "kv_pool"  # b)\n)', f'@ooms(  # a\n    "kv_pool", {OLD_WINDOW}  # b)\n)', "fits"),
    (
        OURS,
        '@ooms(\n    "kv_pool",  # why, (really\n    # more\n)',
        f'@ooms(\n    "kv_pool",  # why, (really\n    {OLD_WINDOW},\n    # more\n)',
        "fits",
    ),
    (OURS, '@ooms("kv_pool", when="sglang<0.9")', f'@ooms("kv_pool", {OLD_WINDOW})', None),
    (OURS, '@ooms("kv" "_pool")', f'@ooms("kv" "_pool", {OLD_WINDOW})', "fits"),
    (
        "import pytest\n",
        '@pytest.mark.ooms("kv_pool")',
        f'@pytest.mark.ooms("kv_pool", {OLD_WINDOW})',
        "pytest.mark.fits",
    ),
    ("import pytest as pt\n", "@pt.mark.ooms", f"@pt.mark.ooms({OLD_WINDOW})", "pt.mark.fits"),
    ("from pytest import mark as m\n", "@m.ooms", f"@m.ooms({OLD_WINDOW})", "m.fits"),
    ("import pytest_gpuguard as gg\n", "@gg.ooms", f"@gg.ooms({OLD_WINDOW})", "gg.fits"),
    ("from pytest_gpuguard import ooms as o, fits as f\n", "@o", f"@o({OLD_WINDOW})", "f"),
    ("from pytest_gpuguard import *\n", "@ooms", f"@ooms({OLD_WINDOW})", "fits"),
    ('import pytest_gpuguard as gg\nPOOL = "kv_pool"\n', "@gg.ooms(POOL)", f"@gg.ooms(POOL, {OLD_WINDOW})", "gg.fits"),
]


@pytest.mark.parametrize(("head", "old", "new", "fits"), FORMS)
def test_every_way_to_write_a_mark_is_edited_in_place(
    tmp_path: Path, head: str, old: str, new: str, fits: str | None
) -> None:
    window = NEW_WINDOW if fits is not None else 'when="sglang>=0.5.9,<0.9"'
    text = f'"""é."""\n{head}\n\n@other  # é\n{old}\ndef test_it():  # why\n    x = "é\\\n"\n\t\n'
    assert divided(tmp_path, text) == text.replace(f"\n{old}\n", f"\n{new}\n@{fits or 'fits'}({window})\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from pytest_gpuguard import ooms", "from pytest_gpuguard import fits, ooms"),
        ("from pytest_gpuguard import claim, ooms", "from pytest_gpuguard import claim, fits, ooms"),
        ("from pytest_gpuguard import ooms, claim", "from pytest_gpuguard import ooms, claim, fits"),
        ("from pytest_gpuguard import (ooms)", "from pytest_gpuguard import (fits, ooms)"),
        ("from pytest_gpuguard import claim, \\\n    ooms", "from pytest_gpuguard import claim, \\\n    fits, ooms"),
        (
            "from pytest_gpuguard import (\n    claim,  # a\n    ooms,\n)",
            "from pytest_gpuguard import (\n    claim,  # a\n    fits,\n    ooms,\n)",
        ),
        (
            "from pytest_gpuguard import (\n    ooms,\n    claim,  # a\n)",
            "from pytest_gpuguard import (\n    ooms,\n    claim,  # a\n    fits,\n)",
        ),
        ("from pytest_gpuguard.claims.markers import ooms\nimport pytest", None),
        ("from pytest_gpuguard import ooms\nimport pytest\nfits = 3", None),
    ],
)
def test_a_name_that_is_missing_is_imported_or_spelt_out(tmp_path: Path, before: str, after: str | None) -> None:
    text = f"{before}\n\n\n@ooms\ndef test_it(): ...\n"
    wanted = text.replace(before, after or before).replace(
        "@ooms\n", f"@ooms({OLD_WINDOW})\n@{'fits' if after else 'pytest.mark.fits'}({NEW_WINDOW})\n"
    )
    assert divided(tmp_path, text) == wanted


def test_one_import_serves_all_tests_of_a_file(tmp_path: Path) -> None:
    text = "from pytest_gpuguard import ooms\n\n\n@ooms\ndef test_a(): ...\n\n\n@ooms\ndef test_b(): ...\n"
    path = put(tmp_path, text)
    now = [*judged(text, ready(), test="test_a"), *judged(text, failed("jit.smem", "out of"), test="test_b")]
    proposals, told = propose(now, [], tmp_path)
    assert not told
    apply(tmp_path, proposals)
    assert path.read_text() == (
        "from pytest_gpuguard import fails, fits, ooms\n\n\n"
        '@fits\ndef test_a(): ...\n\n\n@fails("jit.smem", match="out of")\ndef test_b(): ...\n'
    )


def test_methods_nested_classes_and_coroutines_are_found(tmp_path: Path) -> None:
    text = f"{OURS}\n\nclass TestA:\n\tclass TestB:\n\t\t@ooms\n\t\tasync def test_it(self): ...\n"
    found = divided(tmp_path, text, "TestA::TestB::test_it")
    assert found == text.replace("@ooms\n", f"@ooms({OLD_WINDOW})\n\t\t@fits({NEW_WINDOW})\n")


@pytest.mark.parametrize("ending", ["", "\r\n", "\n"])
def test_line_ends_and_a_byte_order_mark_stay(tmp_path: Path, ending: str) -> None:
    text = "\ufeff" + f"{OURS}@ooms\ndef test_it(): ...  # \x0c".replace("\n", "\r\n") + ending
    found = divided(tmp_path, text)
    assert found == text.replace("@ooms\r\n", f"@ooms({OLD_WINDOW})\r\n@fits({NEW_WINDOW})\r\n")


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (f"{OURS}tiny = ooms()\n@tiny\ndef test_it(): ...\n", 2, "ooms is the variable tiny"),
        (f"{OURS}pytestmark = [ooms]\ndef test_it(): ...\n", 2, "ooms is stated for the whole module"),
        (f"{OURS}@ooms\nclass TestA:\n    def test_it(self): ...\n", 2, "ooms is stated for the whole class"),
        (f"{OURS}class TestA:\n    pytestmark = ooms()\n    def test_it(self): ...\n", 3, "the whole class"),
        ("from pytest_gpuguard.claims.markers import ooms\n@ooms\ndef test_it(): ...\n", 3, "does not import fits"),
    ],
)
def test_what_cannot_be_edited_safely_is_told_with_its_place(tmp_path: Path, text: str, line: int, why: str) -> None:
    test = "TestA::test_it" if "class TestA" in text else "test_it"
    before, now = judged(text, OOM, OLD, run="r1", test=test), judged(text, ready(), test=test)
    one = refused(tmp_path, text, now, [flip(before, now)])
    assert why in one.why
    assert one.line == line
    assert one.write is not None
    assert f"@fits({NEW_WINDOW})" in one.write


def test_arguments_that_only_a_run_knows_are_told(tmp_path: Path) -> None:
    stated = f"{OURS}@ooms('kv_pool')\ndef test_it(): ...\n"
    text = f"{OURS}import os\n@ooms(os.environ['PHASE'])\ndef test_it(): ...\n"
    one = refused(tmp_path, text, judged(stated, ready()))
    assert (one.line, one.why) == (3, "the arguments of ooms are known to a run only")
    text = "from pytest_gpuguard import expect_toks\nFLOOR = 60\n@expect_toks(min=FLOOR)\ndef test_it(): ...\n"
    seen = rebaselines.rates("expect_toks(min=60)", [52.0] * 8)
    one = refused(tmp_path, text, judged(text, seen))
    assert (one.line, one.write) == (3, "min=51")
    assert "is the name FLOOR" in one.why


def test_a_claim_that_was_edited_since_the_run_is_left_alone(tmp_path: Path) -> None:
    now = judged(f"{OURS}@ooms\ndef test_it(): ...\n", ready())
    one = refused(tmp_path, f"{OURS}@fits\n\ndef test_it(): ...\n", now)
    assert "it states fits on this stack, and ooms was judged: edited since" in one.why
    moved = f"\n\n# new\n{OURS}\n@ooms\ndef test_it(): ...\n"
    assert rebaselines.edited(tmp_path, moved, now) == moved.replace("@ooms", "@fits")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"# coding: latin-1\n# \xe9\n", "encoded in latin-1"),
        (b"# \xff\n", "not encoded in UTF-8"),
        (b"def broken(:\n", "it is no Python"),
        (b"x = 1\x00\n", "it is no Python"),
        (b"x = 1\ry = 2\n", "carriage returns"),
        (b"", "there is no function test_it"),
        (b"def test_it(): ...\ndef test_it(): ...\n", "there are 2 of function test_it"),
        (b"-" * 100_000 + b"1\n", "it is no Python"),
    ],
)
def test_files_that_cannot_be_edited_are_told(tmp_path: Path, data: bytes, why: str) -> None:
    put(tmp_path, data)
    proposals, (one,) = propose(judged(f"{OURS}@ooms\ndef test_it(): ...\n", ready()), [], tmp_path)
    assert proposals == []
    assert why in one.why


def test_files_that_are_gone_elsewhere_or_no_files_are_told(tmp_path: Path) -> None:
    text = f"{OURS}@ooms\ndef test_it(): ...\n"
    now = judged(text, ready())
    root = tmp_path / "root"
    (root / "tests").mkdir(parents=True)
    assert "there is no such file" in propose(now, [], root)[1][0].why
    outside = put(tmp_path, text, "outside.py")
    (root / FILE).symlink_to(outside)
    assert "lies outside" in propose(now, [], root)[1][0].why
    (root / FILE).unlink()
    os.mkfifo(root / FILE)
    assert "there is no such file" in propose(now, [], root)[1][0].why
    (root / FILE).unlink()
    put(root, text, "real.py")
    (root / FILE).symlink_to(root / "real.py")  # git writes through no link: the patch is for the file itself
    proposals, told = propose(now, [], root)
    assert not told
    apply(root, proposals)
    assert (root / FILE).is_symlink()
    assert "@fits" in (root / "real.py").read_text()


@pytest.mark.parametrize("name", ["a b.py", 'a"b\\.py', "é/ü.py", "a\tb.py", "-a.py"])
def test_unusual_names_of_files_are_written_as_git_does(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, "a\n", name)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    path.write_text("b\n")
    plain = [line for line in git(tmp_path, "diff").stdout.decode().split("\n") if not line.startswith("index ")]
    ours = difference(name, "a\n", "b\n")
    assert ours.replace("@@ -1 +1 @@", "@@").split("\n") == "\n".join(plain).replace("@@ -1 +1 @@", "@@").split("\n")
    path.write_text("a\n")
    assert git(tmp_path, "apply", "-", data=ours.encode()).returncode == 0
    assert path.read_text() == "b\n"


def test_the_name_of_a_stack_is_no_parameter() -> None:
    assert place_of("a.py::test_it[new]", "new").parameters == ""
    assert place_of("a.py::test_it[x-1-new]", "new").parameters == "x-1"
    assert place_of("a[b]/c.py::A::test_it[x::y]", "new").names == ("A", "test_it")


@given(st.text(min_size=1))
def test_any_text_becomes_a_literal_that_means_it(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
    assert literal(text).isprintable()


@given(st.text())
def test_words_of_a_line_are_found_in_it_and_never_in_nothing(line: str) -> None:
    import re

    words = words_of(line)
    assert words is None or (re.search(words, line) and not re.search(words, ""))


PIECES = st.sampled_from([*(form for form in FORMS if form[0] == OURS)])
NOISE = st.sampled_from(
    [
        "# é\n",
        "\n",
        "@other\n",
        '@pytest.mark.skipif(x, reason="a, b)")\n',
        "@ooms2(  # (\n)\n",
        "\t\n",
        "# \x0c\u2028\n",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(PIECES, st.lists(NOISE, max_size=3)), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_patch_that_git_applies_gives_exactly_the_edited_text(
    tmp_path: Path, tests: list[tuple[tuple[str, str, str, str | None], list[str]]], crlf: bool, ended: bool
) -> None:
    text = "from pytest_gpuguard import ooms\n"
    for number, (form, noise) in enumerate(tests):
        text += f"\n{''.join(noise)}{form[1]}\n{''.join(noise)}def test_{number}():\n    pass\n"
    text = text if ended else text.removesuffix("\n")
    text = text.replace("\n", "\r\n") if crlf else text
    before = [one for n in range(len(tests)) for one in judged(text, OOM, OLD, run="r1", test=f"test_{n}")]
    now = [one for n in range(len(tests)) for one in judged(text, ready(), test=f"test_{n}")]
    path = put(tmp_path, text)
    proposals, told = propose(now, [flip([old], [new]) for old, new in zip(before, now, strict=True)], tmp_path)
    assert not told
    assert len(proposals) == len(tests)
    ((_, wanted),) = edited(proposals)
    apply(tmp_path, proposals)
    assert path.read_bytes() == wanted.encode()
    added = [line for line in patch(proposals).split("\n") if line.startswith("+") and not line.startswith("+++")]
    assert all("when=" in line or "import" in line for line in added)
    parse(FILE, wanted)


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"memory": {"kv_tokens": "many", "weights_gib": True}, "rates": 3, "decisive": [], "peak_gib": "x"},
        {"rates": {"expect_toks(1, 128, 64, total)": {"samples": ["a", None], "baseline": 3}}, "warnings": None},
        {"rates": {"expect_toks(1, 128, 64, total)": {"samples": [float("nan")] * 9}}, "memory": []},
    ],
)
def test_evidence_that_is_none_leads_to_no_number(tmp_path: Path, evidence: dict[str, object]) -> None:
    text = "from pytest_gpuguard import expect_toks\n@expect_toks(min=60)\ndef test_it(): ...\n"
    now = judged(text, rebaselines.rates("expect_toks(min=60)", [52.0] * 8))
    one = refused(tmp_path, text, [replace(each, evidence=evidence) for each in now])
    assert "no number was measured that it could state" in one.why


def test_source_that_nests_too_deeply_is_told(tmp_path: Path) -> None:
    text = f"{OURS}@ooms\ndef test_it(): ...\n"
    chain = "if a: pass\n" + "elif a: pass\n" * 3000
    one = refused(tmp_path, text + chain, judged(text, ready()))
    assert "it is no Python that this interpreter reads" in one.why
