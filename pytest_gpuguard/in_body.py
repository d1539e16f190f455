"""What a test's own code may ask for while it runs: a server, any command, a probe. All is judged with its claim.

It must never start anything in another phase than the call, where nobody would judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from .calling import IN_CALL, SKIPPED
from .claims.errors import ClaimError
from .claims.markers import serves as serves_marker
from .claims.rehearsal import SIMULATED
from .engines.handle import ServerHandle
from .evaluate import BootFailed, Evaluation
from .terms import skip

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .claims.needs import Unmet
    from .probe_asked import Asked, ProbeResult
    from .run import Runner


class InBody:
    """The three fixtures that are functions, for one pytest process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def sglang(self, item: pytest.Item, model: str, argv: tuple[str, ...], options: dict[str, Any]) -> ServerHandle:
        """What ``sglang_server(…)`` does: a boot of its own for this test. Raises BootFailed, TypeError."""
        evaluation = self._evaluation(item, "sglang_server(…) boots")
        try:
            declared = serves_marker.parse(pytest.mark.serves("sglang", model, *argv, **options).mark)
        except ClaimError as error:
            raise TypeError(f"sglang_server: {error}") from None
        self._skip(item, evaluation.unmet_server(declared))
        told = self._runner.progress.of(item.nodeid), self._runner.progress.waiting(item.nodeid)
        live = self._runner.booted(
            item,
            lambda: evaluation.boot(declared, alone=True, fresh=True, on_progress=told[0], on_wait=told[1]),
        )
        return _handle(evaluation, live)

    def command(self, item: pytest.Item, argv: Sequence[str], options: dict[str, Any]) -> ServerHandle:
        """What ``command_server(…)`` does: any command, booted for this test. Raises BootFailed, TypeError."""
        from . import commands

        evaluation = self._evaluation(item, "command_server(…) boots")
        order = commands.read_order(argv, **options)
        self._skip(item, commands.unmet(evaluation, order))
        told = self._runner.progress.of(item.nodeid), self._runner.progress.waiting(item.nodeid)
        live = self._runner.booted(item, lambda: evaluation.took(commands.boot(evaluation, order, *told)))
        return _handle(evaluation, live)

    def probe(self, item: pytest.Item, asked: Asked) -> ProbeResult:
        """What ``probe(…)`` does. Raises ProbeFailed; skips what cannot be decided here."""
        from .probing import ProbeAbsent, probe

        evaluation = self._evaluation(item, "probe(…) runs its script")
        if self._runner.session.simulated:
            item.stash[SKIPPED] = SIMULATED
            skip(item, "a simulated rig runs no probes")
        waiting = self._runner.progress.waiting(item.nodeid)
        try:
            return self._runner.booted(item, lambda: probe(evaluation, asked, waiting))
        except ProbeAbsent as absent:
            item.stash[SKIPPED] = absent.kind
            skip(item, str(absent))

    def _evaluation(self, item: pytest.Item, what: str) -> Evaluation:
        if not item.stash.get(IN_CALL, False):
            raise RuntimeError(
                f"{what} in the call phase: call it in the test's body "
                "(a fixture may hand over a function that calls it)"
            )
        return self._runner.evaluation(item)

    @staticmethod
    def _skip(item: pytest.Item, unmet: Sequence[Unmet]) -> None:
        if unmet:
            item.stash[SKIPPED] = unmet[0].kind
            skip(item, "; ".join(one.text for one in unmet))


def _handle(evaluation: Evaluation, live: LiveBoot | None) -> ServerHandle:
    """The server that is up. Raises BootFailed."""
    if live is None:
        raise BootFailed(evaluation.latest)
    if live.boot is None or not live.observation.ready:
        raise BootFailed(live.observation)
    return ServerHandle(live.boot, live.observation)
