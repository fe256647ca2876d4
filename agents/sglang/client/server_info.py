"""Reads a server's release, model and limits, and checks that it is supported."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.sglang.client.http import Connection
from turngym.agents.sglang.errors import ServerError

OLDEST, TRIED, BEFORE = (0, 5, 21), "0.5.23", (0, 6)
"""Releases that speak the protocol used here: before OLDEST, weights are updated in another way."""
HEADROOM = 4
"""SGLang keeps prompts 5 ids shorter than prompt and response together, and that 1 shorter than the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """One server."""

    url: str
    version: str
    model: str
    """Path or name of the model that it was started with."""
    kind: str
    """Its architecture, for example Qwen3ForCausalLM."""
    weights: str
    """Name of the weights it has now; `default` unless they were named in an update."""
    max_prompt: int
    """A prompt must be shorter than this."""
    seeded: bool
    """Whether a request's own seed counts (--enable-deterministic-inference); if not, it is ignored."""
    ranks: int
    """Processes that hold a share of the weights (tensor and pipeline parallelism)."""
    replicas: int
    """Data-parallel copies in it."""
    dtype: str

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.max_prompt + HEADROOM


async def read_info(connection: Connection, wait: float) -> ServerInfo:
    """Ask a server; up to `wait` seconds while it starts.

    Raises:
        ServerError: it is down, or no SGLang server that generates.
    """
    patience = max(wait, connection.settings.connect_timeout)
    about = await connection.request_until("GET", "/server_info", deadline=patience)
    model = await connection.request_until("GET", "/model_info", deadline=patience)
    if not isinstance(about, dict) or not isinstance(model, dict) or "version" not in about:
        raise ServerError(f"{connection.url} is not an SGLang server: /server_info says {str(about)[:200]}")
    if not model.get("is_generation", True):
        raise ServerError(f"{connection.url} serves {model.get('model_path')!r}, which does not generate")
    if about.get("skip_tokenizer_init"):
        raise ServerError(f"{connection.url} runs with --skip-tokenizer-init: it cannot stop at texts; leave that out")
    limit = about.get("max_req_input_len")
    if limit is None:
        raise ServerError(
            f"{connection.url} does not say max_req_input_len; SGLang {about['version']} is not supported"
        )
    return ServerInfo(
        url=connection.url,
        version=str(about["version"]),
        model=str(model.get("model_path", about.get("model_path", ""))),
        kind=str((model.get("architectures") or ["?"])[0]),
        weights=str(model.get("weight_version")),
        max_prompt=int(limit),
        seeded=bool(about.get("enable_deterministic_inference")),
        ranks=int(about.get("tp_size", 1)) * int(about.get("pp_size", 1)),
        replicas=int(about.get("dp_size", 1)),
        dtype=str(about.get("dtype", "auto")),
    )


def check_version(servers: Sequence[ServerInfo]) -> None:
    """Raises ServerError for a release that is not supported, or servers that differ in release or model."""
    for server in servers:
        numbers = tuple(int(part) for part in re.findall(r"\d+", server.version)[:3])
        if not OLDEST <= numbers < BEFORE:
            oldest, before = (".".join(map(str, numbers)) for numbers in (OLDEST, BEFORE))
            raise ServerError(
                f"{server.url} is SGLang {server.version}; supported are {oldest} up to, but not, {before} "
                f"(tried: {TRIED}): pip install 'sglang=={TRIED}'"
            )
    asked: list[tuple[str, Callable[[ServerInfo], Any]]] = [
        ("release", lambda server: server.version),
        ("architecture", lambda server: server.kind),
        ("longest prompt", lambda server: server.max_prompt),
    ]
    for what, value in asked:
        if len({value(server) for server in servers}) > 1:
            rows = ", ".join(f"{server.url} {value(server)}" for server in servers)
            raise ServerError(f"the servers differ in {what}: {rows}")
