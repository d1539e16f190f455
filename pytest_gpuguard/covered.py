"""What a run leaves unsaid of the claims that it collected, and of those that it no longer found, in lines.

It must never call a claim gone that was merely not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import pytest

from .collect import CLAIM
from .packing.history import key_of
from .secrets import DeclaredSecrets
from .stacks import plain_nodeid

if TYPE_CHECKING:
    from .ledger.record import Record, Run
    from .ledger.store import Store

#: Lines of one kind on the terminal.
_MOST: Final = 8
#: Of so many claims that are gone a new name is guessed at.
_GUESSES: Final = 50


def noted(items: Iterable[pytest.Item], session: pytest.Session) -> dict[str, Any]:
    """What was collected before any deselection, JSON-able: claims by the ledger's names, and the files of which surely
    everything was collected.
    """
    claims: dict[str, str | None] = {}
    files: dict[str, str] = {}
    secrets = DeclaredSecrets()
    for item in items:
        claim = item.stash.get(CLAIM, None)
        files[item.nodeid.partition("::")[0]] = str(item.path)
        if claim is not None:
            plain = plain_nodeid(item)
            claims[secrets.of(claim).hide(key_of(claim.about.id or plain, plain))] = claim.about.recheck
    return {"claims": claims, "files": sorted(_complete(files, session))}


def _complete(files: Mapping[str, str], session: pytest.Session) -> Iterable[str]:
    """Those of ``files`` (as in node ids → path) of which the command line and pytest left nothing out."""
    config = session.config
    if session.testsfailed or getattr(config.option, "lf", False):
        return ()  # a class that could not be collected; ``--lf`` collects what failed, and nothing beside it
    folder = config.invocation_params.dir
    named = [folder / one.partition("::")[0] for one in config.args if "::" in one]
    if not all(path.exists() for path in named):
        return ()  # a module by its name (``--pyargs``)
    partial = set(map(os.path.realpath, named))
    return (name for name, path in files.items() if os.path.realpath(path) not in partial)


def lines_of(
    store: Store,
    run: Run,
    records: Sequence[Record],
    collected: Mapping[str, Any],
    evaluated: Mapping[str, tuple[float | None, int]],
) -> dict[str, list[str]]:
    """Lines by kind of coverage. ``evaluated`` is the ledger's answer from before the run. Raises LedgerError."""
    from .ledger.coverage import coverage

    claims: Mapping[str, str | None] = collected["claims"]
    before = store.before(run.id)
    file_of = {one.claim: one.nodeid.partition("::")[0] for one in before}
    here = set(collected["files"])
    known = {name: one for name, one in evaluated.items() if name in claims or file_of.get(name) in here}
    rechecks = {name: day for name, day in claims.items() if day is not None}
    today = datetime.now(timezone.utc).date()

    def made(past: Sequence[Record]) -> Any:
        return coverage(claims.keys(), records, known, store.aliases(), rechecks, today, before=past, kind=run.kind)

    found = made([])
    if found.vanished:
        past = [store.history(name, limit=20, evidence=True) for name in found.vanished[:_GUESSES]]
        found = made([several[-1] for several in past if several])
    return {
        "vanished": list(found.vanished),
        "renamed": [str(one) for one in found.renamed],
        "new": list(found.new),
        "never_evaluated": [str(one) for one in found.never_evaluated],
        "unstated": list(found.unstated),
        "overdue": [str(one) for one in found.overdue],
    }


def shown(coverage: Mapping[str, Sequence[str]]) -> list[str]:
    """For the terminal: what somebody should do something about."""
    heads = {
        "vanished": "in the ledger and no longer in the suite",
        "renamed": "",
        "never_evaluated": "",
        "overdue": "",
    }
    found = []
    for kind, head in heads.items():
        lines = coverage.get(kind, ())
        found += [f"{line}: {head}" if head else line for line in lines[:_MOST]]
        if len(lines) > _MOST:
            found.append(f"and {len(lines) - _MOST} more {kind.replace('_', ' ')} (gpuguard report --json)")
    return found
