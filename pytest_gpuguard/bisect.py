"""Which of several stacks, oldest first, is the first on which a claim comes out otherwise: by binary search.

It must never take a stack that could not be evaluated for an answer, nor one claim's verdict for another's.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from .ledger.changes import CACHE
from .ledger.record import Kind, Record
from .ledger.suspects import counts, same_outcome, unsteady

if TYPE_CHECKING:
    from .ledger.store import Store

A = TypeVar("A")
Result = Literal["flipped", "range", "agree", "unanswered"]

#: What of a ledger's components is the rig's: there where GPUs matter to the claim, and only there.
_OF_THE_RIG: Final = ("driver", "gpus")
#: How many lines of a run that left no verdict are shown.
_TAIL: Final = 12
#: How far back a run's own judgements can be, however many others write into the same ledger meanwhile.
_NEWEST: Final = 500
#: How long a run that was told to stop may take to stop its servers, in seconds; its wardens do it after that.
_STOP_S: Final = 120.0
_PR_SET_PDEATHSIG: Final = 1


class BisectError(Exception):
    """The claim cannot be evaluated at all; the text names cause and cure."""


# ----------------------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True, slots=True)
class Found(Generic[A]):
    """What a search ended with. ``answers`` by place among the stacks; ``skipped`` could not be evaluated.

    ``flipped``: ``after`` is the last place that answers as the oldest, ``first`` the next one, which does not.
    ``range``: those between the two could not be evaluated, so that the first is one of ``after + 1`` to ``first``.
    ``agree``: oldest and newest answer alike, and nobody seen between them does not. ``unanswered``: fewer than two
    stacks could be evaluated. ``again`` are places after ``first`` that answer as the oldest does: there are more
    flips than one. ``others`` answer neither as the oldest nor as ``first``.
    """

    result: Result
    answers: Mapping[int, A]
    skipped: tuple[int, ...]
    after: int | None = None
    first: int | None = None
    again: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


def search(
    number: int, same: Callable[[A, A], bool], known: Mapping[int, A] | None = None
) -> Generator[int, A | None, Found[A]]:
    """Yields places to evaluate, is sent their answers (None: it could not be evaluated), and returns what it found.

    ``known`` are answers that cost nothing. Without them and without skips it asks for at most 2 + ceil(log2(number)).
    Raises ValueError for fewer than two stacks.
    """
    if number < 2:
        raise ValueError("a search takes two stacks or more")
    answers: dict[int, A] = dict(known or {})
    skipped: set[int] = set()

    def ask(place: int) -> Generator[int, A | None, bool]:
        if place not in answers and place not in skipped:
            answer = yield place
            if answer is None:
                skipped.add(place)
            else:
                answers[place] = answer
        return place in answers

    def found(result: Result, after: int | None = None, first: int | None = None) -> Found[A]:
        again, others = [], []
        if after is not None and first is not None:
            beyond = {place: answers[place] for place in sorted(answers) if place > first}
            again = [place for place, one in beyond.items() if same(answers[after], one)]
            others = [place for place, one in beyond.items() if place not in again and not same(answers[first], one)]
        return Found(result, dict(answers), tuple(sorted(skipped)), after, first, tuple(again), tuple(others))

    oldest = 0
    while not (yield from ask(oldest)):
        oldest += 1
        if oldest == number:
            return found("unanswered")
    differing = [place for place, one in answers.items() if place > oldest and not same(answers[oldest], one)]
    if differing:
        first = min(differing)
    else:
        first = number - 1
        while first > oldest and not (yield from ask(first)):
            first -= 1
        if first == oldest:
            return found("unanswered")
        if same(answers[oldest], answers[first]):
            return found("agree")
    after = max(place for place, one in answers.items() if place < first and same(answers[oldest], one))
    while untried := [place for place in range(after + 1, first) if place not in skipped]:
        middle = min(untried, key=lambda place: (abs(2 * place - after - first), place))
        if (yield from ask(middle)):
            if same(answers[oldest], answers[middle]):
                after = middle
            else:
                first = middle
    return found("flipped" if first == after + 1 else "range", after, first)


# ----------------------------------------------------------------------------------------------- answers of the ledger


@dataclass(frozen=True, slots=True)
class Candidate:
    """One stack as the user names it, and what it is made of; None where it cannot be asked beforehand.

    ``components`` are the flat fingerprint with the rig's parts, ``cards`` the kinds of cards of this rig.
    """

    name: str
    reference: str
    components: Mapping[str, str | None] | None = None
    cards: frozenset[str] = frozenset()


def remembered(candidate: Candidate, history: Iterable[Record], kind: Kind) -> Record | None:
    """The newest judgement of a claim on just this stack and rig; None without one, or when such ones disagree.

    JIT caches do not count: the evaluation itself fills them.
    """
    if candidate.components is None:
        return None
    fits = [
        one
        for one in history
        if one.kind == kind and counts(one) and not unsteady(one)
        if candidate.cards.issuperset(one.cards) and _is_of(candidate.components, one.components)
    ]
    if not fits or any(not same_outcome(one, fits[0]) for one in fits):
        return None
    return max(fits, key=lambda one: (one.when, one.run))


def _is_of(stack: Mapping[str, str | None], recorded: Mapping[str, str | None]) -> bool:
    """Whether a record was made on this stack: every component of one is that of the other."""
    if not recorded:
        return False
    rigs = set() if "gpus" in recorded else set(_OF_THE_RIG)
    ours = {name: one for name, one in stack.items() if name not in rigs and not name.startswith(CACHE)}
    return ours == {name: one for name, one in recorded.items() if not name.startswith(CACHE)}


# -------------------------------------------------------------------------------------------------------- evaluations


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a claim came out on one stack. ``ran``: pytest was run for it, in so many seconds; else the ledger knew."""

    record: Record
    ran: bool
    seconds: float = 0.0

    @property
    def answers(self) -> bool:
        """Whether the claim was decided, rather than INFRA, NOT_EVALUATED, INCONCLUSIVE or UNSTATED."""
        return counts(self.record) and not unsteady(self.record)


@dataclass(slots=True)
class PytestRunner:
    """Evaluates one claim on one stack by a run of pytest in ``root``, and reads its verdict from the ledger.

    ``url`` is handed on in the environment, which other users of the machine cannot read. ``arguments`` go to pytest.
    """

    store: Store
    url: str
    root: Path
    claim: str
    rig: str
    kind: Kind
    arguments: Sequence[str] = ()
    _nodeid: str | None = field(default=None, init=False)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Run pytest. Raises BisectError when it leaves no verdict of this claim on this stack."""
        nodeid = self.nodeid()
        seen = {one.run for one in self.store.history(self.claim)}
        started = time.monotonic()
        words = ["--gpuguard-stack", f"{candidate.name}={candidate.reference}", "--gpuguard-rig", self.rig]
        code, said = self._pytest([nodeid, *words, *self.arguments])
        seconds = time.monotonic() - started
        new = [
            one
            for one in self.store.history(self.claim, limit=_NEWEST, evidence=True)
            if one.run not in seen and one.kind == self.kind and one.decides
        ]
        on_it = [one for one in new if one.stack == candidate.name]
        if on_it:
            return Evaluation(self._ours(candidate, on_it), True, seconds)
        if new:
            raise BisectError(
                f"{self.claim} was evaluated on the stack {new[-1].stack!r} and not on {candidate.name!r}: a "
                "conftest.py pins it (pytest_gpuguard_stack). Let it return None where names_a_stack(item.config)"
            )
        raise BisectError(
            f"the run on {candidate.name} ended with status {code} and left no verdict of {self.claim} in "
            f"{self.store.url}:\n{_tail(said)}"
        )

    def _ours(self, candidate: Candidate, found: Sequence[Record]) -> Record:
        """The judgement of our run, where somebody else's run of the claim came into the ledger meanwhile."""
        parts = candidate.components
        if len(found) > 1 and parts is not None:
            found = [one for one in found if _is_of(parts, one.components)] or found
        if any(not same_outcome(one, found[0]) for one in found):
            raise BisectError(
                f"{len(found)} runs at once evaluated {self.claim} on stacks called {candidate.name!r}, which came out "
                "differently: give the stacks names that nobody else uses"
            )
        return max(found, key=lambda one: (one.when, one.run))

    def nodeid(self) -> str:
        """Where the claim is: as the ledger says, else by collecting it. Raises BisectError."""
        if self._nodeid is None:
            self._nodeid = self._recorded() or self._collected()
        return self._nodeid

    def _recorded(self) -> str | None:
        for one in reversed(self.store.history(self.claim)):
            nodeid = one.nodeid
            if len(self.store.run(one.run).stacks) > 1:  # then the stack's name is the last of the parameters
                nodeid = nodeid.removesuffix(f"[{one.stack}]")
                if nodeid.endswith(f"-{one.stack}]"):
                    nodeid = nodeid.removesuffix(f"-{one.stack}]") + "]"
            if (self.root / nodeid.partition("::")[0]).is_file():
                return nodeid
        return None

    def _collected(self) -> str:
        if "::" in self.claim:
            if not (self.root / self.claim.partition("::")[0]).is_file():
                raise BisectError(
                    f"there is no file {self.claim.partition('::')[0]} in {self.root}: name the folder with --root"
                )
            return self.claim
        if not re.fullmatch(r"[^\s'\"\\\[\]]+", self.claim):
            raise BisectError(f"{self.claim!r} is not in the ledger, and no id that can be collected: give its node id")
        mark = f'claim(id="{self.claim}")'
        code, said = self._pytest(["--collect-only", *self.arguments, "--verbosity=-1", "-m", mark])
        nodeids = [line for line in said.splitlines() if re.match(r"\S[^\n]*\.py::\S", line)]
        if len(nodeids) == 1:
            return nodeids[0]
        if nodeids:
            raise BisectError(f"{self.claim} is {len(nodeids)} tests: give the node id of one, such as {nodeids[0]}")
        raise BisectError(
            f"there is no claim {self.claim} in {self.root}, by its ledger and by collecting (status {code}); after a "
            f"'--' say where to look, such as '-- suites':\n{_tail(said)}"
        )

    def _pytest(self, words: Sequence[str]) -> tuple[int, str]:
        """Its exit status, and what it printed."""
        addopts = f"{os.environ.get('PYTEST_ADDOPTS', '')} {shlex.join(['--gpuguard-ledger', self.url])}"
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words],
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTEST_ADDOPTS": addopts.strip(), "COLUMNS": "200"},
                start_new_session=True,  # a Ctrl-C reaches it once, through us
                preexec_fn=_dies_with_us(),
            )
            try:
                code = process.wait()
            except BaseException:
                _end(process)
                raise
            out.seek(0)
            return code, out.read().decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a run stop its servers."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _dies_with_us() -> Callable[[], None]:
    """What a run does before it begins, so that it is interrupted when this process is killed."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up before the fork

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts what is in the background with it ignored
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGINT)

    return prepare


def _tail(text: str) -> str:
    from .claims.account import printable
    from .diagnose.redact import redact

    lines = [line for line in text.splitlines() if line.strip()][-_TAIL:]
    return "\n".join(f"  {printable(redact(line))}" for line in lines) or "  (it printed nothing)"
