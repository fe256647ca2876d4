"""A proxy that a test serves over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import proxy_tools as tools
from servers import RunningSite

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.app import create_app
from turngym.agents.serving import DrainingServer
from turngym.scripts.serve_proxy import proxy_front


class ServedProxy:
    """`service` on a running server, and a plain HTTP client. With `key` all clients share it, and `http` sends it."""

    def __init__(self, service: Any, key: str | None = None, more_health: Any = None) -> None:
        self.service = service
        app = create_app(service, keys=ClientKeys({} if key is None else {"": key}), more_health=more_health)
        self.server = DrainingServer(proxy_front(app), drain=10.0)
        self.site = RunningSite(self.server)
        headers = {} if key is None else {"Authorization": b"Bearer " + key.encode()}
        # without certificates, which take a client most of its time to load
        self.http = httpx.Client(base_url=self.server.url, timeout=60, headers=headers, verify=False)

    def health(self) -> Any:
        return self.http.get(self.server.url.removesuffix("/v1") + "/healthz").json()

    def stop(self) -> None:
        self.http.close()
        self.site.stop()
        self.service.close()


class Served(ServedProxy):
    """The service of a bench (`proxy_tools.Bench`)."""

    def __init__(self, bench: Any, key: str | None = None) -> None:
        super().__init__(bench.service, key)
        self.bench, self.policy = bench, bench.policy

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return self.http.post("/chat/completions", json=body, headers=headers or {})

    def events(self, **body: Any) -> Iterator[Any]:
        body = {"messages": [tools.user("x")], "stream": True, **body}
        with self.http.stream("POST", "/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)

    def stop(self) -> None:
        self.policy.flow()
        super().stop()
