"""``gpuguard rebaseline``: how claims should read after what a run saw, as one patch.

It must never apply the patch, nor change the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .ledger.record import Record, Run
    from .ledger.store import Store


@click.command()
@click.argument("claims", nargs=-1, metavar="[CLAIM]...")
@click.option("--run", "run_name", metavar="RUN", help="A run's id, or last, last~1 (default: the last verified one).")
@click.option("--ledger", metavar="URL", help="The ledger (default: .gpuguard/ledger.sqlite in the root folder).")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The folder that the claims' names begin at: pytest's root folder (default: this one).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the patch, instead of standard output.",
)
@click.option("--tighten", is_flag=True, help="Also raise floors of expect_toks that were beaten by far.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/rebaseline.md.")
def rebaseline(
    claims: tuple[str, ...],
    run_name: str | None,
    ledger: str | None,
    root: Path,
    output: Path | None,
    tighten: bool,
    as_json: bool,
) -> None:
    """Propose edits for each CLAIM (default: all) that came out otherwise than stated, as a patch for git apply.

    Nothing is applied. Exits 0 with a patch or with nothing to propose, 2 when the run or a claim is not known.
    """
    from .claims.account import printable
    from .ledger.errors import LedgerError
    from .rebaseline import patch, propose

    try:
        run, records, flips = _seen(ledger, root, run_name, claims)
    except LedgerError as error:
        raise click.UsageError(printable(str(error))) from None
    proposals, refused = propose(records, flips, root, tighten=tighten)
    text = patch(proposals)
    if output is not None:
        _write(output, text)
    if as_json:
        data: dict[str, Any] = {
            "run": run.id,
            "kind": run.kind,
            "proposals": [one.to_dict() for one in proposals],
            "refused": [one.to_dict() for one in refused],
            "patch": text,
        }
        click.echo(json.dumps(data))
        return
    if run.kind != "verified":
        click.echo(f"run {printable(run.id)} is {run.kind}: it shows what a suite does, not what is true", err=True)
    for one in proposals:
        click.echo(printable(f"{one.file}:{one.line}: {one.claim}: {one.why}"), err=True)
        for note in one.notes:
            click.echo(printable(f"  {note}"), err=True)
    for each in refused:
        click.echo(str(each), err=True)
    if not proposals:
        click.echo(f"nothing to propose after run {printable(run.id)}", err=True)
    elif output is None:
        click.echo(text.encode(), nl=False)  # bytes: its line ends are those of the files


def _seen(ledger: str | None, root: Path, name: str | None, claims: Sequence[str]) -> tuple[Run, list[Record], Any]:
    """The run, its records of these claims with their evidence, and its flips. Raises LedgerError."""
    from .ledger.errors import LedgerError
    from .ledger.flips import flips
    from .ledger.store import open_ledger

    place = ledger or str(root / ".gpuguard" / "ledger.sqlite")
    file = place.removeprefix("sqlite:///")
    if "://" not in file and not Path(file).exists():  # it would be made
        raise LedgerError(f"there is no ledger at {place}: run claims first, or name one with --ledger")
    with open_ledger(place) as store:
        run = _run(store, name)
        records = store.records(run.id, evidence=True)
        names = _known(store, run, records, claims)
        chosen = [one for one in records if names is None or one.claim in names]
        found = flips(run, records, store.before(run.id), lambda claims: store.histories(claims, evidence=True))
        if names is not None:  # what shares a test's source decides with it
            functions = {one.nodeid.partition("[")[0] for one in chosen}
            chosen = [one for one in records if one.nodeid.partition("[")[0] in functions]
    return run, chosen, found


def _run(store: Store, name: str | None) -> Run:
    from .ledger.errors import LedgerError

    if name is not None:
        return store.run(name)
    found = store.runs(kind="verified", limit=1)
    if not found:
        raise LedgerError(f"{store.url} has no verified run: run claims on real hardware, or name a run with --run")
    return found[0]


def _known(store: Store, run: Run, records: Sequence[Record], claims: Sequence[str]) -> set[str] | None:
    """The present names of the claims that were asked for; None for all. Raises LedgerError."""
    from .claims.errors import suggest
    from .ledger.errors import LedgerError

    if not claims:
        return None
    present, there = store.aliases(), {one.claim for one in records}
    for one in claims:
        if present.get(one, one) not in there:
            raise LedgerError(
                f"run {run.id} has no claim {one!r}{suggest(one, there) or ': give its id, or its node id'}"
            )
    return {present.get(one, one) for one in claims}


def _write(output: Path, text: str) -> None:
    """Raises click.UsageError."""
    try:
        output.write_bytes(text.encode())
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror or error}") from None
