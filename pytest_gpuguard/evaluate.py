"""One claim from start to end: needs against facts, lease, boot, observation, judgement. Knows no pytest.

The test's own code runs between ``boot`` and ``judge``; what it did comes in as a ``Body``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .boots import LeaseFailed, LiveBoot
from .claims.claim import Claim, Serves
from .claims.errors import ClaimError
from .claims.expect import ExpectToks
from .claims.needs import NOT_NAMED, Unmet, check_needs, select_gpus
from .claims.observation import Decisive, Observation
from .claims.outcome import ARGS_REMOVED
from .claims.rehearsal import SIMULATED, as_rehearsed
from .claims.verdict import Body, Judgement, judge_claim
from .diagnose.redact import without_secrets
from .engines.base import BootSpec, Engine
from .engines.portable import boot_flags
from .engines.process import CommandNotStarted, LogNotWritable
from .engines.sglang import headers
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.models import ModelMissing, find_model
from .facts.stack import Stack, StackError
from .session import DRIVEN, FlagsUnknown, Session, StackAbsent

if TYPE_CHECKING:
    from .engines.boot import Progress
    from .facts.gpu import Rig
    from .facts.stackref import StackRef

#: Names a model's folder, or None when the name is not known to the asker.
ModelOf = Callable[[str], "str | None"]


class BootFailed(RuntimeError):
    """The server did not come up. ``observation`` says what happened; the judge has it already."""

    def __init__(self, observation: Observation) -> None:
        said = observation.decisive.text if observation.decisive else observation.note or "see the log"
        super().__init__(f"{observation.outcome} in phase {observation.phase}: {said} (log: {observation.log})")
        self.observation = observation


class Evaluation:
    """The evaluation of one claim (or of a test that boots servers itself). Collects every observation it makes."""

    def __init__(self, session: Session, claim: Claim, test: str, ref: StackRef, model_of: ModelOf) -> None:
        self.session = session
        self.claim = claim
        self.test = test
        self.ref = ref
        self.live: list[LiveBoot] = []
        #: We stop its servers ourselves, while its code still runs: how they end says nothing.
        self.given_up = False
        #: What ``portable=True`` exchanged, as "old -> new".
        self.translated: tuple[str, ...] = ()
        self._model_of = model_of
        self._observed: list[Observation] = []
        self._measured: list[Mapping[str, float]] = []  # of each boot in ``live``: known facts for its prediction

    # -------------------------------------------------------------------------------------------------------- needs

    def unmet(self) -> tuple[Unmet, ...]:
        """Why this claim cannot be evaluated here, cheapest reason first; empty when it can."""
        needs = self.claim.needs
        stack = None
        serves = self.claim.serves
        if serves is not None and serves.engine not in DRIVEN:
            return (Unmet("engine", f"engine {serves.engine} is not driven by this version"),)
        if needs.any_gpu and self.rig_fault() is None:
            found = check_needs(replace(needs, versions=()), self.session.rig, None, arch_of)
            if found:
                return found
        unmeasured = self.claim.expectations and all(one.unmeasured for one in self.claim.expectations)
        if unmeasured and not self.session.simulated:  # a rehearsal shows at least whether its server comes up
            names = ", ".join(one.label for one in self.claim.expectations)
            return (Unmet("unmeasured", f"not measured yet: {names}"),)
        if self._needs_stack():
            try:
                stack = self.stack
            except StackAbsent as error:
                return (Unmet(error.kind, str(error)),)
            except StackError:
                return ()  # a stack that is there and cannot be asked is a fault, told in the call phase
        if needs.versions:
            if self.rig_fault() is not None:
                return ()
            rig = self.session.rig if any(one[0] == "driver" for one in needs.versions) else None
            found = check_needs(replace(needs, sms=(), archs=(), gpus=0, vram_bytes=0, link=None), rig, stack, arch_of)
            if found:
                return tuple(map(self._unstated, found))
        if serves is not None:
            return self.unmet_server(serves)
        return ()

    def unmet_server(self, serves: Serves) -> tuple[Unmet, ...]:
        """Why this server cannot be booted here: the engine, GPUs or the model are not there."""
        engine = self.session.engine(serves.engine)
        try:
            stack = self.stack
        except StackAbsent as error:
            return (Unmet(error.kind, str(error)),)
        except StackError:
            stack = None
        if stack is not None and stack.package(engine.package) is None and not self.ref.explicit:
            cure = "name one with --gpuguard-stack NAME=PYTHON"
            return (Unmet("stack", f"{self._called} has no {engine.package}: {cure}"),)
        if serves.on_cpu and self.session.simulated:
            return (Unmet(SIMULATED, "a simulated rig has no server on the CPU"),)
        count = 0 if serves.on_cpu else max(self.claim.gpus, serves.gpus)
        if count and self.rig_fault() is None:
            found = select_gpus(self.claim.needs, count, self.session.rig, arch_of).unmet
            if found:
                return found
        try:
            self.find_model(serves.model)
        except ModelMissing as error:
            return (Unmet("models", str(error)),)
        return ()

    def _unstated(self, unmet: Unmet) -> Unmet:
        """A simulated stack that does not name a version does not lack it: nobody said."""
        needed, _, has = unmet.text.partition(", ")
        if self.session.simulated and has in NOT_NAMED:
            return replace(unmet, text=f"{needed}, which nobody said of this simulated stack or rig")
        return unmet

    def _needs_stack(self) -> bool:
        kinds = {subject for subject, _, _ in self.claim.needs.versions}
        return self.claim.serves is not None or bool(kinds & {"cuda", "package"})

    def rig_fault(self) -> HostFault | None:
        """A fault of the host that keeps this claim from being evaluated; never a reason to skip it."""
        if not self._concerns_rig():
            return None
        try:
            rig = self.session.rig
        except HostFault as fault:
            return fault
        whole = [fault for fault in rig.faults if fault.gpu is None]
        if whole:
            return whole[0]
        count = max(self.claim.gpus, 1)
        if rig.faults and select_gpus(self.claim.needs, count, rig, arch_of).unmet:
            whole_rig = _as_if_well(rig, self.claim.needs.sms)
            if not select_gpus(self.claim.needs, count, whole_rig, arch_of).unmet:
                return rig.faults[0]
        return None

    def _concerns_rig(self) -> bool:
        """Whether GPUs or their driver decide anything about this claim."""
        claim = self.claim
        asked = {subject for subject, _, _ in claim.needs.versions}
        asked |= {name for one in claim.expectations if one.when for name, _ in one.when.terms}
        return bool(claim.needs.any_gpu or claim.gpus or "driver" in asked)

    def fault(self) -> tuple[str, str] | None:
        """Outcome and words of what keeps the needs from being checked at all; a boot would find it by itself."""
        fault = self.rig_fault()
        if fault is not None:
            return fault.outcome, f"{fault.cause}. {fault.cure}"
        if self._needs_stack():
            try:
                self.session.stack(self.ref)
            except (StackAbsent, StackError) as error:
                return "infra.boot", str(error)
        return None

    # -------------------------------------------------------------------------------------------------------- facts

    @property
    def stack(self) -> Stack:
        """The facts of the stack under test. Raises StackAbsent, StackError."""
        return self.session.stack(self.ref)

    @property
    def _called(self) -> str:
        return f"stack {self.ref.name!r} ({self.ref.python})"

    def version_of(self, name: str) -> str | None:
        """A version for windows: ``driver`` from the rig, ``cuda`` and packages from the stack."""
        if name == "driver":
            return self.session.rig.driver
        try:
            return self.stack.torch_cuda if name == "cuda" else self.stack.package(name)
        except (StackAbsent, StackError):
            return None

    def find_model(self, name: str) -> str:
        """What the engine is given for a model. Raises ModelMissing."""
        names = dict(self.session.config.models)
        named = self._model_of(name)
        if named is not None:
            names[name] = named
        return find_model(name, names).argument

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
                note = f"{self._called} has no {engine.package}: install it there, or name another stack"
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
        candidates: Sequence[str] = ()
        if prepared.gpus:
            candidates = select_gpus(self.claim.needs, prepared.gpus, self.session.rig, arch_of).uuids
        live = None if fresh else self.session.pool.find(prepared, candidates)
        if live is None:
            try:
                live = self.session.pool.boot(
                    prepared,
                    engine,
                    self.test,
                    candidates,
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
        candidates = select_gpus(self.claim.needs, count, self.session.rig, arch_of).uuids
        with self.session.pool.leased_gpus(candidates, count, self.test) as uuids:
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
                    live.observation = replace(again, samples=live.observation.samples)
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


def _as_if_well(rig: Rig, sms: Sequence[str]) -> Rig:
    """The rig as it would be without its faults; a lost GPU of unknown kind counts as one that was wanted."""
    gpus = (replace(gpu, fault=None, sm=gpu.sm or (sms[0] if sms else "")) for gpu in rig.gpus)
    return replace(rig, gpus=tuple(gpus))


def share_key(serves: Serves, gpus: int, ref: StackRef) -> Hashable:
    """What two claims must have in common to share a boot."""
    return (ref.python, *serves.identity, gpus)
