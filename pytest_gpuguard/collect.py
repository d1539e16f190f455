"""Marks → claims at collection: every mistake becomes a collection error with file, line and suggestion.

Runs for every test of every project that has us installed, so a test without our marks must cost next to nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable
from typing import Any, Final

import pytest

from .claims.claim import About, Claim, Serves, build_claim
from .claims.errors import ClaimError
from .claims.expect import Expectation
from .claims.marker import MARKERS, Marker
from .claims.markers import architectures
from .claims.needs import Needs
from .stacks import chosen

#: A test that carries an expectation, and a test that is only gated by needs.
CLAIM: Final = pytest.StashKey[Claim]()
GATE: Final = pytest.StashKey[Needs]()
_EXTRA: Final = pytest.StashKey[tuple[pytest.MarkDecorator, ...]]()

#: Fixtures by which a test's body gets at its claim's server.
_SERVER: Final = frozenset({"server", "gpuguard_server"})
_MISSPELT_CUTOFF: Final = 0.75


class Collector:
    """Reads the marks of collected tests. One per run: it caches what equal marks mean."""

    def __init__(self, config: pytest.Config) -> None:
        registered = {str(line).partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
        self._known = registered | set(MARKERS)
        self._built: dict[Any, tuple[Claim | Needs | None, tuple[pytest.MarkDecorator, ...]]] = {}
        self._modules: dict[Any, bool] = {}
        self.claims = 0
        self.found = 0
        self.shared = False
        #: What was there before any deselection.
        self.noted: dict[str, Any] = {}

    def check_report(self, collector: pytest.Collector, report: pytest.CollectReport) -> None:
        """Attach a claim to every collected test that carries our marks; make the report fail on a mistake."""
        problems = self._problems(collector, report.result)
        if problems:
            for node in report.result:
                problems += self._below(node)  # pytest will not go there any more
            report.outcome = "failed"
            report.longrepr = "\n".join(problems)
            report.result = []

    def _problems(self, collector: pytest.Collector, children: Iterable[Any]) -> list[str]:
        problems: list[str] = []
        inherited: list[pytest.Mark] | None = None
        for item in children:
            if not isinstance(item, pytest.Item) or _EXTRA in item.stash:
                continue  # the session repeats those that the command line names, without the marks of their module
            if inherited is None:
                inherited = [mark for node in collector.listchain() for mark in node.own_markers]
            marks = [*inherited, *item.own_markers] if inherited else item.own_markers
            if marks:
                try:
                    self._read(item, marks)
                except ClaimError as error:
                    problems.append(f"{_where(item)}: {error}")
        return problems

    def _below(self, node: Any) -> list[str]:
        if not isinstance(node, pytest.Class):
            return []
        try:
            children = list(node.collect())
        except Exception:
            return []  # its own error shows once the others are mended
        return self._problems(node, children) + [one for child in children for one in self._below(child)]

    def _read(self, item: pytest.Item, marks: list[pytest.Mark]) -> None:
        ours = [mark for mark in marks if mark.name in MARKERS]
        if len(ours) != len(marks) and (ours or self._uses_us(item)):
            for mark in marks:
                if mark.name not in self._known:
                    self._check_spelling(mark.name)
        if not ours:
            return
        if not isinstance(item, pytest.Function) or _is_unittest(item):
            raise ClaimError("claims are plain test functions; a unittest method cannot carry one")
        try:
            key = tuple(map(_key, ours))
            found = self._built.get(key)
        except TypeError:  # an unhashable argument, such as env={...}
            key, found = (), None
        if found is None:
            value = _build(item, ours)
            found = (value, _extra_marks(value, ours))
            if key:
                self._built[key] = found
        built, item.stash[_EXTRA] = found
        if isinstance(built, Claim):
            if any(mark.name == "xfail" for mark in marks):
                raise ClaimError(
                    "xfail on a claim: it would also pass on a set-up error or another cause; "
                    "state the failure instead, with ooms(…), unsupported(…) or fails(…)"
                )
            self.claims += 1
            self.found += 1
            self.shared = self.shared or built.serves is not None
            item.stash[CLAIM] = built
        elif isinstance(built, Needs):
            self.found += 1
            item.stash[GATE] = built

    @staticmethod
    def is_claim(item: pytest.Item) -> bool:
        """Whether a test carries an expectation."""
        return CLAIM in item.stash

    def _uses_us(self, item: pytest.Item) -> bool:
        """Whether the test's module has anything of ours: a stranger's unregistered mark is no misspelt one."""
        module = getattr(item, "module", None)
        if module not in self._modules:
            values = vars(module).values() if module is not None else ()
            self._modules[module] = any(
                isinstance(one, Marker) or getattr(one, "__name__", None) == "pytest_gpuguard" for one in values
            )
        return self._modules[module]

    def _check_spelling(self, name: str) -> None:
        if name in self._known:
            return
        near = difflib.get_close_matches(name, MARKERS, n=1, cutoff=_MISSPELT_CUTOFF)
        if near:
            raise ClaimError(f"@{name} is no mark that is known; did you mean {near[0]!r}?")
        self._known.add(name)

    @staticmethod
    def add_marks(items: list[pytest.Item]) -> None:
        """Add architecture marks, and keyword twins of positional arguments, so that ``-m`` can select by them."""
        for item in items:
            for mark in item.stash.get(_EXTRA, ()):
                item.add_marker(mark)


def _extra_marks(built: Claim | Needs | None, ours: list[pytest.Mark]) -> tuple[pytest.MarkDecorator, ...]:
    """The marks to add to a test: its architectures, and its positional arguments by keyword."""
    needs = built.needs if isinstance(built, Claim) else built or Needs()
    extra = [getattr(pytest.mark, arch) for arch in architectures(needs)]
    for mark in ours:
        arguments = MARKERS[mark.name].bind(mark) if mark.args else {}
        simple = {name: value for name, value in arguments.items() if not isinstance(value, tuple)}
        extra += [getattr(pytest.mark, mark.name)(**simple)] if simple else []
    return tuple(extra)


def uses_server(item: pytest.Item) -> bool:
    """Whether a test's own code gets at its claim's server, so that nobody may join it afterwards."""
    return not _SERVER.isdisjoint(getattr(item, "fixturenames", ()))


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same items with equal servers side by side: those that only observe first, then those that use theirs.

    Servers are equal when they are declared alike, for as many GPUs, on the same stack. Among those that observe,
    tests that take the same kind of GPUs stay together.
    """
    keys: dict[int, Hashable] = {}  # equal marks share one claim, so few keys are ever made
    first: dict[Hashable, int] = {}
    kinds: dict[Hashable, int] = {}
    places: list[tuple[int, bool, int, int]] = []
    for position, item in enumerate(items):
        claim = item.stash.get(CLAIM, None)
        if claim is None or claim.serves is None:
            places.append((position, False, position, position))
            continue
        if id(claim) not in keys:
            keys[id(claim)] = (*claim.serves.identity, claim.gpus)
        key = (keys[id(claim)], chosen(item) or item.ihook.pytest_gpuguard_stack(item=item))
        start = first.setdefault(key, position)
        kind = kinds.setdefault((key, claim.needs), position)
        places.append((start, uses_server(item), kind, position))
    return [items[position] for *_, position in sorted(places)]


def _build(item: pytest.Item, marks: list[pytest.Mark]) -> Claim | Needs | None:
    """The claim of one test from its marks, the outermost first. Raises ClaimError that names the mark."""
    needs: list[Needs] = []
    expectations: list[Expectation] = []
    serves: Serves | None = None
    about: About | None = None
    own = set(map(id, item.own_markers))
    own_serves = 0
    for mark in marks:
        try:
            value = MARKERS[mark.name].parse(mark)
        except ClaimError as error:
            raise ClaimError(f"@{mark.name}: {error}") from None
        if isinstance(value, Needs):
            needs.append(value)
        elif isinstance(value, Expectation):
            expectations.append(value)
        elif isinstance(value, Serves):
            own_serves += id(mark) in own
            if own_serves > 1:
                raise ClaimError("@serves twice on one test: a claim boots one server; write two claims")
            serves = value
        elif isinstance(value, About):
            about = value
    claim = build_claim(needs, serves, expectations[::-1], about)
    if claim is not None:
        return claim
    merged = Needs()
    for one in needs:
        merged = merged.merge(one)
    return merged


def _key(mark: pytest.Mark) -> tuple[Any, ...]:
    """What makes two marks mean the same; ``True`` and ``1`` are equal and do not mean the same."""
    given = mark.kwargs
    return (mark.name, mark.args, *map(type, mark.args), tuple(given.items()), *map(type, given.values()))


def _is_unittest(item: pytest.Item) -> bool:
    owner = getattr(item, "cls", None)
    if owner is None:
        return False
    import unittest

    return isinstance(owner, type) and issubclass(owner, unittest.TestCase)


def _where(item: pytest.Item) -> str:
    path, line, name = item.reportinfo()
    place = f"{path}:{line + 1}" if line is not None else str(path)
    try:
        from pathlib import Path

        place = place.replace(str(path), str(Path(path).relative_to(item.config.rootpath)), 1)
    except ValueError:
        pass
    return f"{place}: {name}"
