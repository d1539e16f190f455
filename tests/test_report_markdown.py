"""The support matrix and the summary in Markdown: what they say, how long they may be, what names must not become."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuguard.report.document import document
from pytest_gpuguard.report.markdown import SUMMARY_BYTES, code, summary, support_matrix, text

from .report_runs import CARD, DAY, HOSTILE, OLD, RAW, START, failed, flip, record, run


def cells(row: str) -> list[str]:
    """The cells of a table's row as Markdown cuts it: a bar behind a backslash is text."""
    return [one.strip() for one in row.replace("\\\\", "").replace("\\|", "").strip().strip("|").split("|")]


def test_the_matrix_has_a_row_per_claim_and_cards_and_a_column_per_stack() -> None:
    found = support_matrix(
        [
            failed("ep8"),
            record("ep8", stack="old", components=OLD, when=START - 9 * DAY, run="r1"),
            record("ep8", stack="old", cards=("NVIDIA H200",), run="r2"),
        ],
        ["old", "new"],
    ).splitlines()
    assert found[0] == "| claim | cards | old | new |"
    assert found[2] == "| `ep8` | NVIDIA H200 | HOLDS<br>2026-01-30 `r2` | – |"
    assert found[3] == (
        f"| `ep8` | {CARD} | HOLDS<br>2026-01-21 `r1` "
        "| CONTRADICTED (worse), oom.weights<br>2026-01-30 `20260130-130455-3f2a` |"
    )
    assert "- **new**: sglang 0.5.23, torch 2.9.1, torch_cuda 13.0, flashinfer-python 0.6.9, driver 580.65.06" in found


def test_the_newest_of_a_cell_counts_whatever_the_order() -> None:
    records = [record("a", when=START, verdict="HOLDS"), record("a", when=START - DAY, verdict="CHANGED")]
    for given in (records, records[::-1]):
        assert "CHANGED" not in support_matrix(given)


def test_a_link_leads_to_the_evidence_and_a_run_cannot_leave_it() -> None:
    assert "[r1](reports/r1.html)" in support_matrix([record("a", run="r1")], link="reports/{run}.html")
    assert "](reports/x%29%20%3Cb%3E.html)" in support_matrix([record("a", run="x) <b>")], link="reports/{run}.html")
    with pytest.raises(ValueError, match=r"put \{run\}"):
        support_matrix([], link="reports/")


def test_an_empty_ledger_is_said() -> None:
    assert "Nothing was verified yet" in support_matrix([])


def test_rehearsals_and_hearsay_say_so() -> None:
    assert "REHEARSED HOLDS" in support_matrix([record(kind="rehearsed")])
    assert "hearsay: HOLDS" in support_matrix([record(hearsay=True)])
    found = summary(document(run("replayed"), [failed(kind="replayed")], [flip(failed(kind="replayed"))]))
    assert found.startswith("## gpuguard: REPLAYED ")
    assert "was REPLAYED HOLDS" in found


def test_flips_come_first_in_the_summary() -> None:
    bad = failed("ep8")
    found = summary(document(run(), [bad, record("x", "NOT_EVALUATED", reason="sm", fact="needs SM90")], [flip(bad)]))
    assert found.startswith("## gpuguard: 2 claims, 1 worse\n")
    assert found.index("What flipped") < found.index("### Verdicts") < found.index("What did not go as claimed")
    assert "suspect 1: sglang 0.5.18 → 0.5.23 (for: held under every sglang before 0.5.23, 7 runs)" in found
    assert "- 1 not evaluated for `sm`: needs SM90" in found


@pytest.mark.parametrize(
    "name", ["a|b", "`a`", "a\nb", "<b>", "[x](y)", "*a*_b_", "@me", "www.x.org", "ftp://x", HOSTILE]
)
def test_no_name_leaves_its_cell(name: str) -> None:
    for row in support_matrix([record(name, stack=name, run=name, outcome=name, cards=(name,))]).splitlines()[:3]:
        assert len(cells(row)) == 3
    for said in (text(name), code(name)):
        assert not any(raw in said for raw in RAW)
        assert "\n" not in said
        assert "<" not in said.replace("&lt;", "") or said.startswith("`")


def test_markup_is_shown_and_does_nothing() -> None:
    assert text("a|b `c` <b> [d](e) *f* _g_ ~h~ $i$ \\") == (
        "a\\|b \\`c\\` &lt;b> \\[d\\](e) \\*f\\* \\_g\\_ \\~h\\~ \\$i\\$ \\\\"
    )
    assert text("@team &lt; https://x.org") == "&#64;team &amp;lt; https&#58;//x.org"
    assert [text(one)[:5] for one in ("# a", "- a", "> a", "+ a", "1. a")] == [
        "&#35;",
        "&#45;",
        "&#62;",
        "&#43;",
        "&#49;",
    ]
    assert code("a`b") == "a\\`b"


def test_a_summary_never_gets_longer_than_github_takes_and_says_what_it_left_out() -> None:
    records = [failed(f"test::{i}", fact="é|" * 400) for i in range(2500)]
    found = summary(document(run(), records, [flip(records[0])]))
    assert len(found.encode()) <= SUMMARY_BYTES
    assert "What flipped" in found
    assert "**Cut here: " in found
    short = summary(document(run(), records[:40], [flip(records[0])]), limit=3000)
    assert len(short.encode()) <= 3000
    assert "more pieces" in short


def test_an_empty_run_has_a_summary() -> None:
    assert "0 claims, none flipped" in summary(document(run(), []))


def test_when_it_last_held_and_a_run_without_an_end_are_told() -> None:
    found = replace(flip(failed(), before=failed(run="run-7")), held=record(run="run-3", when=START - 30 * DAY))
    said = summary(document(run(), [found.now], [found]))
    assert "  - held last on 2025-12-31 (run `run-3`, stack new); what changed is counted from there" in said
    assert "**it never came to its end**" in said
    assert "never came" not in summary(document(run(ended=START + 60), []))
