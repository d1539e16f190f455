"""The server as a test's body sees it: where it is, what it said of itself, and a few requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .sglang import headers

if TYPE_CHECKING:
    import httpx

    from ..claims.observation import Observation
    from .boot import Boot

_TIMEOUT_S = 300.0


class ServerHandle:
    """A server that is up. Requests raise httpx errors as they come; they say nothing by themselves."""

    def __init__(self, boot: Boot, observation: Observation) -> None:
        self._boot = boot
        self.observation = observation

    @property
    def url(self) -> str:
        """``http://127.0.0.1:20032``."""
        return self._boot.url

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._boot.port

    @property
    def model(self) -> str:
        """The model as the engine was given it."""
        return self._boot.spec.model

    @property
    def log(self) -> str:
        """The path of its log."""
        return str(self._boot.log)

    @property
    def info(self) -> Mapping[str, Any]:
        """Its server_info, as it was when it became ready."""
        return self._boot.facts.info if self._boot.facts is not None else {}

    def stop(self) -> None:
        """Stop it now; otherwise it is stopped when the test ends."""
        self._boot.stop()

    def client(self, timeout: float = _TIMEOUT_S) -> httpx.Client:
        """A client for this server, proxies off. Close it, or use it in a ``with``."""
        import httpx

        return httpx.Client(
            base_url=self.url, timeout=timeout, trust_env=False, verify=False, headers=headers(self._boot.spec)
        )

    def get(self, path: str, timeout: float = _TIMEOUT_S) -> Any:
        """GET, and the answer's JSON. Raises httpx.HTTPError."""
        with self.client(timeout) as client:
            return client.get(path).raise_for_status().json()

    def post(self, path: str, body: Mapping[str, Any], timeout: float = _TIMEOUT_S) -> Any:
        """POST JSON, and the answer's JSON. Raises httpx.HTTPError."""
        with self.client(timeout) as client:
            return client.post(path, json=dict(body)).raise_for_status().json()

    def generate(self, prompt: str, max_new_tokens: int = 32, temperature: float = 0.0, **params: Any) -> str:
        """The text that follows a prompt, greedy unless told otherwise. Raises httpx.HTTPError."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, **params}
        answer = self.post("/generate", {"text": prompt, "sampling_params": sampling})
        return str(answer["text"])


class PendingServer:
    """What the ``server`` fixture is until the call phase has booted the server."""

    def __init__(self) -> None:
        self._handle: ServerHandle | None = None

    def attach(self, handle: ServerHandle) -> None:
        """Give it the server that is up now."""
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._handle is None:
            raise RuntimeError(
                f"server.{name} was used before the test's call, where the server is not up yet: use it in the test's "
                f"body; a fixture that needs a server of its own takes sglang_server and hands over a function"
            )
        return getattr(self._handle, name)
