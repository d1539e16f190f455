"""Fixtures: facts of rig and stack, leased GPUs, the claim's server, and a server of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .engines.handle import PendingServer, ServerHandle
    from .facts.gpu import Gpu, Rig
    from .facts.stack import Stack


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
        return runner.boot_in_body(request.node, model, argv, options)

    return sglang_server


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
