"""The lines before the first claim: which rig, which stacks, and with ``-v`` which ranks share what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import pytest

from ..claims.account import short
from ..claims.claim import Claim
from ..collect import CLAIM
from ..facts.faults import HostFault
from ..facts.stack import StackError
from ..run_stacks import StackAbsent

if TYPE_CHECKING:
    from ..facts.stackref import StackRef
    from ..options import Config
    from ..run import Runner
    from ..session import Session

#: A quarantine is told in so many characters, and a longer path is not repeated.
_LONGEST: Final = 240
_LONG_PATH: Final = 40


def header(runner: Runner, items: Iterable[pytest.Item], verbosity: int, facts: bool = True) -> list[str]:
    """Rig, every stack that a claim is about (unless without ``facts``); with ``-v`` layouts and translated flags."""
    if verbosity < 0:
        return []
    claims = [(item, item.stash[CLAIM]) for item in items if CLAIM in item.stash]
    if not claims:
        return []
    lines: list[str] = []
    if facts:
        lines += facts_lines(
            runner.session,
            list(dict.fromkeys(runner.ref_of(item) for item, _ in claims)),
            locks=any(claim.gpus for _, claim in claims),
        )
    if verbosity > 0:
        lines += [text for item, claim in claims for text in layout_lines(item.nodeid.rpartition("::")[2], claim)]
    if verbosity > 0 and facts:
        for item, _ in claims:
            changes = ", ".join(runner.evaluation(item).translation())
            lines += [f"{item.nodeid.rpartition('::')[2]}: portable: {changes}"] if changes else []
    return lines


def facts_lines(session: Session, refs: Iterable[StackRef], locks: bool) -> list[str]:
    """One line for the rig, one per stack, and one for each kind of evidence that this user may not see.

    With ``locks`` also where GPUs are reserved, who might not see that, and which GPUs are in quarantine.
    """
    gpus = False
    try:
        rig, gpus = session.rig.describe(), bool(session.rig.gpus)
    except HostFault as fault:
        rig = f"host fault: {fault}"
    lines = [f"rig: {rig}"]
    if session.config.label:
        lines.insert(0, notice(session.config))
    for ref in refs:
        try:
            lines.append(f"stack {ref.name}: {session.stack(ref).describe()}")
        except (StackAbsent, StackError) as error:
            lines.append(str(error))
    try:
        lines += session.missing_evidence()
    except HostFault:
        pass  # told above: a rig that cannot be asked
    return lines + (lock_lines() if locks and not session.simulated and gpus else [])


def lock_lines() -> list[str]:
    """Where GPUs are reserved, what containers must mount, what is doubtful about it, and what is in quarantine."""
    from ..facts.lease import UnsupportedPlatform
    from ..lease.dirs import LockDirError, lock_dir
    from ..lease.mounts import findings
    from ..lease.quarantine import quarantined  # whose text is another user's, and may hold anything

    try:
        folder = lock_dir()
    except (LockDirError, UnsupportedPlatform) as error:
        return [f"locks: {error}"]
    shut = [f"{short(str(one), _LONGEST)} (gpuguard who --clear lifts it)" for one in quarantined(folder).values()]
    mounted = f"-v {folder}:{folder}" if len(str(folder)) <= _LONG_PATH else "mount it at the same path"
    return [
        f"locks: {folder} (all who use these GPUs must see this folder; containers: {mounted})",
        *(f"locks: {line}" for line in findings(folder)),
        *shut,
    ]


def notice(config: Config) -> str:
    """The first line of a run on a simulated rig."""
    return f"{config.label}: {config.rig} is simulated: what follows shows what these claims do, and not what is true"


def layout_lines(name: str, claim: Claim) -> list[str]:
    """Who shares what, and GPUs that are leased and idle."""
    if claim.serves is None:
        return []
    layout = claim.serves.resolved_layout
    if layout.gpus == 1 and not claim.serves.layout:
        return []
    idle = claim.gpus - layout.gpus
    note = f" ({layout.gpus} used, {claim.gpus} leased: {idle} idle)" if idle > 0 else ""
    return [f"{name}: {layout.describe()}{note}"]
