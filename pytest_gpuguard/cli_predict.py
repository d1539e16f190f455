"""``gpuguard predict``: whether a model would fit, from its config.json, a rig, a release and flags, before any boot.

It boots nothing and downloads nothing; what cannot be predicted is one line on stderr, never a traceback.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from .facts.choice import RIG_FORMS

if TYPE_CHECKING:
    from .claims.layout import Layout
    from .predict.values import Box, Prediction

_ENGINE: Final = re.compile(r"(?P<name>[A-Za-z]+)(?:\s*==\s*(?P<version>\S.*))?")
_SEVERAL: Final = re.compile(r"-{1,2}[A-Za-z][\w-]*\s")
#: What a configuration of a form that nobody has seen makes of our arithmetic.
_UNFORESEEN: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AssertionError)


@click.command()
@click.option("--model", required=True, metavar="PATH", help="A model's config.json, or the folder that it lies in.")
@click.option("--rig", default="auto", metavar="RIG", show_default=True, help=f"The GPUs: {RIG_FORMS}.")
@click.option("--engine", default="sglang", metavar="NAME[==VERSION]", show_default=True, help="Whose rules apply.")
@click.option("--measured", multiple=True, metavar="NAME=NUMBER", help="A known number in place of a rule; repeatable.")
@click.option("--layout", metavar="LAYOUT", help='Parallel sizes, such as "TP8 DP8 EP8", in place of their flags.')
@click.option("--search", is_flag=True, help="Try every layout of this rig, the most KV tokens first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the keys of docs/prediction.md.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS...]")
def predict(
    model: str,
    rig: str,
    engine: str,
    measured: tuple[str, ...],
    layout: str | None,
    search: bool,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Say whether a model would fit on GPUs, how many tokens its KV pool would hold, and why.

    FLAGS are the server's own, after a "--". Exits 0 when it fits (with --search: when any layout does), 1 when it does
    not, 2 when nothing can be predicted from what was given.
    """
    from .claims.errors import ClaimError
    from .facts.simulated import SimulationError
    from .predict.values import PredictError

    try:
        fits, lines, data = _answer(model, rig, engine, measured, layout, search, flags)
    except (PredictError, ClaimError, SimulationError) as error:
        said = re.sub(r"\s*\n\s*", " ", str(error))
        click.echo(_printable(f"gpuguard predict: {said}"), err=True)
        raise SystemExit(2) from None
    if as_json:
        click.echo(json.dumps(finite(data), allow_nan=False))
    else:
        for text, colour in lines:
            click.echo(_coloured(_printable(text), colour))
    if not fits:
        raise SystemExit(1)


def _answer(
    model: str,
    rig: str,
    engine: str,
    measured: Sequence[str],
    layout: str | None,
    search: bool,
    flags: Sequence[str],
) -> tuple[bool, Iterable[tuple[str, str]], Mapping[str, Any]]:
    """Whether it fits, the lines to print, and the JSON. Raises PredictError, ClaimError, SimulationError."""
    from .claims.layout import parse_layout, resolve
    from .predict.values import PredictError

    name, version = engine_of(engine)
    known = measured_of(measured)
    words = flags_of(flags)
    declared = resolve(parse_layout(layout), words) if layout is not None else None
    if search and declared is not None:
        raise PredictError("--search tries all layouts: leave --layout out")
    file = config_of(model)
    box, notes = _box(rig)
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    try:
        if search:
            return _search(file, box, notes, name, version, known, words, width)
        return _one(file, box, notes, name, version, known, words, declared, width)
    except PredictError:
        raise
    except _UNFORESEEN as error:
        raise PredictError(
            f"{model}: something in it has a form that no rule here knows ({type(error).__name__}: {error}); "
            "please report it"
        ) from error


def _one(
    file: Path,
    box: Box,
    notes: tuple[str, ...],
    engine: str,
    version: str | None,
    known: Mapping[str, float],
    words: Sequence[str],
    declared: Layout | None,
    width: int,
) -> tuple[bool, Iterable[tuple[str, str]], Mapping[str, Any]]:
    from dataclasses import replace

    from .predict.predictor import predict as predicted
    from .report.predicted import prediction_lines

    found: Prediction = predicted(file, box, engine, version, words, measured=known, layout=declared)
    found = replace(found, assumptions=(*found.assumptions, *notes))
    return found.fits, list(prediction_lines(found, box, width)), found.to_dict()


def _search(
    file: Path,
    box: Box,
    notes: tuple[str, ...],
    engine: str,
    version: str | None,
    known: Mapping[str, float],
    words: Sequence[str],
    width: int,
) -> tuple[bool, Iterable[tuple[str, str]], Mapping[str, Any]]:
    from .predict.predictor import facts_of
    from .predict.search import search as searched
    from .report.predicted import search_lines

    found = searched(facts_of(file, box, known), engine, version, words)
    for note in (*notes, *found.notes):
        click.echo(f"note: {note}", err=True)
    called = f"{engine} {version}" if version else engine
    return bool(found.layouts), list(search_lines(found, called, box, width)), found.to_dict()


def engine_of(text: str) -> tuple[str, str | None]:
    """``"sglang==0.5.7"`` → ("sglang", "0.5.7"); the version may be left out. Raises PredictError."""
    from .predict.predictor import ENGINES
    from .predict.values import PredictError

    match = _ENGINE.fullmatch(text.strip())
    if match is None or match["name"].lower() not in ENGINES:
        raise PredictError(f"--engine {text!r} is none of {', '.join(ENGINES)}: write sglang, or sglang==0.5.7")
    return match["name"].lower(), match["version"]


def measured_of(texts: Iterable[str]) -> dict[str, float]:
    """``"weights_gib=77.7"`` → {"weights_gib": 77.7}. Raises PredictError; names are checked where rules are."""
    from .predict.values import PredictError

    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            number = float(value) if equals and name.strip() else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise PredictError(f"--measured {text!r} is no NAME=NUMBER: write weights_gib=77.7")
        if found.setdefault(name.strip(), number) != number:
            raise PredictError(f"--measured gives {name.strip()} twice")
    return found


def flags_of(words: Sequence[str]) -> tuple[str, ...]:
    """The server's flags as words; one word that holds several flags is split as a shell does. Raises PredictError."""
    from .predict.values import PredictError

    found: list[str] = []
    for word in words:
        try:
            found += shlex.split(word) if _SEVERAL.match(word) else [word]
        except ValueError as error:
            raise PredictError(f"flags {word!r}: {error}") from None
    return tuple(found)


def config_of(text: str) -> Path:
    """The file or folder of a model; a hub id stands for its snapshot in the local cache. Raises PredictError."""
    import os

    from .facts.models import hub_cache, is_hub_id, newest_snapshot
    from .predict.values import PredictError

    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise PredictError(f"{text}: this folder has no config.json, so it is no model")
    if path.exists() or not is_hub_id(text):
        return path
    found = newest_snapshot(text, hub_cache(os.environ))
    if found is None:
        raise PredictError(f"{text} is no file or folder, and no model of that name is in the hub cache")
    return found


def _box(rig: str) -> tuple[Box, tuple[str, ...]]:
    from .facts.choice import parse_rig
    from .facts.simulated import simulated_rig
    from .predict.boxes import box_of
    from .predict.values import PredictError

    try:
        choice = parse_rig(rig)
    except ValueError as error:
        raise PredictError(f"--rig {error}") from None
    if choice.kind == "simulated":
        return box_of(simulated_rig(choice))
    if choice.kind != "real":
        raise PredictError(f"--rig {rig}: {choice.kind} rigs are not available in this version")
    from .facts.nvml import query_rig

    return box_of(query_rig())


def finite(value: Any) -> Any:
    """The same data with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def _printable(text: str) -> str:
    """Names in a configuration may hold anything, also what a terminal would act on."""
    if text.isprintable():
        return text  # the import below costs as much as the prediction
    from .claims.account import printable

    return printable(text)


def _coloured(text: str, colour: str) -> str:
    if not colour or not sys.stdout.isatty():
        return text
    if colour in ("bold", "dim"):
        return click.style(text, bold=colour == "bold", dim=colour == "dim")
    return click.style(text, fg=colour, bold=colour in ("green", "red"))
