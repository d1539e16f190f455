"""Sizes, durations, shares and bounds as people write them; GB and GiB are never mixed."""

from __future__ import annotations

import math

import pytest

from pytest_gpuguard.claims.units import (
    GIB,
    Comparison,
    parse_bytes,
    parse_comparison,
    parse_duration,
    parse_gib,
    parse_percent,
)
from tests.laws import given, st


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("96GB", 96_000_000_000),
        ("96gb", 96_000_000_000),
        ("89.4GiB", round(89.4 * 2**30)),
        (" 75 GiB ", 75 * 2**30),
        ("97887MiB", 97887 * 2**20),
        ("512KB", 512_000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["96", "96G", "96Gi", "GB", "-1GB", "1e3GB", "96GBs", "", "9 6GB", 96, None, True])
def test_anything_else_is_no_size_and_the_message_shows_both_units(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a size: .*"96GB" \(10⁹ bytes\) or "75GiB"'):
        parse_bytes(text)


@given(st.integers(0, 10**6), st.sampled_from(["K", "M", "G", "T"]))
def test_a_binary_unit_is_always_larger_than_its_decimal_namesake(number: int, prefix: str) -> None:
    binary, decimal = parse_bytes(f"{number}{prefix}iB"), parse_bytes(f"{number}{prefix}B")
    assert binary > decimal or number == 0


@given(st.integers(0, 10**5))
def test_gib_and_bytes_agree(number: int) -> None:
    assert parse_gib(f"{number}GiB") == number
    assert parse_gib(f"{number}GiB") * GIB == parse_bytes(f"{number}GiB")


def test_other_binary_units_are_converted_to_gib() -> None:
    assert parse_gib("512MiB") == 0.5


@pytest.mark.parametrize(
    ("text", "exact"), [("75GB", "69.85GiB"), ("75 gb", "69.85GiB"), ("512MB", "0.48GiB"), ("1TB", "931.32GiB")]
)
def test_a_decimal_unit_is_refused_where_engines_print_gib(text: str, exact: str) -> None:
    with pytest.raises(ValueError, match="engines print GiB and call it GB") as refusal:
        parse_gib(text)
    assert f'"{exact}" for {text}' in str(refusal.value)


def test_the_refusal_of_gb_offers_the_engines_own_number() -> None:
    with pytest.raises(ValueError, match='write "75GiB" for the engine\'s number'):
        parse_gib("75GB")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20m", 1200), ("20 min", 1200), ("90s", 90), ("90", 90), ("1.5h", 5400), ("250ms", 0.25), (90, 90), (0.5, 0.5)],
)
def test_a_duration_is_in_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0s", "-5s", "soon", "5 days", "", 0, -1, True, None, math.nan, math.inf])
def test_no_duration_is_zero_negative_endless_or_a_word(text: str | float) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), (" 12.5 % ", 0.125), (0.05, 0.05)])
def test_a_tolerance_is_a_share_below_one(text: str | float, share: float) -> None:
    assert parse_percent(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "0%", "100%", "x%", "nan%", 5, 0, 1, True, None, math.nan])
def test_anything_else_is_no_tolerance(text: str | float) -> None:
    with pytest.raises(ValueError, match=r'is not a tolerance: write "5%" or 0\.05'):
        parse_percent(text)


@pytest.mark.parametrize(
    ("text", "below", "at", "above"),
    [
        (">=10", False, True, True),
        (">10", False, False, True),
        ("<=10", True, True, False),
        ("<10", True, False, False),
        ("==10", False, True, False),
        (" >= 1_0 ", False, True, True),
        (10, False, True, True),
    ],
)
def test_a_bound_decides_below_at_and_above_its_number(text: str | int, below: bool, at: bool, above: bool) -> None:
    bound = parse_comparison(text)
    assert (bound.holds(9), bound.holds(10), bound.holds(11)) == (below, at, above)


@pytest.mark.parametrize("text", ["10", "=>10", ">", "about 10", "!=10", ">=-1", "", True, None, math.inf, math.nan])
def test_anything_else_is_no_bound(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a bound: write"):
        parse_comparison(text)


@given(st.sampled_from([">=", "<=", "==", ">", "<"]), st.integers(0, 10**9) | st.floats(0.001, 10**6))
def test_a_bound_reads_back_what_it_prints(operator: str, value: float) -> None:
    bound = Comparison(operator, float(value))
    if "e" not in str(bound):  # very small numbers print in a form that nobody writes in a claim
        assert parse_comparison(str(bound)) == bound


@given(st.floats(-(10**6), 10**6), st.floats(0, 10**6))
def test_opposite_bounds_never_agree(measured: float, value: float) -> None:
    assert Comparison(">=", value).holds(measured) != Comparison("<", value).holds(measured)
    assert Comparison(">", value).holds(measured) != Comparison("<=", value).holds(measured)
