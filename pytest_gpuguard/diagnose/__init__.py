"""Why an engine failed, and what its memory looked like: read from its log and its ``server_info``, nothing else.

This package must never guess: what no signature explains is ``unknown``. It imports only ``claims`` and data files.
"""

from __future__ import annotations

from .boot import Event, Progress
from .classify import classify_file, classify_text
from .memory import from_server_info, merge_tables
from .redact import redact
from .signature import Signature
from .signatures import SignatureError, load_signatures
from .stream import Classifier

__all__ = [
    "Classifier",
    "Event",
    "Progress",
    "Signature",
    "SignatureError",
    "classify_file",
    "classify_text",
    "from_server_info",
    "load_signatures",
    "merge_tables",
    "redact",
]
