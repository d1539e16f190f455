"""Take secrets out of text before it is kept anywhere.

It must never leave a token readable because the text around it looks unusual; losing a harmless word is fine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"

#: Whole tokens that are secrets by their own shape. Each pattern is bounded, so a hostile line costs little.
_SHAPES: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,200}"  # Hugging Face
    r"|api_org_[A-Za-z0-9]{8,200}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,40}"  # AWS key id
    r"|gh[pousr]_[A-Za-z0-9]{16,255}|github_pat_[A-Za-z0-9_]{20,255}"
    r"|glpat-[A-Za-z0-9_-]{12,100}"
    r"|sk-[A-Za-z0-9_-]{16,200}"
    r"|nvapi-[A-Za-z0-9_-]{16,200}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,200}"
    r"|eyJ[A-Za-z0-9_-]{8,500}\.[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{0,1000})"
)

#: ``name=value``, ``'name': 'value'`` and ``--name value``, where the name says that the value is a secret.
_NAMED: Final = re.compile(
    r"(?P<name>(?:\b|_)(?:(?:admin[_-])?api[_-]?keys?|hf[_-]?token|auth[_-]?token|access[_-]?token|hub[_-]?token"
    r"|aws[_-]secret[_-]access[_-]key|aws[_-]session[_-]token|secret[_-]?key|client[_-]secret|passw(?:or)?d"
    r"|hugging[_-]?face(?:[_-]hub)?[_-]token|ssl[_-]keyfile[_-]password)\b)"
    r"(?P<between>['\"]?(?:\s{0,4}[=:]\s{0,4}|\s{1,4}))"
    r"(?!None\b|null\b|\*{3})(?P<value>'[^'\n]{1,500}'|\"[^\"\n]{1,500}\"|[^\s,;)}\]'\"]{1,500})",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(?P<word>Bearer|Basic)\s{1,4}(?P<value>[A-Za-z0-9._~+/=-]{6,2000})", re.IGNORECASE)
_URL_PASSWORD: Final = re.compile(r"(?P<head>://[^\s/:@]{1,100}:)[^\s/@]{1,200}(?=@)")
#: One cheap look decides whether a line can hold a secret at all.
_HINT: Final = re.compile(
    r"hf_|api_org_|AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|sk-|nvapi-|xox|eyJ|key|token|secret|passw|bearer|basic|://",
    re.IGNORECASE,
)


_SECRET_FLAG: Final = re.compile(r"^--?(?:[\w-]*[-_])?(?:api-?key|key|token|password|secret)$", re.IGNORECASE)


def without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line, the values of secret flags replaced, in whichever form they are given."""
    kept: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            kept.append(MASK)
        elif equals and _SECRET_FLAG.match(name):
            kept.append(f"{name}={MASK}")
        else:
            kept.append(redact(word))
        hide = not equals and _SECRET_FLAG.match(word) is not None
    return tuple(kept)


def redact(text: str) -> str:
    """The text with tokens, passwords and keys replaced by ``***``; everything else is as it was."""
    if _HINT.search(text) is None:
        return text
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(lambda match: f"{match['word']} {MASK}", text)
    text = _URL_PASSWORD.sub(lambda match: f"{match['head']}{MASK}", text)
    return _NAMED.sub(_mask_value, text)


def _mask_value(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{match['name']}{match['between']}{quote}{MASK}{quote}"
