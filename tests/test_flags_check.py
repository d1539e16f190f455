"""Flags against a release's ``--help`` and the table of all releases, the way argparse itself takes them."""

from __future__ import annotations

import argparse
import contextlib
import io

import pytest

from pytest_gpuguard.claims.layout import flag_value
from pytest_gpuguard.engines.flags import (
    FlagFacts,
    FlagSet,
    ReleaseTable,
    check_flags,
    load_releases,
    parse_help,
)

from .laws import given, settings, st

OPTIONS: list[tuple[list[str], dict[str, object]]] = [
    (["--model-path", "--model"], {"required": True, "help": "The path of the weights, see --not-a-flag."}),
    (["--tp-size", "--tensor-parallel-size"], {"type": int, "help": "The size; -1 means automatic."}),
    (["-p", "--port"], {"type": int}),
    (["--load-format"], {"choices": ["auto", "dummy"], "help": "%(choices)s"}),
    (["--trust-remote-code"], {"action": "store_true"}),
    (["--cuda-graph-bs-decode"], {"nargs": "+", "type": int}),
    (["--cuda-graph-max-bs-decode"], {"type": int}),
    (["--cuda-graph-max-bs-prefill"], {"type": int, "help": "A very long explanation " * 12}),
    (["--numa-node"], {"nargs": "*"}),
    (["--tune"], {"nargs": "?"}),
    (["--enable-it"], {"action": argparse.BooleanOptionalAction}),
    (["--json"], {}),
]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="sglang serve", exit_on_error=True)
    for names, keywords in OPTIONS:
        made.add_argument(*names, **keywords)  # type: ignore[arg-type]
    return made


def help_text(columns: str = "80") -> str:
    import os
    from unittest import mock

    with mock.patch.dict(os.environ, {"COLUMNS": columns}):
        return parser().format_help()


KNOWN = parse_help(help_text())
TABLE = ReleaseTable(
    "sglang",
    ("0.4.6", "0.5.12", "0.5.23"),
    {
        "--cuda-graph-max-bs": FlagFacts(
            "--cuda-graph-max-bs", (("0.4.6", "0.5.12"),), "value", use="--cuda-graph-max-bs-decode"
        ),
        "--tp-size": FlagFacts("--tp-size", (("0.4.6", None),), "value"),
        "--newer": FlagFacts("--newer", (("0.5.23", None),), "nothing"),
        "--once": FlagFacts("--once", (("0.5.12", "0.5.12"),), "nothing"),
        "--hidden": FlagFacts("--hidden", (("0.5.12", None),), "value", hidden=True),
    },
)


def kinds(line: str) -> list[tuple[str, str]]:
    return [(problem.flag, problem.kind) for problem in check_flags(line.split(), KNOWN, TABLE)]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_is_read_at_any_width(columns: str) -> None:
    flags = parse_help(help_text(columns))
    wanted = {name for names, _ in OPTIONS for name in names} | {"-h", "--help", "--no-enable-it"}
    assert flags.options == wanted
    assert {"--model", "--port", "-p", "--cuda-graph-bs-decode", "--numa-node"} <= flags.takes_value
    assert not {"--trust-remote-code", "--help"} & flags.takes_value
    assert flags.choices is not None
    assert flags.choices["--load-format"] == ("auto", "dummy")


def test_text_without_options_gives_an_empty_set() -> None:
    assert (
        parse_help("")
        == parse_help("Traceback (most recent call last):\n  File 'x'\n")
        == FlagSet(frozenset(), frozenset(), {})
    )


def test_newer_argparse_writes_the_value_once() -> None:
    flags = parse_help("options:\n  -m, --model MODEL     the model\n  --x {a,b}             x\n")
    assert flags.options == {"-m", "--model", "--x"}
    assert flags.takes_value == {"-m", "--model", "--x"}


def test_flags_that_the_release_takes_are_fine() -> None:
    assert (
        kinds("--model m --tp-size 8 --tp 8 --tensor=8 -p 80 -p80 --port=80 --trust -h --no-enable-it --hidden 3") == []
    )
    assert kinds("--tp-size -1 --tune -0.5 --numa-node -1 -2 - m --json -1e-3") == []
    assert check_flags(["--json", "-a b", "--", "--nope"], KNOWN, TABLE) == []


def test_another_release_s_flag_is_removed_and_names_it() -> None:
    (problem,) = check_flags(["--cuda-graph-max-bs=8"], KNOWN, TABLE)
    assert (problem.flag, problem.kind) == ("--cuda-graph-max-bs", "removed")
    assert "0.4.6–0.5.12" in problem.message
    assert "use --cuda-graph-max-bs-decode" in problem.message
    (newer,) = check_flags(["--newer"], KNOWN, TABLE)
    assert (newer.kind, "since 0.5.23" in newer.message) == ("removed", True)
    (once,) = check_flags(["--once"], KNOWN, TABLE)
    assert "sglang 0.5.12 knows it" in once.message


def test_a_flag_of_no_release_is_unknown_and_suggests_one() -> None:
    (problem,) = check_flags(["--trust-remote-cod", "--trust-remote-coed"][1:], KNOWN, TABLE)
    assert (problem.kind, "did you mean --trust-remote-code?" in problem.message) == ("unknown", True)
    (other,) = check_flags(["--cuda-graph-mx-bs"], FlagSet(frozenset({"--x"})), TABLE)
    assert "--cuda-graph-max-bs is one of sglang 0.4.6–0.5.12" in other.message
    (wild,) = check_flags(["--zzz"], KNOWN, TABLE)
    assert "no release of sglang from 0.4.6 to 0.5.23" in wild.message
    assert kinds("--tp_size 3 --trust_remote_code") == [("--tp_size", "unknown"), ("--trust_remote_code", "unknown")]


def test_an_ambiguous_abbreviation_is_a_problem() -> None:
    (problem,) = check_flags(["--cuda-graph-max-b", "3"], KNOWN, TABLE)
    assert problem.kind == "ambiguous"
    assert "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill" in problem.message


TRIED = """
--tp --tp-size --t --mod --model --cuda --cuda-graph-max --nope --nope=1 --p --port=3 -p3 -p -x -1 -1.5 --tune --enable
--no-e --load-format=dummy --e -h1 --j --numa
"""
WORDS = st.sampled_from(TRIED.split())


@given(WORDS)
@settings(max_examples=200, deadline=None)
def test_words_are_taken_as_argparse_takes_them(word: str) -> None:
    """A single word is a problem for us exactly when argparse calls it unrecognised or ambiguous."""
    made = parser()
    for action in made._actions:
        action.required = False
    message = io.StringIO()
    with (
        contextlib.redirect_stderr(message),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        made.parse_args([word])
    refused = "unrecognized arguments" in message.getvalue() or "ambiguous option" in message.getvalue()
    stray_number = word in ("-1", "-1.5")
    assert bool(check_flags([word], KNOWN, TABLE)) == (refused and not stray_number)


# --- values ---


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--tp-size 8", "8"),
        ("--tp-size=8", "8"),
        ("--tp 4 --tp-size 8", "8"),
        ("--tp-size=8 --tp 4", "4"),
        ("--tp-size -1", "-1"),
        ("--tp-size=", ""),
        ("--tp-size", None),
        ("--tp-size --port 3", None),
        ("--tp-sizes 8", None),
        ("-- --tp-size 8", None),
        ("", None),
    ],
)
def test_the_last_value_of_a_flag_counts(line: str, value: str | None) -> None:
    assert flag_value(line.split(), ("--tp-size", "--tp")) == value


def test_values_with_spaces_may_begin_with_a_dash() -> None:
    assert flag_value(["--json", "- x"], ("--json",)) == "- x"


# --- the shipped table ---


def test_the_shipped_table_knows_what_changed_between_releases() -> None:
    table = load_releases()
    assert (table.releases[0], table.releases[-1]) == ("0.4.6", "0.5.23")
    assert table.flags["--mem-fraction-static"].where() == "since 0.4.6"
    graph = table.flags["--cuda-graph-max-bs"]
    assert (graph.where(), graph.use, graph.deprecated) == ("0.4.6–0.5.18", "--cuda-graph-max-bs-decode", "0.5.15")
    assert table.flags["--enable-ep-moe"].use == "--ep-size N"
    assert table.flags["--tensor-parallel-size"].where() == "since 0.4.6"
    assert table.flags["--attn-dp-size"].where() == "since 0.5.23"
    assert table.flags["--trust-remote-code"].takes == "nothing"
    assert table.flags["--cuda-graph-bs"].takes == "list"
    assert len(table.known_in("0.4.6")) > 100 < len(table.known_in("0.5.23"))
    with pytest.raises(KeyError):
        table.known_in("0.5.17")


@pytest.mark.parametrize(
    ("release", "flag", "kind"),
    [
        ("0.5.23", "--cuda-graph-max-bs", "removed"),
        ("0.5.12", "--cuda-graph-max-bs", None),
        ("0.5.12", "--cuda-graph-max-bs-decode", "removed"),
        ("0.5.12", "--attn-dp-size", "removed"),
        ("0.5.23", "--enable-deepep-moe", "removed"),
        ("0.4.6", "--moe-a2a-backend", "removed"),
        ("0.5.23", "--tp", None),
        ("0.5.23", "--mem-frac", None),
        ("0.5.23", "--cuda-graph", "ambiguous"),
        ("0.5.23", "--mem-fraction-statik", "unknown"),
        ("0.5.23", "--forward-pass-metrics-ipc-name", None),
    ],
)
def test_the_shipped_table_judges_flags_of_a_release(release: str, flag: str, kind: str | None) -> None:
    table = load_releases()
    visible = frozenset(name for name in table.known_in(release) if not table.flags[name].hidden)
    problems = check_flags([flag, "1"], FlagSet(visible), table)
    assert [problem.kind for problem in problems] == ([kind] if kind else [])


def test_the_shipped_table_is_sorted_and_small() -> None:
    from pytest_gpuguard.diagnose.data import package_text

    text = package_text("facts/sglang_flags.json")
    assert len(text) < 100_000
    names = list(load_releases().flags)
    assert names == sorted(names)
