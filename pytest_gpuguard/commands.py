"""What ``command_server(…)`` does: boots any command for a test's body, on leased GPUs, and has it observed.

It must never run a command outside a lease, nor on a machine that the rig only simulates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from .claims import arguments
from .claims.answers import Answers, Check
from .claims.errors import ClaimError
from .claims.markers import LEASED
from .claims.needs import Unmet, select_gpus
from .claims.observation import Observation
from .claims.rehearsal import SIMULATED
from .claims.units import parse_duration
from .diagnose.signatures import read_signature_files
from .engines.base import BootSpec
from .engines.command import COMMAND, Command, Readiness, default_model
from .engines.process import CommandNotStarted, LogNotWritable
from .facts.faults import HostFault
from .facts.gpu import arch_of
from .reserve import LeaseFailed

if TYPE_CHECKING:
    from .boots import LiveBoot
    from .engines.boot import Progress
    from .evaluate import Evaluation

_BOOT_TIMEOUT: Final = "5m"
#: Lines with nothing in common: a pattern that is found in each says nothing of readiness.
_ANY_LINES: Final = ("a", "Z 1")


@dataclass(frozen=True, slots=True)
class Order:
    """One command as a test asked for it; ``gpus`` None: as many as the claim needs."""

    words: tuple[str, ...]
    ready: Readiness
    port: int | None
    gpus: int | None
    env: Mapping[str, str]
    boot_timeout_s: float
    model: str


def read_order(
    argv: Sequence[str],
    *,
    ready: str = "/health",
    port: int | None = None,
    gpus: int | None = None,
    env: Mapping[str, str] | None = None,
    boot_timeout: str | float = _BOOT_TIMEOUT,
    model: str | None = None,
) -> Order:
    """The arguments of ``command_server``, checked. Raises TypeError that says what is right."""
    try:
        return _read(argv, ready, port, gpus, env, boot_timeout, model)
    except ClaimError as error:
        raise TypeError(f"command_server: {error}") from None


def _read(
    argv: Sequence[str],
    ready: str,
    port: int | None,
    gpus: int | None,
    env: Mapping[str, str] | None,
    boot_timeout: str | float,
    model: str | None,
) -> Order:
    if isinstance(argv, (str, bytes)):
        raise ClaimError(f"argv is a list of words, not one string: {argv!r}; no shell splits it")
    if not isinstance(argv, Sequence):
        raise ClaimError(f"argv is a list of words, not {argv!r}")
    words = tuple(map(str, argv))
    if not words or not words[0]:
        raise ClaimError("argv is empty: there is no command to start")
    if any("\0" in word for word in words):
        raise ClaimError("a word of argv has a NUL character in it, which no program can be given")
    if port is not None and not (arguments.count(port) and port <= 65535):
        raise ClaimError(f"port={port!r} is not a port: leave it out, and one is leased (1 to 65535)")
    if gpus is not None and gpus != 0 and not arguments.count(gpus):
        raise ClaimError(f"gpus={gpus!r} is not a count of GPUs")
    variables = arguments.strings("env", env)
    for name in variables:
        if name in (*LEASED, "PORT"):
            raise ClaimError(f"env may not set {name}: it belongs to the lease ({', '.join((*LEASED, 'PORT'))})")
    return Order(
        words=words,
        ready=_readiness(ready),
        port=port,
        gpus=gpus if gpus is None else int(gpus),
        env=variables,
        boot_timeout_s=arguments.parsed("boot_timeout", parse_duration, boot_timeout),
        model=arguments.text("model", model) if model is not None else default_model(words),
    )


def _readiness(ready: str) -> Readiness:
    text = arguments.text("ready", ready)
    if text.startswith("/"):
        if any(mark.isspace() or not mark.isprintable() for mark in text):
            raise ClaimError(f"ready={text!r} is not a path: spaces are written %20")
        return Readiness(path=text)
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ClaimError(f"ready={text!r} is neither a path (/health) nor a regular expression: {error}") from None
    if pattern.search("") or all(map(pattern.search, _ANY_LINES)):
        raise ClaimError(f"ready={text!r} is found in every line: name words that only a server that is up prints")
    return Readiness(line=pattern)


def unmet(evaluation: Evaluation, order: Order) -> tuple[Unmet, ...]:
    """Why this command cannot be run here; empty when it can."""
    if evaluation.session.simulated:
        return (Unmet(SIMULATED, "a simulated rig has no GPUs that a command could use"),)
    if evaluation.ref.container:
        said = f"stack {evaluation.ref.name!r} is an image, and command_server runs commands on this machine"
        return (Unmet("stack", f"{said}: name a python with --gpuguard-stack NAME=PYTHON"),)
    count = _count(evaluation, order)
    if count and evaluation.rig_fault() is None:
        try:
            return select_gpus(evaluation.claim.needs, count, evaluation.session.rig, arch_of).unmet
        except HostFault:
            return ()  # told where it is booted
    return ()


def boot(
    evaluation: Evaluation,
    order: Order,
    on_progress: Callable[[Progress], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> LiveBoot | Observation:
    """Boot the command on a lease of its own. Never raises for what may happen to a boot: that is an observation."""
    session, claim = evaluation.session, evaluation.claim
    fault = evaluation.rig_fault()
    if fault is not None:
        return _without_boot(fault.outcome, f"{fault.cause}. {fault.cure}")
    count = _count(evaluation, order)
    spec = BootSpec(
        engine=COMMAND,
        stack=evaluation.ref.name,
        python=evaluation.ref.python,
        model=order.model,
        flags=order.words,
        env=tuple(sorted(order.env.items())),
        gpus=count,
        exclusive=claim.needs.exclusive and count > 0,
        boot_timeout_s=order.boot_timeout_s,
    )
    engine = Command(order.ready, order.port, read_signature_files(session.config.signatures))
    try:
        choice = evaluation.gpus_for(count)
        live = session.pool.boot(
            spec,
            engine,
            evaluation.test,
            choice,
            shared=False,
            on_progress=on_progress,
            on_wait=on_wait,
            keep=evaluation.live,
        )
    except (LeaseFailed, HostFault) as error:
        return _without_boot(error.outcome, str(error))
    except LogNotWritable as error:
        return _without_boot("infra.boot", f"{error.filename}: {error.strerror} (--gpuguard-log-dir)")
    except (OSError, CommandNotStarted) as error:
        return _without_boot("infra.boot", f"the command could not be started: {error}")
    live.touched = True
    evaluation.placed(live)
    if live.observation.ready:
        live.observation = replace(live.observation, answers=_answers(order.ready))
    return live


def _count(evaluation: Evaluation, order: Order) -> int:
    return evaluation.claim.gpus if order.gpus is None else order.gpus


def _answers(ready: Readiness) -> Answers:
    """What a command is known to answer: that which says that it is ready. The test's body asks for more."""
    return Answers("short", (Check("readiness", True, str(ready)),))


def _without_boot(outcome: str, note: str) -> Observation:
    return Observation(engine=COMMAND, outcome=outcome, phase="start", note=note)
