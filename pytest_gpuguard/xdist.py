"""pytest-xdist: facts are asked once and shared, and the controller prints them when workers have collected claims.

Markers never reach the controller, so workers write what their claims need into a folder that it made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from .claims.expect import Rated
from .facts.stackref import StackRef
from .files import read_json, write_json
from .packing.history import key_of
from .remembering import remembering_of
from .report.payload import lost_payload
from .secrets import DeclaredSecrets
from .stacks import plain_nodeid

if TYPE_CHECKING:
    from .claims.claim import Claim
    from .run import Runner


#: The rig as JSON data, where it was asked before the folder was there.
RIG: Final = pytest.StashKey[dict[str, Any]]()
#: Its presence in the shared folder tells workers that the run is over.
STOP: Final = "stop"
#: What a test is skipped with that is not begun for that reason.
STOPPED: Final = "the run was stopped by a failure elsewhere"


class Controller:
    """The controller's side."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="gpuguard-"))
        self._told = self._shared = False
        self._failed = 0
        rig = config.stash.get(RIG, None)
        if rig is not None:  # asked already, for the number of workers
            write_json(self._folder / "rig.json", rig)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker the folder that facts are shared through, and whether claims are packed."""
        if not self._shared:  # before any worker plans
            self._shared = True
            remembering_of(self._config).share_times(self._folder)
        node.workerinput["gpuguard_share"] = str(self._folder)
        node.workerinput["gpuguard_pack"] = settings_of(self._config).pack

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> object | None:
        """Our own scheduler for a packed run, else xdist's."""
        if not settings_of(config).pack:
            return None
        from .packing.controller import make_scheduler

        return make_scheduler(config, self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        """Print rig and stacks once, as soon as a worker has found claims."""
        data = read_json(self._folder / f"claims-{node.gateway.id}.json")
        if self._told or data is None:
            return
        self._told = True
        remembering = remembering_of(self._config)
        remembering.collected = data["collected"]
        remembering.share_before(self._folder)
        remembering.share_rates(self._folder, {one["key"] for one in data["claims"] if one["rated"]})
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self._config.option.verbose < 0:
            return
        from .report.header import facts_lines
        from .session import Session

        session = Session(settings_of(self._config), self._folder)
        try:
            stacks = [StackRef(**one) for one in data["stacks"]]
            lines = facts_lines(session, stacks, locks=any(one["gpus"] for one in data["claims"]))
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
            self._stop()
            session: Any = self._config.pluginmanager.get_plugin("dsession")
            if settings_of(self._config).pack and session is not None and not getattr(session, "shouldstop", False):
                # xdist does not count a test that its worker crashed in; what it says of a run that workers stopped
                # would not be the reason
                session.shouldstop = f"stopping after {self._failed} failures"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """After a worker has ended the run (``pytest.exit``, Ctrl-C, ``--stepwise``) the others begin no test."""
        output = getattr(node, "workeroutput", None) or {}
        interrupted = output.get("exitstatus") == pytest.ExitCode.INTERRUPTED
        if interrupted or output.get("shouldstop") or output.get("shouldfail"):
            self._stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Also when only the controller was interrupted: workers end, and should begin nothing meanwhile."""
        self._stop()

    def _stop(self) -> None:
        if self._folder.is_dir():
            (self._folder / STOP).touch()

    def lost(self, report: pytest.TestReport) -> dict[str, Any] | None:
        """The payload of a claim whose worker crashed: no verdict came back, and none may be missing."""
        if not report.failed or report.when in ("setup", "call", "teardown"):
            return None
        for file in self._folder.glob("claims-*.json"):
            for one in read_json(file)["claims"]:
                if one["nodeid"] == report.nodeid:
                    label = settings_of(self._config).label
                    lost = lost_payload(one["told"], "the xdist worker that ran it crashed", label)
                    return {**lost, "claim": one["claim"], "key": one["key"], "stack": one["stack"]}
        return None

    def pytest_unconfigure(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def write_claims(session: pytest.Session) -> None:
    """The worker's side: what its claims need, for the controller."""
    from .collect import CLAIM
    from .plugin import MANAGER, runner_of
    from .report.header import layout_lines

    folder = worker_share(session.config)
    if folder is None:
        return
    runner: Runner = runner_of(session.config)
    claims = [(item, item.stash[CLAIM]) for item in session.items if CLAIM in item.stash]
    if not claims:
        return
    collector = session.config.stash[MANAGER].collector
    secrets = DeclaredSecrets()
    worker = session.config.workerinput["workerid"]  # type: ignore[attr-defined]
    data = {
        "stacks": [asdict(ref) for ref in dict.fromkeys(runner.ref_of(item) for item, _ in claims)],
        "layouts": [line for item, claim in claims for line in layout_lines(item.nodeid.rpartition("::")[2], claim)],
        "collected": collector.noted if collector is not None else None,
        "claims": [_about(runner, item, claim, secrets.of(claim).hide) for item, claim in claims],
    }
    write_json(folder / f"claims-{worker}.json", data)


def _about(runner: Runner, item: pytest.Item, claim: Claim, hide: Callable[[str], str]) -> dict[str, Any]:
    """A claim as the controller must know it: its GPUs, and what it is called should its worker crash."""
    plain = plain_nodeid(item)
    return {
        "nodeid": item.nodeid,
        "told": hide(item.nodeid),
        "claim": hide(claim.about.id or item.nodeid),
        "key": hide(key_of(claim.about.id or plain, plain)),
        "stack": runner.ref_of(item).name,
        "gpus": claim.gpus,
        "rated": any(isinstance(one, Rated) for one in claim.expectations),
    }


def settings_of(config: pytest.Config) -> Any:
    """The settings of this run."""
    from .plugin import MANAGER

    return config.stash[MANAGER].settings


def worker_share(config: pytest.Config) -> Path | None:
    """The folder that an xdist worker shares facts through, or None outside xdist."""
    given = getattr(config, "workerinput", {}).get("gpuguard_share")
    return Path(os.fspath(given)) if given else None
