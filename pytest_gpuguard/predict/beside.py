"""A prediction beside what a real boot measured: number by number, and aloud where one is beyond its error bar.

Pure. It judges the predictor, never the claim: no verdict depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..claims.observation import MemoryTable, Observation
from ..claims.outcome import READY
from .values import Prediction

#: Name, what people call it, and its verb.
NUMBERS: Final[Mapping[str, tuple[str, str]]] = {
    "avail_before_gib": ("free memory before the weights", "is"),
    "weights_gib": ("the weights", "are"),
    "rest_gib": ("the room for the KV pool", "is"),
    "kv_tokens": ("the KV tokens", "are"),
    "graph_gib": ("the graphs", "are"),
    "margin_gib": ("the margin", "is"),
}
_MEMORY: Final = "oom."


def compared(prediction: Prediction, observation: Observation) -> dict[str, Any]:
    """The payload's ``prediction``: numbers by their names, in GiB and tokens; only those that both sides have.

    ``beyond`` names the numbers whose difference exceeds the bar, and ``verdict`` where the boot ended otherwise than
    predicted although the numbers were not too close to tell. A number without a bar is never beyond it.
    """
    seen = _measured(observation)
    names = [name for name in NUMBERS if getattr(prediction, name) is not None and name in seen]
    bars = {name: prediction.bars[name] for name in names if name in prediction.bars}
    beyond = [name for name in bars if abs(seen[name] - getattr(prediction, name)) > bars[name] + _printed(name)]
    if _otherwise(prediction, observation):
        beyond.append("verdict")
    return {
        "rules": prediction.rules,
        "verdict": prediction.verdict,
        "outcome": observation.outcome,
        "predicted": {name: getattr(prediction, name) for name in names},
        "measured": {name: seen[name] for name in names},
        "bars": bars,
        "beyond": beyond,
        "assumptions": list(prediction.assumptions),
        "absent": None,
    }


def absent(why: str) -> dict[str, Any]:
    """The payload's ``prediction`` where none could be made, with the same keys."""
    return {
        "rules": None,
        "verdict": None,
        "outcome": None,
        "predicted": {},
        "measured": {},
        "bars": {},
        "beyond": [],
        "assumptions": [],
        "absent": why,
    }


def beside(prediction: Prediction, observation: Observation) -> tuple[str, ...]:
    """What ``compared`` says, a line for each number, and a line for each that is beyond its bar."""
    return lines_of(compared(prediction, observation))


def lines_of(data: Mapping[str, Any], everything: bool = True) -> tuple[str, ...]:
    """The lines of a payload's ``prediction``; without ``everything`` only what is beyond its bar."""
    if data.get("absent"):
        return (f"no prediction beside it: {data['absent']}",) if everything else ()
    lines = []
    if everything:
        if data["predicted"]:
            numbers = "; ".join(_both(name, data) for name in data["predicted"])
            lines.append(f"prediction (rules of {data['rules']}): {numbers}")
        else:
            lines.append(f"prediction (rules of {data['rules']}): {data['verdict']}; the boot printed no number of it")
    return (*lines, *(_aloud(name, data) for name in data["beyond"]))


def _measured(observation: Observation) -> dict[str, float]:
    table: MemoryTable = observation.memory
    found = {
        "avail_before_gib": table.avail_before_gib,
        "weights_gib": table.weights_gib,
        "rest_gib": table.rest_gib,
        "kv_tokens": table.kv_tokens,
        "graph_gib": table.graph_gib,
        # Free memory is a margin only once everything is allocated.
        "margin_gib": table.free_gib if observation.was_ready or observation.ready else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _printed(name: str) -> float:
    """Half of the last digit that engines print: 0.01 GiB."""
    return 0.005 if name.endswith("_gib") else 0.0


def _otherwise(prediction: Prediction, observation: Observation) -> bool:
    """Whether memory decided otherwise than predicted, and not within the error of the room for the pool."""
    outcome = observation.outcome
    if outcome != READY and not outcome.startswith(_MEMORY):
        return False  # a crash for another reason says nothing of memory
    if prediction.verdict == outcome or (prediction.fits and outcome == READY):
        return False
    if outcome in ("oom.runtime", "oom.host"):
        return False  # after the boot, or not the GPU's: nothing of it is predicted
    return prediction.verdict == "rejected" or not _close(prediction)


def _close(prediction: Prediction) -> bool:
    """Whether the error of the numbers that decide is larger than what they decide by."""
    bars = prediction.bars
    if prediction.verdict == "oom.weights":
        short = (prediction.weights_gib or 0.0) - (prediction.avail_before_gib or 0.0)
        return short < bars.get("weights_gib", 0.0) + bars.get("avail_before_gib", 0.0)
    return abs(prediction.rest_gib or 0.0) < bars.get("rest_gib", 0.0)


def _both(name: str, data: Mapping[str, Any]) -> str:
    bar = data["bars"].get(name)
    called = NUMBERS[name][0].removeprefix("the ")
    around = f" ± {_size(bar, name)}" if bar else ""
    return (
        f"{called} predicted {_size(data['predicted'][name], name)}{around}{_unit(name)}, "
        f"measured {_size(data['measured'][name], name)}"
    )


def _aloud(name: str, data: Mapping[str, Any]) -> str:
    if name == "verdict":
        return f"the boot ended {data['outcome']}, where {data['verdict']} was predicted"
    called, verb = NUMBERS[name]
    difference = data["measured"][name] - data["predicted"][name]
    more = "more" if difference > 0 else "less"
    bar = f"bar {_size(data['bars'][name], name)}" if data["bars"][name] else "a number that was given"
    said = f"{called} {verb} {_size(abs(difference), name)}{_unit(name)} {more} than predicted ({bar})"
    hint = _hint(name, data)
    return f"{said}: {hint}" if hint else said


def _hint(name: str, data: Mapping[str, Any]) -> str:
    beyond, measured = data["beyond"], data["measured"]
    if name == "weights_gib":
        fact = f'measured={{"weights_gib": {measured[name]:g}}} takes the fact'
        if measured[name] > data["predicted"][name]:
            return f"buffers taken while loading (all-to-all, a draft, adapters) are in no config.json; {fact}"
        return fact
    if name == "avail_before_gib":
        return "what the driver, CUDA and the communicators take differs from the boots that the rule is from"
    if name in ("rest_gib", "kv_tokens"):
        causes = [one for one in ("avail_before_gib", "weights_gib", "rest_gib") if one in beyond and one != name]
        if causes:
            return f"it follows from {' and '.join(NUMBERS[one][0] for one in causes)}"
        if name == "kv_tokens":
            return "a token takes another size than the rules say, or a flag limits the pool"
    return ""


def _size(value: float, name: str) -> str:
    if name == "kv_tokens":
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 and not name.startswith(("weights", "avail")) else f"{value:.1f}"


def _unit(name: str) -> str:
    return " GiB" if name.endswith("_gib") else " tokens"
