"""Two servers under the same load, in turns: both up at once where there is room, else one after the other.

Whatever happens to either of them, it is in the observation afterwards, and the other server is stopped.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from .booting import carried
from .claims.series import Series
from .claims.stats import LEAST
from .loaded import Loaded
from .measure.gather import Gathering
from .measuring import known_series, put_series
from .reserve import if_alone

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .claims.expect import Compare
    from .evaluate import Evaluation
    from .measure.gather import Taken

#: Blocks of one series of boots: boots are dear, so they give as many as may be needed, as far as the time goes.
BLOCKS: Final = 24
#: Samples of one block: A B B A.
_OF_BLOCK: Final = 4
TOGETHER: Final = "both up at once, loaded in turns"
IN_TURN: Final = "one after the other on the same GPUs"


def compare(evaluation: Evaluation, live: LiveBoot, stated: Compare) -> LiveBoot:
    """Measure the ratio of one comparison; returns the claim's own server, which may be another boot of it."""
    other = stated.other
    assert other is not None
    unmet = evaluation.unmet_server(other)
    if unmet:
        text = f"the other server cannot be booted here: {unmet[0].text}"
        put_series(evaluation, live, stated, Series(unmet=(unmet[0].kind, text)))
        return live
    gathering = Gathering(stated.bounds, stated.limit_s, known_series(live, stated))
    how = gathering.series.how
    if not gathering.over:
        beside = evaluation.boot_beside(other, live) if stated.together else None
        if beside is not None:
            how = TOGETHER
            try:
                _in_turns(live, beside, stated, gathering)
            finally:
                _keep_other(live, stated, beside)
                evaluation.session.pool.stop(beside)
        else:
            how = IN_TURN
            live = _one_by_one(evaluation, live, stated, gathering)
    put_series(evaluation, live, stated, replace(gathering.result(), how=how))
    return live


def _in_turns(live: LiveBoot, beside: LiveBoot, stated: Compare, gathering: Gathering) -> None:
    """A B B A, while both are up: slow drift of the machine cancels in each block."""
    if not beside.observation.ready:
        return
    with Loaded(live, stated) as ours:
        ours.pause()  # the one that is not measured is idle, also while the other one warms up
        with Loaded(beside, stated) as others:
            others.pause()
            while not gathering.over:
                first = ours.sample(gathering.left_s)
                ours.pause()
                middle = (others.sample(gathering.left_s), others.sample(gathering.left_s))
                others.pause()
                gathering.add_block((first, ours.sample(gathering.left_s)), middle)
                ours.pause()


def _one_by_one(evaluation: Evaluation, live: LiveBoot, stated: Compare, gathering: Gathering) -> LiveBoot:
    """A, then B, then A again on the same GPUs: three boots, each with as many samples as its time allows."""
    other, pool = stated.other, evaluation.session.pool
    assert other is not None
    before = _samples(live, stated, gathering, None)
    count = len(before)
    if not _ready_still(live) or gathering.over or not count:
        return live
    began = time.monotonic()
    live.shared = False
    pool.stop(live, keep=True)
    if not live.observation.ready:  # its lock was taken away meanwhile
        return live
    beside = evaluation.boot_other(other, live)
    gathering.spent(time.monotonic() - began)
    middle: list[Taken] = []
    try:
        if beside.observation.ready:
            middle = _samples(beside, stated, gathering, 2 * count, spare=1 / 3)
    finally:
        _keep_other(live, stated, beside)
        pool.stop(beside)
    began = time.monotonic()
    again = evaluation.boot_again(live)
    gathering.spent(time.monotonic() - began)
    if again is None or not again.observation.ready or len(middle) < 2:
        return again or live
    after = _samples(again, stated, gathering, len(middle) // 2)
    if _ready_still(again):
        for number, (first, last) in enumerate(zip(before, after, strict=False)):  # as many as the time gave of each
            gathering.add_block((first, last), middle[2 * number : 2 * number + 2])
    return again


def _samples(
    live: LiveBoot, stated: Compare, gathering: Gathering, count: int | None, spare: float = 0.0
) -> list[Taken]:
    """So many samples of one server; the first of all says by its length how many there is time for.

    Fewer where the time is over but for ``spare``, a share of what they took. One that failed ends them: it is told,
    and there is nothing to compare.
    """
    found: list[Taken] = []
    began = time.monotonic()
    with Loaded(live, stated) as loaded:
        while count is None or len(found) < count:
            if found and gathering.left_s <= spare * (time.monotonic() - began):
                break
            one = loaded.sample(gathering.left_s)
            if one.window.failed is not None:
                gathering.add(one)
                if one.window.ours and not gathering.left_s:
                    break  # the time was over
                return []
            found.append(one)
            if count is None:
                fits = int(stated.limit_s / (1.1 * _OF_BLOCK * max(one.window.seconds, 1e-3)))
                if fits < LEAST:
                    needed = LEAST * _OF_BLOCK * one.window.seconds * 1.1
                    gathering.doubt(
                        f"one sample takes {one.window.seconds:.0f} s, the least that can decide, {LEAST} blocks of "
                        f'{_OF_BLOCK}, {needed:.0f} s: write limit="{needed * 1.5:.0f}s", or a smaller output_len'
                    )
                    return []
                count = min(fits, BLOCKS)
    return found


def _ready_still(live: LiveBoot) -> bool:
    """Look at the claim's own server once more: what ended it must be known before it is stopped."""
    if live.boot is None:
        return False
    again = if_alone(live.boot.observe_again(), live.held)
    if not again.ready:
        live.observation = carried(again, live.observation)
    return again.ready


def _keep_other(live: LiveBoot, stated: Compare, beside: LiveBoot) -> None:
    """Keep what the other server did, with the claim's own observation."""
    seen = beside.observation
    if beside.boot is not None and seen.ready:
        seen = if_alone(beside.boot.observe_again(), beside.held)
    others = MappingProxyType({**live.observation.others, stated.subject: seen})
    live.observation = replace(live.observation, others=others)
