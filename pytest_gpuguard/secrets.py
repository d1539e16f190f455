"""Secrets of the environment, hidden in all that is kept or shown of a run.

By their value, wherever they turn up, and by their shape. It must never hide an ordinary short word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .diagnose.redact import MASK, redact
from .facts.stack_probe import redact_text

_NAME: Final = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|KEY|TOKEN|PASSW(?:OR)?D|PASS|SECRET|CREDENTIALS?|AUTH)(?:_|$)", re.IGNORECASE
)
#: A shorter value might be any word ("true", "none", "1234").
_SHORTEST: Final = 8


class Secrets:
    """What must not be told: the values of ``environments`` under a name that says so."""

    def __init__(self, environments: Iterable[Mapping[str, str]] = ()) -> None:
        values = {
            value
            for environment in (os.environ, *environments)
            for name, value in environment.items()
            # a path to a file of secrets is no secret
            if _NAME.search(name) and len(value) >= _SHORTEST and not value.startswith(("/", "~/", "./"))
        }
        longest_first = sorted(values, key=lambda one: (-len(one), one))
        self._values = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def hide(self, text: str) -> str:
        """The text without secrets."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        return redact_text(redact(text))

    def clean(self, data: Any) -> Any:
        """JSON-able data with every text in it, also the keys, without secrets."""
        if isinstance(data, str):
            return self.hide(data)
        if isinstance(data, Mapping):
            return {self.clean(key): self.clean(value) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.clean(one) for one in data]
        return data
