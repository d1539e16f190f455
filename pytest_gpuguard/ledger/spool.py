"""A file for judgements whose ledger fails in mid-run; ``gpuguard ledger import`` takes it. It must never lose a line.

It is the same JSON Lines as an export, so importing it twice, or beside what did reach the ledger, does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..files import make_folder
from . import lines
from .errors import LedgerError
from .record import Record, Run


class Spool:
    """Takes what a ``Store`` takes. The file and its folder are made by the first call; what is there is kept."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, run: Run) -> None:
        """Notes a run."""
        self._append([lines.run_line(run)])

    def add(self, records: Sequence[Record]) -> None:
        """Adds judgements. They are on the disk when it returns."""
        self._append(lines.record_lines(records))

    def finish(self, run_id: str, ended: float) -> None:
        """Notes when a run ended, in epoch seconds."""
        self._append([lines.finish_line(run_id, ended)])

    def _append(self, new: Iterable[str]) -> None:
        """Raises LedgerError when the file cannot be written; the rest of a line is told by ``import`` as broken."""
        data = "".join(line + "\n" for line in new).encode()
        try:
            make_folder(self.path.parent)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if not size:
                    data = lines.header().encode() + b"\n" + data
                elif os.pread(descriptor, 1, size - 1) != b"\n":
                    data = b"\n" + data  # a write that was cut off: it must not take the next line with it
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerError(
                f"the spool {self.path} cannot be written ({error.strerror}): make room there, and make it writable"
            ) from None
