"""What one run asks once and keeps: rig, stacks, their flags, models, and the servers that are up.

Under xdist the workers share facts through a folder: whoever needs a fact first asks for it, the others read it.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from .claims.claim import ENGINES
from .engines.sglang import SGLang
from .run_stacks import RunStacks

if TYPE_CHECKING:
    from .boots import BootPool
    from .diagnose.signature import SignatureFile
    from .engines.base import BootSpec, Engine
    from .facts.faults import HostFault
    from .facts.gpu import Rig
    from .facts.nvml import NvmlChild
    from .lease.clean import CleanRoom
    from .lease.production import Production
    from .measure.sampler import Sampler
    from .options import Config
    from .reserve import Reservations
    from .sim.memory import SimulatedGpus

#: Engines that this version drives. The others are declared and judged NOT_EVALUATED.
DRIVEN: Final[Mapping[str, Callable[[tuple[SignatureFile, ...]], Engine]]] = {"sglang": SGLang}
assert set(DRIVEN) <= set(ENGINES)


class Session(RunStacks):
    """The services of one run. ``share`` is the folder that xdist workers exchange facts through, or None.

    ``assigned()`` are the GPUs that the controller of a packed run means this worker's next lease to take.
    """

    def __init__(
        self, config: Config, share: Path | None = None, assigned: Callable[[], tuple[str, ...]] = tuple
    ) -> None:
        super().__init__(config, share)
        self.assigned = assigned
        #: Called while a lease is waited for, and before a boot: what it raises ends that.
        self.check: Callable[[], None] = lambda: None
        #: What probes of this run have answered so far, by their question.
        self.probed: dict[Hashable, object] = {}
        self._rig: Rig | None = None
        self._nvml: NvmlChild | None = None
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

    def jit_environment(self, spec: BootSpec) -> dict[str, str]:
        """Empty caches of compiled kernels for a boot, one set for each stack of this run; {} when not asked for."""
        from .fresh_jit import INSIDE, environment

        if not self.config.fresh_jit or self.simulated:
            return {}
        if spec.container is not None:
            return environment(f"{INSIDE}-{uuid4().hex[:12]}")  # a mount over /tmp would bring the last boot's
        return environment(str(self._private(f"jit-{hashlib.sha256(spec.python.encode()).hexdigest()[:12]}")))

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

    def named_gpus(self, uuids: Sequence[str]) -> str:
        """GPUs as a person tells them apart: ``GPU 0, 1 (h200)``."""
        numbers = ", ".join(str(self.rig.gpu(uuid).index) for uuid in uuids)
        return f"GPU {numbers} ({', '.join(self.cards(uuids))})"

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
