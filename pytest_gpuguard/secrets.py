"""Secrets of the environment, hidden in all that is kept or shown of a run.

By their value, wherever they turn up, and by their shape. It must never hide an ordinary short word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .diagnose.redact import MASK, redact, without_secrets
from .facts.stack_probe import redact_text

if TYPE_CHECKING:
    from .claims.claim import Claim

#: The words that may stand without an underscore before them are those of ``PGPASSWORD`` and ``MYTOKEN``.
_NAME: Final = re.compile(
    r"(?:(?:^|_)(?:KEY|PASS|PWD|AUTH)|API_?KEYS?|ACCESS_?KEY|TOKEN|PASSW(?:OR)?D|SECRET|CREDENTIALS?)(?:_|$)",
    re.IGNORECASE,
)
#: A shorter value might be any word ("true", "none", "1234").
_SHORTEST: Final = 8


class Secrets:
    """What must not be told: values of ``environments`` under a name that says so, and of secret flags in ``argvs``."""

    def __init__(self, environments: Iterable[Mapping[str, str]] = (), argvs: Iterable[Sequence[str]] = ()) -> None:
        values = {
            value
            for environment in (os.environ, *environments)
            for name, value in environment.items()
            if _NAME.search(name) and not _is_place(value)
        }
        for argv in argvs:
            for word, shown in zip(argv, without_secrets(argv), strict=True):
                if word != shown and shown.endswith(MASK):
                    values.add(word.removeprefix(shown.removesuffix(MASK)))
        values = {one for one in values if len(one) >= _SHORTEST}
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


class DeclaredSecrets:
    """Those of claims as they are declared. Equal marks share one claim, so few are ever made."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Claim, Secrets]] = {}

    def of(self, claim: Claim) -> Secrets:
        """What must not be told of this claim."""
        if id(claim) not in self._made:  # the claim is kept, so that its id stays its own
            serves = claim.serves
            self._made[id(claim)] = (claim, Secrets([serves.env], [serves.flags]) if serves is not None else Secrets())
        return self._made[id(claim)][1]


def _is_place(value: str) -> bool:
    """Whether this is a path to a file of secrets, which is none: one that is there, for a key may begin with "/"."""
    return value.startswith(("/", "~/", "./")) and os.path.exists(os.path.expanduser(value))
