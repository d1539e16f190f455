"""What a run knows of its own tests from earlier runs, and what it notes of them for later ones.

It must never ask for facts that nothing else needs: a test that needs no stack and no GPU has neither among its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final

import pytest

from ..claims.drift import on_cards
from ..facts.faults import HostFault
from ..facts.stack import StackError
from ..run_stacks import StackAbsent
from ..stacks import plain_nodeid
from .history import Expected, Seconds, Stopwatch, expected_of, key_of, parts_of
from .history_file import LocalHistory, history_file, read_history

if TYPE_CHECKING:
    from ..boots import LiveBoot
    from ..claims.series import Baseline
    from ..facts.gpu import Rig
    from ..facts.stack import Stack
    from ..run import Runner
    from .budgeted import Budgeted
    from .ledger_times import Times

_WATCH: Final = pytest.StashKey[Stopwatch]()
#: Fixtures by which a test's own code comes to a stack.
_STACKS: Final = frozenset({"gpuguard_sglang_server", "gpuguard_command_server", "gpuguard_probe", "gpuguard_stack"})


class Memory:
    """Of one pytest process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._history: LocalHistory | None = None
        self._times: Times | None = None
        self._up: tuple[Hashable, LiveBoot | None] = (None, None)

    @property
    def history(self) -> LocalHistory:
        """What earlier runs have left; read once."""
        if self._history is None:
            self._history = read_history(history_file(self._runner.config.rootpath))
        return self._history

    def key(self, item: pytest.Item) -> str:
        """The name of a test in the history."""
        return key_of(self._runner.evaluation(item).claim.about.id or item.nodeid, item.nodeid)

    def expected(self, item: pytest.Item) -> Expected:
        """How long a test is expected to take."""
        from .facts import leases

        claim = self._runner.evaluation(item).claim
        return expected_of(claim, item.nodeid, self.history, not leases(item), lambda: self._shared(item))

    def _shared(self, item: pytest.Item) -> Seconds | None:
        """How long a claim took where the ledger last saw it, on such cards. Of a rehearsal that says nothing."""
        from .ledger_times import expected

        if self._runner.session.simulated:
            return None
        if self._times is None:
            self._times = self._runner.times()
        evaluation, plain = self._runner.evaluation(item), plain_nodeid(item)
        known = self._times.get(key_of(evaluation.claim.about.id or plain, plain))
        if not known:
            return None
        cards: tuple[str, ...] = ()
        if any(one.cards for one in known):
            try:
                cards = self._runner.session.cards([gpu.uuid for gpu in self._runner.session.rig.usable])
            except HostFault:
                pass  # told by the verdict
        return expected(known, evaluation.ref.name, cards)

    def parts(self, item: pytest.Item) -> dict[str, str | None]:
        """The parts of stack and rig that matter to a test; those that cannot be asked are missing."""
        return parts_of(*self._facts(item))

    def components(self, item: pytest.Item) -> dict[str, str | None]:
        """The same in full, flat: every package, environment variables, caches."""
        from ..ledger.changes import components_of

        stack, rig = self._facts(item)
        return components_of(
            stack.fingerprint() if stack is not None else {}, rig, stack is not None and stack.simulated
        )

    def _facts(self, item: pytest.Item) -> tuple[Stack | None, Rig | None]:
        evaluation = self._runner.evaluation(item)
        claim, session = evaluation.claim, self._runner.session
        subjects = {subject for subject, _, _ in claim.needs.versions}
        stack = rig = None
        try:
            if claim.gpus or "driver" in subjects:
                rig = session.rig
            named = not _STACKS.isdisjoint(getattr(item, "fixturenames", ()))
            if claim.serves is not None or named or subjects & {"cuda", "package"}:
                stack = evaluation.stack
        except (HostFault, StackAbsent, StackError):
            pass  # told by the verdict
        return stack, rig

    def baselines(self, item: pytest.Item) -> Callable[[str, Sequence[str]], Baseline | None]:
        """Answers what rate of a load is known from before, by the expectation's subject and the cards.

        That of the ledger, which may be a fleet's, or of this machine's own history: the higher one.
        """

        def known(subject: str, cards: Sequence[str]) -> Baseline | None:
            local = self.history.baseline(self.key(item), subject, cards)
            shared = self._runner.rates(item).get(on_cards(subject, cards))
            both = [one for one in (shared, local) if one is not None]
            return max(both, key=lambda one: one.rate, default=None)

        return known

    # ----------------------------------------------------------------------------------------------------------- times

    def begin(self, item: pytest.Item) -> str | None:
        """A test's set-up begins. Returns why the budget is against it, if it is."""
        item.stash[_WATCH] = Stopwatch()
        return self.budget.refusal(item.nodeid, self._is_up(item)) if self.budget is not None else None

    @property
    def budget(self) -> Budgeted | None:
        """The budget of this run, if it has one."""
        budget: Budgeted | None = self._runner.config.pluginmanager.get_plugin("gpuguard-budget")
        return budget

    def watch(self, item: pytest.Item) -> Stopwatch:
        """The watch of a test that has begun."""
        return item.stash.setdefault(_WATCH, Stopwatch())

    def note_boot(self, item: pytest.Item, live: LiveBoot | None) -> None:
        """A test's declared server was booted or joined."""
        self._up = (self._runner.evaluation(item).share_key(), live)

    def _is_up(self, item: pytest.Item) -> bool:
        """Whether a test will join a server that is up."""
        known, live = self._up
        if live is None or known is None or known != self._runner.evaluation(item).share_key():
            return False
        return live.shared and not live.touched and live.usable
