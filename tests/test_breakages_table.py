"""docs/breakages.md: 25 rows, and every claim and test that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "breakages.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]
CLAIMS = {"upgrades": "test_upgrades", "silent": "test_silent", "service": "test_service"}
TESTS = {"engines": "test_breakages_engines", "silent": "test_breakages_silent"}


def functions(folder: str, file: str) -> set[str]:
    """The tests of the file of this name below a folder."""
    (found,) = (ROOT / folder).rglob(f"{file}.py")
    return set(re.findall(r"^def (test_\w+)\(", found.read_text(encoding="utf-8"), re.MULTILINE))


def test_there_is_a_row_for_each_of_the_25() -> None:
    assert [int(row[0].strip("| ")) for row in ROWS] == list(range(1, 26))
    assert {len(row) for row in ROWS} == {7}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_each_row_names_a_claim_that_is_shipped_and_a_test_that_exists(row: list[str]) -> None:
    for cell, folder, names in ((row[3], "suites", CLAIMS), (row[6], "tests", TESTS)):
        found = re.findall(r"`(\w+)::(test_\w+)`", cell)
        assert found
        for file, name in found:
            assert name in functions(folder, names.get(file, file)), name
