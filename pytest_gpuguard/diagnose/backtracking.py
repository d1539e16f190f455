"""How long a regular expression could take at most, whatever the text: counted before it is ever used.

It must never pass a pattern whose work multiplies with every repetition; one that it does not understand it refuses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any, Final

if sys.version_info >= (3, 11):
    import re._constants as _ops
    import re._parser as _parser
else:
    import sre_constants as _ops
    import sre_parse as _parser

#: The longest run that one quantifier may take, and the most work that all of a pattern's quantifiers may multiply to:
#: where the pattern may begin anywhere in a line, and where it is tied to the line's beginning.
MAX_REPEAT: Final = 500
MAX_WORK: Final = 4_000
MAX_WORK_ANCHORED: Final = 40_000

_REPEATS: Final = tuple(
    getattr(_ops, name) for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") if hasattr(_ops, name)
)
_ATOMIC: Final = getattr(_ops, "ATOMIC_GROUP", None)
#: Characters that stand for all: two sets of characters are apart if no one of these is in both.
_ALPHABET: Final = frozenset([*map(chr, range(128)), "é", "²", "\u2028", "–"])
_SETS: Final = (_ops.LITERAL, _ops.NOT_LITERAL, _ops.ANY, _ops.IN)


class PatternError(ValueError):
    """A regular expression in a data file is wrong or could take long."""


def compile_bounded(pattern: str, flags: int = 0, *, anchored: bool = False) -> re.Pattern[str]:
    """Compile a pattern whose quantifiers are all bounded and not nested; raises PatternError.

    Searching text of length n then costs at most n · MAX_WORK steps (MAX_WORK_ANCHORED for one that begins with ``^``),
    whatever the text is. ``anchored``: it is only ever tried where a line begins.
    """
    try:
        parsed = _parser.parse(pattern, flags)
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise PatternError(f"not a regular expression: {error}") from None
    anchored = anchored or (_anchored(parsed) and not compiled.flags & re.MULTILINE)
    _work(parsed, MAX_WORK_ANCHORED if anchored else MAX_WORK)
    return compiled


def _anchored(items: Any) -> bool:
    """Whether a match can only begin where the text begins."""
    for op, argument in items:
        if op is _ops.AT:
            return argument in (_ops.AT_BEGINNING, _ops.AT_BEGINNING_STRING)
        if op is _ops.SUBPATTERN:
            return _anchored(argument[-1])
        return op is _ops.BRANCH and all(_anchored(branch) for branch in argument[1])
    return False


def _work(items: Any, limit: int) -> int:
    """The product of the variable runs in a sequence; raises PatternError beyond the limits."""
    product = 1
    for op, argument in items:
        if op in _REPEATS:
            low, high, body = argument
            inner = _work(body, limit)
            if high is _ops.MAXREPEAT or high > MAX_REPEAT:
                raise PatternError(f"an unbounded quantifier; write {{0,n}} with n <= {MAX_REPEAT}")
            if high > 1 and (not _parts_ways(body) or high * inner > MAX_REPEAT):
                raise PatternError("nested quantifiers")
            product *= (high - low + 1) * inner
        elif op in _SETS or op in (_ops.AT, _ops.GROUPREF):
            continue
        elif op is _ops.BRANCH:
            product *= max(_work(branch, limit) for branch in argument[1])
        elif op is _ops.GROUPREF_EXISTS:
            product *= max(_work(branch, limit) for branch in argument[1:] if branch is not None)
        else:
            product *= _work(_inside(op, argument), limit)
        if product > limit:
            raise PatternError(f"too much backtracking: its quantifiers multiply to more than {limit}")
    return product


def _inside(op: Any, argument: Any) -> Any:
    """What a group or a look-around holds."""
    if op in (_ops.SUBPATTERN, _ops.ASSERT, _ops.ASSERT_NOT):
        return argument[-1]
    if op is _ATOMIC:
        return argument
    raise PatternError(f"{str(op).lower()} is not allowed here")


# --- may a body be repeated? ------------------------------------------------------------------------------------------


def _parts_ways(body: Any) -> bool:
    """Whether a repeated body matches any text in one way only: so trying again costs no more than the first time."""
    items = _flat(body)
    if not _one_way(items):
        return False
    if not _runs(items):
        return True  # no alternative begins another: they are told apart where they begin
    # The end of one round and the beginning of the next must be found without trying.
    first, last = _begins([items[0]]), _begins([items[-1]])
    fixed_first, fixed_last = items[0][0] in _SETS, items[-1][0] in _SETS
    return (fixed_first and not first & _holds(items[1:])) or (fixed_last and not last & _holds(items[:-1]))


def _runs(items: Iterable[tuple[Any, Any]]) -> bool:
    """Whether something in the sequence may be there more or less often."""
    for op, argument in items:
        if op in _REPEATS and (argument[0] != argument[1] or _runs(_flat(argument[2]))):
            return True
        if op is _ops.BRANCH and any(_runs(_flat(branch)) for branch in argument[1]):
            return True
    return False


def _flat(items: Any) -> list[tuple[Any, Any]]:
    """The sequence without its groups."""
    found: list[tuple[Any, Any]] = []
    for op, argument in items:
        if op is _ops.SUBPATTERN or op is _ATOMIC:
            found += _flat(_inside(op, argument))
        else:
            found.append((op, argument))
    return found


def _one_way(items: list[tuple[Any, Any]]) -> bool:
    """Whether a sequence matches any one stretch of text in one way at most."""
    for number, (op, argument) in enumerate(items):
        rest = items[number + 1 :]
        if op in _REPEATS:
            low, high, body = argument
            if not _one_way(_flat(body)) or (low != high and _holds(_flat(body)) & _begins(rest)):
                return False
        elif op is _ops.BRANCH:
            branches = [_flat(branch) for branch in argument[1]]
            if not all(map(_one_way, branches)):
                return False
            if not all(_apart([*a, *rest], [*b, *rest]) for a, b in combinations(branches, 2)):
                return False
        elif op in (_ops.GROUPREF, _ops.GROUPREF_EXISTS):
            return False
    return True


def _apart(first: list[tuple[Any, Any]], second: list[tuple[Any, Any]]) -> bool:
    """Whether no text begins with a match of both."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one[0] not in _SETS or other[0] not in _SETS:
            return not _begins(first[number:]) & _begins(second[number:])
        if not _characters(*one) & _characters(*other):
            return True
    return False


def _begins(items: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The characters that a match of the sequence may begin with, "" among them if it may be empty."""
    found: frozenset[str] = frozenset()
    for op, argument in items:
        if op in _REPEATS:
            begins = _begins(_flat(argument[2])) | ({""} if argument[0] == 0 else frozenset())
        elif op is _ops.BRANCH:
            begins = frozenset().union(*(_begins(_flat(branch)) for branch in argument[1]))
        elif op in _SETS:
            begins = _characters(op, argument)
        else:
            continue
        found |= begins - {""}
        if "" not in begins:
            return found
    return found | {""}


def _holds(items: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The characters that a match of the sequence may hold."""
    found: frozenset[str] = frozenset()
    for op, argument in items:
        if op in _REPEATS:
            found |= _holds(_flat(argument[2]))
        elif op is _ops.BRANCH:
            found |= frozenset().union(*(_holds(_flat(branch)) for branch in argument[1]))
        elif op in _SETS:
            found |= _characters(op, argument)
    return found


def _characters(op: Any, argument: Any) -> frozenset[str]:
    """The characters of one place, in either case."""
    if op is _ops.ANY:
        return _ALPHABET
    if op is _ops.NOT_LITERAL:
        return _ALPHABET - {chr(argument)}
    if op is _ops.LITERAL:
        return frozenset({chr(argument), chr(argument).swapcase()})
    found: set[str] = set()
    negate = False
    for kind, value in argument:
        if kind is _ops.NEGATE:
            negate = True
        elif kind is _ops.LITERAL:
            found |= {chr(value)} if negate else {chr(value), chr(value).swapcase()}
        elif kind is _ops.RANGE:
            low, high = value
            marks = {mark for mark in _ALPHABET if low <= ord(mark) <= high}
            found |= marks if negate else marks | {mark.swapcase() for mark in marks}
        elif kind is _ops.CATEGORY:
            found |= {mark for mark in _ALPHABET if _CATEGORIES[value](mark)}
        else:
            return _ALPHABET
    return _ALPHABET - found if negate else frozenset(found)


def _word(mark: str) -> bool:
    return mark.isalnum() or mark == "_"


_CATEGORIES: Final[Mapping[Any, Callable[[str], bool]]] = {
    _ops.CATEGORY_DIGIT: str.isdecimal,
    _ops.CATEGORY_NOT_DIGIT: lambda mark: not mark.isdecimal(),
    _ops.CATEGORY_SPACE: str.isspace,
    _ops.CATEGORY_NOT_SPACE: lambda mark: not mark.isspace(),
    _ops.CATEGORY_WORD: _word,
    _ops.CATEGORY_NOT_WORD: lambda mark: not _word(mark),
}
