"""A proxy that a test serves over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import proxy_tools as tools

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.app import create_app
from turngym.agents.serving import DrainingServer
from turngym.scripts.serve_proxy import proxy_front


class Served:
    """A running server, its bench, and a plain HTTP client."""

    def __init__(self, bench: Any, key: str | None = None, keys: ClientKeys | None = None) -> None:
        """With `key` all clients share it, and `http` sends it; with `keys` each has its own."""
        keys = keys or ClientKeys({} if key is None else {"": key})
        self.bench, self.policy, self.service = bench, bench.policy, bench.service
        self.server = DrainingServer(proxy_front(create_app(bench.service, keys=keys)), port=0, drain=10.0)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        headers = {} if key is None else {"Authorization": b"Bearer " + key.encode()}
        # without certificates, which take a client most of its time to load
        self.http = httpx.Client(base_url=self.server.url, timeout=20, headers=headers, verify=False)

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return self.http.post("/chat/completions", json=body, headers=headers or {})

    def events(self, **body: Any) -> Iterator[Any]:
        body = {"messages": [tools.user("x")], "stream": True, **body}
        with self.http.stream("POST", "/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    said = line.removeprefix("data: ")
                    yield said if said == "[DONE]" else json.loads(said)

    def health(self) -> Any:
        return self.http.get(self.server.url.removesuffix("/v1") + "/healthz").json()

    def stop(self) -> None:
        self.policy.flow()
        self.http.close()
        self.server.stop()
        self.thread.join(20)
        self.service.close()
