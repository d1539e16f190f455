"""One claim from start to end: needs against facts, lease, boot, observation, judgement. Knows no pytest.

The test's own code runs between ``boot`` and ``judge``; what it did comes in as a ``Body``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .boots import LiveBoot
from .claims.claim import Claim, Serves
from .claims.errors import ClaimError
from .claims.expect import ExpectToks
from .claims.gpuset import GpuChoice
from .claims.needs import select_gpus
from .claims.observation import Decisive, Observation
from .claims.outcome import ARGS_REMOVED
from .claims.rehearsal import as_rehearsed
from .claims.verdict import Body, Judgement, judge_claim
from .diagnose.redact import without_secrets
from .engines.base import BootSpec, Engine
from .engines.portable import boot_flags
from .engines.process import CommandNotStarted, LogNotWritable
from .engines.sglang import headers
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.models import ModelMissing
from .facts.stack import Stack, StackError
from .reserve import LeaseFailed, if_alone
from .session import DRIVEN, FlagsUnknown, Session, StackAbsent
from .situation import ModelOf, Situation

if TYPE_CHECKING:
    from .engines.boot import Progress
    from .facts.stackref import StackRef


class BootFailed(RuntimeError):
    """The server did not come up. ``observation`` says what happened; the judge has it already."""

    def __init__(self, observation: Observation) -> None:
        said = observation.decisive.text if observation.decisive else observation.note or "see the log"
        super().__init__(f"{observation.outcome} in phase {observation.phase}: {said} (log: {observation.log})")
        self.observation = observation


class Evaluation(Situation):
    """The evaluation of one claim (or of a test that boots servers itself). Collects every observation it makes."""

    def __init__(self, session: Session, claim: Claim, test: str, ref: StackRef, model_of: ModelOf) -> None:
        super().__init__(session, claim, ref, model_of)
        self.test = test
        self.live: list[LiveBoot] = []
        #: We stop its servers ourselves, while its code still runs: how they end says nothing.
        self.given_up = False
        #: What ``portable=True`` exchanged, as "old -> new".
        self.translated: tuple[str, ...] = ()
        self._observed: list[Observation] = []
        self._measured: list[Mapping[str, float]] = []  # of each boot in ``live``: known facts for its prediction

    # --------------------------------------------------------------------------------------------------------- boot

    def share_key(self) -> Hashable:
        """Equal for claims that declare the same server on the same stack."""
        serves = self.claim.serves
        return None if serves is None else share_key(serves, self.claim.gpus, self.ref)

    def boot(
        self,
        serves: Serves,
        *,
        alone: bool = False,
        fresh: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> LiveBoot | None:
        """Boot the declared server, or join one that is up. None when it was decided before any lease was taken.

        ``alone``: this test's code will use the server, so nobody joins it later. ``fresh``: never join one either.
        The observation is recorded in every case. Never raises for what may happen to a boot.
        """
        engine = self.session.engine(serves.engine)
        fault = self.rig_fault()
        if fault is not None:
            self._without_boot(engine, fault.outcome, note=f"{fault.cause}. {fault.cure}")
            return None
        try:
            stack = self.stack
            if stack.package(engine.package) is None:
                note = f"{self.called} has no {engine.package}: install it there, or name another stack"
                self._without_boot(engine, "infra.boot", note=note)
                return None
            prepared = self._prepare(serves, engine, stack)
        except (StackAbsent, StackError) as error:
            self._without_boot(engine, "infra.boot", note=str(error))
            return None
        except (ModelMissing, ClaimError) as error:
            outcome = "model.missing" if isinstance(error, ModelMissing) else "bad.args"
            self._without_boot(engine, outcome, note=str(error))
            return None
        if isinstance(prepared, Observation):
            self._observed.append(prepared)
            return None
        choice = GpuChoice(())
        if prepared.gpus:
            choice = select_gpus(self.claim.needs, prepared.gpus, self.session.rig, arch_of).choice
        live = None if fresh else self.session.pool.find(prepared, choice.uuids)
        if live is None:
            try:
                live = self.session.pool.boot(
                    prepared,
                    engine,
                    self.test,
                    choice,
                    key=self.share_key(),
                    shared=not fresh,
                    version=stack.package(engine.package),
                    on_progress=on_progress,
                    on_wait=on_wait,
                    keep=self.live,
                )
            except LeaseFailed as error:
                self._without_boot(engine, error.outcome, note=str(error))
                return None
            except HostFault as error:
                self._without_boot(engine, error.outcome, note=str(error))
                return None
            except LogNotWritable as error:
                note = f"{error.filename}: {error.strerror} (--gpuguard-log-dir)"
                self._without_boot(engine, "infra.boot", note=note)
                return None
            except (OSError, CommandNotStarted) as error:
                self._without_boot(engine, "infra.boot", note=f"the server could not be started: {error}")
                return None
        live.touched = live.touched or alone
        self.live.append(live)
        self._measured.append(serves.measured)
        return live

    def _prepare(self, serves: Serves, engine: Engine, stack: Stack) -> BootSpec | Observation:
        """The spec to boot, or the observation of flags that this release refuses."""
        model = self.find_model(serves.model)
        try:
            text: str | None = self.session.help_text(engine, stack)
        except FlagsUnknown:
            text = None  # the boot itself will show what is wrong with this stack
        flags, translated = boot_flags(serves, engine, text)
        self.translated = tuple(dict.fromkeys([*self.translated, *translated]))
        spec = BootSpec(
            engine=engine.name,
            stack=self.ref.name,
            python=stack.python,
            model=model,
            flags=flags,
            env=tuple(sorted(serves.env.items())),
            wrapper=serves.wrapper,
            gpus=0 if serves.on_cpu else max(self.claim.gpus, serves.gpus),
            exclusive=self.claim.needs.exclusive and not serves.on_cpu,
            boot_timeout_s=serves.boot_timeout_s,
            measured=tuple(sorted(serves.measured.items())) if self.session.simulated else (),
        )
        problems = engine.check_flags(flags, text) if text is not None else []
        if not problems:
            return spec
        removed = all(problem.kind == "removed" for problem in problems)
        message = "; ".join(problem.message for problem in problems)
        return Observation(
            engine=engine.name,
            engine_version=stack.package(engine.package),
            outcome=ARGS_REMOVED if removed else "bad.args",
            phase="args",
            decisive=Decisive(0, message),
            note="checked against this release's own --help, before any lease was taken",
            argv=without_secrets(flags),
        )

    def translation(self) -> tuple[str, ...]:
        """What ``portable=True`` exchanges here, told before any boot; empty when the stack cannot be asked."""
        serves = self.claim.serves
        if serves is None or not serves.portable or serves.engine not in DRIVEN:
            return ()
        engine = self.session.engine(serves.engine)
        try:
            if self.stack.package(engine.package) is None:
                return ()
            return boot_flags(serves, engine, self.session.help_text(engine, self.stack))[1]
        except (StackAbsent, StackError, FlagsUnknown, ClaimError):
            return ()  # told where the claim itself is evaluated

    @property
    def latest(self) -> Observation:
        """The observation that was made last without a boot."""
        return self._observed[-1]

    def _without_boot(self, engine: Engine, outcome: str, note: str) -> None:
        self._observed.append(Observation(engine=engine.name, outcome=outcome, phase="start", note=note))

    @contextmanager
    def leased(self) -> Iterator[tuple[str, ...]]:
        """GPUs for a test that boots nothing, clean before and after. Raises LeaseFailed."""
        count = self.claim.gpus
        choice = select_gpus(self.claim.needs, count, self.session.rig, arch_of).choice
        with self.session.reservations.gpus(choice, count, self.claim.needs.exclusive, self.test) as uuids:
            yield uuids

    def measure(self, live: LiveBoot) -> None:
        """Take the samples that the claim's expectations ask for, from a server that is up."""
        from .measure.toks import measure_toks

        if live.boot is None or self.session.simulated:  # a simulated server has no speed that could be measured
            return
        samples = dict(live.observation.samples)
        for expectation in self.claim.expectations:
            if isinstance(expectation, ExpectToks) and expectation.unmeasured is None:
                stated = expectation.when is None or expectation.when.matches(self.version_of)
                if stated and expectation.subject not in samples:
                    samples[expectation.subject] = measure_toks(
                        live.boot.url,
                        headers(live.spec),
                        expectation,
                        lambda: live.boot is not None and live.boot.alive,
                    )
        live.observation = replace(live.observation, samples=MappingProxyType(samples))

    def forecast(self) -> dict[str, Any] | None:
        """The prediction beside the last boot, as JSON data; None without a boot on real GPUs. Never raises."""
        live = self.live[-1] if self.live else None
        if live is None or self.session.simulated or not live.observation.gpus:
            return None
        from .forecast import forecast

        return forecast(live, self.session.rig, self.version_of(live.spec.engine), self._measured[-1])

    # -------------------------------------------------------------------------------------------------------- judge

    def observations(self, patient: bool = False) -> list[Observation]:
        """Every observation so far; servers that are up are looked at once more, patiently when the test failed."""
        found = list(self._observed)
        for live in self.live:
            if live.boot is not None and live.observation.ready and not self.given_up:
                again = live.boot.observe_again(patient)
                if again.ready:
                    live.observation = replace(live.observation, tail=again.tail, resolved=again.resolved)
                else:
                    live.observation = if_alone(replace(again, samples=live.observation.samples), live.held)
            found.append(live.observation)
        return found

    def judge(self, body: Body) -> tuple[tuple[Judgement, ...], list[Observation]]:
        """The judgements of this claim, and what they rest on."""
        observations = self.observations(patient=body.kind in ("error", "assertion"))
        judgements = judge_claim(self.claim, observations, self.version_of, body)
        if self.session.simulated:
            from .sim.unknown import unknown_in

            unknown = [what for one in observations for what in unknown_in(one.log)]
            judgements = as_rehearsed(self.claim, judgements, observations, list(dict.fromkeys(unknown)), body)
        return judgements, observations


def share_key(serves: Serves, gpus: int, ref: StackRef) -> Hashable:
    """What two claims must have in common to share a boot."""
    return (ref.python, *serves.identity, gpus)
