"""pytest's hooks, thin: each hands over to the module that does the work, which is imported only then.

A run that collects no claim must not pay for us.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

from . import newhooks
from .fixtures import (
    command_server,
    gpuguard_command_server,
    gpuguard_gpus,
    gpuguard_probe,
    gpuguard_rig,
    gpuguard_server,
    gpuguard_sglang_server,
    gpuguard_stack,
    gpuguard_stack_choice,
    gpus,
    probe,
    rig,
    server,
    sglang_server,
    stack,
)
from .names import ARCHITECTURES, MARKS, is_container
from .options import Config, add_options, is_packed, read_config

if TYPE_CHECKING:
    from .collect import Collector
    from .remembering import Remembering
    from .report.terminal import Summary
    from .run import Runner

__all__ = [
    "command_server",
    "gpuguard_command_server",
    "gpuguard_gpus",
    "gpuguard_probe",
    "gpuguard_rig",
    "gpuguard_server",
    "gpuguard_sglang_server",
    "gpuguard_stack",
    "gpuguard_stack_choice",
    "gpus",
    "probe",
    "rig",
    "server",
    "sglang_server",
    "stack",
]


class Manager:
    """What this run has of ours so far. The heavy parts appear with the first claim."""

    def __init__(self, config: pytest.Config, settings: Config) -> None:
        self.config = config
        self.settings = settings
        self.collector: Collector | None = None
        self.closing = False
        self.problems: list[str] = []
        self._runner: Runner | None = None
        self._summary: Summary | None = None
        self.remembering: Remembering | None = None
        self._registered = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}

    def concerns(self, items: list[Any], inherited: list[pytest.Mark]) -> bool:
        """Whether any mark here is ours, or is known to nobody and might be a misspelt one of ours."""
        if self.collector is not None:
            return True
        known = self._registered
        marks = [*inherited, *(mark for item in items for mark in getattr(item, "own_markers", ()))]
        return any(mark.name in MARKS or mark.name not in known for mark in marks)

    def collect(self, collector: pytest.Collector, report: pytest.CollectReport) -> None:
        """Read the marks of what was collected."""
        inherited = [mark for node in collector.listchain() for mark in node.own_markers]
        if not self.concerns(report.result, inherited):
            return
        if self.collector is None:
            from .collect import Collector

            self.collector = Collector(self.config)
        self.collector.check_report(collector, report)

    @property
    def runner(self) -> Runner:
        """Runs claims; made, and registered for its hooks, when first asked for."""
        if self._runner is None:
            from .run import Runner
            from .terms import BodyGate
            from .xdist import worker_share

            self._runner = Runner(self.config, self.settings, worker_share(self.config))
            self.config.pluginmanager.register(self._runner, "gpuguard-runner")
            self.config.pluginmanager.register(BodyGate(), "gpuguard-body")
        return self._runner

    @property
    def summary(self) -> Summary:
        """Verdicts so far."""
        if self._summary is None:
            from .report.terminal import Summary

            self._summary = Summary(self.settings.require)
            if not hasattr(self.config, "workerinput"):
                from .packing.recorder import Recorder

                self.config.pluginmanager.register(Recorder(self.config, self._summary.results), "gpuguard-recorder")
        return self._summary

    @property
    def has_results(self) -> bool:
        """Whether any verdict was reported."""
        return self._summary is not None

    def close(self) -> None:
        """Stop everything of ours; what went wrong is kept for the summary."""
        if self._runner is not None:
            self.problems += self._runner.close()


class Verdicts:
    """Takes verdicts off reports, in the process that writes the summary."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdict that a report carries."""
        controller: Any = self._manager.config.pluginmanager.get_plugin("gpuguard-xdist")
        if controller is not None and not hasattr(report, "gpuguard"):
            lost = controller.lost(report)
            if lost is not None:
                report.gpuguard = lost  # type: ignore[attr-defined]
        if hasattr(report, "gpuguard"):
            remembering, summary = self._manager.remembering, self._manager.summary
            if remembering is not None:
                remembering.take(report)
            summary.add(report)
            if remembering is not None:
                remembering.keep(summary.results[report.gpuguard["nodeid"]])


MANAGER: Final = pytest.StashKey[Manager]()


def runner_of(config: pytest.Config) -> Runner:
    """The runner of this pytest process."""
    return config.stash[MANAGER].runner


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare our options."""
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that a conftest may implement."""
    pluginmanager.add_hookspecs(newhooks)


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Refuse what packing cannot go with, before xdist changes what was given."""
    if is_packed(config) and not config.option.collectonly and not hasattr(config, "workerinput"):
        from .packing.controller import check_options

        check_options(config)
    return (yield)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` of a packed run: as many workers as there are GPUs."""
    if not is_packed(config) or config.option.collectonly or config.option.numprocesses != "auto":
        return None
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    from .packing.controller import auto_workers

    return auto_workers(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Why a packed run does not run claims side by side."""
    if not is_packed(config) or config.option.collectonly or config.pluginmanager.hasplugin("dsession"):
        return None
    if not config.pluginmanager.hasplugin("xdist"):
        return "packing: pytest-xdist is not installed: claims run one after the other, equal servers boot once"
    return "packing: claims run one after the other, equal servers boot once; add -n auto to use all GPUs at once"


def pytest_configure(config: pytest.Config) -> None:
    """Register our marks, read the options, and let xdist know us."""
    if getattr(config.option, "markers", False):
        from .claims.markers import MARKERS

        lines = [MARKERS[name].help() for name in sorted(MARKERS)]
    else:
        lines = [f"{name}: a claim about serving hardware (pytest --markers explains)" for name in sorted(MARKS)]
    for line in lines:
        config.addinivalue_line("markers", line)
    for name in ARCHITECTURES:
        config.addinivalue_line("markers", f"{name}: added to claims that need this architecture")
    settings = read_config(config)
    for name, python in () if settings.simulated else settings.stacks:
        if is_container(python):
            continue  # whether the image is there is asked when a claim needs it
        if not os.access(python, os.X_OK) or os.path.isdir(python):  # pathlib raises where it may not look
            state = "is not an executable file" if os.path.lexists(python) else "does not exist"
            raise pytest.UsageError(
                f"--gpuguard-stack {name}={python}: this python {state}; "
                f"give the python of the environment that the engine is installed in"
            )
    manager = config.stash[MANAGER] = Manager(config, settings)
    config.pluginmanager.register(Verdicts(manager), "gpuguard-verdicts")
    if not hasattr(config, "workerinput"):
        from .remembering import remember

        manager.remembering = remember(config, settings)
    if settings.label is not None:
        from .rehearsed import Rehearsed

        config.pluginmanager.register(Rehearsed(settings), "gpuguard-rehearsed")
    if settings.budget_s is not None and not config.option.collectonly:
        from .packing.budgeted import Budgeted

        config.pluginmanager.register(Budgeted(config, settings), "gpuguard-budget")
    # xdist registers its session after us, but has decided by now.
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        from .xdist import Controller

        config.pluginmanager.register(Controller(config), "gpuguard-xdist")
    if getattr(config, "workerinput", {}).get("gpuguard_pack"):
        from .packing.worker import Announcer, PackedWorker
        from .xdist import worker_share

        folder = worker_share(config)
        assert folder is not None
        config.pluginmanager.register(PackedWorker(folder), "gpuguard-packed-worker")
        config.pluginmanager.register(Announcer(folder), "gpuguard-announcer")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing behind, also when the session ended early."""
    manager = config.stash.get(MANAGER, None)
    if manager is not None:
        manager.close()


# ------------------------------------------------------------------------------------------------------- collection


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Several stacks: a test for each. Last, so that the stack's name is the last part of the node id."""
    settings = metafunc.config.stash[MANAGER].settings
    if len(settings.stacks) > 1:
        from .stacks import multiply

        multiply(metafunc, [name for name, _ in settings.stacks])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Attach claims to what was collected; a mistake in one is a collection error."""
    report = yield
    if report.outcome == "passed" and report.result:
        collector.config.stash[MANAGER].collect(collector, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Add marks before ``-m`` looks at them; put equal servers side by side, also after others have moved tests."""
    collector = config.stash[MANAGER].collector
    if collector is not None:
        collector.add_marks(items)
        if collector.found:
            from .covered import noted

            collector.noted = noted(items, session)
        if collector.shared:
            from .collect import ordered

            items[:] = ordered(items)  # before, because ``--stepwise`` looks for a place in the order that will be run
            result = yield
            items[:] = ordered(items)
            return result
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the servers that are wanted, after deselection; have the runner ready.

    First, because xdist's own hook tells the controller, which then looks for what we write here.
    """
    manager = session.config.stash[MANAGER]
    if manager.collector is not None and manager.collector.found and not session.config.option.collectonly:
        manager.runner.expect(session.items)
        if manager.remembering is not None:
            manager.remembering.collected = manager.collector.noted
        if hasattr(session.config, "workerinput"):
            from .xdist import write_claims

            write_claims(session)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Rig and stack, before the first claim runs; with ``-v`` the layouts too. ``--collect-only`` asks nothing."""
    manager = config.stash[MANAGER]
    quiet = config.option.collectonly and config.option.verbose <= 0
    if quiet:
        return []
    if manager.collector is None or not manager.collector.claims:
        rehearsed: Any = config.pluginmanager.get_plugin("gpuguard-rehearsed")
        return rehearsed.notice(items) if rehearsed is not None and config.option.verbose >= 0 else []
    from .report.header import header

    return header(manager.runner, items, config.option.verbose, facts=not config.option.collectonly)


# ------------------------------------------------------------------------------------------------------ pytest-timeout


#: Fixtures by which a test's own code boots servers; the short names stand on these.
_BOOTING: Final = frozenset({"gpuguard_sglang_server", "gpuguard_command_server"})


def _is_timed(item: pytest.Item) -> bool:
    """Whether a test may boot a server, so that its clock must stand still meanwhile."""
    if _BOOTING & set(getattr(item, "fixturenames", ())):
        return True
    manager = item.config.stash[MANAGER]
    return manager.collector is not None and manager.collector.is_claim(item)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A claim's clock counts its own code and not its boots, so it is ours."""
    manager = item.config.stash[MANAGER]
    if not _is_timed(item):
        return None
    from .timeouts import TIMER, ItemTimer

    capture: Any = item.config.pluginmanager.get_plugin("capturemanager")
    uncapture = capture.suspend_global_capture if capture is not None else lambda: None
    timer = ItemTimer(settings.timeout, settings.method, lambda: manager.runner.give_up(item), uncapture)
    item.stash[TIMER] = timer
    timer.start()
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """Stop a claim's clock."""
    if not _is_timed(item):
        return None
    from .timeouts import TIMER

    timer = item.stash.get(TIMER, None)
    if timer is None:
        return None
    timer.cancel()
    return True


# --------------------------------------------------------------------------------------------------------- reporting


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> Any:
    """The verdict's category, letter and word."""
    if not hasattr(report, "gpuguard"):
        return None
    from .report.terminal import status

    manager = config.stash[MANAGER]
    live = config.option.verbose > 0 and not config.pluginmanager.hasplugin("dsession") and not manager.closing
    return status(report, live)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop servers; fail the run on reasons that this runner should have met."""
    manager = session.config.stash.get(MANAGER, None)
    if manager is None:
        return
    manager.close()
    good = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if good and (manager.problems or (manager.has_results and manager.summary.missed())):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line per claim, and every count."""
    manager = config.stash.get(MANAGER, None)
    if manager is not None:
        manager.closing = True  # pytest's own short summary says a verdict without repeating its fact
    for problem in manager.problems if manager is not None else ():
        terminalreporter.write_line(f"gpuguard: ERROR at the end of the run: {problem}", red=True)
    if manager is not None and manager.has_results:
        if manager.remembering is not None:
            manager.remembering.write(terminalreporter, config.option.verbose)
        manager.summary.write(terminalreporter, config.option.verbose)
