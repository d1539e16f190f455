"""The compute capabilities that claims may name (``needs_smNN``), as a plain table that costs nothing to import.

It must agree with ``facts/catalogue.toml`` (a test sees to it) and never read a file: plug-in start-up imports it.
"""

from __future__ import annotations

from typing import Final

#: SM number → architecture name. SM numbers are families, not an order: SM120 does not run SM100 kernels.
SM_ARCHITECTURES: Final[dict[str, str]] = {
    "70": "volta",
    "75": "turing",
    "80": "ampere",
    "86": "ampere",
    "87": "ampere",
    "89": "ada",
    "90": "hopper",
    "100": "blackwell",
    "101": "blackwell",
    "103": "blackwell",
    "110": "blackwell",
    "120": "blackwell",
    "121": "blackwell",
}
