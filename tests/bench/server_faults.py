"""Sends malformed requests to every server and counts what goes wrong.

A failure is a status of 500 or more, no answer to a complete request, a traceback in the log, a server that ended, or
one that has more threads, descriptors or memory afterwards.

Examples:
    python tests/bench/server_faults.py 15000                  # to each server, seed 0
    python tests/bench/server_faults.py 2000 7 proxy webshop   # seed 7, two servers
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from malformed_requests import KINDS, SILENT, Route, malformed
from tally import Tally, cpu_spent

from turngym.agents import load_world
from turngym.core.errors import TurngymError
from turngym.core.tables import Table, markdown

# --- What one server did

BAD = ("5xx", "no answer", "traceback", "ended", "leak")
WARM = 0.2
"""Share of the requests sent before the first measurement of memory: caches, pools and arenas fill first."""
RSS_GROWTH = 1.1, 16.0
"""Memory may grow by this factor plus this many MB; more is a leak."""


@dataclass(slots=True, kw_only=True)
class ServerRow(Tally):
    """Counts what one server answered, and its use of memory, threads and descriptors."""

    bad: tuple[str, ...] = BAD
    before: Usage | None = None
    after: Usage | None = None
    distinct: set[int] = field(default_factory=set)
    """Hashes of what was sent."""

    def answered(self, kind: str, status: int | None, sent: bytes) -> None:
        """Counts the answer to one request; `status` is None if there was none."""
        self.distinct.add(hash(sent))
        if status is None:
            outcome = "closed" if kind in (*SILENT, "huge header") else "no answer"
        else:
            outcome = f"{status // 100}xx"
        # a note is made for failures only: making it takes longer than the request
        self.count(outcome, f"{status} for {kind}: {sent[:300]!r}" if outcome in BAD else "")

    @property
    def tries(self) -> int:
        """Requests; what is counted besides them is no try."""
        return sum(count for name, count in self.outcomes.items() if name not in ("traceback", "ended", "leak"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process uses."""

    rss: float
    """MB."""
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Reads the use of process `pid` from /proc."""
        status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(rss=int(status["VmRSS"]) / 1024, threads=int(status["Threads"]), files=files)

    def leaks(self, later: Usage) -> str:
        """Names what has grown too much in `later`; empty if nothing has."""
        factor, more = RSS_GROWTH
        found = []
        if later.threads > self.threads + 2:
            found.append(f"{self.threads} -> {later.threads} threads")
        if later.files > self.files + 4:
            found.append(f"{self.files} -> {later.files} descriptors")
        if later.rss > factor * self.rss + more:
            found.append(f"{self.rss:.0f} -> {later.rss:.0f} MB")
        return ", ".join(found)


# --- The servers and their routes

_MESSAGES = [{"role": "user", "content": "hello"}]
_RPC: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "begin"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a server is started, and a valid request for each of its routes."""

    name: str
    command: list[str]
    routes: tuple[Route, ...]
    needs: str = ""
    """The server is left out where this module is not installed."""


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
        command=_command("serve", "webshop", "--profile", "embedded-small", "--out", "none"),
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
"""All our servers. Each function writes what its server needs into a folder. SGLang's own server is not tested."""


# --- Requests

SILENT_SECONDS = 0.1
"""How long a client waits for an answer to an incomplete request before it disconnects, seconds."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH, _CLOSE = re.compile(rb"(?i)content-length: *(\d+)"), re.compile(rb"(?i)connection: *close")
Count = Callable[[str, int | None, bytes], None]
"""Called with (kind, status or None, the request)."""


@dataclass(slots=True)
class Sender:
    """Sends requests of random kinds to one server and counts the answers with `count`.

    It has one thread. A connection is kept for the next request as long as the server keeps it.
    """

    address: tuple[str, int]
    routes: Sequence[Route]
    rng: np.random.Generator
    count: Count
    _kept: socket.socket | None = None
    _parked: deque[tuple[float, socket.socket, str, bytes]] = field(default_factory=deque)
    """Incomplete requests with the time when to look for an answer; others are sent meanwhile."""

    def send(self, requests: int) -> None:
        """Sends `requests` requests. Raises OSError if the server accepts no connection."""
        host = f"{self.address[0]}:{self.address[1]}"
        for _ in range(requests):
            kind = KINDS[int(self.rng.integers(len(KINDS)))]
            sent = malformed(kind, self.routes, host, self.rng)
            client = self._kept or socket.create_connection(self.address, timeout=10)
            self._kept = None
            if kind in SILENT:
                self._park(client, kind, sent)
            else:
                status, stays = exchange(client, sent)
                self.count(kind, status, sent)
                self._kept = client if stays else None
                if not stays:
                    client.close()
            self._collect(time.monotonic())
        self._collect(None)
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _park(self, client: socket.socket, kind: str, sent: bytes) -> None:
        try:
            client.sendall(sent)
        except OSError:
            self.count(kind, None, sent)
            client.close()
        else:
            self._parked.append((time.monotonic() + SILENT_SECONDS, client, kind, sent))

    def _collect(self, now: float | None) -> None:
        """Reads the answers to parked requests that are due at `now`. Without `now` it waits for all of them."""
        while self._parked and (now is None or self._parked[0][0] <= now):
            until, client, kind, sent = self._parked.popleft()
            if now is None:
                time.sleep(max(until - time.monotonic(), 0))
            try:
                client.settimeout(0)
                found = _STATUS.match(client.recv(65536))
            except OSError:
                found = None
            self.count(kind, None if found is None else int(found[1]), sent)
            client.close()


def exchange(client: socket.socket, sent: bytes) -> tuple[int | None, bool]:
    """Sends one request. Returns (status or None, whether the connection can be used again)."""
    try:
        client.sendall(sent)
        head, _, body = _until(client, b"", b"\r\n\r\n").partition(b"\r\n\r\n")
        found, length = _STATUS.match(head), _LENGTH.search(head)
        if found is None:
            return None, False
        if length is None or _CLOSE.search(head):
            return int(found[1]), False
        left = int(length[1]) - len(body)
        while left > 0:
            part = client.recv(min(left, 1 << 16))
            if not part:
                return int(found[1]), False
            left -= len(part)
        # bytes beyond this answer would be read as the next one
        return int(found[1]), left == 0
    except OSError:
        return None, False


def _until(client: socket.socket, found: bytes, end: bytes) -> bytes:
    while end not in found and (part := client.recv(65536)):
        found += part
    return found


# --- Each server in turn


def run_server_faults(requests: int, seed: int, only: Sequence[str] = ()) -> Iterator[ServerRow]:
    """Sends `requests` to each server that is installed; yields a row for each as soon as it is known.

    Raises TurngymError for a server that does not start, or for a name in `only` that none has.
    """
    with tempfile.TemporaryDirectory(prefix="turngym-faults-") as scratch:
        if unknown := set(only) - set(TARGETS):
            raise TurngymError(f"no server {min(unknown)!r}; valid: {', '.join(TARGETS)}")
        for place, (name, make) in enumerate(TARGETS.items()):
            if only and name not in only:
                continue
            one = make(Path(scratch))
            if _installed(one.needs):
                yield _tried(one, requests, np.random.default_rng((seed, place)), Path(scratch) / f"{one.name}.log")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def server_table(rows: Sequence[ServerRow]) -> Table:
    """Makes one row per server: answers by class, tracebacks; memory, threads and descriptors before and after."""
    classes = ("1xx", "2xx", "3xx", "4xx", "5xx", "closed", "no answer", "traceback")
    lines = []
    for row in rows:
        used = ["-"] * 3
        if row.before is not None and row.after is not None:
            pairs = [(f"{usage.rss:.0f}", str(usage.threads), str(usage.files)) for usage in (row.before, row.after)]
            used = [f"{one} -> {other}" for one, other in zip(*pairs, strict=True)]
        counts = [row.tries, len(row.distinct), *(row.outcomes[name] for name in classes)]
        lines.append([row.what, *(str(count) for count in counts), *used, f"{row.seconds:.0f}"])
    return ["server", "requests", "distinct", *classes, "MB", "threads", "descriptors", "CPU s"], lines


def _tried(one: Served, requests: int, rng: np.random.Generator, log: Path) -> ServerRow:
    row, begun = ServerRow(what=f"requests to {one.name}"), cpu_spent()
    with log.open("w+") as out:
        server = subprocess.Popen(one.command, stdout=out, stderr=out, cwd=log.parent)
        try:
            host, port = ready(one, server, log)
            warm, sender = int(WARM * requests), Sender((host, port), one.routes, rng, row.answered)
            sender.send(warm)
            row.before = Usage.of(server.pid)
            sender.send(requests - warm)
            row.after = _settled(server.pid, row.before)
            if leaks := row.before.leaks(row.after):
                row.count("leak", leaks)
        except OSError as error:
            row.count("ended", f"{error}: {log.read_text()[-300:]!r}")
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()
            server.wait()
    row.seconds, text = cpu_spent() - begun, log.read_text(errors="replace")
    row.count("traceback", text[text.find("Traceback") :][:1500], times=text.count("Traceback (most recent call last)"))
    return row


def _settled(pid: int, before: Usage) -> Usage:
    """Measures again until connections that have just ended are gone, for at most five seconds."""
    for _ in range(50):
        found = Usage.of(pid)
        if found.files <= before.files and found.threads <= before.threads:
            break
        time.sleep(0.1)
    return found


def ready(one: Served, server: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    """Address and port of a server that has just been started, once it accepts a connection. Raises TurngymError."""
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"http://([\d.]+):(\d+)", log.read_text(errors="replace")):
            with contextlib.suppress(OSError), socket.create_connection((found[1], int(found[2])), timeout=5):
                return found[1], int(found[2])
        time.sleep(0.1)
    raise TurngymError(f"the server {one.name} did not start: {log.read_text(errors='replace')[-300:]!r}")


def main(argv: Sequence[str]) -> int:
    """Prints the table; the module's docstring has examples. The exit status is 1 if anything failed."""
    rows = list(run_server_faults(int(argv[0]), int([*argv, "0"][1]), argv[2:]))
    print(markdown(server_table(rows)))
    print("\n".join(note for row in rows for note in row.notes))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
