"""A small server as engines are: OpenAI-like streaming completions, tokens made by torch in one loop for all requests.

Run as a file: ``server.py PORT [cuda|cpu|none]``. It counts every token that it sends, and when:
``/sent?since=&until=`` says how many were sent between two moments of this machine's monotonic clock.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MODEL = "device-check"
#: A step takes at least so long, in seconds: a pace that any meter can follow.
STEP_S = 0.005


class Steps:
    """One decode loop: each step makes one token for each request that is in flight."""

    def __init__(self, device: str) -> None:
        self._step = _work(device)
        self._lock = threading.Condition()
        self._waiting: dict[queue.SimpleQueue[int], int] = {}
        self._sent: list[float] = []
        self._guard = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, tokens: int) -> queue.SimpleQueue[int]:
        """Be given so many tokens, one a step; the queue ends with -1."""
        mine: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            self._waiting[mine] = tokens
            self._lock.notify()
        return mine

    def leave(self, mine: queue.SimpleQueue[int]) -> None:
        """Its client is gone."""
        with self._lock:
            self._waiting.pop(mine, None)

    def count(self) -> None:
        """One token was sent just now."""
        with self._guard:  # a moment that is later is never noted earlier
            self._sent.append(time.monotonic())

    def sent(self, since: float, until: float) -> int:
        """How many tokens were sent between two moments."""
        with self._guard:
            return bisect_right(self._sent, until) - bisect_right(self._sent, since)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting:
                    self._lock.wait()
            began = time.monotonic()
            token = self._step()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
            with self._lock:
                for mine, left in list(self._waiting.items()):
                    mine.put(token)
                    if left == 1:
                        mine.put(-1)
                        del self._waiting[mine]
                    else:
                        self._waiting[mine] = left - 1


def _work(device: str) -> Callable[[], int]:
    """What makes a token: attention and a feed-forward layer over a little KV cache; nothing at all for ``none``."""
    if device == "none":
        return lambda: 7
    import torch

    size, width = (256, 64) if device == "cpu" else (4096, 4096)
    kind = torch.float32 if device == "cpu" else torch.float16
    torch.manual_seed(0)
    keys, one = (torch.randn(width, size, device=device, dtype=kind) / size**0.5 for _ in range(2))
    up = torch.randn(size, 4 * size, device=device, dtype=kind) / size**0.5
    down = torch.randn(4 * size, size, device=device, dtype=kind) / size**0.5

    def step() -> int:
        with torch.no_grad():
            query = one[:16]
            seen = torch.softmax(query @ keys.T, dim=-1) @ keys
            logits = torch.relu(seen @ up) @ down
            return int(logits[0].argmax())  # waits for the device

    print(f"device {device}: first token {step()}", flush=True)
    return step


class Handler(BaseHTTPRequestHandler):
    """``/health``, ``/v1/models``, ``/sent`` and streamed ``/v1/completions``."""

    protocol_version = "HTTP/1.1"
    steps: Steps

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: there are many."""

    def do_GET(self) -> None:
        """Health, models, the count."""
        asked = urlsplit(self.path)
        if asked.path == "/health":
            self._json({})
        elif asked.path == "/v1/models":
            self._json({"data": [{"id": MODEL}]})
        elif asked.path == "/sent":
            given = {name: float(values[0]) for name, values in parse_qs(asked.query).items()}
            self._json({"tokens": self.steps.sent(given["since"], given["until"])})
        else:
            self._json({"error": "no such path"}, 404)

    def do_POST(self) -> None:
        """A completion, streamed."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        mine = self.steps.ask(int(body["max_tokens"]))
        done = 0
        try:
            while (token := mine.get()) >= 0:
                done += 1
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": done}
                choice = {"index": 0, "text": f" {token}", "finish_reason": None}
                self._event(json.dumps({"model": MODEL, "choices": [choice], "usage": usage}))
                self.steps.count()
            self._event("[DONE]")
            self._chunk(b"")
        except OSError:
            self.steps.leave(mine)
            self.close_connection = True

    def _event(self, data: str) -> None:
        self._chunk(f"data: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Many requests at once, and many that knock at once."""

    daemon_threads = True
    request_queue_size = 256


def main(words: list[str]) -> None:
    """Serve until the end of this process."""
    device = words[1] if len(words) > 1 else "cuda"
    Handler.steps = Steps(device)
    print(f"serving on port {words[0]}", flush=True)
    Server(("127.0.0.1", int(words[0])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
