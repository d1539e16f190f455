"""What is measured of a server that is up, for one claim: its answers, the memory that is left, its speed.

It judges nothing: all that it finds goes into the observation. A rehearsal has nothing to measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .claims.answered import probed
from .claims.answers import Answers, Check
from .claims.expect import Compare, ExpectToks, Rated, Works
from .claims.layout import flag_value
from .claims.series import Series
from .claims.units import GIB
from .engines.sglang import headers
from .facts.faults import HostFault
from .loaded import Loaded

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .evaluate import Evaluation

#: How long a server may take over its answers, in seconds: the first request of a shape may compile kernels.
_SHORT_S = 300.0
_FULL_S = 1800.0
#: The checks that every probe makes; a full one adds those of the claim's own files.
_SHORT = ("prefill", "same prompt again", "long prompt", "burst")


class Measuring:
    """Measures for one evaluation, on one server."""

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
        else:
            self._live.observation = replace(self._live.observation, answers=None)  # another claim's
        for one in stated:
            if isinstance(one, ExpectToks) and not self._live.broken:
                put_series(self._evaluation, self._live, one, self._rate(one))
        for one in stated:
            if isinstance(one, Compare) and not self._live.broken:
                from .comparing import compare

                self._live = compare(self._evaluation, self._live, one)
        return self._live

    # ------------------------------------------------------------------------------------------------------- answers

    def _probe(self) -> None:
        """Ask it a few questions, once per server and set of files; then look at the memory that is left."""
        live = self._live
        wanted = [one for one in self._evaluation.stated() if isinstance(one, Works) and one.level == "full"]
        full = wanted[0] if wanted else None
        files = (full.questions, full.reference) if full is not None else (None, None)
        key = tuple(str(self._evaluation.file(name)) if name is not None else None for name in files)
        if key not in live.answers:
            live.answers[key] = found = self._ask(full)
            # What another claim's files showed is not this one's affair.
            short = tuple(one for one in found.checks if one.name in _SHORT)
            live.answers.setdefault((None, None), Answers("short", short, judged=found.judged))
            live.observation = replace(live.observation, free_gib=self._free_gib())
        live.observation = replace(live.observation, answers=live.answers[key])

    def _ask(self, full: Works | None) -> Answers:
        from .measure.works import works

        live, file = self._live, self._evaluation.file
        assert live.boot is not None
        found = works(
            live.boot.url,
            headers(live.spec),
            "full" if full is not None else "short",
            context=None,  # it asks the server for what it needs to know
            model=live.served,
            alive=lambda: live.boot is not None and live.boot.alive,
            questions=file(full.questions) if full is not None else None,
            reference=file(full.reference) if full is not None else None,
            deadline_s=_FULL_S if full is not None else _SHORT_S,
            judged=flag_value(live.spec.flags, ("--load-format",)) != "dummy",
        )
        # A deadline of ours is no hang while the server is at work.
        at_work = live.boot.alive and live.boot.silent_s < self._evaluation.session.config.stall_s
        return replace(found, checks=tuple(_in_time(one) if at_work else one for one in found.checks))

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

    def _rate(self, stated: ExpectToks) -> Series:
        from .measure.gather import Gathering

        here = stated.on(self._live.observation.cards)
        if here is None:
            return Series()  # no reference for this card: nothing to measure against
        gathering = Gathering(here.bounds, here.limit_s, known_series(self._live, stated))
        if not gathering.over:
            with Loaded(self._live, here) as loaded:
                while not gathering.over:
                    gathering.add(loaded.sample(gathering.left_s))
        return gathering.result()


def _in_time(check: Check) -> Check:
    """A check that a server at work did not come to in its time is open."""
    if check.ok is not False or check.outcome != "hang.timeout":
        return check
    return replace(check, ok=None, fact=f"{check.fact}, and its log goes on", outcome="ready")


def known_series(live: LiveBoot, stated: Rated) -> Series | None:
    """What another claim measured of the same load on this server; a fault of the moment is nobody else's evidence."""
    known = live.observation.series.get(stated.subject)
    return None if known is None else replace(known, ours=None, unmet=None)


def put_series(evaluation: Evaluation, live: LiveBoot, stated: Rated, series: Series) -> None:
    """Keep a series with the observation, held against what this claim knows from before."""
    observation = live.observation
    baseline = evaluation.baseline(stated, observation.cards)
    found: Mapping[str, Any] = {**observation.series, stated.subject: replace(series, baseline=baseline)}
    live.observation = replace(observation, series=MappingProxyType(dict(found)))
