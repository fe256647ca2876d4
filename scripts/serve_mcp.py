"""Serve the tasks of a panel to MCP clients: an agent plays an episode by calling tools, over stdio or HTTP.

Examples:
    turngym serve mcp --panel alfworld-quickstart --out runs/agent
    turngym serve mcp --panel webshop-quickstart --out runs/agent --transport http --port 8020

Every episode is judged and recorded as `turngym eval` records its own; --out gets trace.jsonl and results.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from turngym.agents.adapters.mcp import Episodes, server
from turngym.agents.adapters.panel_sessions import PanelSessions
from turngym.agents.client_keys import ClientKeys
from turngym.agents.serving import Listen
from turngym.agents.serving_asgi import AsgiServer, JsonBodies, KeyedClients
from turngym.core.nested import KIND
from turngym.core.numbers import Count, Million, Positive, Seed
from turngym.core.plugins import need
from turngym.core.spec import Spec
from turngym.scripts.options import read_options


class Transport(Spec, tag_field=KIND):
    """How clients come."""


class Stdio(Transport, tag="stdio"):
    """The client starts this process, which is one episode."""


class Http(Transport, tag="http"):
    """Any number of clients and episodes, at http://HOST:PORT/mcp."""

    listen: Listen = Listen(port=8020)
    clients: Million = 64
    """Most episodes that are open at a time."""
    idle: Positive = 900.0
    """Seconds without a call after which an episode ends."""
    client_keys: Path | None = None
    """File with a line for each client, its name and its key. Episodes are then its own, and it may have an equal part
    of --clients open. Without it all clients are one, and an episode is known by its name alone."""


class ServeMcp(Spec):
    """What to serve, and where."""

    panel: str
    """Name (newest version), full name, or path of a manifest. Each episode is its next task that nobody has played:
    every task once, then every task again."""
    out: Path
    """Folder for trace.jsonl and results.json; what is in it is added to."""
    agent: str = "mcp"
    """Name under which the episodes are recorded; one for each folder."""
    transport: Stdio | Http = Stdio()
    """`stdio`: the client starts this process, which is one episode; `http`: any number of clients and episodes, at
    http://HOST:PORT/mcp."""
    limit: Count | None = None
    """Only the first so many tasks of the panel."""
    seed: Seed = 0
    """Seed of the episodes, as that of `turngym eval`."""
    max_turns: Count | None = None
    """Turns before an episode is cut; by default the environment's own limit."""
    data: Path | None = None
    """Folder of the data; by default where the environment looks for it."""


def main(argv: Sequence[str]) -> int:
    config = read_options(ServeMcp, argv, prog="turngym serve mcp", about=__doc__)
    need("mcp.server.mcpserver", "turngym serve mcp (mcp 2)", "mcp")
    keys = ClientKeys.of(None, config.transport.client_keys if isinstance(config.transport, Http) else None)
    episodes = open_episodes(config, keys)
    try:
        serve(config, server(episodes), keys)
    finally:
        episodes.close()
    return 0


def open_episodes(config: ServeMcp, keys: ClientKeys) -> Episodes:
    sessions = PanelSessions.of(
        config.panel,
        channel="tool",
        limit=config.limit,
        seed=config.seed,
        max_turns=config.max_turns,
        data=None if config.data is None else str(config.data),
        trace=config.out / "trace.jsonl",
    )
    http = config.transport if isinstance(config.transport, Http) else Http()
    return Episodes(
        sessions,
        agent=config.agent,
        named=http is config.transport,
        most=http.clients,
        share=keys.share(http.clients),
        idle=http.idle,
    )


def serve(config: ServeMcp, application: Any, keys: ClientKeys) -> None:
    """Answer clients until the last one leaves (stdio) or Ctrl-C (HTTP)."""
    if isinstance(config.transport, Http):
        listen = config.transport.listen
        # its own check of Host knows no further names; ours stands in front of it
        checked = "0.0.0.0" if listen.hosts else listen.host
        app = JsonBodies(application.streamable_http_app(stateless_http=True, json_response=True, host=checked))
        web = AsgiServer(KeyedClients(app, keys), extra="mcp", **structs.asdict(listen))
        web.stop_on_signals()
        print(f"{config.panel} for MCP clients at {web.url}/mcp; Ctrl-C ends it", flush=True)
        web.run()
        return
    anyio = need("anyio", "turngym serve mcp", "mcp")
    stdio = need("mcp.server.stdio", "turngym serve mcp", "mcp").stdio_server

    async def run() -> None:
        async with stdio() as (incoming, outgoing):
            await application.run(incoming, outgoing, application.create_initialization_options())

    print(f"{config.panel} over stdio; episodes in {config.out}", file=sys.stderr, flush=True)
    anyio.run(run)
