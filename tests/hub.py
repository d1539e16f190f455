"""A hub on this machine: an HTTP server that answers as much of the hub's API as a snapshot download asks."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
Repos = dict[str, dict[str, bytes]]


class Hub:
    """The repositories (id → file → content), and what was asked for. ``breaks`` names files that end too early."""

    def __init__(self, repos: Repos) -> None:
        self.repos = repos
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.breaks: set[str] = set()
        self.url = ""

    @property
    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path]


@contextmanager
def serve(repos: Repos) -> Iterator[Hub]:
    hub = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                self._repo(match[1])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
                files = hub.repos.get(match[1], {})
                self._json([{"type": "file", "path": n, "size": len(c), "oid": _sha(c)[:40]} for n, c in files.items()])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self._file(match[1], match[2], body)
            else:
                self._error(404, "EntryNotFound")

        def _repo(self, name: str) -> None:
            if name not in hub.repos:
                self._error(404, "RepoNotFound")
                return
            files = [{"rfilename": one, "size": len(content)} for one, content in hub.repos[name].items()]
            self._json({"id": name, "modelId": name, "sha": REVISION, "siblings": files})

        def _file(self, name: str, file: str, body: bool) -> None:
            content = hub.repos.get(name, {}).get(file)
            if content is None:
                self._error(404, "EntryNotFound")
                return
            asked = self.headers.get("Range")
            first = int(re.findall(r"\d+", asked)[0]) if asked else 0
            if asked and body:
                hub.ranges.append(f"{file}:{first}")
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{_sha(content)}"')
            self.send_header("Accept-Ranges", "bytes")
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            if body and file in hub.breaks:
                self.wfile.write(content[first : first + (len(content) - first) // 2])
                self.wfile.flush()
                self.close_connection = True
            elif body:
                self.wfile.write(content[first:])

        def _json(self, data: object) -> None:
            text = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
