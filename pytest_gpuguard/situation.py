"""What one claim meets here: its needs against rig, stack and models, cheapest question first. Boots nothing.

What cannot be asked is a fault of the host, told where the claim is evaluated, and never a reason to skip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .claims.expect import ExpectToks
from .claims.needs import NOT_NAMED, Unmet, check_needs, select_gpus
from .claims.rehearsal import SIMULATED
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .facts.models import ModelMissing, find_model
from .facts.stack import Stack, StackError
from .run_stacks import StackAbsent
from .session import DRIVEN, Session

if TYPE_CHECKING:
    from .claims.claim import Claim, Serves
    from .facts.gpu import Rig
    from .facts.stackref import StackRef

#: Names a model's folder, or None when the name is not known to the asker.
ModelOf = Callable[[str], "str | None"]


class Situation:
    """A claim, the stack that it is about, and the facts of this run that decide whether it can be evaluated."""

    def __init__(self, session: Session, claim: Claim, ref: StackRef, model_of: ModelOf) -> None:
        self.session = session
        self.claim = claim
        self.ref = ref
        self._model_of = model_of

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
            card = self._no_reference()
            if card is not None:
                return (card,)
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

    def _no_reference(self) -> Unmet | None:
        """Why a claim about nothing but speed has nothing to be compared with on the cards that it would get."""
        stated = self.claim.expectations
        if self.session.simulated or not stated or not all(isinstance(one, ExpectToks) for one in stated):
            return None
        chosen = select_gpus(self.claim.needs, max(self.claim.gpus, 1), self.session.rig, arch_of).choice
        cards = self.session.cards(chosen.uuids)
        if any(one.on([card]) is not None for one in stated for card in cards if isinstance(one, ExpectToks)):
            return None
        named = ", ".join(dict.fromkeys(name for one in stated if isinstance(one, ExpectToks) for name, _ in one.cards))
        return Unmet("card", f"no reference for {', '.join(cards)}: it is stated for {named}")

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
            return (Unmet("stack", f"{self.called} has no {engine.package}: {cure}"),)
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
    def called(self) -> str:
        """The stack as messages name it."""
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


def _as_if_well(rig: Rig, sms: Sequence[str]) -> Rig:
    """The rig as it would be without its faults; a lost GPU of unknown kind counts as one that was wanted."""
    gpus = (replace(gpu, fault=None, sm=gpu.sm or (sms[0] if sms else "")) for gpu in rig.gpus)
    return replace(rig, gpus=tuple(gpus))
