"""The stand-in's HTTP server: health, facts, and deterministic filler that says it is simulated.

No model answers here: what it generates has the asked number of tokens, and no meaning.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from .log import Log
from .release import Release

#: One token each.
_FILLER: Final = ("this ", "text ", "is ", "simulated, ", "not ", "generated; ")
_DEFAULT_TOKENS: Final = 16
_OPEN: Final = ("/health", "/health_generate")


@dataclass(slots=True)
class Serving:
    """What is served, and whether it is ready. ``context`` is the longest request, in tokens."""

    release: Release
    info: Mapping[str, Any]
    name: str
    path: str
    architecture: str
    context: int
    api_key: str | None = None
    metrics: bool = False
    ready: bool = False
    generated: int = 0
    prompted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def filler(count: int) -> list[str]:
    """``count`` tokens of text, always the same."""
    return [_FILLER[at % len(_FILLER)] for at in range(count)]


def start(serving: Serving, host: str, port: int) -> ThreadingHTTPServer:
    """Listen, and answer in threads. Raises OSError when the port cannot be had."""
    handler = type("Handler", (_Handler,), {"serving": serving})
    kind = _Six if ":" in host else _Server
    server = kind((host, port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def expect_the_end() -> threading.Event:
    """From now on SIGTERM sets this event, and ends nothing by itself."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    signal.signal(signal.SIGINT, lambda *_: over.set())
    return over


def wait_for_the_end(over: threading.Event, log: Log, server: ThreadingHTTPServer) -> None:
    """Return once the event is set and the port is free again."""
    over.wait()
    log.say("sigterm")
    server.shutdown()
    server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event of the server's: its log must not show a traceback."""


class _Six(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    serving: Serving

    def log_message(self, *words: Any) -> None:
        """SGLang's access log is no evidence of anything."""

    def do_GET(self) -> None:
        serving, path = self.serving, self.path.partition("?")[0]
        if not self._allowed(path):
            return
        late = serving.release.at_least("0.5.6")
        if path in _OPEN:
            early = not serving.release.at_least("0.5.3") and path == "/health"  # 200 before the warm-up, until 0.5.3
            self._empty(200 if serving.ready or early else 503)
        elif path == "/get_server_info" or (path == "/server_info" and late):
            self._json(serving.info)
        elif path == "/get_model_info" or (path == "/model_info" and late):
            self._json(
                {
                    "model_path": serving.path,
                    "tokenizer_path": serving.path,
                    "is_generation": True,
                    "architectures": [serving.architecture],
                    "simulated": True,
                }
            )
        elif path == "/v1/models":
            card = {"id": serving.name, "object": "model", "owned_by": "sglang", "max_model_len": serving.context}
            self._json({"object": "list", "data": [card]})
        elif path == "/flush_cache":
            self._text("Cache flushed.\n")
        elif path == "/metrics" and serving.metrics:
            self._text(
                f"sglang:prompt_tokens_total {serving.prompted}\nsglang:generation_tokens_total {serving.generated}\n"
                f"sglang:max_total_num_tokens {serving.info.get('max_total_num_tokens', 0)}\n"
            )
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        except ValueError:
            self._json({"error": {"message": "the body is no JSON"}}, 400)
            return
        if not isinstance(body, dict):
            self._json({"error": {"message": "the body is no object"}}, 400)
            return
        if not self._allowed(path):
            return
        if path == "/flush_cache":
            self._text("Cache flushed.\n")
        elif path == "/generate":
            self._generate(body)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(body, path.endswith("/chat/completions"))
        else:
            self._json({"detail": "Not Found"}, 404)

    # --------------------------------------------------------------------------------------------------- generation

    def _generate(self, body: Mapping[str, Any]) -> None:
        params = body.get("sampling_params")
        count = self._count(params.get("max_new_tokens") if isinstance(params, dict) else None, 128)
        if count is None:
            return
        prompt = body.get("input_ids")
        length = len(prompt) if isinstance(prompt, list) else len(str(body.get("text", "")).split())
        if self._too_long(length, count):
            return
        tokens = filler(count)

        def meta(done: int) -> dict[str, Any]:
            reason = {"type": "length", "length": count} if done == count else None
            return {
                "id": "simulated",
                "finish_reason": reason,
                "prompt_tokens": length,
                "completion_tokens": done,
                "cached_tokens": 0,
            }

        if not body.get("stream"):
            self._json({"text": "".join(tokens), "output_ids": [0] * count, "meta_info": meta(count)})
            return
        self._stream({"text": "".join(tokens[: at + 1]), "meta_info": meta(at + 1)} for at in range(count))

    def _complete(self, body: Mapping[str, Any], chat: bool) -> None:
        asked = body.get("max_completion_tokens")
        count = self._count(body.get("max_tokens") if asked is None else asked, _DEFAULT_TOKENS)
        if count is None:
            return
        prompt = body.get("messages") if chat else body.get("prompt", "")
        length = len(prompt) if isinstance(prompt, list) and not chat else len(str(prompt).split())
        if self._too_long(length, count):
            return
        tokens = filler(count)
        usage = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
        head: dict[str, Any] = {"id": "simulated", "created": 0, "model": body.get("model") or self.serving.name}
        if not body.get("stream"):
            said = "".join(tokens)
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
            kind = "chat.completion" if chat else "text_completion"
            self._json({**head, "object": kind, "choices": [choice], "usage": usage})
            return
        options = body.get("stream_options")
        wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._stream(_chunks(head, tokens, chat, usage if wants_usage else None))

    def _count(self, asked: Any, default: int) -> int | None:
        """How many tokens are asked for; None once a wrong number was answered."""
        if asked is None:
            return default
        if isinstance(asked, (int, float)) and 0 <= asked < 1e15 and asked == int(asked):
            return int(asked)
        self._json({"error": {"message": f"{asked!r} is no number of tokens"}}, 400)
        return None

    def _too_long(self, length: int, count: int) -> bool:
        if length + count <= self.serving.context:
            with self.serving.lock:
                self.serving.prompted += length
                self.serving.generated += count
            return False
        said = f"{length} + {count} tokens are more than the context of {self.serving.context}"
        self._json({"error": {"message": said}}, 400)
        return True

    # ------------------------------------------------------------------------------------------------------ answers

    def _allowed(self, path: str) -> bool:
        key = self.serving.api_key
        if not key or path in _OPEN or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json({"error": "Unauthorized"}, 401)
        return False

    def _stream(self, events: Iterator[Mapping[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _json(self, body: Mapping[str, Any], status: int = 200) -> None:
        self._send(json.dumps(body, default=str).encode(), "application/json", status)

    def _text(self, text: str) -> None:
        self._send(text.encode(), "text/plain; charset=utf-8", 200)

    def _empty(self, status: int) -> None:
        self._send(b"", "text/plain", status)

    def _send(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _chunks(
    head: Mapping[str, Any], tokens: list[str], chat: bool, usage: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    for at, token in enumerate(tokens):
        last = at + 1 == len(tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length" if last else None}
        choice |= {"delta": {"role": "assistant", "content": token}} if chat else {"text": token}
        yield {**head, "object": kind, "choices": [choice]}
    if usage is not None:
        yield {**head, "object": kind, "choices": [], "usage": dict(usage)}
