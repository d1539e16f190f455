"""pytest-xdist: facts are asked once and shared, and the controller prints them when workers have collected claims.

Markers never reach the controller, so workers write what their claims need into a folder that it made.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from .facts.stackref import StackRef
from .report.payload import lost_payload

if TYPE_CHECKING:
    from .run import Runner


#: Its presence in the shared folder tells workers that the run is over.
STOP: Final = "stop"


class Controller:
    """The controller's side."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="gpuguard-"))
        self._told = False
        self._failed = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker the folder that facts are shared through."""
        node.workerinput["gpuguard_share"] = str(self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Print rig and stacks once, as soon as a worker has found claims."""
        found = self._folder / f"claims-{node.gateway.id}.json"
        if self._told or not found.exists():
            return
        self._told = True
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self._config.option.verbose < 0:
            return
        from .report.header import facts_lines
        from .session import Session

        data = json.loads(found.read_text())
        session = Session(_settings(self._config), self._folder)
        try:
            lines = facts_lines(session, [StackRef(**one) for one in data["stacks"]])
        finally:
            session.close()
        reporter.ensure_newline()
        for line in [*lines, *(data["layouts"] if self._config.option.verbose > 0 else [])]:
            reporter.write_line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After ``-x`` or ``--maxfail``, claims that workers still hold are not booted."""
        self._failed += report.failed and not hasattr(report, "wasxfail")
        most = self._config.option.maxfail
        if most and self._failed >= most:
            (self._folder / STOP).touch()

    def lost(self, report: pytest.TestReport) -> dict[str, Any] | None:
        """The payload of a claim whose worker crashed: no verdict came back, and none may be missing."""
        if not report.failed or report.when in ("setup", "call", "teardown"):
            return None
        for file in self._folder.glob("claims-*.json"):
            data = json.loads(file.read_text())
            if any(one["nodeid"] == report.nodeid for one in data["claims"]):
                return lost_payload(
                    report.nodeid, "the xdist worker that ran it crashed", _settings(self._config).label
                )
        return None

    def pytest_unconfigure(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def write_claims(session: pytest.Session) -> None:
    """The worker's side: what its claims need, for the controller."""
    from .collect import CLAIM
    from .plugin import runner_of
    from .report.header import layout_lines

    folder = worker_share(session.config)
    if folder is None:
        return
    runner: Runner = runner_of(session.config)
    claims = [(item, item.stash[CLAIM]) for item in session.items if CLAIM in item.stash]
    if not claims:
        return
    worker = session.config.workerinput["workerid"]  # type: ignore[attr-defined]
    data = {
        "stacks": [asdict(ref) for ref in dict.fromkeys(runner.ref_of(item) for item, _ in claims)],
        "layouts": [line for item, claim in claims for line in layout_lines(item.nodeid.rpartition("::")[2], claim)],
        "claims": [
            {
                "nodeid": item.nodeid,
                "gpus": claim.gpus,
                "exclusive": claim.needs.exclusive,
                "minutes": claim.about.minutes,
                "server": claim.serves.describe() if claim.serves is not None else None,
            }
            for item, claim in claims
        ],
    }
    scratch = folder / f"claims-{worker}.tmp"
    scratch.write_text(json.dumps(data))
    scratch.replace(folder / f"claims-{worker}.json")


def _settings(config: pytest.Config) -> Any:
    from .plugin import MANAGER

    return config.stash[MANAGER].settings


def worker_share(config: pytest.Config) -> Path | None:
    """The folder that an xdist worker shares facts through, or None outside xdist."""
    given = getattr(config, "workerinput", {}).get("gpuguard_share")
    return Path(os.fspath(given)) if given else None
