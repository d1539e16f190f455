"""``gpuguard history``, ``diff``, ``matrix`` and ``report``: what the ledger says, for a person and for a program.

They must never call a rehearsal a verification.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_common import answering, fail, json_option, ledger_option, output_option, say, told

if TYPE_CHECKING:
    from .ledger.answers import Answers
    from .ledger.flips import Flip
    from .ledger.record import Record, Run

_KIND = click.option(
    "--kind",
    type=click.Choice(["verified", "rehearsed", "replayed"]),
    help="Verdicts of this kind only.",
)


@click.command()
@click.argument("claim", required=False)
@click.option("--limit", type=click.IntRange(1), default=30, show_default=True, help="The newest so many.")
@ledger_option
@json_option
def history(claim: str | None, limit: int, url: str | None, as_json: bool) -> None:
    """Show what became of CLAIM in every run, and what changed in between; without a claim, list the claims."""
    from .claims.account import printable
    from .ledger.changes import changes
    from .ledger.changes import told as changes_told
    from .report.flips import spoken
    from .report.words import stamp

    with answering(url) as store:
        if claim is None:
            _claims(store, as_json)
            return
        past = [one for one in store.history(claim) if one.decides][-limit:]
        if not past:
            near = [name for name in _names(store) if claim.casefold() in name.casefold()]
            hint = f"; did you mean {near[0]!r}?" if near else "; gpuguard history lists them"
            fail(f"the ledger has no claim {claim!r}{hint}")
    if as_json:
        say(json.dumps([{k: v for k, v in one.to_dict().items() if k != "evidence"} for one in past]))
        return
    before: dict[tuple[str, tuple[str, ...]], Record] = {}
    for one in past:
        where = f"{one.stack}{' on ' + ', '.join(one.cards) if one.cards else ''}"
        say(printable(f"{stamp(one.when)}  {spoken(one)}  [{where}]  {one.fact}"))
        known = before.get((one.stack, one.cards))
        if known is not None and one.components:
            for line in changes_told(changes(known.components, one.components)):
                say(printable(f"    {line}"))
        if one.components:
            before[one.stack, one.cards] = one


def _names(store: Answers) -> list[str]:
    names = {name for kind in ("verified", "rehearsed", "replayed") for name in store.evaluated(kind)}
    return sorted(names)


def _claims(store: Answers, as_json: bool) -> None:
    names = _names(store)
    from .claims.account import printable

    if names or as_json:
        say(json.dumps(names) if as_json else "\n".join(map(printable, names)))


class Comparison:
    """A run beside what was known before it, or beside another run."""

    def __init__(self, store: Answers, run: Run, against: Run | None, evidence: bool = False) -> None:
        from .ledger.flips import differences, flips

        self.run, self.against = run, against
        self.records = store.records(run.id, evidence)
        before = store.before(run.id) if against is None else store.records(against.id)
        self.flips: Sequence[Flip] = flips(run, self.records, before, store.histories)
        self.differences: Sequence[Flip] = differences(run, self.records)

    def called(self, said: str) -> str:
        """What is said of the run, as a rehearsal where it is one."""
        from .names import labelled
        from .report.words import label_of

        return f"run {self.run.id}: {labelled(label_of(self.run.kind), said)}"

    @property
    def others(self) -> list[Flip]:
        """Differences between stacks that are no flips already."""
        told = {(one.now.claim, one.now.stack) for one in self.flips}
        return [one for one in self.differences if (one.now.claim, one.now.stack) not in told]

    def document(self, history: Callable[[str], Sequence[Record]], coverage: Any = None) -> dict[str, Any]:
        """As the JSON report has it."""
        from .report.document import document

        return document(self.run, self.records, self.flips, self.differences, history, coverage)


@click.command()
@click.argument("run", default="last")
@click.argument("against", required=False)
@ledger_option
@json_option
def diff(run: str, against: str | None, url: str | None, as_json: bool) -> None:
    """Show what flipped in RUN (an id, its beginning, last, last~1) against what was known before it.

    With AGAINST, against that run. Exits 1 when something flipped.
    """
    from .claims.account import printable
    from .report.flips import lines

    with answering(url) as store:
        found = Comparison(store, store.run(run), store.run(against) if against else None)
        if as_json:
            made = found.document(lambda claim: ())
            kept = {name: made[name] for name in ("format", "label", "run", "flips", "differences")}
            say(json.dumps({**kept, "against": against}))
    if not as_json:
        width = shutil.get_terminal_size().columns
        shown = lines(found.flips, width) or [printable(found.called("nothing flipped"))]
        if found.others:
            shown = [*shown, "", "between the stacks of this run:", *lines(found.others, width)]
        say("\n".join(shown))
    if found.flips or found.differences:
        raise SystemExit(1)


@click.command()
@_KIND
@click.option("--stack", "stacks", multiple=True, metavar="NAME", help="These stacks, in this order; repeatable.")
@click.option("--link", metavar="URL", help="Where a run's evidence is, with {run} in it.")
@click.option("--markdown", is_flag=True, help="A Markdown table (the default form).")
@ledger_option
@json_option
@output_option
def matrix(
    kind: str | None,
    stacks: tuple[str, ...],
    link: str | None,
    markdown: bool,
    url: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print the support matrix: claims, cards and stacks, with the day each was last verified."""
    from .report.markdown import support_matrix

    with answering(url) as store:
        latest = store.latest(kind or "verified")  # type: ignore[arg-type]
    if as_json:
        cells = [{k: v for k, v in one.to_dict().items() if k not in ("evidence", "components")} for one in latest]
        told(json.dumps([one for one in cells if not stacks or one["stack"] in stacks]), output)
        return
    try:
        told(support_matrix(latest, stacks, link), output)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--link") from None


@click.command()
@click.argument("run", default="last")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML page.")
@click.option("--markdown", "summary", type=click.Path(dir_okay=False, path_type=Path), help="Write Markdown.")
@click.option("--github", is_flag=True, help="Append to $GITHUB_STEP_SUMMARY, and print annotations.")
@ledger_option
@json_option
@output_option
def report(
    run: str,
    page: Path | None,
    summary: Path | None,
    github: bool,
    url: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Report RUN (an id, its beginning, last, last~1), what flipped first.

    Without a form: the terminal's. Forms can be combined. Exits 0 whatever the run found.
    """
    from .claims.account import printable
    from .report import github as github_report
    from .report import markdown
    from .report.flips import lines

    if github and as_json and output is None:
        fail("--github prints annotations to standard output, so the JSON needs a file: -o FILE")
    with answering(url) as store:
        found = Comparison(store, store.run(run), None, evidence=True)
        made = found.document(lambda claim: store.history(claim, evidence=True), _coverage(store, found))
    if page is not None:
        from .report.curves import MissingExtra
        from .report.html import html

        try:
            told(html(made), page)
        except MissingExtra as error:
            fail(str(error))
    if summary is not None:
        told(markdown.summary(made), summary)
    if github:
        _github(markdown.summary(made), github_report.annotations(made))
    if as_json:
        told(json.dumps(made), output)
    elif page is None and summary is None and not github:
        counts = ", ".join(f"{number} {name}" for name, number in made["counts"]["verdicts"].items() if number)
        heading = printable(found.called(counts))
        told("\n".join([heading, *lines(found.flips, shutil.get_terminal_size().columns)]), output)


def _github(text: str, annotations: Sequence[str]) -> None:
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        fail("GITHUB_STEP_SUMMARY is not set: --github is for a GitHub workflow; --markdown FILE writes the same")
    try:
        with open(file, "a", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    for line in annotations:
        say(line)


def _coverage(store: Answers, found: Comparison) -> dict[str, list[str]]:
    """What the run noted of its own collection; empty for a run of another machine."""
    note = store.notes().get(f"coverage {found.run.id}")
    return {str(kind): [str(one) for one in lines] for kind, lines in (note or {}).items()}
