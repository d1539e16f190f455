"""One server under one load: windows of it as samples, each with why it does not count, or may be doubted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .engines.sglang import headers

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .claims.expect import Rated
    from .measure.gather import Taken
    from .measure.load import Window

#: The least length of one sample, in seconds: shorter ones show the scheduler's ticks.
SAMPLE_S: Final = 1.0


class Loaded:
    """A server that is warmed up under the load of an expectation; a context manager.

    The load runs on between samples until ``pause``.
    """

    def __init__(self, live: LiveBoot, stated: Rated) -> None:
        from .measure.load import Load
        from .measure.meter import Meter

        assert live.boot is not None
        self._live = live
        self._per = stated.per
        self._failed: Window | None = None
        load = Load(stated.concurrency, stated.input_len, stated.output_len, seed=next(live.loads))
        self._meter = Meter(live.boot.url, headers(live.spec), load, model=live.served, alive=self._alive)

    def _alive(self) -> bool:
        return self._live.boot is not None and self._live.boot.alive

    def __enter__(self) -> Loaded:
        try:
            window = self._meter.warm_up()
            self._failed = window if window.failed is not None else None
        except BaseException:
            self._meter.close()  # nobody leaves what was never entered
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._meter.close()

    def pause(self) -> None:
        """Take the load off the server until the next sample."""
        self._meter.pause()

    def sample(self, most_s: float) -> Taken:
        """One window, of at most so many seconds.

        Rejected when the GPUs were slowed, could not be asked, somebody else used them, or graphs were not used.
        """
        from .measure.gather import taken

        if self._failed is not None:  # a request that failed while warming up failed too
            failed, self._failed = self._failed, None
            return taken(failed, self._per)
        boot = self._live.boot
        eager = boot.eager_decodes if boot is not None else 0
        # Whole rounds of one slot, however long one takes.
        window = self._meter.sample(SAMPLE_S, rounds=1, most_s=max(most_s, SAMPLE_S))
        reason, doubts = self._conditions(window.started, window.ended, eager)
        return taken(window, self._per, reason, doubts)

    def _conditions(self, started: float, ended: float, eager: int) -> tuple[str | None, tuple[str, ...]]:
        """Why a sample does not count, and what is not known of its time."""
        live = self._live
        doubts: tuple[str, ...] = ()
        if live.sampler is not None:
            found = live.sampler.conditions(started, ended)
            reasons = [*found.foreign, *found.slowed, *found.silent]
            if reasons:
                return reasons[0], ()
            doubts = found.unknown
        graphs = bool(live.spec.gpus) and not live.observation.resolved.evidence("cuda_graph", False)
        if graphs and live.boot is not None and live.boot.eager_decodes > eager:
            return "decode steps ran without CUDA graphs (cuda graph: False)", ()
        return None, doubts
