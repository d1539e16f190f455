"""One claim from start to end: needs against facts, lease, boot, observation, judgement. Knows no pytest.

The test's own code runs between ``boot`` and ``judge``; what it did comes in as a ``Body``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .booting import Booting, carried
from .boots import LiveBoot
from .claims.claim import Claim
from .claims.expect import MaxMem, Rated
from .claims.observation import NO_SERVER, Observation
from .claims.outcome import READY
from .claims.rehearsal import as_rehearsed
from .claims.verdict import Body, Judgement, judge_claim
from .engines.command import COMMAND
from .reserve import if_alone
from .session import Session
from .situation import ModelOf

if TYPE_CHECKING:
    from .claims.series import Baseline
    from .facts.stackref import StackRef
    from .measure.sampler import Sampler


class BootFailed(RuntimeError):
    """The server did not come up. ``observation`` says what happened; the judge has it already."""

    def __init__(self, observation: Observation) -> None:
        said = observation.decisive.text if observation.decisive else observation.note or "see the log"
        super().__init__(f"{observation.outcome} in phase {observation.phase}: {said} (log: {observation.log})")
        self.observation = observation


class Evaluation(Booting):
    """The evaluation of one claim (or of a test that boots servers itself). Collects every observation it makes."""

    def __init__(self, session: Session, claim: Claim, test: str, ref: StackRef, model_of: ModelOf) -> None:
        super().__init__(session, claim, test, ref, model_of)
        #: It is evaluated once more: what this run has answered already does not count.
        self.anew = False
        #: What its probes were given: some of it may be secret.
        self.asked_texts: list[dict[str, str]] = []
        #: We stop its servers ourselves, while its code still runs: how they end says nothing.
        self.given_up = False
        self._bare: tuple[Sampler, tuple[str, ...], float] | None = None
        #: What is known of a rate from before, by the expectation's subject and the cards.
        self.baselines: Callable[[str, Sequence[str]], Baseline | None] | None = None

    @contextmanager
    def leased(self) -> Iterator[tuple[str, ...]]:
        """GPUs for a test that boots nothing, clean before and after; their peak is sampled. Raises LeaseFailed."""
        count = self.claim.gpus
        choice = self.gpus_for(count)
        with self.session.reservations.gpus(choice, count, self.claim.needs.exclusive, self.test) as uuids:
            if self.place is not None:
                self.place.took(uuids)
            limited = any(isinstance(one, MaxMem) and one.of == "peak" for one in self.claim.expectations)
            sampler = self.session.sampler(uuids, own_processes) if limited else None
            self._bare = (sampler, uuids, time.monotonic()) if sampler is not None else None
            try:
                yield uuids
            finally:
                if sampler is not None:
                    sampler.stop()

    @property
    def repeatable(self) -> bool:
        """Whether it can be judged anew. A peak on GPUs that a fixture has leased cannot: it is that of the lease."""
        return self._bare is None

    # ------------------------------------------------------------------------------------------------------ measure

    def measure(self, live: LiveBoot) -> LiveBoot:
        """Take what the claim's expectations ask for from a server that is up; returns the one that is up then."""
        from .measuring import Measuring

        if live.boot is None or self.session.simulated:  # a simulated server has nothing that could be measured
            return live
        return Measuring(self, live).run()

    def baseline(self, stated: Rated, cards: Sequence[str]) -> Baseline | None:
        """What was verified of this rate on such cards; None when there is nothing."""
        return self.baselines(stated.subject, cards) if self.baselines is not None else None

    def forecast(self) -> dict[str, Any] | None:
        """The prediction beside the last boot, as JSON data; None without a boot on real GPUs. Never raises."""
        live = self.live[-1] if self.live else None
        if live is None or self.session.simulated or not live.observation.gpus or live.spec.engine == COMMAND:
            return None
        from .forecast import forecast

        return forecast(live, self.session.rig, self.version_of(live.spec.engine), self._measured[-1])

    # -------------------------------------------------------------------------------------------------------- judge

    def observed(self, observation: Observation) -> None:
        """Keep what was seen without a server of this claim."""
        self._observed.append(observation)

    def observations(self, patient: bool = False) -> list[Observation]:
        """Every observation so far; servers that are up are looked at once more, patiently when the test failed."""
        found = list(self._observed)
        for live in self.live:
            if live.boot is not None and live.observation.ready and not self.given_up:
                again = live.boot.observe_again(patient or live.broken)
                if again.ready:
                    again = replace(live.observation, tail=again.tail, resolved=again.resolved)
                else:
                    again = carried(again, live.observation)
                live.observation = if_alone(again, live.held)
            peak = live.sampler.peak() if live.sampler is not None else None
            if peak is not None and live.sampler is not None:
                strangers = live.sampler.conditions(live.began, time.monotonic()).foreign
                live.observation = replace(live.observation, peak=peak, strangers=strangers)
            found.append(live.observation)
        if self._bare is not None:
            sampler, uuids, began = self._bare
            strangers = sampler.conditions(began, time.monotonic()).foreign
            peak = sampler.peak()
            found.append(Observation(NO_SERVER, READY, "ready", peak=peak, gpus=uuids, strangers=strangers))
        return found

    def judge(self, body: Body) -> tuple[tuple[Judgement, ...], list[Observation]]:
        """The judgements of this claim, and what they rest on."""
        observations = self.observations(patient=body.kind in ("error", "assertion"))
        judgements = judge_claim(self.claim, observations, self.version_of, body)
        if self.session.simulated:
            from .sim.unknown import unknown_in

            unknown = [what for one in observations for what in unknown_in(one.log)]
            judgements = as_rehearsed(self.claim, judgements, observations, list(dict.fromkeys(unknown)), body)
        return judgements, observations


def own_processes() -> set[int]:
    """The pids of our own process and of all that it has started."""
    import psutil

    me = psutil.Process()
    return {me.pid, *(one.pid for one in me.children(recursive=True))}
