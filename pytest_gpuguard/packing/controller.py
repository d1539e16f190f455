"""The controller's side of a packed run: how many workers, which GPUs, and what is said of the plan.

It must never open a CUDA context, and never ask the rig for a run that only collects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from ..facts.faults import HostFault
from ..options import Config, read_config
from ..session import Session
from ..xdist import RIG, settings_of
from .facts import read_works
from .history import span
from .plan import Unit, Work, simulate
from .scheduler import PackedScheduling, assign

OWN_DISTRIBUTION: Final = (
    "--gpuguard-pack distributes the tests by itself: leave out {given} (also from addopts), and say with -n how many "
    "workers there are (-n auto: as many as this rig has GPUs)"
)
NO_STEPWISE: Final = (
    "--stepwise goes on from a place in the order of the tests, and --gpuguard-pack with -n keeps no order: it would "
    "pass over tests that never ran. Take -x, and --lf for the next run; or leave out -n"
)


def check_options(config: pytest.Config) -> None:
    """Refuse what cannot go together. Raises pytest.UsageError."""
    option = config.option
    workers = getattr(option, "numprocesses", None)
    if workers == 0 or (workers in ("auto", "logical") and option.usepdb):
        return  # xdist runs no workers then, whatever else is given
    if getattr(option, "distload", False) or getattr(option, "dist", "no") != "no":
        given = "-d" if option.distload else f"--dist {option.dist}"
        raise pytest.UsageError(OWN_DISTRIBUTION.format(given=given))
    stepwise = any(getattr(option, name, False) for name in ("stepwise", "stepwise_skip", "stepwise_reset"))
    if workers and stepwise:
        raise pytest.UsageError(NO_STEPWISE)


def auto_workers(config: pytest.Config) -> int:
    """As many workers as the rig has GPUs that may be used, at least one. What was found is kept for the run."""
    session = Session(read_config(config))
    try:
        rig = session.rig
        if rig.kind == "real":
            config.stash[RIG] = rig.to_dict()
        return max(len(rig.leasable), 1)
    except HostFault:
        return 1  # told where claims are evaluated
    finally:
        session.close()


def make_scheduler(config: pytest.Config, folder: Path) -> PackedScheduling:
    """The scheduler of this run; ``folder`` is shared with the workers."""
    settings: Config = settings_of(config)

    def gpus_of() -> list[str]:
        session = Session(settings, folder)
        try:
            return [gpu.uuid for gpu in session.rig.leasable]
        except HostFault:
            return []
        finally:
            session.close()

    def say(works: Sequence[Work], order: Sequence[Unit], gpus: Sequence[str], workers: int) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and config.option.verbose >= 0 and any(not work.plain for work in works):
            reporter.ensure_newline()
            line = plan_line(works, order, gpus, workers)
            reporter.write_line(f"{line} on a real rig" if settings.simulated else line)

    return PackedScheduling(
        config,
        lambda collection: read_works(folder, collection),
        gpus_of,
        lambda worker, uuids: assign(folder, worker, uuids),
        say,
    )


def plan_line(works: Sequence[Work], order: Sequence[Unit], gpus: Sequence[str], workers: int) -> str:
    """What is planned, in one line."""
    leasing = [work for work in works if not work.plain]
    boots = sum(not unit.plain for unit in order)
    about = span(max((one.end for one in simulate(order, gpus, workers)), default=0.0))
    where = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}" if gpus else "no GPUs"
    return (
        f"packing: {len(leasing)} test{'s' if len(leasing) != 1 else ''} in {boots} lease{'s' if boots != 1 else ''} "
        f"on {where} by {workers} worker{'s' if workers != 1 else ''}: about {about} expected"
    )
