"""Each child of a server, a trainer and a player may be stopped (SIGSTOP): what is asked to end ends nevertheless."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from stopped import ends_though_stopped

from turngym.agents.servers.weights import free_port

pytestmark = pytest.mark.long
STUDENT = Path(__file__).parents[2] / "agents" / "worlds" / "checkpoints" / "alfworld" / "student"
CORPUS = '{"id": "1", "title": "Lisbon", "text": "Lisbon is the capital of Portugal."}\n'
SERVED = ("--port", "PORT")
HOUSEHOLD = ("--env", "turngym/ALFWorld-v0", "--split", "generated", "--threads", "1", "--tracker", "none")
GRPO = ("train", "grpo", "--student", str(STUDENT), *HOUSEHOLD, "--steps", "500", "--episodes", "16", "--out", "run")
COMMANDS: dict[str, Sequence[str]] = {
    "proxy": ("serve", "proxy", "--student", str(STUDENT), "--out", "out", "--threads", "1", *SERVED),
    "retrieval": ("serve", "retrieval", "--index", "bm25:corpus.jsonl", *SERVED),
    "mcp": ("serve", "mcp", "--panel", "alfworld-quickstart", "--out", "out", "--transport", "http", *SERVED),
    "openenv": ("serve", "openenv", "--model", str(STUDENT), *SERVED),
    "play": ("serve", "play", "--models", f"model:{STUDENT}", *SERVED),
    "webshop": ("serve", "webshop", *SERVED),
    "rollout": (
        *("rollout", "--env", "turngym/ALFWorld-v0", "--agent", f"model:{STUDENT}"),
        *("--tasks", "400", "--workers", "2", "--out", "o.jsonl"),
    ),
    "eval": (
        *("eval", "--panel", "alfworld-quickstart", "--agent", f"model:{STUDENT}", "--samples", "50"),
        *("--workers", "2", "--out", "out"),
    ),
    "train": (*GRPO, "--workers", "2"),
    "ranks": GRPO,
}
MADE = {"rollout": "o.jsonl", "eval": "out/trace.jsonl", "train": "run/metrics.jsonl", "ranks": "run/metrics.jsonl"}
"""What is there once it plays; a server says that it is ready."""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read from /proc")
@pytest.mark.parametrize("name", list(COMMANDS))
def test_it_ends(name: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    if name == "mcp":
        pytest.importorskip("mcp.server.mcpserver", reason="the extra mcp is not installed")
    port = str(free_port("127.0.0.1"))
    argv = ["-m", "turngym.scripts", *(port if word == "PORT" else word for word in COMMANDS[name])]
    if name == "ranks":
        argv = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *argv]
    # torchrun ends by an exception of its own
    ends_though_stopped(argv, tmp_path, lambda: _working(name, tmp_path), traceback=name == "ranks")


def _working(name: str, folder: Path) -> bool:
    if name not in MADE:
        return any(word in (folder / "log").read_text() for word in ("ready", "Serving", "http://"))
    made = folder / MADE[name]
    return made.exists() and made.stat().st_size > 0
