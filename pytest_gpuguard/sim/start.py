"""How a boot of the stand-in begins: its order is read, the predictor is asked, and the phases are run.

It knows argv, config.json, rig and release, and ends the process with the status that SGLang would end with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..claims.layout import Layout
from ..facts.gpu import Rig
from ..facts.simulated import simulated_packages, simulated_rig
from ..predict.values import PredictError, Prediction
from . import failures
from .argv import read_argv
from .boot import Boot
from .log import Log
from .order import Order, read_order
from .release import Release, load_release
from .scene import box_of


def main(words: Sequence[str]) -> NoReturn:
    """Boot as ordered by the command line, and serve until SIGTERM. Never returns."""
    order = read_order(words)
    rig = simulated_rig(order.rig)
    packages = simulated_packages(order.stack)
    release = load_release(packages["sglang"])
    given = read_argv(order.argv, release)
    alone = Log(release, Layout(), ())
    alone.own(f"a simulated boot of sglang {release.version} on {order.rig}: no GPU, no weights, nothing measured")
    if given.error is not None:
        failures.refused(alone, given.error)
    try:
        prediction = predicted(order, rig, release)
    except PredictError as error:
        alone.no_rule(f"this boot: {error}")
        raise SystemExit(1) from None
    Boot(order, rig, release, given, prediction, frozenset(packages)).run()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to be torn down


def predicted(order: Order, rig: Rig, release: Release) -> Prediction:
    """The arithmetic of this boot, by the one predictor that there is."""
    from ..predict.predictor import predict

    return predict(
        order.folder,
        box_of(rig, order.gpus),
        "sglang",
        release.version,
        tuple(_without_model(order.argv)),
        dict(order.env),
        dict(order.measured),
    )


def _without_model(argv: Sequence[str]) -> list[str]:
    """The flags without the model's path, host and port, which the predictor is not asked about."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--model-path", "--host", "--port"):
            skip = True
        else:
            kept.append(word)
    return kept
