"""A real headless Chromium for the tests of pages, driven through chromedriver's HTTP interface and nothing else.

Its network is cut, it has a profile of its own, and it ends with the test.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1280,900",
)

#: Also when pytest is killed nothing stays: the driver alone would leave its browser behind.
_GUARD = 'trap "kill -KILL 0" TERM; "$@" & wait'


class Browser:
    """One page of one browser."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.request(method, f"/session/{self._session}{path}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def cdp(self, command: str, **params: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, page: Path, fragment: str = "") -> None:
        self.ask("POST", "/url", {"url": "about:blank"})
        self.ask("POST", "/url", {"url": page.as_uri() + fragment})

    def js(self, script: str, *args: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def click(self, selector: str) -> None:
        """A real click, by mouse, where the element is; refused where something else covers it."""
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.ask("POST", f"/element/{next(iter(found.values()))}/click", {})

    def type(self, selector: str, text: str) -> None:
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.ask("POST", f"/element/{next(iter(found.values()))}/value", {"text": text})

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefers(self, scheme: str) -> None:
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def without_scripts(self, off: bool = True) -> None:
        self.cdp("Emulation.setScriptExecutionDisabled", value=off)

    def console(self) -> list[str]:
        """What the console was told since the last call: errors, refusals of the page's policy."""
        return [one["message"] for one in self.ask("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        told = [json.loads(one["message"])["message"] for one in self.ask("POST", "/se/log", {"type": "performance"})]
        return [one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"]

    def shot(self, path: Path, whole: bool = False) -> None:
        taken = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


def chromium() -> str | None:
    """Debian's name, then others'."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser for a ``with`` block. Without Chromium the test is skipped, and fails in continuous integration."""
    found, driver = chromium(), shutil.which("chromedriver")
    if found is None or driver is None:
        said = "Chromium is not installed: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="gpuguard-chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "sh", "-c", _GUARD, "sh", driver, f"--port={port}", "--log-level=OFF"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                _wait(client, process)
                yield from _session(client, found, profile)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _session(client: httpx.Client, binary: str, profile: str) -> Iterator[Browser]:
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": binary, "args": [*_FLAGS, f"--user-data-dir={profile}"]},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
    assert "sessionId" in answer, answer
    page = Browser(client, answer["sessionId"])
    try:
        yield page
    finally:
        page.ask("DELETE", "")


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, f"chromedriver ended with {process.returncode}"
        try:
            if client.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("chromedriver did not come up within 30 s")
