"""The servers, each on a small world of its own, and where they take requests."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.worlds import load_world
from turngym.scripts.bench.faults.malformed import Route

_MESSAGES = [{"role": "user", "content": "hello"}]
_RPC: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "begin"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a server is started, and a request of each kind that it takes."""

    name: str
    command: list[str]
    routes: tuple[Route, ...]
    needs: str = ""
    """Module without which it is left out."""


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "turngym.scripts", *words, "--port", "0"]


def _proxy(folder: Path) -> Served:
    student = str(load_world("alfworld").checkpoint("student"))
    chat = {"messages": _MESSAGES, "max_tokens": 1, "temperature": 1.0, "session_id": "a", "tools": None, "seed": 1}
    chat |= {"stop": "x", "n": 1, "logprobs": False, "metadata": {"a": 1}}
    return Served(
        name="proxy",
        command=_command(
            *("serve", "proxy", "--student", student, "--out", str(folder / "proxy")),
            *("--no-train", "--threads", "1", "--device", "cpu"),
        ),
        routes=(
            Route(method="POST", path="/v1/chat/completions", body=chat),
            Route(method="POST", path="/v1/sessions/done", body={"session_id": "a", "messages": _MESSAGES}),
        ),
        needs="waitress",
    )


def _retrieval(folder: Path) -> Served:
    corpus = folder / "corpus.jsonl"
    lines = [{"id": str(n), "contents": f'"Page {n}"\nwords about {n}'} for n in range(100)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    body = {"queries": ["page 7"], "topk": 2, "return_scores": True}
    return Served(
        name="retrieval",
        command=_command("serve", "retrieval", "--index", f"bm25:{corpus}", "--processes", "0"),
        routes=(Route(method="POST", path="/retrieve", body=body),),
        needs="waitress",
    )


def _webshop(folder: Path) -> Served:
    return Served(
        name="webshop",
        command=_command("serve", "webshop", "--profile", "embedded-small", "--out", "None"),
        routes=(
            Route(method="GET", path="/", body={"note": "gone"}, form=True),
            Route(method="GET", path="/shop", body={"a": "1"}, form=True),
            Route(method="POST", path="/start", body={"token": "x", "goal": "1"}, form=True),
            Route(method="POST", path="/act", body={"token": "x", "turn": "0", "click": "back"}, form=True),
        ),
        needs="waitress",
    )


def _trace(folder: Path) -> Served:
    from turngym.scripts.rollout import main

    trace = folder / "trace.jsonl"

    with contextlib.redirect_stdout(io.StringIO()):
        main(["--env", "turngym/WebShop-v0", "--agent", "expert", "--tasks", "2", "--out", str(trace)])
    query = {
        "run": "0",
        "start": "0",
        "count": "5",
        "at": "0",
        "sort": "turns",
        "text": "x",
        "task": "t",
        "sample": "0",
    }
    return Served(
        name="trace",
        command=_command("trace", "view", str(trace)),
        routes=tuple(
            Route(method="GET", path=f"/api/{name}", body=dict(query), form=True)
            for name in ("rows", "episode", "runs")
        ),
        needs="waitress",
    )


def _openenv(folder: Path) -> Served:
    action = {"response": "look", "response_ids": None, "logprobs": None, "policy_version": 0, "action": None}
    return Served(
        name="openenv",
        command=_command("serve", "openenv", "--env", "turngym/ALFWorld-v0"),
        routes=(
            Route(method="POST", path="/reset", body={"seed": 1, "task_id": None, "sample": 0, "episode_id": "a"}),
            Route(method="POST", path="/step", body={"action": action, "timeout_s": 1.0, "request_id": "a"}),
            Route(method="POST", path="/step", body=action),
            Route(method="POST", path="/mcp", body=_RPC),
        ),
        needs="openenv",
    )


def _mcp(folder: Path) -> Served:
    words = ("serve", "mcp", "--panel", "webshop-quickstart", "--out", str(folder / "mcp"), "--transport", "http")
    return Served(
        name="mcp",
        command=_command(*words),
        routes=(Route(method="POST", path="/mcp", body=_RPC),),
        needs="mcp.server.mcpserver",
    )


TARGETS: dict[str, Callable[[Path], Served]] = {
    "proxy": _proxy,
    "retrieval": _retrieval,
    "webshop": _webshop,
    "trace": _trace,
    "openenv": _openenv,
    "mcp": _mcp,
}
"""All servers of ours, with what they need written into a folder. SGLang's own server is not among them."""
