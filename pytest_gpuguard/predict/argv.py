"""Values of flags as text and numbers, for the settings of either engine.

Pure. The last of several spellings wins, as in the engines' own parsers; what cannot be meant is a PredictError.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..claims.layout import flag_value
from .values import PredictError


def argv_text(argv: Sequence[str], *names: str) -> str | None:
    """The value of a flag in any of its ``names``; None where it is not given."""
    value = flag_value(argv, names)
    if value is None and any(word in names for word in argv):
        raise PredictError(f"{next(word for word in argv if word in names)} needs a value")
    return value


def argv_number(argv: Sequence[str], least: float, *names: str) -> float | None:
    """A finite number of at least ``least``; None where the flag is not given."""
    value = argv_text(argv, *names)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        raise PredictError(f"{names[0]} {value!r} is not a number") from None
    if not least <= number < float("inf"):
        raise PredictError(f"{names[0]} {value} is impossible: it is at least {least:g}")
    return number


def argv_whole(argv: Sequence[str], least: int, *names: str) -> int | None:
    """A whole number of at least ``least``; None where the flag is not given."""
    number = argv_number(argv, least, *names)
    if number is None:
        return None
    if number != int(number):
        raise PredictError(f"{names[0]} {number:g} is not a whole number")
    return int(number)


def argv_share(argv: Sequence[str], *names: str) -> float | None:
    """A share above 0 and at most 1; None where the flag is not given."""
    number = argv_number(argv, 0, *names)
    if number is not None and not 0 < number <= 1:
        raise PredictError(f"{names[0]} {number:g} is impossible: it is a share, above 0 and at most 1")
    return number
