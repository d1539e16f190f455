"""Writers at once, killed with -9: nothing that was reported is lost, on each kind of database."""

from __future__ import annotations

import re
import subprocess
import sys

from .postgres import started_postgres as started_postgres
from .postgres import url_of_each_database as url_of_each_database

ROUNDS = 10


def test_eight_writers_of_which_any_are_killed_lose_nothing(url: str) -> None:
    command = [sys.executable, "-m", "tests.ledger_storm", url, str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    figures = re.fullmatch(r"10 rounds: (\d+) adds and (\d+) counts reported, all of them kept\n", done.stdout)
    assert figures, done.stdout
    assert int(figures[1]) >= ROUNDS * 4  # they were really at work when they were killed
