"""Serve over HTTP what this machine has: environments, pages to play in, a policy that learns, retrieval."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.scripts.main import dispatch

VERBS = {
    "mcp": "turngym.scripts.serve_mcp",
    "openenv": "turngym.scripts.serve_openenv",
    "play": "turngym.scripts.serve_play",
    "policy": "turngym.scripts.serve_policy",
    "proxy": "turngym.scripts.serve_proxy",
    "retrieval": "turngym.scripts.serve_retrieval",
    "webshop": "turngym.scripts.serve_webshop",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("turngym serve", VERBS, argv)
