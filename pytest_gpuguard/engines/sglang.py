"""SGLang: its command line, its environment, its HTTP surface from 0.4.6 to 0.5.23.

Endpoints by release: ``/get_server_info`` and ``/get_model_info`` always, ``/server_info`` and ``/model_info`` since
0.5.6 (the old names warn since 0.5.10). ``/health`` generates a token since 0.5.3; in 0.4.6 it answers before warm-up,
which is why an answer alone is never readiness.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..claims.layout import DP_ATTENTION_FLAG, SIZE_FLAGS, Layout, flag_value, sizes_from_flags
from .base import BootSpec, ServerFacts

if TYPE_CHECKING:
    import httpx

    from ..diagnose.signature import SignatureFile
    from ..facts.lease import Lease, PortRange
    from .flags import FlagProblem
    from .log import LogReader
    from .portable import Translation

_INFO = ("/server_info", "/get_server_info")
_MODEL = ("/model_info", "/get_model_info")


class SGLang:
    """The SGLang engine. ``signatures`` are files of failure signatures that the user adds to ours."""

    name = "sglang"
    package = "sglang"

    def __init__(self, signatures: tuple[SignatureFile, ...] = ()) -> None:
        self._signatures = signatures

    def layout_flags(self, layout: Layout, flags: Sequence[str], known: frozenset[str]) -> tuple[str, ...]:
        """Sizes that the flags do not give themselves. dp-attention is one flag since 0.5.23, two before it."""
        given = sizes_from_flags(flags)
        words: list[str] = []
        for name in ("tp", "pp", "ep"):
            size = getattr(layout, name)
            if size > 1 and name not in given:
                words += [SIZE_FLAGS[name][0], str(size)]
        if layout.dp > 1 and layout.dp_attention and "dp" not in given:
            if "--attn-dp-size" in known:
                words += ["--attn-dp-size", str(layout.dp)]
            else:
                words += ["--dp-size", str(layout.dp)]
                words += [DP_ATTENTION_FLAG] if DP_ATTENTION_FLAG not in flags else []
        return tuple(words)

    def help_command(self, python: str) -> list[str]:
        """``python -m sglang.launch_server --help``."""
        return [python, "-m", "sglang.launch_server", "--help"]

    def check_flags(self, flags: Sequence[str], help_text: str) -> list[FlagProblem]:
        """Flags that this release's own ``--help`` does not list."""
        from .flags import check_flags, load_releases, parse_help

        return check_flags(flags, parse_help(help_text), load_releases())

    def translate(self, flags: Sequence[str], help_text: str) -> tuple[tuple[str, ...], tuple[Translation, ...]]:
        """Flags that were renamed between releases, in the words of this one."""
        from .flags import parse_help
        from .portable import translate

        return translate(flags, parse_help(help_text))

    def command(self, spec: BootSpec, ports: PortRange) -> list[str]:
        """The user's argv verbatim, with model, host and port where it does not give them itself."""
        command: list[str] = [*spec.wrapper, spec.python, "-m", "sglang.launch_server"]
        command += ["--model-path", spec.model, *spec.flags]
        if flag_value(spec.flags, ("--host",)) is None:
            command += ["--host", "127.0.0.1"]
        if flag_value(spec.flags, ("--port",)) is None:
            command += ["--port", str(ports.base)]
        return command

    def environment(self, spec: BootSpec, lease: Lease) -> dict[str, str]:
        """Leased GPUs only, hub offline, unbuffered; the claim's own variables last."""
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        # As in an activated environment: JIT builds call ninja and nvcc by name.
        env["PATH"] = os.pathsep.join([os.path.dirname(spec.python), os.environ.get("PATH", os.defpath)])
        if lease.cuda_visible_devices:
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            env["CUDA_VISIBLE_DEVICES"] = lease.cuda_visible_devices
        return env | dict(spec.env)

    def port(self, spec: BootSpec, ports: PortRange) -> int:
        """The declared ``--port``, else the first leased one."""
        declared = flag_value(spec.flags, ("--port",))
        return int(declared) if declared is not None and declared.isdigit() else ports.base

    def reader(self, version: str | None, majors: Sequence[int]) -> LogReader:
        """A reader of SGLang's log."""
        from .log import LogReader

        return LogReader("sglang", version, majors, self._signatures)

    def ask(self, url: str, spec: BootSpec, timeout_s: float) -> ServerFacts:
        """Ask health, then model, then server_info; whatever does not answer is left out."""
        import httpx

        with httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, verify=False, headers=headers(spec)
        ) as client:
            try:
                if client.get("/health").status_code != 200:
                    return ServerFacts(healthy=False)
            except httpx.HTTPError:
                return ServerFacts(healthy=False)
            model = _first_json(client, _MODEL).get("model_path")
            return ServerFacts(True, model if isinstance(model, str) else None, _first_json(client, _INFO))


def headers(spec: BootSpec) -> dict[str, str]:
    """The authorization that the server's ``--api-key`` asks for."""
    key = flag_value(spec.flags, ("--api-key",))
    return {"Authorization": f"Bearer {key}"} if key else {}


def _first_json(client: httpx.Client, paths: Sequence[str]) -> dict[str, Any]:
    import httpx

    for path in paths:
        try:
            answer = client.get(path)
            if answer.status_code == 200:
                found = answer.json()
                return found if isinstance(found, dict) else {}
        except (httpx.HTTPError, ValueError):
            continue
    return {}
