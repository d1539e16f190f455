"""How one claim runs inside pytest: set-up, call, judgement, report. The only place where verdicts meet pytest.

Judging happens while the call phase is still running, so that ``--pdb`` stops exactly on what pytest calls a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from .calling import IN_CALL, SKIPPED, call_again, calling
from .claims.claim import Claim
from .claims.needs import Needs
from .claims.observation import Observation
from .claims.verdict import Body, Judgement, Verdict, worst
from .collect import CLAIM, GATE
from .confirm import Confirmation, read_before, read_rates
from .engines.handle import PendingServer, ServerHandle
from .evaluate import Evaluation
from .in_body import InBody
from .packing.history import key_of
from .packing.memory import Memory
from .packing.scheduler import assigned
from .recording import properties, recorded, secrets_of, shown
from .report.payload import REPORT_KEY, labelled, spoken
from .report.progress import ProgressLine
from .same_gpus import SameGpus
from .session import Session
from .stacks import chosen, plain_nodeid
from .terms import SKIP_BODY, XFAIL, drop_xfail, finish, skip, unjudged
from .timeouts import TIMER, ClaimTimeout
from .xdist import STOP, STOPPED

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .claims.series import Baseline
    from .facts.gpu import Gpu
    from .facts.stackref import StackRef
    from .ledger.flips import Index
    from .options import Config
    from .packing.ledger_times import Times

T = TypeVar("T")

EVALUATION: Final = pytest.StashKey[Evaluation]()
PAYLOAD: Final = pytest.StashKey[dict[str, Any]]()
#: What a body that asked for its server late was given.
LATE: Final = pytest.StashKey[PendingServer]()


class Runner:
    """Runs claims in this pytest process. Registered as a plugin once the first claim was collected."""

    def __init__(self, config: pytest.Config, settings: Config, share: Path | None) -> None:
        self.config = config
        self.settings = settings
        self.session = Session(settings, share, lambda: assigned(share) if share is not None else ())
        self._share = share
        self.progress = ProgressLine(config)
        #: For what a test's own code asks for.
        self.in_body = InBody(self)
        self.memory = Memory(self)
        self._same_gpus = SameGpus(share)
        self.confirmation = Confirmation(
            settings.confirm, settings.kind, [name for name, _ in settings.stacks], self.before
        )

    def rates(self, item: pytest.Item) -> Mapping[str, Baseline]:
        """What rates of an item's claim the ledger has verified, by load and cards."""
        from .remembering import remembering_of

        plain = plain_nodeid(item)
        name = key_of(self.evaluation(item).claim.about.id or plain, plain)
        return read_rates(self._share, name) if self._share is not None else remembering_of(self.config).rates(name)

    def times(self) -> Times:
        """How long claims took, as the ledger knows it."""
        from .packing.ledger_times import read_times
        from .remembering import remembering_of

        return read_times(self._share) if self._share is not None else remembering_of(self.config).times()

    def before(self) -> Index:
        """What was verified before this run."""
        from .remembering import remembering_of

        return read_before(self._share) if self._share is not None else remembering_of(self.config).before()

    # ------------------------------------------------------------------------------------------------------- set-up

    def ref_of(self, item: pytest.Item) -> StackRef:
        """The stack that an item's claim is about: its folder's conftest says, else the command line.

        Where the command line names several, the one that the item was multiplied for.
        """
        name = chosen(item)
        if name is not None:
            return self.session.named_stack(name)
        ref: StackRef | None = item.ihook.pytest_gpuguard_stack(item=item)
        return ref or self.session.default_stack()

    def evaluation(self, item: pytest.Item) -> Evaluation:
        """The evaluation of an item: of its claim, or of a test that only boots servers itself."""
        if EVALUATION not in item.stash:
            claim = item.stash.get(CLAIM, None) or Claim(item.stash.get(GATE, Needs()), None, ())
            item.stash[EVALUATION] = Evaluation(
                self.session,
                claim,
                item.nodeid,
                self.ref_of(item),
                lambda model: item.ihook.pytest_gpuguard_model(item=item, model=model),
            )
            item.stash[EVALUATION].folder = item.path.parent
            stack = chosen(item)
            if stack is not None:
                item.stash[EVALUATION].place = self._same_gpus.of(plain_nodeid(item), stack, self.session.named_gpus)
            item.stash[EVALUATION].baselines = self.memory.baselines(item)
        return item.stash[EVALUATION]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what cannot be evaluated here, before any fixture is set up; faults of the host wait for the call."""
        keys: tuple[pytest.StashKey[Any], ...] = (EVALUATION, PAYLOAD, SKIPPED, LATE)
        for key in keys:  # a test that is run again starts anew
            if key in item.stash:
                del item.stash[key]
        self.session.check = lambda: self._unless_stopped(item)
        refused = self.memory.begin(item)
        if CLAIM not in item.stash and GATE not in item.stash and refused is None:
            return
        if CLAIM in item.stash and next(item.iter_markers("xfail"), None) is not None:
            pytest.fail(XFAIL, pytrace=False)
        self._unless_stopped(item)
        evaluation = self.evaluation(item)
        unmet = evaluation.unmet()
        if unmet:
            text = "; ".join(one.text for one in unmet)
            self._not_evaluated(item, text, unmet[0].kind)
        if refused is not None:
            self._not_evaluated(item, refused, "budget")
        fault = evaluation.fault() if evaluation.claim.serves is None else None
        if fault is not None:  # no boot will meet it: without this the body would run as if the needs were met
            outcome, words = fault
            self._record_setup(item, Verdict.INFRA, outcome, f"{outcome}: {words}")
            pytest.fail(labelled(self.settings.label, f"INFRA: {item.stash[PAYLOAD]['fact']}"), pytrace=False)

    def _unless_stopped(self, item: pytest.Item) -> None:
        """Skip a test when the run was stopped: at its set-up, while it waits for a lease, right before a boot."""
        if self._share is not None and (self._share / STOP).exists():
            skip(item, STOPPED)

    def _not_evaluated(self, item: pytest.Item, text: str, reason: str) -> None:
        self._record_setup(item, Verdict.NOT_EVALUATED, "none", text, reason)
        skip(item, labelled(self.settings.label, f"NOT_EVALUATED: {item.stash[PAYLOAD]['fact']}"))

    def _record_setup(
        self, item: pytest.Item, verdict: Verdict, outcome: str, fact: str, reason: str | None = None
    ) -> None:
        label = " / ".join(one.label for one in self.evaluation(item).claim.expectations) or "needs"
        self._record(item, (Judgement(label, verdict, outcome, fact, reason=reason),), [])

    # --------------------------------------------------------------------------------------------------------- call

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Take off an xfail that a fixture has added, before pytest looks at it."""
        if CLAIM in item.stash and drop_xfail(item):
            pytest.fail(XFAIL, pytrace=False)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Boot, run the test's body, judge."""
        claim = pyfuncitem.stash.get(CLAIM, None)
        if claim is None:
            pyfuncitem.stash[IN_CALL] = True
            try:
                return (yield)
            finally:
                pyfuncitem.stash[IN_CALL] = False
        evaluation = self.evaluation(pyfuncitem)
        live = self._boot(pyfuncitem, evaluation, claim) if claim.serves is not None else None
        failed = claim.serves is not None and (live is None or live.broken)
        pyfuncitem.stash[SKIP_BODY] = failed
        result: Any = None
        with calling(pyfuncitem, pyfuncitem.stash.get(TIMER, None)) as called:
            result = yield
        pyfuncitem.stash[SKIP_BODY] = False
        body, error = called.body, called.error
        if failed and body.kind == "passed":
            body = Body("not_run")
        called.unless_stopped()
        if drop_xfail(pyfuncitem):
            body, error = Body("error", XFAIL), None
        judgements, observations = evaluation.judge(body)
        self._record(pyfuncitem, judgements, observations)
        if self._flips(pyfuncitem):
            judgements, told = self.confirmation.again(judgements, lambda: self._again(pyfuncitem))
            self._record(pyfuncitem, judgements, observations, told)
        finish(pyfuncitem, shown(worst(judgements), secrets_of(evaluation)), claim, error, self.settings)
        return result if result is not None else True

    def _flips(self, item: pytest.Function) -> bool:
        """Whether a claim that was judged is to be judged again: it flips, and its code can be called once more."""
        if not self.settings.confirm or not self.evaluation(item).repeatable or inspect.iscoroutinefunction(item.obj):
            return False
        data, budget = item.stash[PAYLOAD], self.memory.budget
        if not self.confirmation.flips(data):
            return False
        took = sum(one for one in data["seconds"].values() if one is not None)
        return budget is None or budget.left_s >= took * self.settings.confirm

    def _again(self, item: pytest.Function) -> Sequence[Judgement]:
        """Judge a claim once more, on a server of its own, with all of the test's own time."""
        first, timer = item.stash[EVALUATION], item.stash.get(TIMER, None)
        try:
            del item.stash[EVALUATION]
            if timer is not None:
                del item.stash[TIMER]  # no clock runs during the boot
            evaluation = self.evaluation(item)
            evaluation.anew = True
            claim, body = evaluation.claim, Body("not_run")
            live = self._boot(item, evaluation, claim, fresh=True) if claim.serves is not None else None
            if claim.serves is None or (live is not None and not live.broken):
                body = call_again(item, timer.anew() if timer is not None else None)
            return evaluation.judge(body)[0]
        except pytest.skip.Exception as skipped:  # the run was stopped meanwhile
            return (Judgement("claim", Verdict.NOT_EVALUATED, "none", str(skipped), reason="skip"),)
        finally:
            item.stash[EVALUATION] = first
            if timer is not None:
                item.stash[TIMER] = timer

    def _boot(
        self, item: pytest.Function, evaluation: Evaluation, claim: Claim, fresh: bool = False
    ) -> LiveBoot | None:
        serves = claim.serves
        assert serves is not None
        given = (item.funcargs.get("server"), item.funcargs.get("gpuguard_server"), item.stash.get(LATE, None))
        handle = next((one for one in given if isinstance(one, PendingServer)), None)
        live = self.booted(
            item,
            lambda: evaluation.boot(
                serves,
                alone=handle is not None,
                fresh=fresh,
                on_progress=self.progress.of(item.nodeid),
                on_wait=self.progress.waiting(item.nodeid),
            ),
        )
        self.memory.note_boot(item, live)
        if live is not None and live.boot is not None and live.observation.ready:
            up = live
            live = self._paused(item, lambda: evaluation.measure(up))
            if live.boot is not None and handle is not None:
                handle.attach(ServerHandle(live.boot, live.observation))
        return live

    def attach_late(self, item: pytest.Item, handle: PendingServer) -> None:
        """A body that asks for ``server`` by ``request.getfixturevalue`` gets the one that is up."""
        item.stash[LATE] = handle  # it gets no other one when it is run again
        for live in self.evaluation(item).live if item.stash.get(IN_CALL, False) else ():
            if live.boot is not None and live.observation.ready:
                live.touched = True
                handle.attach(ServerHandle(live.boot, live.observation))

    def booted(self, item: pytest.Item, work: Callable[[], T]) -> T:
        """Boot, which counts for none of the test's own time."""
        return self._paused(item, lambda: self.memory.watch(item).boot(work))

    def _paused(self, item: pytest.Item, work: Callable[[], T]) -> T:
        """Boot or measure with the test's own clock standing still."""
        timer = item.stash.get(TIMER, None)
        if timer is not None:
            timer.pause()
            if timer.expired:
                raise ClaimTimeout(timer.message, pytrace=False)
        try:
            return work()
        finally:
            self.progress.clear()
            if timer is not None:
                timer.start()

    # ------------------------------------------------------------------------------------------------------ verdict

    def _record(
        self,
        item: pytest.Item,
        judgements: tuple[Judgement, ...],
        observations: list[Observation],
        confirmed: Mapping[str, Any] | None = None,
    ) -> None:
        data = item.stash[PAYLOAD] = recorded(self, item, judgements, observations, confirmed)
        item.user_properties[:] = [one for one in item.user_properties if not one[0].startswith("gpuguard_")]
        item.user_properties += properties(data)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Carry the verdict on the report. A claim that failed or was skipped outside the judge gets one here."""
        report = yield
        if type(report) is not pytest.TestReport:
            return report  # a subtest's: the claim has a report of its own
        if TIMER in item.stash and (call.when != "setup" or not report.passed):
            item.stash[TIMER].pause()  # who keeps and tells the verdict is on nobody's clock
        claim = item.stash.get(CLAIM, None)
        data = item.stash.get(PAYLOAD, None)
        if claim is not None and data is None and report.when in ("setup", "call") and not report.passed:
            data = self._unjudged(item, claim, call, report)
        if data is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
            if claim is not None and claim.about.hearsay and report.failed and report.when == "setup":
                path, line, _ = item.reportinfo()
                report.outcome = "skipped"  # hearsay is never red, also where its set-up is broken
                report.longrepr = (str(path), line or 0, f"{spoken(data)}: {data['fact']}")
            setattr(report, REPORT_KEY, data)
            report.user_properties = list(item.user_properties)
        return report

    def _unjudged(
        self, item: pytest.Item, claim: Claim, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> dict[str, Any]:
        """The payload of a claim that never reached the judge: a set-up error, a skip mark, an interrupt."""
        self._record(item, (unjudged(claim, call, report),), [])
        return item.stash[PAYLOAD]

    # ----------------------------------------------------------------------------------------------------- teardown

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Stop servers that nobody will use; a leak is an error of its own here, and changes no verdict."""
        timer = item.stash.get(TIMER, None)
        if timer is not None:
            timer.start()
        try:
            return (yield)
        finally:
            if timer is not None:
                timer.pause()
            done = self._key(item)
            following = self._key(nextitem) if nextitem is not None else None
            leaks = self.session.pool.settle(done, following) if EVALUATION in item.stash else []
            if leaks:
                pytest.fail("\n".join(leaks), pytrace=False)

    def _key(self, item: pytest.Item) -> Hashable:
        claim = item.stash.get(CLAIM, None)
        return self.evaluation(item).share_key() if claim is not None and claim.serves is not None else None

    def expect(self, items: list[pytest.Item]) -> None:
        """Count the servers that the selected claims declare."""
        self.session.pool.expect(key for key in map(self._key, items) if key is not None)

    @contextmanager
    def leased_gpus(self, item: pytest.Item) -> Iterator[tuple[Gpu, ...]]:
        """GPUs for a test that boots no server. Raises LeaseFailed."""
        evaluation = self.evaluation(item)
        claim = evaluation.claim
        if claim.serves is not None:
            raise pytest.UsageError(
                f"{item.nodeid}: gpus leases GPUs of its own; a claim with @serves has its server's"
            )
        if self.session.simulated:
            skip(item, "a simulated rig has no GPUs that a test's own code could use")
        if not claim.needs.any_gpu:
            raise pytest.UsageError(f"{item.nodeid}: the fixture gpus needs @needs_gpus(n) on the test")
        with evaluation.leased() as uuids:
            yield tuple(self.session.rig.gpu(uuid) for uuid in uuids)

    def give_up(self, item: pytest.Item) -> str:
        """Called from the timer's thread: stop this test's servers, and say what their logs end with."""
        evaluation = self.evaluation(item)
        evaluation.observations()
        evaluation.given_up = True
        said = []
        for live in evaluation.live:
            said += [f"log: {live.observation.log}", *(f"| {line}" for line in live.observation.tail[-8:])]
            if live.boot is not None:
                live.boot.stop()
        return "\n".join(said)

    def close(self) -> list[str]:
        """Stop everything that is left."""
        return self.session.close()
