"""What the predictor says of boots that somebody booted, against what their logs said; numbers only, nothing is booted.

`measured_boots/boots.json` has a boot a line: the card (a name of the catalogue, or name, MiB, SM and NVLink), the
configuration (numbers, architecture and quantization, in `configs/`), release, flags, and what was measured. `inputs`
are numbers of the boot that the prediction needs because its log does not name the card. `apart` tells why a number
does not count: a fork, branch or image follows rules of its own. It must never be fitted to: rules are the engine's.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.facts.catalogue import cards
from pytest_gpuguard.predict.predictor import predict
from pytest_gpuguard.predict.values import Box, Prediction

FOLDER = Path(__file__).parent / "measured_boots"
#: Why a number may be apart and still count: the free memory stands for the name of the card, not for a rule.
UNNAMED = "the card is not named: the boot's own free memory is an input"


@dataclass(frozen=True)
class Boot:
    """One boot and its prediction."""

    row: dict[str, Any]
    prediction: Prediction = field(repr=False)

    def has(self, number: str) -> bool:
        """Whether this number was measured and counts."""
        return number in self.row and self.row.get("apart", {}).get(_kind(number), UNNAMED) == UNNAMED

    def error(self, number: str) -> float:
        """The relative error; for an outcome or a fraction 0 when right, else 1."""
        measured, found = self.row[number], self.found(number)
        if number == "outcome":
            return float(found != measured)
        if number == "fraction":
            printed = Decimal(repr(measured))
            return float(Decimal(repr(found)).quantize(printed) != printed)
        return float(abs((found or 0) - measured) / measured)

    def found(self, number: str) -> Any:
        """What was predicted."""
        said = self.prediction
        if number == "outcome":
            return "ready" if said.fits else said.verdict
        return {"weights": said.weights_gib, "tokens": said.kv_tokens, "fraction": said.mem_fraction_static}[number]


def _kind(number: str) -> str:
    return "verdict" if number == "outcome" else number


def _box(row: dict[str, Any]) -> Box:
    card = row["card"]
    if not isinstance(card, str):
        name, total, sm, nvlink = card
        return Box(name, row["count"], total, None, sm, nvlink)
    known = cards()[card]
    assert known.total_mib is not None
    return Box(known.name, row["count"], known.total_mib, known.reserved_mib, known.sm, known.nvlink)


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((FOLDER / "boots.json").read_text(encoding="utf-8"))
    return rows


@cache
def boots(engine: str) -> tuple[Boot, ...]:
    """Every boot of an engine with its prediction."""
    return tuple(
        Boot(
            row,
            predict(
                FOLDER / "configs" / row["config"],
                _box(row),
                engine=row["engine"],
                version=row.get("version"),
                flags=shlex.split(row["flags"]),
                measured=row.get("inputs", {}),
            ),
        )
        for row in _rows()
        if row["engine"] == engine
    )


def table(found: Sequence[Boot], number: str) -> str:
    """A line for each boot, the worst first."""
    lines = [
        f"{boot.row['id']} {boot.row['engine']} {boot.row.get('version')} {boot.row['model']} x{boot.row['count']} "
        f"{boot.row['flags']}\n    {number}: predicted {boot.found(number)}, measured {boot.row[number]}, "
        f"error {boot.error(number):.2%} ({boot.prediction.verdict}; {boot.row['source']})"
        for boot in sorted(found, key=lambda boot: -boot.error(number))
    ]
    return "\n".join(["", *lines])


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile, interpolated between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@pytest.mark.parametrize(
    ("number", "engines", "median", "ninetieth", "least"),
    [
        pytest.param("weights", ("sglang", "vllm"), 0.01, 0.04, 20, id="weights"),
        pytest.param("tokens", ("sglang",), 0.025, 0.08, 5, id="tokens of the KV pool of SGLang"),
    ],
)
def test_what_was_measured_is_predicted_within(
    number: str, engines: tuple[str, ...], median: float, ninetieth: float, least: int
) -> None:
    found = [boot for engine in engines for boot in boots(engine) if boot.has(number)]
    errors = [boot.error(number) for boot in found]
    assert len(found) >= least
    assert statistics.median(errors) <= median, table(found, number)
    assert quantile(errors, 0.9) <= ninetieth, table(found, number)


def test_a_fraction_that_a_log_printed_is_predicted_to_its_last_digit() -> None:
    found = [boot for boot in boots("sglang") if "fraction" in boot.row and "fraction" not in boot.row.get("apart", {})]
    assert len(found) >= 2
    assert not any(boot.error("fraction") for boot in found), table(found, "fraction")


@pytest.mark.parametrize(("engine", "least"), [("sglang", 9), ("vllm", 4)])
def test_whether_a_boot_fits_and_where_it_ends_is_predicted(engine: str, least: int) -> None:
    found = [boot for boot in boots(engine) if boot.has("outcome")]
    assert len(found) >= least
    right = sum(not boot.error("outcome") for boot in found)
    assert right / len(found) >= 0.95, table(found, "outcome")


def test_the_boots_are_numbers_with_a_source_and_nothing_large() -> None:
    assert (FOLDER / "boots.json").stat().st_size < 60_000
    sizes = {file.name: file.stat().st_size for file in (FOLDER / "configs").iterdir()}
    assert max(sizes.values()) < 30_000
    assert sum(sizes.values()) < 100_000
    rows = _rows()
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["config"] for row in rows} == set(sizes)
    for row in rows:
        assert row["source"]
        assert {"weights", "tokens", "fraction", "outcome"} & row.keys()
