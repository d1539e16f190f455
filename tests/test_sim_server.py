"""The stand-in over HTTP: what each release answers where, in which shape, and that it says it is simulated."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .sim_models import DENSE, command, free_port, running, write_model


@contextmanager
def served(folder: Path, release: str, *flags: str) -> Iterator[httpx.Client]:
    model, port = write_model(folder / "model", DENSE), free_port()
    argv = command(model, folder / "memory", "sim:rtx-5090:1", f"sim:sglang=={release}", "--port", str(port), *flags)
    log = folder / "server.log"
    with running(argv, log, 1) as process:
        deadline = time.monotonic() + 30
        while b"ready to roll" not in log.read_bytes() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None, log.read_text()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            yield client


MEMORY = {
    "0.4.6": None,
    "0.4.10": {"weight", "kvcache", "token_capacity", "cuda_graph"},
    "0.5.12": {"weight", "kvcache", "token_capacity", "graph"},
    "0.5.23": {"weight", "kvcache", "token_capacity", "graph", "startup_available"},
}


@pytest.mark.parametrize("release", MEMORY)
def test_facts_are_where_and_as_the_release_has_them(release: str, tmp_path: Path) -> None:
    late = release in ("0.5.12", "0.5.23")
    with served(tmp_path, release, "--mem-fraction-static", "0.9", "--context-length", "4096") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health_generate").status_code == 200
        assert client.get("/server_info").status_code == (200 if late else 404)
        assert client.get("/model_info").status_code == (200 if late else 404)
        info: dict[str, Any] = client.get("/get_server_info").json()
        assert client.get("/get_model_info").json()["model_path"] == info["model_path"]
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
        assert client.get("/metrics").status_code == 404
        assert client.get("/nothing").status_code == 404
        assert client.post("/flush_cache").status_code == 200
    assert info["version"] == release
    assert info["simulated"] is True
    assert info["mem_fraction_static"] == 0.9
    assert info["context_length"] == 4096
    assert info["max_total_num_tokens"] > 4096
    (state,) = info["internal_states"]
    wanted = MEMORY[release]
    assert (set(state["memory_usage"]) if wanted else state) == (wanted or {})
    if release == "0.5.23":
        assert set(state["memory_usage"]["graph"]) == {"decode"}


def test_generation_has_the_asked_length_says_what_it_is_and_never_changes(tmp_path: Path) -> None:
    with served(tmp_path, "0.5.23", "--enable-metrics", "--context-length", "2048") as client:
        ask = {"text": "a b c", "sampling_params": {"max_new_tokens": 7, "temperature": 0.0}}
        first = client.post("/generate", json=ask).json()
        assert first == client.post("/generate", json=ask).json()
        assert "simulated" in first["text"]
        assert (first["meta_info"]["prompt_tokens"], first["meta_info"]["completion_tokens"]) == (3, 7)
        streamed = events(client.post("/generate", json={**ask, "stream": True}).text)
        assert len(streamed) == 7
        assert streamed[-1]["meta_info"]["completion_tokens"] == 7
        assert streamed[-1]["text"] == first["text"]
        ids = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=ids).json()["meta_info"]["prompt_tokens"] == 100
        long = {"input_ids": [1] * 2047, "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=long).status_code == 400
        assert client.post("/generate", content=b"{").status_code == 400

        body = {"model": "any", "prompt": "a b", "max_tokens": 5}
        whole = client.post("/v1/completions", json=body).json()
        assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        parts = events(
            client.post(
                "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
            ).text
        )
        said = "".join(one["choices"][0]["text"] for one in parts if one["choices"])
        assert said == whole["choices"][0]["text"]
        assert parts[-1]["usage"]["completion_tokens"] == 5
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=chat).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
        deltas = events(client.post("/v1/chat/completions", json={**chat, "stream": True}).text)
        assert (
            "".join(one["choices"][0]["delta"]["content"] for one in deltas)
            == (answer["choices"][0]["message"]["content"])
        )
        assert "sglang:generation_tokens_total" in client.get("/metrics").text
        assert "gen_throughput" not in client.get("/metrics").text


WRONG = (
    b"[]",
    b"null",
    b"3",
    b'{"max_tokens": -5}',
    b'{"max_tokens": "x"}',
    b'{"max_tokens": NaN}',
    b'{"max_tokens": 1e9}',
)


def test_a_wrong_request_or_a_client_that_goes_away_leaves_no_traceback(tmp_path: Path) -> None:
    with served(tmp_path, "0.5.23", "--enable-metrics") as client:
        assert [client.post("/v1/completions", content=one).status_code for one in WRONG] == [400] * len(WRONG)
        generate = [one.replace(b"max_tokens", b"max_new_tokens") for one in WRONG[3:]]
        for one in (*WRONG[:3], *(b'{"sampling_params": ' + each + b"}" for each in generate)):
            assert client.post("/generate", content=one).status_code == 400
        nothing = {"prompt": "a", "max_tokens": 0}
        assert client.post("/v1/completions", json=nothing).json()["usage"]["completion_tokens"] == 0
        assert "sglang:generation_tokens_total 0" in client.get("/metrics").text, "what was refused is not counted"
        long = b'{"prompt": "a", "max_tokens": 30000, "stream": true}'
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as leaving:
            leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(long), long))
            leaving.recv(10)
        assert client.get("/health").status_code == 200
        time.sleep(0.2)  # for the thread that still writes
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_a_key_is_asked_for_where_one_was_given_and_is_told_to_nobody(tmp_path: Path) -> None:
    with served(tmp_path, "0.5.12", "--api-key", "hunter2") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/server_info").status_code == 401
        found = client.get("/server_info", headers={"Authorization": "Bearer hunter2"})
        assert found.json()["api_key"] == "***"
    assert "hunter2" not in (tmp_path / "server.log").read_text()


def test_a_port_that_is_taken_is_told_in_uvicorns_words(tmp_path: Path) -> None:
    import socket

    from pytest_gpuguard.engines.log import LogReader

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        model = write_model(tmp_path / "model", DENSE)
        argv = command(model, tmp_path / "memory", "sim:rtx-5090:1", "sim:sglang==0.5.12", "--port", str(port))
        log = tmp_path / "server.log"
        with running(argv, log, 1) as process:
            assert process.wait(30) == 1
    reader = LogReader("sglang", "0.5.12")
    reader.feed(log.read_bytes())
    assert reader.closed().outcome == "port.in_use"


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
