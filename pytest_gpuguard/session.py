"""What one run asks once and keeps: rig, stacks, their flags, models, and the servers that are up.

Under xdist the workers share facts through a folder: whoever needs a fact first asks for it, the others read it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .claims.claim import ENGINES
from .engines.sglang import SGLang
from .facts.stackref import StackRef
from .files import asked_once

if TYPE_CHECKING:
    from .boots import BootPool
    from .containers.image import Container, ContainerSettings
    from .diagnose.signature import SignatureFile
    from .engines.base import BootSpec, Engine
    from .facts.faults import HostFault
    from .facts.gpu import Rig
    from .facts.nvml import NvmlChild
    from .facts.stack import Stack
    from .lease.clean import CleanRoom
    from .lease.production import Production
    from .measure.sampler import Sampler
    from .options import Config
    from .reserve import Reservations
    from .sim.memory import SimulatedGpus

#: Engines that this version drives. The others are declared and judged NOT_EVALUATED.
DRIVEN: Final[Mapping[str, Callable[[tuple[SignatureFile, ...]], Engine]]] = {"sglang": SGLang}
assert set(DRIVEN) <= set(ENGINES)

_HELP_TIMEOUT_S: Final = 180.0


class StackAbsent(LookupError):
    """A stack that is not there; the message names the command that builds it, when one is known.

    ``kind`` is what an unmet need of it is counted by.
    """

    def __init__(self, message: str, kind: str = "stack") -> None:
        super().__init__(message)
        self.kind = kind


class FlagsUnknown(RuntimeError):
    """The stack's own ``--help`` could not be read; the message carries what it printed."""


class Session:
    """The services of one run. ``share`` is the folder that xdist workers exchange facts through, or None.

    ``assigned()`` are the GPUs that the controller of a packed run means this worker's next lease to take.
    """

    def __init__(
        self, config: Config, share: Path | None = None, assigned: Callable[[], tuple[str, ...]] = tuple
    ) -> None:
        self.config = config
        self.assigned = assigned
        #: Called while a lease is waited for, and before a boot: what it raises ends that.
        self.check: Callable[[], None] = lambda: None
        self._share = share
        self._rig: Rig | None = None
        self._nvml: NvmlChild | None = None
        self._stacks: dict[str, Stack] = {}
        self._refused: dict[str, Exception] = {}  # images that are absent, or cannot be asked
        self._help: dict[str, str | FlagsUnknown] = {}
        self._pool: BootPool | None = None
        self._simulated: SimulatedGpus | None = None
        self._scratch: Path | None = None
        self._production: Production | None = None
        self._lock = threading.RLock()

    # -------------------------------------------------------------------------------------------------------- facts

    @property
    def rig(self) -> Rig:
        """The GPUs that this run may use. Faults are on the rig, not raised."""
        from .facts.gpu import Rig

        if self._rig is None and self.simulated:
            from .facts.simulated import simulated_rig

            self._rig = simulated_rig(self.config.rig)
        if self._rig is None:
            self._rig = Rig.from_dict(self.shared("rig", lambda: self.nvml.rig().to_dict()))
        return self._rig

    @property
    def simulated(self) -> bool:
        """Whether the rig is simulated: then NVML is never asked, and nothing that is found is a verification."""
        return self.config.simulated

    @property
    def devices(self) -> NvmlChild | SimulatedGpus:
        """Who is asked for memory and processes of the rig's GPUs."""
        if not self.simulated:
            return self.nvml
        from .sim.memory import SimulatedGpus

        if self._simulated is None:
            self._simulated = SimulatedGpus(self.rig, self._private("memory"))
        return self._simulated

    @property
    def gpu_locks(self) -> Path | None:
        """The folder of the locks on GPUs: None for the host's own; a simulated rig's GPUs are this run's alone."""
        return self._private("locks") if self.simulated else None

    @property
    def clean_room(self) -> CleanRoom:
        """How this run looks at the memory of GPUs before and after they are used."""
        from .lease.clean import CleanRoom

        return CleanRoom(self._used, self._holders, self.config.baseline_bytes, self.config.reclaim_s)

    def _used(self, uuids: Sequence[str]) -> dict[str, int | HostFault | None]:
        """Used bytes by UUID, or the fault of a GPU that cannot be asked. Raises HostFault of the whole host."""
        from .facts.faults import HostFault, NvmlTimeout

        found: dict[str, int | HostFault | None] = {}
        for uuid in uuids:
            device = self.rig.gpu(uuid).device
            try:
                found[uuid] = self.devices.memory([device])[device].used
            except HostFault as fault:
                if fault.gpu is None and not isinstance(fault, NvmlTimeout):
                    raise
                found[uuid] = fault
        return found

    def _holders(self, uuids: Sequence[str]) -> dict[str, list[tuple[int, int | None]]]:
        named = {uuid: self.rig.gpu(uuid).device for uuid in uuids}
        found = self.devices.processes(named.values())
        return {uuid: found[device] for uuid, device in named.items()}

    def vacate(self) -> None:
        """Have the production unit give its GPUs up, where there is one. Raises ProductionError, LockDirError."""
        if self._production is None and self.config.vacate and not self.simulated:
            from .lease.production import Production

            self._production = Production(
                self.config.vacate,
                self.config.restore,
                self.config.log_dir / "production.log",
                timeout_s=self.config.hook_timeout_s,
            )
        if self._production is not None:
            self._production.vacate()

    @property
    def production_fds(self) -> tuple[int, ...]:
        """What boots hand on to their wardens, so that the production unit waits for them too."""
        return self._production.fds if self._production is not None else ()

    def _private(self, name: str) -> Path:
        """A folder of this run: that of all xdist workers where there are some."""
        with self._lock:
            if self._share is None and self._scratch is None:
                from .sim.scratch import scratch_folder

                self._scratch = scratch_folder()
            folder = (self._share or self._scratch or Path()) / f"sim-{name}"
            folder.mkdir(exist_ok=True)
            return folder

    @property
    def nvml(self) -> NvmlChild:
        """The one child process that NVML is asked in."""
        from .facts.nvml import NvmlChild

        with self._lock:
            if self._nvml is None:
                self._nvml = NvmlChild()
            return self._nvml

    def engine(self, name: str) -> Engine:
        """An engine that this version drives, which reads its log with the user's signatures too."""
        from .diagnose.signatures import read_signature_files

        if self.simulated and name == "sglang":
            from .sim.engine import SimulatedSGLang

            return SimulatedSGLang(
                self.config.rig, self._private("memory"), read_signature_files(self.config.signatures)
            )
        return DRIVEN[name](read_signature_files(self.config.signatures))

    def missing_evidence(self) -> list[str]:
        """What this user may not see of the kernel and the driver, one line each; takes at most some seconds."""
        from .facts.faults import HostFault
        from .facts.kernel_log import kernel_log_denied

        if self.simulated:
            return []  # what this machine's kernel says concerns no simulated boot
        uuids = [gpu.uuid for gpu in self.rig.usable] if self.rig.kind == "real" else []
        lines, silent = [], []
        try:
            silent = [uuid for uuid, told in self.nvml.xid_events(uuids).items() if not told] if uuids else []
        except HostFault:
            silent = uuids
        denied = kernel_log_denied()
        blind = len(silent) == len(uuids)
        if denied is not None:
            said = f"kernel log not readable ({denied.why})"
            if not uuids:
                lines.append(f"{said}: OOM kills are judged from counters only")
            elif blind:
                lines.append(
                    f"{said}, and no Xid events from NVML: hardware faults show in the server's log only, and "
                    "OOM kills are judged from counters only"
                )
            else:
                lines.append(f"{said}: hardware faults are judged from NVML's events, OOM kills from counters only")
        if silent and not (blind and denied is not None):
            which = "any GPU here" if blind else ", ".join(silent)
            lines.append(f"no Xid events from NVML of {which}: hardware faults show in the kernel log only")
        return lines

    def named_stack(self, name: str) -> StackRef:
        """One of the stacks of the command line."""
        return StackRef(name, dict(self.config.stacks)[name])

    def default_stack(self) -> StackRef:
        """The stack of the command line, else the python that runs pytest; on a simulated rig the newest release."""
        if self.config.stacks:
            name, python = self.config.stacks[0]
            return StackRef(name, python)
        if self.simulated:
            from .facts.simulated import default_stack

            return StackRef("simulated", default_stack())
        return StackRef("default", sys.executable, explicit=False)

    def stack(self, ref: StackRef) -> Stack:
        """The facts of a stack. Raises StackAbsent, or StackError when its python cannot be asked."""
        from .facts.stack import Stack, StackError, probe_stack

        if ref.simulated != self.simulated:
            raise self._mismatch(ref)
        if ref.simulated:
            from .facts.simulated import STACK_FORM, SimulationError, simulated_stack

            try:
                return simulated_stack(ref.name, ref.python)
            except SimulationError as error:
                raise StackError(ref.name, str(error), f"Write {STACK_FORM}") from None
        if ref.container:
            return self._image(ref)
        if not Path(ref.python).exists():
            cure = f"; build it: {ref.build}" if ref.build else ""
            raise StackAbsent(f"stack {ref.name!r}: {ref.python} does not exist{cure}")
        if ref.python not in self._stacks:
            key = "stack-" + hashlib.sha256(f"{ref.name}\0{ref.python}".encode()).hexdigest()[:16]
            self._stacks[ref.python] = self._cold(
                Stack.from_dict(self.shared(key, lambda: probe_stack(ref.name, ref.python).to_dict()))
            )
        return self._stacks[ref.python]

    def _image(self, ref: StackRef) -> Stack:
        """The facts of an image. Raises StackAbsent, StackError."""
        from .containers.client import ImageAbsent
        from .containers.probe import probe_image
        from .facts.stack import Stack, StackError

        if ref.python in self._refused:  # an engine that hangs is waited for once, and not for every claim
            raise self._refused[ref.python]
        if ref.python not in self._stacks:
            key = "stack-" + hashlib.sha256(ref.python.encode()).hexdigest()[:16]

            def ask() -> dict[str, Any]:
                return probe_image(ref.name, ref.python, self._container_settings()).to_dict()

            try:
                self._stacks[ref.python] = self._cold(Stack.from_dict(self.shared(key, ask)))
            except (ImageAbsent, StackError) as error:
                said = f"stack {ref.name!r}: {str(error).replace('NAME=', f'{ref.name}=')}"
                refused = StackAbsent(said) if isinstance(error, ImageAbsent) else error
                self._refused[ref.python] = refused
                raise refused from None
        return self._stacks[ref.python]

    def container(self, stack: Stack) -> Container | None:
        """The image that a stack is, with what its containers are given; None for a python."""
        from .containers.probe import container_of

        return container_of(stack, self._container_settings()) if "image" in stack.facts else None

    def _container_settings(self) -> ContainerSettings:
        from .containers.image import ContainerSettings

        return self.config.containers or ContainerSettings()

    def _cold(self, stack: Stack) -> Stack:
        """A stack whose JIT caches this run makes empty ones of."""
        from .fresh_jit import cold

        return cold(stack) if self.config.fresh_jit else stack

    def jit_environment(self, spec: BootSpec) -> dict[str, str]:
        """Empty caches of compiled kernels for a boot, one set for each stack of this run; {} when not asked for."""
        from .fresh_jit import INSIDE, environment

        if not self.config.fresh_jit or self.simulated:
            return {}
        if spec.container is not None:
            return environment(INSIDE)
        return environment(str(self._private(f"jit-{hashlib.sha256(spec.python.encode()).hexdigest()[:12]}")))

    def _mismatch(self, ref: StackRef) -> StackAbsent:
        if self.simulated:
            said = f"stack {ref.name!r}: a simulated rig cannot run a real stack ({ref.python})"
            return StackAbsent(said, "simulated")
        return StackAbsent(f"stack {ref.name!r}: {ref.python} runs on a simulated rig only, and this one is real")

    def help_text(self, engine: Engine, stack: Stack) -> str:
        """The engine's ``--help`` in this stack, kept on disk for as long as the stack's packages stay the same.

        Raises FlagsUnknown.
        """
        from .facts.stack import cache_dir

        if stack.simulated:
            from .sim.engine import stack_help

            return stack_help(stack.python)
        container = self.container(stack)
        stamps = _stamps(stack.python, engine.package) if container is None else [[container.id]]
        state = json.dumps([engine.name, stack.python, dict(stack.packages), stamps], sort_keys=True)
        key = hashlib.sha256(state.encode()).hexdigest()[:24]
        known = self._help.get(key)
        if isinstance(known, FlagsUnknown):
            raise known
        if known is not None:
            return known
        file = cache_dir() / f"help-{key}.txt"
        try:
            if not stamps:
                raise OSError("an editable installation changes under an unchanged version")
            text = file.read_text()
        except OSError:
            try:
                text = (
                    _run_help(engine.help_command(stack.python)) if container is None else _help_in(container, engine)
                )
            except FlagsUnknown as error:
                self._help[key] = error
                raise
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                scratch = file.with_suffix(f".{threading.get_ident()}.tmp")
                scratch.write_text(text)
                scratch.replace(file)
            except OSError:
                pass  # a cache that cannot be written is no cache
        self._help[key] = text
        return text

    def shared(self, name: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer to ``ask()``, JSON data: under xdist one worker asks for all."""
        if self._share is None:
            return ask()
        found: dict[str, Any] = asked_once(self._share / f"{name}.json", ask)
        return found

    # -------------------------------------------------------------------------------------------------------- boots

    @property
    def pool(self) -> BootPool:
        """The servers that are up."""
        from .boots import BootPool

        if self._pool is None:
            self._pool = BootPool(self)
        return self._pool

    def sampler(self, uuids: Sequence[str], ours: Callable[[], Collection[int]]) -> Sampler | None:
        """A sampler of these GPUs that runs; None where there is nothing to sample."""
        from .measure.sampler import Sampler

        if self.simulated or not uuids:
            return None
        sampler = Sampler(uuids, ours=ours)
        sampler.start()
        return sampler

    def cards(self, uuids: Sequence[str]) -> tuple[str, ...]:
        """The kinds of cards that these GPUs are: the catalogue's slugs, else NVML's names."""
        from .facts.catalogue import slug_of

        return tuple(dict.fromkeys(slug_of(self.rig.gpu(uuid).name) for uuid in uuids))

    @property
    def reservations(self) -> Reservations:
        """Takes what boots need of this host."""
        from .reserve import Reservations

        return Reservations(self)

    def close(self) -> list[str]:
        """Stop everything; returns what was wrong at the end, one line each."""
        problems = []
        if self._pool is not None:
            problems = self._pool.close()
        if self._production is not None:
            problem = self._production.restore(2 * self.config.hook_timeout_s)
            problems += [problem] if problem is not None else []
            self._production = None
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
            self._simulated = None
        return problems


def _stamps(python: str, package: str) -> list[list[object]]:
    """Size and time of the installed files that declare the engine's flags; empty when pip did not put them there."""
    roots = Path(python).parent.parent.glob(f"lib/python3*/site-packages/{package}")
    files = [
        file
        for root in roots
        for file in (*root.glob("*.py"), *root.glob("srt/*args*.py"), *root.glob("srt/arg_groups/*.py"))
    ]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


def _help_in(container: Container, engine: Engine) -> str:
    from .containers.client import ContainerError
    from .containers.probe import help_of

    try:
        return help_of(container, engine.help_command, _HELP_TIMEOUT_S)
    except ContainerError as error:
        raise FlagsUnknown(str(error)) from error


def _run_help(command: list[str]) -> str:
    import os

    env = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=_HELP_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FlagsUnknown(f"{' '.join(command)}: {error}") from error
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0 or "--" not in text:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise FlagsUnknown(f"{' '.join(command)} failed: {said[-1] if said else f'exit {done.returncode}'}")
    return text
