"""Which release somebody means: a version, words that hold one, or a branch of some day.

Pure. What cannot be told is the newest release that is known, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from packaging.version import InvalidVersion, Version

_VERSION: Final = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?")
_DAY: Final = re.compile(r"(?<!\d)(20\d\d)-?(\d\d)(?:-?(\d\d))?(?!\d)")
#: When SGLang's releases came out (PyPI), oldest first: a branch of a day has the rules of the release that came next.
_SGLANG: Final = (
    ("2025-01-27", "0.4.2"), ("2025-02-14", "0.4.3"), ("2025-03-13", "0.4.4"), ("2025-04-07", "0.4.5"),
    ("2025-04-27", "0.4.6"), ("2025-06-10", "0.4.7"), ("2025-06-24", "0.4.8"), ("2025-07-06", "0.4.9"),
    ("2025-07-31", "0.4.10"), ("2025-08-23", "0.5.1"), ("2025-09-11", "0.5.2"), ("2025-10-06", "0.5.3"),
    ("2025-10-24", "0.5.4"), ("2025-11-06", "0.5.5"), ("2025-12-03", "0.5.6"), ("2026-01-01", "0.5.7"),
    ("2026-01-23", "0.5.8"), ("2026-02-23", "0.5.9"), ("2026-04-05", "0.5.10"), ("2026-05-05", "0.5.11"),
    ("2026-05-16", "0.5.12"), ("2026-06-11", "0.5.13"), ("2026-06-26", "0.5.14"), ("2026-07-10", "0.5.15"),
    ("2026-07-25", "0.5.16"), ("2026-08-08", "0.5.17"), ("2026-08-21", "0.5.18"), ("2026-09-04", "0.5.19"),
    ("2026-09-18", "0.5.20"), ("2026-10-01", "0.5.21"), ("2026-10-16", "0.5.22"), ("2026-10-30", "0.5.23"),
)  # fmt: skip


def meant(version: str, engine: str, newest: str) -> tuple[str, str | None]:
    """The release that ``version`` means, and what has to be said about it (None: it is a release as it stands).

    ``"0.5.9"`` is itself; ``"~0.5.12 (2026-05-15)"`` holds one; ``"main 2025-08-13"`` is of a day.
    """
    text = version.strip()
    try:
        Version(text)
    except InvalidVersion:
        pass
    else:
        return text, None
    if match := _VERSION.search(text):
        return match[0], f"{text!r} is no release: {match[0]}, which stands in it, is taken"
    if engine == "sglang" and (day := _DAY.search(text)):
        release = _at(f"{day[1]}-{day[2]}-{day[3] or '15'}", _SGLANG, newest)
        return release, f"{text!r} is no release: sglang {release}, the first one after that day, is taken"
    return newest, f"{text!r} is no release: the rules of {engine} {newest}, the newest known, are used"


def _at(day: str, releases: Sequence[tuple[str, str]], newest: str) -> str:
    return next((release for released, release in releases if released >= day), newest)
