"""A stand-in for the Hugging Face hub on 127.0.0.1: the answers that its library asks for, of models in folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """Serves `server.models`, repository name to folder, at one commit that `main` and `v1` name."""

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            if name in server.models and revision in ("", "main", "v1", COMMIT):
                folder = server.models[name]
                files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
                rows = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
                return self._send(json.dumps({"id": name, "sha": server.commit, "siblings": rows}).encode(), {}, body)
        elif "/resolve/" in path:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            place = server.models.get(name, Path("/nowhere")) / file
            if place.is_file():
                data = place.read_bytes()
                heads = {"X-Repo-Commit": server.commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
                return self._send(data, heads, body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _send(self, data: bytes, heads: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**heads, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[Any]:
    """The server, with `url` and the paths that were `asked`."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.models, server.asked, server.commit = models, [], COMMIT
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
