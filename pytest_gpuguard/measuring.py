"""What is measured of a server that is up, for one claim: its answers, the memory left, its speed alone and compared.

It judges nothing: all that it finds goes into the observation. A rehearsal has nothing to measure.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from .claims.answered import probed
from .claims.expect import Compare, ExpectToks, Rated, Works
from .claims.layout import flag_value
from .claims.series import Series
from .claims.stats import LEAST
from .claims.units import GIB
from .engines.sglang import headers
from .facts.faults import HostFault
from .reserve import if_alone

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .evaluate import Evaluation
    from .measure.gather import Gathering, Taken
    from .measure.meter import Meter


#: How long a server may take over its answers, in seconds: the first request of a shape may compile kernels.
_SHORT_S: Final = 300.0
_FULL_S: Final = 1800.0
#: The least length of one sample, in seconds: shorter ones show the scheduler's ticks.
SAMPLE_S: Final = 1.0


class Measuring:
    """Measures for one evaluation. ``folder`` is where the files that a claim names are looked for first."""

    def __init__(self, evaluation: Evaluation, live: LiveBoot) -> None:
        self._evaluation = evaluation
        self._live = live

    def run(self) -> LiveBoot:
        """Measure what the claim's expectations ask for; returns the server that is up afterwards.

        A comparison of servers that do not fit beside each other boots the claim's own server once more.
        """
        stated = self._evaluation.stated()
        if any(map(probed, stated)):
            self._probe()
        for one in stated:
            if isinstance(one, ExpectToks) and not self._live.broken:
                self._put(one, self._rate(one))
        for one in stated:
            if isinstance(one, Compare) and one.subject not in self._live.observation.series and not self._live.broken:
                self._compare(one)
        return self._live

    # ------------------------------------------------------------------------------------------------------- answers

    def _probe(self) -> None:
        """Ask it a few questions, once per server and level; then look at the memory that is left."""
        from .measure.works import works

        live, wanted = self._live, [one for one in self._evaluation.stated() if isinstance(one, Works)]
        full = next((one for one in wanted if one.level == "full"), None)
        level = "full" if full is not None else "short"
        known = live.observation.answers
        if known is not None and (known.level == "full" or level == "short"):
            return
        assert live.boot is not None
        info = live.boot.facts.info if live.boot.facts is not None else {}
        answers = works(
            live.boot.url,
            headers(live.spec),
            level,
            context=None,  # it asks the server for what it needs to know
            model=_served(info, live),
            alive=lambda: live.boot is not None and live.boot.alive,
            questions=self._evaluation.file(full.questions) if full is not None else None,
            reference=self._evaluation.file(full.reference) if full is not None else None,
            deadline_s=_FULL_S if full is not None else _SHORT_S,
            judged=flag_value(live.spec.flags, ("--load-format",)) != "dummy",
        )
        live.observation = replace(live.observation, answers=answers, free_gib=self._free_gib())

    def _free_gib(self) -> float | None:
        """The least free memory of the server's GPUs now, in GiB; None where NVML does not say."""
        uuids = self._live.observation.gpus
        if not uuids:
            return None
        session = self._evaluation.session
        devices = [session.rig.gpu(uuid).device for uuid in uuids]
        try:
            found = [one.free for one in session.devices.memory(devices).values()]
        except HostFault:
            return None  # told where the GPUs are given back
        known = [one for one in found if one is not None]
        return min(known) / GIB if known and len(known) == len(found) else None

    # --------------------------------------------------------------------------------------------------------- rates

    def _put(self, stated: Rated, series: Series) -> None:
        observation = self._live.observation
        baseline = self._evaluation.baseline(stated)
        found = {**observation.series, stated.subject: replace(series, baseline=baseline)}
        self._live.observation = replace(observation, series=MappingProxyType(found))

    def _rate(self, stated: ExpectToks) -> Series:
        from .measure.gather import Gathering

        here = stated.on(self._live.observation.cards)
        if here is None:
            return Series()  # no reference for this card: nothing to measure against
        known = self._live.observation.series.get(stated.subject)  # another claim's, with bounds of its own
        gathering = Gathering(here.bounds, here.limit_s, known)
        if not gathering.over:
            with _Loaded(self._live, here) as loaded:
                while not gathering.over:
                    gathering.add(loaded.sample())
        return gathering.result()

    def _compare(self, stated: Compare) -> None:
        from .measure.gather import Gathering

        evaluation, other = self._evaluation, stated.other
        assert other is not None
        unmet = evaluation.unmet_server(other)
        if unmet:
            text = f"the other server cannot be booted here: {unmet[0].text}"
            self._put(stated, Series(unmet=(unmet[0].kind, text)))
            return
        gathering = Gathering(stated.bounds, stated.limit_s)
        beside = evaluation.boot_beside(other, self._live) if stated.together else None
        how = "both up at once, loaded in turns" if beside is not None else "one after the other on the same GPUs"
        try:
            if beside is not None:
                self._in_turns(stated, beside, gathering)
            else:
                self._one_by_one(stated, gathering)
        finally:
            if beside is not None:
                self._other(stated, beside)
                evaluation.session.pool.stop(beside)
        self._put(stated, replace(gathering.result(), how=how))

    def _in_turns(self, stated: Compare, beside: LiveBoot, gathering: Gathering) -> None:
        """A B B A, while both are up: slow drift of the machine cancels in each block."""
        if not beside.observation.ready:
            return
        with _Loaded(self._live, stated) as ours, _Loaded(beside, stated) as others:
            while not gathering.over:
                first = ours.sample()
                ours.pause()  # the one that is not measured is idle
                middle = (others.sample(), others.sample())
                others.pause()
                gathering.add_pair((first, ours.sample()), middle)

    def _one_by_one(self, stated: Compare, gathering: Gathering) -> None:
        """A, then B, then A again on the same GPUs, each with as many samples as blocks are to come of them."""
        evaluation, other = self._evaluation, stated.other
        assert other is not None
        while not gathering.over:
            ours = self._series(self._live, stated, LEAST)
            before = time.monotonic()
            self._live.shared = False
            evaluation.session.pool.stop(self._live, keep=True)
            beside = evaluation.boot_other(other, self._live)
            gathering.spent(time.monotonic() - before)
            others = self._series(beside, stated, 2 * LEAST) if beside.observation.ready else []
            self._other(stated, beside)
            before = time.monotonic()
            evaluation.session.pool.stop(beside)
            if not self._again():
                return
            gathering.spent(time.monotonic() - before)
            if not beside.observation.ready:
                return
            after = self._series(self._live, stated, LEAST)
            for number in range(LEAST):
                if not gathering.over:
                    gathering.add_pair((ours[number], after[number]), others[2 * number : 2 * number + 2])

    def _again(self) -> bool:
        """Boot the claim's own server once more, in the place of the one that was stopped."""
        before, evaluation = self._live, self._evaluation
        live = evaluation.boot_again(before)
        if live is None:
            return False
        self._live = live
        return live.observation.ready

    def _series(self, live: LiveBoot, stated: Rated, count: int) -> list[Taken]:
        with _Loaded(live, stated) as loaded:
            return [loaded.sample() for _ in range(count)]

    def _other(self, stated: Compare, beside: LiveBoot) -> None:
        """Keep what the other server did, with the claim's own observation."""
        observation, seen = self._live.observation, beside.observation
        if beside.boot is not None and seen.ready:
            seen = if_alone(beside.boot.observe_again(), beside.held)
        others = MappingProxyType({**observation.others, stated.subject: seen})
        self._live.observation = replace(observation, others=others)


class _Loaded:
    """One server under one load, warmed up; every sample says whether it counts."""

    def __init__(self, live: LiveBoot, stated: Rated) -> None:
        from .measure.load import Load
        from .measure.meter import Meter

        assert live.boot is not None
        self._live = live
        self._per = stated.per
        info = live.boot.facts.info if live.boot.facts is not None else {}
        load = Load(stated.concurrency, stated.input_len, stated.output_len, seed=next(live.loads))
        self._meter: Meter = Meter(
            live.boot.url, headers(live.spec), load, model=_served(info, live), alive=self._alive
        )

    def _alive(self) -> bool:
        return self._live.boot is not None and self._live.boot.alive

    def __enter__(self) -> _Loaded:
        try:
            self._meter.warm_up()
        except BaseException:
            self._meter.close()  # nobody leaves what was never entered
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._meter.close()

    def pause(self) -> None:
        """Take the load off the server until the next sample."""
        self._meter.pause()

    def sample(self) -> Taken:
        """One window; rejected when the GPUs were slowed, somebody else used them, or graphs were not used."""
        from .measure.gather import taken

        boot = self._live.boot
        eager = boot.eager_decodes if boot is not None else 0
        window = self._meter.sample(SAMPLE_S, rounds=1)  # whole rounds of one slot, however long one takes
        return taken(window, self._per, self._rejected(window.started, window.ended, eager))

    def _rejected(self, started: float, ended: float, eager: int) -> str | None:
        live = self._live
        if live.sampler is not None:
            found = live.sampler.conditions(started, ended)
            reasons = [*found.foreign, *found.slowed]
            if reasons:
                return reasons[0]
        graphs = bool(live.spec.gpus) and not live.observation.resolved.evidence("cuda_graph", False)
        if graphs and live.boot is not None and live.boot.eager_decodes > eager:
            return "decode steps ran without CUDA graphs (cuda graph: False)"
        return None


def _served(info: Any, live: LiveBoot) -> str:
    """The model's name as requests must give it."""
    named = info.get("served_model_name")
    return named if isinstance(named, str) and named else live.spec.model
