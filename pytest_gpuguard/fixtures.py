"""Fixtures: facts of rig and stack, leased GPUs, the claim's server, and a server of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .engines.handle import PendingServer, ServerHandle
    from .facts.gpu import Gpu, Rig
    from .facts.stack import Stack
    from .probe_asked import ProbeResult


@pytest.fixture
def gpuguard_rig(request: pytest.FixtureRequest) -> Rig:
    """The GPUs that this run may use, and their facts."""
    from .plugin import runner_of

    return runner_of(request.config).session.rig


@pytest.fixture
def gpuguard_stack(request: pytest.FixtureRequest) -> Stack:
    """The software under test, and its fingerprint."""
    from .plugin import runner_of

    return runner_of(request.config).evaluation(request.node).stack


@pytest.fixture
def gpuguard_stack_choice(request: pytest.FixtureRequest) -> str:
    """The name of the stack that a test was multiplied for, where a run has several."""
    name: str = request.param
    return name


@pytest.fixture
def gpuguard_gpus(request: pytest.FixtureRequest) -> Iterator[tuple[Gpu, ...]]:
    """GPUs leased for a test that boots no server: as many as ``needs_gpus`` says, and meeting the other needs."""
    from .plugin import runner_of

    runner = runner_of(request.config)
    with runner.leased_gpus(request.node) as gpus:
        yield gpus


@pytest.fixture
def gpuguard_server(request: pytest.FixtureRequest) -> PendingServer:
    """The server that ``@serves(…)`` declares; up once the test's body runs."""
    from .collect import CLAIM
    from .engines.handle import PendingServer
    from .plugin import runner_of

    claim = request.node.stash.get(CLAIM, None)
    if claim is None or claim.serves is None:
        raise pytest.UsageError(
            f"{request.node.nodeid}: the fixture server needs @serves(…) on the test; "
            f"for a server that the test decides on itself, take sglang_server"
        )
    server = PendingServer()
    runner_of(request.config).attach_late(request.node, server)
    return server


@pytest.fixture
def gpuguard_sglang_server(request: pytest.FixtureRequest) -> Callable[..., ServerHandle]:
    """``sglang_server(model, *argv, layout=None, env=None, **options)`` boots a server of this test's own.

    Call it in the test's body; it is stopped when the test ends. Raises BootFailed when it does not come up; the
    claim's judge has the observation either way.
    """
    from .plugin import runner_of

    runner = runner_of(request.config)

    def sglang_server(model: str, *argv: str, **options: Any) -> ServerHandle:
        return runner.in_body.sglang(request.node, model, argv, options)

    return sglang_server


@pytest.fixture
def gpuguard_command_server(request: pytest.FixtureRequest) -> Callable[..., ServerHandle]:
    """``command_server(argv, ready="/health", port=None, gpus=None, env=None, boot_timeout="5m", model=None)``.

    Boots any command on GPUs of its own lease: as many as ``gpus`` says, else as the claim needs. ``{port}`` in a word
    of ``argv`` and PORT in its environment are the port that it is to listen on. ``ready`` is a path that answers 200
    once it is up, or a regular expression that a line of its log then matches. Call it in the test's body; it is
    stopped when the test ends. Raises BootFailed when it does not come up; the judge has the observation either way.
    """
    from .plugin import runner_of

    runner = runner_of(request.config)

    def command_server(argv: Sequence[str], **options: Any) -> ServerHandle:
        return runner.in_body.command(request.node, argv, options)

    return command_server


@pytest.fixture
def gpuguard_probe(request: pytest.FixtureRequest) -> Callable[..., ProbeResult]:
    """``probe(script, args=None, gpus=None, deadline="60s", env=None, contrast=None)`` asks the stack's own python.

    ``script`` is a shipped probe's name, or a file beside the test. It runs on leased GPUs: as many as @needs_gpus
    says, "all" that meet the claim's needs, or 0. ``contrast`` are variables under which one that fails is run once
    more, for the report. Equal questions of a run are asked once. Returns a ProbeResult (data, seconds, log); raises
    ProbeFailed when something is broken (the judge has the observation), TypeError for a wrong question.
    """
    from .plugin import runner_of
    from .probe_asked import read_asked

    runner = runner_of(request.config)

    def probe(script: str | Path, **options: Any) -> ProbeResult:
        needs = runner.evaluation(request.node).claim.needs
        needed = max(needs.gpus, 1) if needs.any_gpu else 0
        return runner.in_body.probe(request.node, read_asked(script, request.path.parent, needed=needed, **options))

    return probe


@pytest.fixture
def rig(gpuguard_rig: Rig) -> Rig:
    """The GPUs that this run may use, and their facts."""
    return gpuguard_rig


@pytest.fixture
def stack(gpuguard_stack: Stack) -> Stack:
    """The software under test, and its fingerprint."""
    return gpuguard_stack


@pytest.fixture
def gpus(gpuguard_gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """GPUs leased for a test that boots no server."""
    return gpuguard_gpus


@pytest.fixture
def server(gpuguard_server: PendingServer) -> PendingServer:
    """The server that ``@serves(…)`` declares; up once the test's body runs."""
    return gpuguard_server


@pytest.fixture
def sglang_server(gpuguard_sglang_server: Callable[..., ServerHandle]) -> Callable[..., ServerHandle]:
    """Boots a server of this test's own: ``sglang_server(model, *argv, layout=None, env=None, **options)``."""
    return gpuguard_sglang_server


@pytest.fixture
def command_server(gpuguard_command_server: Callable[..., ServerHandle]) -> Callable[..., ServerHandle]:
    """Boots any command: ``command_server(argv, ready="/health", port=None, gpus=None, env=None, **options)``."""
    return gpuguard_command_server


@pytest.fixture
def probe(gpuguard_probe: Callable[..., ProbeResult]) -> Callable[..., ProbeResult]:
    """Runs a small script in the stack's own python: ``probe(script, args=…, gpus=…, deadline="60s", contrast=…)``."""
    return gpuguard_probe
