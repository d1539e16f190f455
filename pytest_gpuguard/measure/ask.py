"""Asking a server for greedy answers over ``/generate``, or ``/v1/completions`` where that is missing.

It tells apart what failed from what was refused: a server that does not know a parameter, or wants another key, has
not shown that its stack is broken.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .replies import (
    COMPLETIONS,
    EMBEDS,
    NATIVE,
    Failed,
    Reply,
    mentions_nan,
    message_of,
    one_line,
    read_native,
    read_openai,
)
from .sanity import Answer

CHAT: Final = "/v1/chat/completions"
#: Statuses by which a server says that the request, not the model, is what it does not like.
_REFUSED: Final = frozenset({400, 401, 402, 403, 404, 405, 410, 413, 415, 422, 429, 501})
_ABSENT: Final = frozenset({404, 405, 410, 501})
_LOGPROB: Final = re.compile("log.?prob", re.IGNORECASE)
#: After the process has died its socket takes a moment to break.
_GRACE_S: Final = 1.0
_POLL_S: Final = 0.2
#: A request that waits so long for its answer hangs; one that is overtaken by the deadline sooner has merely come late.
_HUNG_S: Final = 60.0


class Asker:
    """Requests to one server, over the endpoint that it turns out to have, within one deadline.

    ``logprobs`` says whether log-probs are asked for; it turns False when the server can answer only without them.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        model: str | None = None,
        alive: Callable[[], bool] = lambda: True,
        deadline_s: float = 300.0,
    ) -> None:
        import httpx

        self.logprobs = True
        self.note = ""
        self._alive, self._model, self._paths = alive, model, [NATIVE, COMPLETIONS]
        self.deadline = time.monotonic() + deadline_s
        self._hung_s = min(_HUNG_S, deadline_s / 4)
        self._client = httpx.Client(
            base_url=url, headers=dict(headers), trust_env=False, verify=False, timeout=max(deadline_s, 1.0)
        )

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, never less than a tenth."""
        return max(self.deadline - time.monotonic(), 0.1)

    def get(self, *paths: str) -> dict[str, Any]:
        """The JSON object at the first of these paths that has one; empty when none has."""
        import httpx

        for path in paths:
            try:
                answer = self._client.get(path, timeout=min(self.left_s, 10.0))
                said = answer.json() if answer.status_code == 200 else None
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):  # RecursionError: deeply nested
                continue
            if isinstance(said, dict):
                return said
        return {}

    def server_info(self) -> dict[str, Any]:
        """What SGLang says of how it runs; empty of another server."""
        return self.get("/server_info", "/get_server_info")

    def no_text(self, info: Mapping[str, Any]) -> str | None:
        """Why this server, with this ``server_info``, generates no text, or None.

        Log-probs must not be asked of such a one: it has no logits. SGLang tells by an argument of the server, or by
        the model (0.5.23, ``/model_info``).
        """
        if info.get("is_embedding") is True or (info and self._model_info().get("is_generation") is False):
            return EMBEDS
        return None

    def model_path(self, info: Mapping[str, Any]) -> str:
        """The path or name of the model that is served, by whoever tells it."""
        return str(self._model_info().get("model_path") or info.get("model_path") or self.model())

    def _model_info(self) -> dict[str, Any]:
        return self.get("/model_info", "/get_model_info")

    def model(self) -> str:
        """The name by which requests to ``/v1`` name the model."""
        if self._model is None:
            data = self.get("/v1/models").get("data")
            first = data[0] if isinstance(data, list) and data else None
            self._model = str(first["id"]) if isinstance(first, dict) and first.get("id") else "default"
        return self._model

    def answer(self, prompt: str, tokens: int) -> Reply:
        """The greedy answer to one prompt, of at most so many tokens."""
        return self.answers([prompt], tokens)[0]

    def answers(self, prompts: Sequence[str], tokens: int) -> list[Reply]:
        """Greedy answers to prompts that are asked at once, in their order."""
        return self.together([lambda prompt=prompt: self.answer_here(prompt, tokens) for prompt in prompts])  # type: ignore[misc]

    def together(self, jobs: Sequence[Callable[[], Reply]], width: int | None = None) -> list[Reply]:
        """What these jobs gave, ``width`` at once; one that hangs at the deadline, or when the server dies, is failed.

        Threads are daemons: one that hangs in a socket must not keep the interpreter from ending.
        """
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(jobs)):
            todo.put(number)
        done: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((number, jobs[number]()))
                except BaseException as error:  # raised in the caller's thread
                    done.put((number, error))

        for _ in range(min(width or len(jobs), len(jobs))):
            threading.Thread(target=work, daemon=True).start()
        replies: dict[int, Reply] = {}
        died: float | None = None
        heard = time.monotonic()
        while len(replies) < len(jobs):
            try:
                number, reply = done.get(timeout=_POLL_S)
            except queue.Empty:
                now = time.monotonic()
                if died is None and not self._alive():
                    died = now
                if died is not None and now - died > _GRACE_S:
                    return self._missing(replies, len(jobs), Failed("the server died and gave no answer"))
                if now > self.deadline + _POLL_S:
                    return self._missing(replies, len(jobs), self._late(now - heard))
                continue
            if isinstance(reply, BaseException):
                raise reply
            replies[number], heard = reply, time.monotonic()
        return [replies[number] for number in range(len(jobs))]

    def _missing(self, replies: Mapping[int, Reply], count: int, instead: Failed) -> list[Reply]:
        return [replies.get(number, instead) for number in range(count)]

    def _late(self, waited_s: float) -> Failed:
        if waited_s < self._hung_s:
            return Failed("the time for all requests together ran out while the server answered", refused=True)
        return Failed(f"no answer within {waited_s:.0f} s, with the server alive", outcome="hang.timeout")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | Failed:
        """The JSON object that came back, or why there is none."""
        import httpx

        started = time.monotonic()
        try:
            answer = self._client.post(path, json=dict(body), timeout=self.left_s)
            status, text = answer.status_code, answer.text
        except UnicodeEncodeError as error:
            return Failed(f"the request is no text that can be sent: {error.reason}", refused=True)
        except httpx.TimeoutException:
            return self._late(time.monotonic() - started)
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: closed under it
            return Failed(f"the connection broke: {type(error).__name__}: {error}".rstrip(": "))
        try:
            said = json.loads(text)  # reads NaN and Infinity too
        except (ValueError, RecursionError):
            said = None
        if status != 200:
            message = message_of(said) or one_line(text)
            return Failed(
                f"{path} answered {status}{': ' if message else ''}{message}",
                refused=status in _REFUSED,
                outcome="numerics" if status >= 500 and mentions_nan(message) else "unknown",
                status=status,
            )
        if not isinstance(said, dict):
            return Failed(f"{path} answered 200 with what is no JSON object: {text.strip()[:80]!r}", status=200)
        if "error" in said and "text" not in said and "choices" not in said:
            message = message_of(said)
            return Failed(
                f"{path} answered with an error: {message}", outcome="numerics" if mentions_nan(message) else "unknown"
            )
        return said

    def answer_here(self, prompt: str, tokens: int) -> Reply:
        """As ``answer``, in the caller's thread, which nothing but the deadline ends: for jobs of ``together``."""
        wanted = self.logprobs
        reply = self._over_paths(prompt, tokens, wanted)
        # Log-probs are our instrument, not the claim: a server that cannot give them is asked without. Behind a 500 may
        # be a NaN that JSON cannot hold (vllm#13035), and then the tokens show it, or a path that has no log-probs.
        if wanted and isinstance(reply, Failed) and _for_logprobs(reply):
            plain = self._over_paths(prompt, tokens, False)
            if isinstance(plain, Answer):
                self.logprobs = False
                self.note = f"; without log-probs, for which {reply.fact}"
                return plain
        return reply

    def ask_raw(self, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | Failed:
        """The JSON object from whichever endpoint the server has, each with its body; watched as ``answer`` is."""
        found: list[dict[str, Any]] = []

        def job() -> Reply:
            said = self._first(lambda path: dict(bodies[path]) | ({} if path == NATIVE else {"model": self.model()}))
            if isinstance(said, Failed):
                return said
            found.append(said[1])
            return Answer("", "")

        reply = self.together([job])[0]
        return reply if isinstance(reply, Failed) else found[0]

    def _over_paths(self, prompt: str, tokens: int, logprobs: bool) -> Reply:
        def body(path: str) -> dict[str, Any]:
            return _native_body(prompt, tokens, logprobs) if path == NATIVE else self._openai(prompt, tokens, logprobs)

        said = self._first(body)
        if isinstance(said, Failed):
            return said
        path, answer = said
        return read_native(prompt, answer) if path == NATIVE else read_openai(prompt, answer)

    def _first(self, body: Callable[[str], dict[str, Any]]) -> tuple[str, dict[str, Any]] | Failed:
        """What the first endpoint said that the server has; it is the only one asked from then on."""
        paths = self._paths
        for path in paths:
            said = self.post(path, body(path))
            if not isinstance(said, Failed):
                self._paths = [path]
                return path, said
            # 422: an endpoint of that name which wants another body, as of other servers
            other = said.status in _ABSENT or (said.status == 422 and path == NATIVE)
            if not other or path == paths[-1]:
                return said
        raise AssertionError("there is always an endpoint to ask")

    def _openai(self, prompt: str, tokens: int, logprobs: bool) -> dict[str, Any]:
        more = {"logprobs": 1} if logprobs else {}
        return {"model": self.model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def _for_logprobs(failed: Failed) -> bool:
    """Whether it may have failed for the log-probs alone."""
    if failed.refused:
        return _LOGPROB.search(failed.fact) is not None
    return failed.status == 500 and failed.outcome == "unknown"


def _native_body(prompt: str, tokens: int, logprobs: bool) -> dict[str, Any]:
    more = {"return_logprob": True} if logprobs else {}
    return {"text": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}, **more}
