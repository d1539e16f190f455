"""Why an engine failed, and what its memory looked like: read from its log and its ``server_info``, nothing else.

This package must never guess: what no signature explains is ``unknown``. It imports only ``claims`` and data files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .boot import Event, Progress
    from .classify import classify_file, classify_text
    from .memory import from_server_info, merge_tables
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
]

_MODULES: Final = {
    "Classifier": "stream",
    "Event": "boot",
    "Progress": "boot",
    "Signature": "signature",
    "SignatureError": "signatures",
    "classify_file": "classify",
    "classify_text": "classify",
    "from_server_info": "memory",
    "load_signatures": "signatures",
    "merge_tables": "memory",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: whoever only hides secrets must not pay for a reader of logs."""
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
