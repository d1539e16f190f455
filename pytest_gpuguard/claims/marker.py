"""What all decorators of the contract have in common: making a mark, and reading it back at collection.

Knows no decorator by itself and never judges an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import pytest

from .errors import ClaimError, suggest

P = ParamSpec("P")
T = TypeVar("T")
Test = TypeVar("Test", bound="Callable[..., Any] | type")

_NO_MATCH: Final = object()


class Marker(Generic[P, T]):
    """A decorator of the contract: makes a mark when called, and parses that mark at collection."""

    def __init__(self, name: str, build: Callable[P, T]) -> None:
        self.name = name
        self.build = build
        self.__doc__ = build.__doc__
        self._signature: inspect.Signature | None = None
        self._cache: dict[Any, T] = {}

    @overload
    def __call__(self, test: Test, /) -> Test: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> pytest.MarkDecorator: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Mark a test; the arguments are validated at collection."""
        return getattr(pytest.mark, self.name)(*args, **kwargs)

    @property
    def mark(self) -> pytest.Mark:
        """The mark without arguments: lets ``pytestmark = [needs_sm120, needs_gpus(2)]`` name it bare."""
        found: pytest.Mark = getattr(pytest.mark, self.name).mark
        return found

    @property
    def signature(self) -> inspect.Signature:
        """The decorator's parameters."""
        if self._signature is None:
            self._signature = inspect.signature(self.build)
        return self._signature

    @property
    def usage(self) -> str:
        """How it is written: ``needs_gpus(n, vram=None, link=None, exclusive=False)``."""
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in self.signature.parameters.values()]
        return f"{self.name}{inspect.Signature(bare)}"

    def help(self) -> str:
        """The line that ``pytest --markers`` prints."""
        first = (self.__doc__ or "").strip().partition("\n\n")[0]
        return f"{self.usage}: {' '.join(first.split())}"

    def parse(self, mark: pytest.Mark) -> T:
        """The value that a mark declares. Raises ClaimError."""
        try:
            kinds = tuple(map(type, (*mark.args, *mark.kwargs.values())))  # 1, 1.0 and True are equal, not the same
            key = (mark.args, tuple(mark.kwargs.items()), kinds)
            cached = self._cache.get(key, _NO_MATCH)
        except TypeError:  # an unhashable argument, such as env={...}
            return self._parse(mark)
        if cached is not _NO_MATCH:
            return cached  # type: ignore[return-value]
        value = self._cache[key] = self._parse(mark)
        return value

    def _parse(self, mark: pytest.Mark) -> T:
        self.bind(mark)
        return self.build(*mark.args, **mark.kwargs)

    def bind(self, mark: pytest.Mark) -> dict[str, Any]:
        """The mark's arguments by keyword. Raises ClaimError with a suggestion for a misspelt one."""
        parameters = self.signature.parameters
        for keyword in mark.kwargs:
            if keyword not in parameters:
                hint = suggest(keyword, parameters) or f"; it takes {', '.join(parameters) or 'no arguments'}"
                raise ClaimError(f"unknown argument {keyword!r}{hint}")
        try:
            return dict(self.signature.bind(*mark.args, **mark.kwargs).arguments)
        except TypeError as error:
            raise ClaimError(f"{error}; it is written {self.usage}") from error


#: Every decorator by name.
MARKERS: Final[dict[str, Marker[Any, Any]]] = {}


def marker(build: Callable[P, T]) -> Marker[P, T]:
    """Turn a validating function into a decorator of the contract."""
    made = Marker(build.__name__, build)
    MARKERS[made.name] = made
    return made
