"""A server in a container, behind the same interface as a process: started under the warden, watched, and ended.

It must never touch a container that does not carry this boot's label. Readiness has no proof by pid: the port was free
before, the container lives, and what answers serves our model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..containers import end as _end
from ..containers import start as _start
from ..containers.client import ImageAbsent, client_of, run_name
from ..facts.models import hub_cache, is_hub_id
from ..lease import warden as _warden
from .process import MARKER, CommandNotStarted, ServerProcess, StopReport
from .proctree import Proc

if TYPE_CHECKING:
    from ..facts.lease import Lease
    from .base import BootSpec

#: Of the host's, and without meaning in a container: it has its own PATH, and sees the leased GPUs only, from 0 on.
_HOSTS_OWN: Final = ("PATH", "CUDA_VISIBLE_DEVICES")
#: The engine kills when the grace is over; its client must live to see that.
_SLACK_S: Final = 10.0


class ContainerServer(ServerProcess):
    """A running container and the clients that watch it. Make one with ``boot``; end it with ``stop``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._cidfile: Path | None = None
        self._client = ""
        self._main: Proc | None = None

    @classmethod
    def boot(
        cls,
        spec: BootSpec,
        lease: Lease,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        fds: Sequence[int],
        grace_s: float,
    ) -> ContainerServer:
        """Start ``command`` in the spec's image with the leased GPUs. ``env`` is what the engine asks for.

        Raises CommandNotStarted, LogNotWritable, UnsupportedPlatform. Interrupted anywhere, nothing is left.
        """
        container = spec.container
        assert container is not None
        try:
            client = client_of(container.engine)
        except ImageAbsent as error:
            raise CommandNotStarted(str(error)) from None
        name = uuid.uuid4().hex
        cidfile = Path(tempfile.mkdtemp(prefix="gpuguard-boot-"), "cid")
        variables = container.variables(inside(spec, env))
        words = container.run_words(
            command,
            {**variables, MARKER: ""},
            lease=name,
            run=run_name(),
            cidfile=str(cidfile),
            gpus=lease.visible or lease.uuids,
            read=(_folder(spec.model),) if spec.model else (),  # a probe has none
            detached=True,
        )
        given = ("--engine", client, "--cidfile", str(cidfile), "--lease", name)
        python = (sys.executable or "python3", "-I", "-S")
        try:
            server = cls.start(
                [*python, _start.__file__, *given, "--grace", str(grace_s), "--", *words],
                container.client_environment(variables),
                None,
                log,
                pass_fds=fds,
                end=[*python, _end.__file__, *given],
            )
        except BaseException:
            _end.clear(str(cidfile))  # the warden ends what it may have started, by the label
            raise
        server._cidfile, server._client = cidfile, client
        return server

    @property
    def state(self) -> Mapping[str, Any]:
        """What was noted of the container: ``id``, ``pid`` (the host's), ``fault``; empty before it runs."""
        try:
            assert self._cidfile is not None
            found = json.loads(self._cidfile.with_name("state.json").read_text(encoding="utf-8"))
        except (AssertionError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def fault(self) -> tuple[str, str] | None:
        """What kept the container from running, or took it away: nothing that the server did."""
        found = self._fault or self.state.get("fault")
        if not found and self._exit is not None and (self._exit.code or 0) < 0:  # a container's own status never is
            found = "infra.lost", f"what follows its container was killed by signal {-(self._exit.code or 0)}"
        self._fault = (str(found[0]), str(found[1])) if found else None
        return self._fault

    _fault: tuple[str, str] | None = None

    def unheard(self) -> tuple[str, str] | None:
        """Its log comes from its engine: one that hangs, or has not even started it, makes no server silent."""
        name, container = os.path.basename(self._client), self.state.get("id")
        if not container:
            return "infra.boot", f"{name} run has not answered yet"
        facts, why = _end.inspect(self._client, container)
        if facts is None:
            return "infra.lost", f"{name} no longer says what its container does: {why or 'it has none of that name'}"
        if not (facts.get("State") or {}).get("Running"):
            return "infra.lost", f"its container has ended, but {name} logs has not"
        return None

    @property
    def ending(self) -> bool:
        """Whether the container's first process is gone: its engine tells that some tenths of a second later."""
        return self.poll() is None and self._container_main() is None and self._main is not None

    def owns_port(self, port: int, host: str | None = None) -> bool:
        """Whether the container lives: whoever answers is it, for nobody listened on the port before."""
        self._container_main()
        return self.poll() is None and bool(self.state.get("id"))

    def stop(self, grace: float = 30.0) -> StopReport:
        """As for a process; the grace is the engine's, and its client is given longer."""
        _ = self.fault  # the file is removed with the container
        report = super().stop(grace + _SLACK_S)
        if self._cidfile is not None:
            _end.clear(str(self._cidfile))
        return report

    def _remember(self) -> dict[int, Proc]:
        """The clients, and the container's processes: NVML and the kernel name them by the host's pids."""
        found = super()._remember()
        main = self._container_main()
        if main is not None:
            theirs = {main.pid: main, **_warden.descendants(main.pid)}
            found = found | {pid: proc for pid, proc in theirs.items() if not proc.dead}
            self._seen.update(found)
        return found

    def _container_main(self) -> Proc | None:
        """The container's first process, if it is proven to be that: by its cgroup, or by our marker."""
        if self._main is not None:
            now = _warden.read_proc(self._main.pid)
            return now if now is not None and now.start == self._main.start and not now.dead else None
        state = self.state
        pid, name = state.get("pid"), state.get("id")
        proc = _warden.read_proc(pid) if isinstance(pid, int) and pid > 1 else None
        if proc is not None and not proc.dead and name and self._is_container(proc.pid, name):
            self._main = proc
        return self._main

    def _is_container(self, pid: int, name: str) -> bool:
        for file, sign in ((f"/proc/{pid}/cgroup", name), (f"/proc/{pid}/environ", f"{MARKER}={self._marker}")):
            try:
                if sign.encode() in Path(file).read_bytes():
                    return True
            except OSError:
                continue  # another user's
        return False


def inside(spec: BootSpec, env: Mapping[str, str]) -> dict[str, str]:
    """What a server in a container gets of what its engine asks for; the claim's own variables all the same."""
    found = {name: value for name, value in env.items() if name not in _HOSTS_OWN}
    if is_hub_id(spec.model):
        found["HF_HUB_CACHE"] = str(hub_cache(os.environ).absolute())
    return found | dict(spec.env)


def _folder(model: str) -> str:
    """The folder that a model is read from: its own, or the hub cache, where files are links into another folder."""
    cache = hub_cache(os.environ)
    folder = Path(os.path.abspath(model))
    return str(cache.absolute()) if is_hub_id(model) or cache.absolute() in folder.parents else str(folder)
