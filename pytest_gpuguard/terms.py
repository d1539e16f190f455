"""Claims in pytest's terms: whose fault an exception in a test is, and what pytest is told of a verdict."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Final, NoReturn

import pytest

from .claims.claim import Claim
from .claims.judgement import Body, Judgement, Verdict
from .evaluate import BootFailed
from .report.payload import labelled
from .timeouts import ClaimTimeout

if TYPE_CHECKING:
    from .options import Config

#: What pytest shows under "Captured …" for a claim.
SECTION: Final = "gpuguard"

#: Set while a claim's server is not there: its body must not run.
SKIP_BODY: Final = pytest.StashKey[bool]()

XFAIL: Final = "xfail was added to a claim: it would also pass on a set-up error or another cause"


def body_of(raised: BaseException, item: pytest.Function, reason: str) -> Body:
    """Whose fault an exception that left the test's body is."""
    said = one_line(raised)
    if isinstance(raised, ClaimTimeout):
        return Body("timeout", said)
    if isinstance(raised, BootFailed):
        return Body("not_run", said)  # the judge has its observation
    if isinstance(raised, pytest.skip.Exception):
        return Body("skip", said, reason)
    if isinstance(raised, pytest.xfail.Exception):
        return Body("error", f"pytest.xfail() was called in a claim: {said}")
    if inspect.iscoroutinefunction(item.obj) and isinstance(raised, pytest.fail.Exception):
        return Body("error", said)  # pytest cannot run it without a plugin for async tests
    if isinstance(raised, (AssertionError, pytest.fail.Exception)):
        return Body("assertion", said)
    return Body("error", said)


def finish(
    item: pytest.Item, judgement: Judgement, claim: Claim, error: BaseException | None, settings: Config
) -> None:
    """Turn the verdict that decides into pytest's terms: return, skip or fail."""
    verdict = judgement.verdict
    text = labelled(settings.label, f"{verdict}: {judgement.expectation}: {judgement.fact}")
    if verdict is Verdict.HOLDS:
        return
    if claim.about.hearsay or verdict in (Verdict.NOT_EVALUATED, Verdict.UNSTATED):
        skip(item, text)
    if verdict is Verdict.INCONCLUSIVE and not settings.strict:
        skip(item, text)
    kinds = {Verdict.WORSE: "worse", Verdict.CHANGED: "changed", Verdict.BETTER: "better"}
    if verdict in kinds and kinds[verdict] not in settings.fail_on:
        skip(item, f"{text} (not in --gpuguard-fail-on)")
    detail = "\n".join(f"  {line}" for line in judgement.details)
    if error is not None and not isinstance(error, (BootFailed, ClaimTimeout, pytest.skip.Exception)):
        # The body's own exception is where a debugger should stand; the verdict goes beside it.
        item.add_report_section("call", SECTION, f"{text}\n{detail}" if detail else text)
        raise error
    pytest.fail(f"{text}\n{detail}" if detail else text, pytrace=False)


def skip(item: pytest.Item, reason: str) -> NoReturn:
    """Skip with the test's own place as the location."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


def drop_xfail(item: pytest.Item) -> bool:
    """Remove xfail marks that were added to a claim while it ran; True when there were any."""
    kept = [mark for mark in item.own_markers if mark.name != "xfail"]
    dropped = len(kept) < len(item.own_markers)
    item.own_markers[:] = kept
    return dropped


def one_line(error: BaseException) -> str:
    """An exception in one line, with its type where its words alone would not say whose it is."""
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    named = text if isinstance(error, (AssertionError, pytest.fail.Exception, pytest.skip.Exception)) else ""
    text = named or f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else text[:199] + "…"


def unjudged(claim: Claim, call: pytest.CallInfo[None], report: pytest.TestReport) -> Judgement:
    """The judgement of a claim that never reached the judge: a set-up error, a skip mark, an interrupt."""
    said = one_line(call.excinfo.value) if call.excinfo is not None else "no reason given"
    skipped = report.skipped
    return Judgement(
        " / ".join(one.label for one in claim.expectations),
        Verdict.NOT_EVALUATED if skipped else Verdict.INFRA,
        "none" if skipped else "infra.test",
        f"skipped in {report.when}: {said}" if skipped else f"error in {report.when}: {said}",
        reason="skip" if skipped else None,
    )


class BodyGate:
    """Keeps a test's body from running when its server did not come up."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object | None:
        """Claim that the body was run."""
        return True if pyfuncitem.stash.get(SKIP_BODY, False) else None
