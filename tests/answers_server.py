"""A stand-in for the HTTP side of a server, with a made-up model and faults on demand.

The model: words are tokens, ids hash the words, and an answer depends on the whole prompt as that of a real one does.
``fault`` is one of the names in ``FAULTS``; ``dead`` is what the process would show.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 5000
# fmt: off
FAULTS = frozenset({
    "nan", "null", "infinite", "zeros", "repeat", "cycle", "own_repeat", "unreadable", "empty", "random",
    "second_dies", "second_changes", "second_tie", "second_drifts", "burst_dies", "burst_zeros", "long_dies",
    "nan_500", "plain_500", "hang", "hang_dead", "malformed", "no_text", "abort_nan", "abort_400", "error_200",
    "no_endpoint", "no_generate", "chat_only", "other_generate", "unauthorized", "refuses_logprobs",
    "logprobs_500", "no_logprobs", "speculative", "no_cache", "ranks", "drifted", "garbage", "refuses_all",
    "nan_completions", "slow", "no_chat",
    "embeds", "deep_info",
})
# fmt: on


def ids_of(text: str) -> list[int]:
    """The token ids of a text."""
    return [zlib.crc32(word.encode()) % (VOCABULARY - 10) + 10 for word in text.split()]


def noise(seed: object) -> float:
    """A number of [0, 1) that depends on the seed alone."""
    return zlib.crc32(repr(seed).encode()) / 2**32


class AnswersServer:
    """What runs, and what it was asked."""

    def __init__(self, fault: str | None = None, **info: Any) -> None:
        assert fault is None or fault in FAULTS, fault
        self.fault, self.dead = fault, False
        self.context = info.pop("context", 4096)
        self.replies: dict[str, str] = info.pop("replies", {})
        #: What chats say instead: choices of the answer, by the question.
        self.choices: dict[str, dict[str, Any]] = info.pop("choices", {})
        self.model_info = {"model_path": "/models/stand-in", **info.pop("model_info", {})}
        self.key: str | None = info.pop("key", None)
        self.info = {"version": "0.5.23", "chunked_prefill_size": 512, "max_total_num_tokens": 16384, **info}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.seen: dict[str, int] = {}
        self.running = 0
        self.lock = threading.Lock()
        self.url = ""

    def has(self, *names: str) -> bool:
        """Whether the fault is one of these."""
        return self.fault in names

    def alive(self) -> bool:
        """As the process table would say it."""
        return not self.dead

    def output(self, prompt: str, count: int, again: bool, burst: bool) -> list[tuple[float | None, int, str]]:
        """(log-prob, id, text) of each output token."""
        out: list[tuple[float | None, int, str]] = []
        for at in range(count):
            chance = noise((prompt, at))
            word = f"w{int(chance * 4000)}"
            made: tuple[float | None, int, str] = (-0.05 - chance, ids_of(word)[0], word + " ")
            if self.has("random"):
                made = (-8.4 - chance / 10, *made[1:])
            elif self.has("zeros", "nan_completions") or (self.has("burst_zeros") and burst):
                made = (-8.517, 0, "!")
            elif self.has("repeat"):
                made = (-0.01, 77, " the")
            elif self.has("cycle"):
                made = (-0.01, 70 + at % 3, " abc"[at % 3])
            elif self.has("own_repeat"):
                made = (-0.4, ids_of(prompt)[-1], prompt.split()[-1])
            elif self.has("unreadable"):
                made = (*made[:2], "\ufffd")
            elif self.has("second_changes") and again:
                made = (-0.02, 99 + at, f"v{at}")
            elif self.has("second_tie") and again and at >= 2:
                made = (-0.8, 99 + at, f"v{at}")
            elif self.has("second_drifts") and again:
                made = (made[0] - 3.0, *made[1:])  # type: ignore[operator]
            if self.has("second_tie") and not again and at >= 2:
                made = (-0.75, *made[1:])
            if self.has("second_changes") and not again:
                made = (-0.03, *made[1:])
            if at == 2 and self.has("nan", "null", "infinite"):
                bad = {"nan": float("nan"), "null": None, "infinite": float("-inf")}[str(self.fault)]
                made = (bad, *made[1:])
            out.append(made)
        return out

    def input_logprobs(self, ids: list[int]) -> list[list[Any]]:
        """[log-prob, id, None] of each token of a prompt."""
        values: list[Any] = [None]
        for at in range(1, len(ids)):
            value = -0.1 - 4 * noise(tuple(ids[: at + 1]))
            if self.has("drifted"):
                value -= 0.2 * (noise(("drift", at)) - 0.5)
            if self.has("garbage"):
                value = -8.5 - noise(at)
            if self.has("nan", "null") and at == 3:
                value = float("nan") if self.has("nan") else None  # type: ignore[assignment]
            values.append(value)
        return [[value, one, None] for value, one in zip(values, ids, strict=True)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: AnswersServer

    def log_message(self, *words: object) -> None:
        pass

    def reply(self, body: object, status: int = 200) -> None:
        self.raw(json.dumps(body).encode(), status)

    def raw(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def drop(self) -> None:
        """As when the process behind the socket is gone."""
        self.state.dead = True
        self.close_connection = True

    def refused(self) -> bool:
        key = self.state.key
        if self.state.has("unauthorized") or (key and self.headers.get("Authorization") != f"Bearer {key}"):
            self.reply({"error": "unauthorized"}, 401)
            return True
        return False

    def do_GET(self) -> None:
        state = self.state
        if self.refused():
            return
        if state.has("deep_info"):
            return self.raw(b'{"a":' * 100_000)
        native = not state.has("no_generate", "chat_only", "nan_completions", "other_generate")
        if self.path == "/server_info" and native:
            return self.reply(
                {"model_path": state.model_info["model_path"], "context_length": state.context, **state.info}
            )
        if self.path == "/model_info" and native:
            return self.reply(state.model_info)
        if self.path == "/v1/models":
            return self.reply({"data": [{"id": "stand-in", "max_model_len": state.context}]})
        if self.path == "/version" and not native:
            return self.reply({"version": "0.19.0"})
        return self.reply({"error": "not found"}, 404)

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        with state.lock:
            state.bodies.append((self.path, body))
            state.running += 1
        try:
            if not state.dead and not self.refused():
                self.post(body)
            elif state.dead:
                self.close_connection = True
        finally:
            with state.lock:
                state.running -= 1

    def post(self, body: dict[str, Any]) -> None:
        state = self.state
        if self.path == "/generate":
            if state.has("no_endpoint", "no_generate", "chat_only", "nan_completions"):
                return self.reply({"detail": "Not Found"}, 404)
            if state.has("other_generate"):
                return self.reply({"detail": [{"loc": ["body", "inputs"], "msg": "Field required"}]}, 422)
            sampling = body["sampling_params"]
            return self.generate(body["text"], sampling["max_new_tokens"], bool(body.get("return_logprob")), body)
        if self.path == "/v1/completions" and not state.has("no_endpoint", "chat_only"):
            return self.generate(body["prompt"], body["max_tokens"], body.get("logprobs") is not None, body)
        if self.path == "/v1/chat/completions" and state.has("no_chat"):
            return self.reply({"error": {"message": "the tokenizer has no chat template"}}, 400)
        if self.path == "/v1/chat/completions" and not state.has("no_endpoint"):
            text = state.replies.get(body["messages"][0]["content"], "I do not know")
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            choice = state.choices.get(body["messages"][0]["content"], choice)
            return self.reply({"choices": [choice], "usage": {"prompt_tokens": 9}})
        return self.reply({"detail": "Not Found"}, 404)

    def generate(self, prompt: str, count: int, logprobs: bool, body: dict[str, Any]) -> None:
        state = self.state
        ids = ids_of(prompt)
        with state.lock:
            again = state.seen.get(prompt, 0)
            state.seen[prompt] = again + 1
        if state.has("slow"):
            time.sleep(0.15)
        if state.has("burst_dies", "burst_zeros"):
            time.sleep(0.15)  # long enough for the others to arrive
        burst = state.running > 2
        if len(ids) + count > state.context:
            message = (
                f"The input ({len(ids)} tokens) is longer than the model's context length ({state.context} tokens)."
            )
            return self.reply({"error": {"message": message}}, 400)
        if logprobs and state.has("refuses_logprobs"):
            return self.reply({"error": "return_logprob is not supported"}, 400)
        if logprobs and state.has("logprobs_500", "nan_completions"):
            return self.raw(b"Internal Server Error", 500)
        if state.has("embeds"):
            return self.reply({"embedding": [0.1] * 8, "meta_info": {"prompt_tokens": len(ids)}})
        if state.has("refuses_all"):
            return self.reply({"error": "unknown field `temperature`"}, 400)
        if state.has("nan_500"):
            return self.reply({"error": {"message": "NaN detected! sampler: next_token_logits"}}, 500)
        if state.has("plain_500"):
            return self.reply({"error": {"message": "a nano banana of finance"}}, 500)
        if state.has("hang", "hang_dead"):
            state.dead = state.has("hang_dead")
            time.sleep(3)
            self.close_connection = True
            return None
        dies = (state.has("second_dies") and again) or (state.has("burst_dies") and burst)
        if dies or (state.has("long_dies") and len(ids) > state.info["chunked_prefill_size"]):
            return self.drop()
        if logprobs and state.has("speculative"):
            return self.drop()
        if state.has("malformed"):
            return self.raw(b'{"text": "half an ans')
        if state.has("no_text"):
            return self.reply({"outputs": []})
        if state.has("error_200"):
            return self.reply({"error": {"message": "something went wrong"}})
        out = [] if state.has("empty") else state.output(prompt, count, bool(again), burst)
        if prompt in state.replies:
            out = [(-0.1, ids_of(word)[0], word + " ") for word in state.replies[prompt].split()]
        text = "".join(one[2] for one in out)
        if self.path != "/generate":
            return self.openai(prompt, text, out, body)
        hit = 0 if not again or state.has("no_cache") or (state.has("ranks") and again < 4) else len(ids) - 1
        finish: dict[str, Any] = {"type": "length", "length": count}
        if state.has("abort_nan"):
            finish = {"type": "abort", "message": "the logits were NaN", "status_code": 500}
        if state.has("abort_400"):
            finish = {"type": "abort", "message": "too long for me", "status_code": 400}
        meta: dict[str, Any] = {"finish_reason": finish, "prompt_tokens": len(ids), "cached_tokens": hit}
        if logprobs and not state.has("no_logprobs"):
            meta["output_token_logprobs"] = [[*one[:2], None] for one in out]
            meta["input_token_logprobs"] = state.input_logprobs(ids) if "logprob_start_len" in body else []
        return self.reply({"text": text, "output_ids": [one[1] for one in out], "meta_info": meta})

    def openai(self, prompt: str, text: str, out: list[tuple[float | None, int, str]], body: dict[str, Any]) -> None:
        choice: dict[str, Any] = {"text": text, "finish_reason": "length", "logprobs": None}
        if "logprobs" in body and not self.state.has("no_logprobs"):
            told = [(one[0], one[1], one[2]) for one in out]
            if body.get("echo"):
                told = [(one[0], one[1], "") for one in self.state.input_logprobs(ids_of(prompt))] + told
            named = body.get("return_tokens_as_token_ids")
            tokens = [f"token_id:{one[1]}" if named else one[2] for one in told]
            choice["logprobs"] = {"token_logprobs": [one[0] for one in told], "tokens": tokens}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": len(ids_of(prompt))}})


@contextmanager
def answers_server(fault: str | None = None, **info: Any) -> Iterator[AnswersServer]:
    """A server in threads of this process; ``info`` is more of its server_info, or its context, replies, and key."""
    state = AnswersServer(fault, **info)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
