"""The servers of one claim: its own, booted or joined, and those that it is compared with. Knows no pytest.

Every boot leaves an observation, also one that was decided before any lease was taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from .boots import LiveBoot
from .claims.claim import Claim, Serves
from .claims.errors import ClaimError
from .claims.expect import Expectation, Works
from .claims.gpuset import GpuChoice
from .claims.needs import select_gpus
from .claims.observation import Decisive, Observation
from .claims.outcome import ARGS_REMOVED
from .containers.image import PYTHON as IMAGE_PYTHON
from .diagnose.redact import without_secrets
from .engines.base import BootSpec, Engine
from .engines.portable import boot_flags
from .engines.process import CommandNotStarted, LogNotWritable
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.models import ModelMissing
from .facts.stack import Stack, StackError
from .reserve import LeaseFailed
from .run_stacks import FlagsUnknown, StackAbsent
from .session import DRIVEN, Session
from .situation import ModelOf, Situation

if TYPE_CHECKING:
    from .engines.boot import Progress
    from .facts.stackref import StackRef
    from .same_gpus import Place


class Booting(Situation):
    """Boots for one claim (or for a test that boots servers itself), and keeps what each boot showed."""

    def __init__(self, session: Session, claim: Claim, test: str, ref: StackRef, model_of: ModelOf) -> None:
        super().__init__(session, claim, ref, model_of)
        self.test = test
        self.live: list[LiveBoot] = []
        #: What ``portable=True`` exchanged, as "old -> new".
        self.translated: tuple[str, ...] = ()
        #: The GPUs that it had on another stack of this run, where there are several.
        self.place: Place | None = None
        #: Where the files that the claim names are looked for first.
        self.folder: Path | None = None
        self._observed: list[Observation] = []
        self._measured: list[Mapping[str, float]] = []  # of each boot in ``live``: known facts for its prediction
        self._telling: tuple[Callable[[Progress], None] | None, Callable[[str], None] | None] = (None, None)

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
        self._telling = (on_progress, on_wait)
        problem = self._files_problem()
        if problem is not None:
            found: LiveBoot | Observation = _without_boot(self.session.engine(serves.engine), "bad.args", problem)
        else:
            found = self._booted(serves, fresh=fresh, key=self.share_key())
        if isinstance(found, LiveBoot):
            found.touched = found.touched or alone
        return self.took(found, serves.measured)

    def took(
        self, found: LiveBoot | Observation, measured: Mapping[str, float] = MappingProxyType({})
    ) -> LiveBoot | None:
        """Keep a boot, or the observation that stands for one; ``measured`` are known facts for its prediction."""
        if isinstance(found, Observation):
            self._observed.append(found)
            return None
        self.live.append(found)
        self._measured.append(measured)
        return found

    def _booted(
        self,
        serves: Serves,
        *,
        fresh: bool,
        key: Hashable = None,
        wait_s: float | None = None,
        among: Callable[[GpuChoice, int], GpuChoice] = lambda choice, count: choice,
    ) -> LiveBoot | Observation:
        """A server that is up or has failed; or an observation without any boot. ``among`` narrows the GPUs."""
        engine = self.session.engine(serves.engine)
        fault = self.rig_fault()
        if fault is not None:
            return _without_boot(engine, fault.outcome, note=f"{fault.cause}. {fault.cure}")
        try:
            stack = self.stack
            if stack.package(engine.package) is None:
                note = f"{self.called} has no {engine.package}: install it there, or name another stack"
                return _without_boot(engine, "infra.boot", note=note)
            prepared = self._prepare(serves, engine, stack)
        except (StackAbsent, StackError) as error:
            return _without_boot(engine, "infra.boot", note=str(error))
        except (ModelMissing, ClaimError) as error:
            outcome = "model.missing" if isinstance(error, ModelMissing) else "bad.args"
            return _without_boot(engine, outcome, note=str(error))
        if isinstance(prepared, Observation):
            return prepared
        choice = self.gpus_for(prepared.gpus, among)
        live = None if fresh else self.session.pool.find(prepared, choice.uuids)
        if live is not None:
            return self.placed(live)
        on_progress, on_wait = self._telling
        try:
            live = self.session.pool.boot(
                prepared,
                engine,
                self.test,
                choice,
                key=key,
                shared=not fresh,
                version=stack.package(engine.package),
                on_progress=on_progress,
                on_wait=on_wait,
                keep=self.live,
                wait_s=wait_s,
            )
        except (LeaseFailed, HostFault) as error:
            return _without_boot(engine, error.outcome, note=str(error))
        except LogNotWritable as error:
            note = f"{error.filename}: {error.strerror} (--gpuguard-log-dir)"
            return _without_boot(engine, "infra.boot", note=note)
        except (OSError, CommandNotStarted) as error:
            return _without_boot(engine, "infra.boot", note=f"the server could not be started: {error}")
        return self.placed(live)

    def gpus_for(
        self, count: int, among: Callable[[GpuChoice, int], GpuChoice] = lambda choice, count: choice
    ) -> GpuChoice:
        """The GPUs that a boot may take, those of the claim's other stacks first; ``among`` narrows them."""
        if not count:
            return GpuChoice(())
        choice = among(select_gpus(self.claim.needs, count, self.session.rig, arch_of).choice, count)
        return choice if self.place is None else self.place.preferring(choice, count)

    def placed(self, live: LiveBoot) -> LiveBoot:
        """A boot, once it is noted where it ran."""
        if self.place is not None:
            self.place.took(live.observation.gpus)
        return live

    # --------------------------------------------------------------------------------------- the servers of comparisons

    def boot_beside(self, serves: Serves, live: LiveBoot) -> LiveBoot | None:
        """Another server while this one is up, on GPUs of its own; None when there is no room for it right now."""
        gpus = 0 if serves.on_cpu else max(self.claim.gpus, serves.gpus)
        if not gpus or not live.spec.gpus or self.claim.needs.exclusive:
            return None
        cards, cards_of = set(live.observation.cards), self.session.cards

        def alike(choice: GpuChoice, count: int) -> GpuChoice:
            """Cards of the same kind: others would be what is compared."""
            taken = [uuid for uuid in choice.uuids if uuid in live.observation.gpus]
            return choice.without([*taken, *(uuid for uuid in choice.uuids if not cards.issuperset(cards_of([uuid])))])

        choice = select_gpus(self.claim.needs, gpus, self.session.rig, arch_of).choice
        if len(alike(choice, gpus).uuids) < gpus:
            return None
        found = self._booted(serves, fresh=True, wait_s=0.0, among=alike)
        if isinstance(found, LiveBoot):
            return found
        # Where others have the GPUs, one after the other needs no more than we hold.
        return None if found.outcome == "infra.lease" else LiveBoot(live.spec, found)

    def boot_other(self, serves: Serves, before: LiveBoot) -> LiveBoot:
        """Another server, once this one has been stopped."""
        found = self._booted(serves, fresh=True, among=_same(before))
        return found if isinstance(found, LiveBoot) else LiveBoot(before.spec, found)

    def boot_again(self, before: LiveBoot) -> LiveBoot | None:
        """The claim's own server once more, in the place of one that was stopped; what was measured goes along."""
        serves = self.claim.serves
        assert serves is not None
        found = self._booted(serves, fresh=True, among=_same(before))
        if isinstance(found, Observation):
            self._observed.append(found)
            return None
        found.answers = before.answers
        found.observation = carried(found.observation, before.observation)
        found.touched = before.touched
        self.live[self.live.index(before)] = found
        return found

    def _prepare(self, serves: Serves, engine: Engine, stack: Stack) -> BootSpec | Observation:
        """The spec to boot, or the observation of flags that this release refuses."""
        model = self.find_model(serves.model)
        try:
            text: str | None = self.session.help_text(engine, stack)
        except FlagsUnknown:
            text = None  # the boot itself will show what is wrong with this stack
        flags, translated = boot_flags(serves, engine, text)
        self.translated = tuple(dict.fromkeys([*self.translated, *translated]))
        container = self.session.container(stack)
        if container is not None and os.path.isdir(model):
            model = os.path.abspath(model)  # a container has another working directory
        spec = BootSpec(
            engine=engine.name,
            stack=self.ref.name,
            python=stack.python if container is None else IMAGE_PYTHON,
            model=model,
            flags=flags,
            env=tuple(sorted(serves.env.items())),
            wrapper=serves.wrapper,
            gpus=0 if serves.on_cpu else max(self.claim.gpus, serves.gpus),
            exclusive=self.claim.needs.exclusive and not serves.on_cpu,
            boot_timeout_s=serves.boot_timeout_s,
            measured=tuple(sorted(serves.measured.items())) if self.session.simulated else (),
            container=container,
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

    # ------------------------------------------------------------------------------------------------------- files

    def stated(self) -> list[Expectation]:
        """The expectations whose window matches this stack."""
        return self.claim.stated(self.version_of)

    def file(self, name: str | None) -> Path | None:
        """A file that a claim names, beside its test first, then where pytest runs."""
        if name is None:
            return None
        beside = self.folder / name if self.folder is not None else Path(name)
        return beside if beside.exists() else Path(name)

    def _files_problem(self) -> str | None:
        """What is wrong with the files that the claim's expectations name, before anything is booted for them."""
        named = [one for one in self.stated() if isinstance(one, Works) and (one.questions or one.reference)]
        if not named:
            return None
        from .measure import questions, reference

        try:
            for one in named:
                for name, read in ((one.questions, questions.read_questions), (one.reference, reference.read)):
                    file = self.file(name)
                    if file is not None:
                        read(file)
        except (OSError, ValueError) as error:
            return str(error)
        return None


def _same(live: LiveBoot) -> Callable[[GpuChoice, int], GpuChoice]:
    """The GPUs that a server had, for another one that needs no more."""
    uuids = live.observation.gpus
    return lambda choice, count: GpuChoice(uuids) if uuids and count <= len(uuids) else choice


def _without_boot(engine: Engine, outcome: str, note: str) -> Observation:
    return Observation(engine=engine.name, outcome=outcome, phase="start", note=note)


def carried(observation: Observation, before: Observation) -> Observation:
    """An observation with what was measured before it was made."""
    return replace(
        observation,
        series=before.series,
        others=before.others,
        answers=before.answers,
        free_gib=before.free_gib,
        cards=before.cards,
        peak=before.peak,
        strangers=before.strangers,
    )


def share_key(serves: Serves, gpus: int, ref: StackRef) -> Hashable:
    """What two claims must have in common to share a boot."""
    return (ref.python, *serves.identity, gpus)
