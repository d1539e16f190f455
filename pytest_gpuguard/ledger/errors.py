"""What goes wrong with a ledger. It must never import a database, so that whoever catches it need not either."""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger cannot be read or written. The text names cause and cure, and never a password."""
