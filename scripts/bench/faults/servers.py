"""Malformed requests to every server, over real sockets or inside its own process: what it answers, what it keeps.

A failure is an answer of 500 and more, no answer to a complete request, a traceback in the log, a server that ended, or
one that has more threads, descriptors or memory afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table
from turngym.scripts.bench.faults.rows import WARM, ServerRow, Usage
from turngym.scripts.bench.faults.sender import Sender
from turngym.scripts.bench.faults.served import TARGETS, Served
from turngym.scripts.bench.faults.tally import cpu_spent

INSIDE = "turngym.scripts.bench.faults.inside"


def run_server_faults(requests: int, seed: int, only: Sequence[str] = (), inside: int = 0) -> Iterator[ServerRow]:
    """Malformed requests to each server that is installed here: `requests` over sockets, `inside` in its own process.

    A row for each way, as soon as it is known.

    Raises TurngymError for a server that does not start, or for a name in `only` that none has.
    """
    with tempfile.TemporaryDirectory(prefix="turngym-faults-") as scratch:
        if unknown := set(only) - set(TARGETS):
            raise TurngymError(f"no server {min(unknown)!r}; valid: {', '.join(TARGETS)}")
        for place, (name, make) in enumerate(TARGETS.items()):
            if only and name not in only:
                continue
            one = make(Path(scratch))
            if not _installed(one.needs):
                continue
            log = Path(scratch) / f"{one.name}.log"
            if requests:
                yield _tried(one, requests, np.random.default_rng((seed, place)), log)
            if inside:
                yield _tried_inside(one.name, inside, seed, log)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def server_table(rows: Sequence[ServerRow]) -> Table:
    """A row per server: answers by class, tracebacks, memory, threads and descriptors before and after."""
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
            host, port = _ready(one, server, log)
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
    row.seconds = cpu_spent() - begun
    _read_log(row, log)
    return row


def _tried_inside(name: str, requests: int, seed: int, log: Path) -> ServerRow:
    row, begun = ServerRow(what=f"requests inside {name}"), cpu_spent()
    with tempfile.TemporaryDirectory(dir=log.parent) as folder, log.open("w+") as out:
        words = [sys.executable, "-m", INSIDE, name, str(requests), str(seed), folder]
        status = subprocess.run(words, stdout=out, stderr=out, cwd=folder, check=False).returncode
        found = Path(folder) / "inside.json"
        if status or not found.exists():
            row.count("ended", f"status {status}: {log.read_text(errors='replace')[-300:]!r}")
        else:
            row.add_json(json.loads(found.read_text()))
    if row.before is not None and row.after is not None and (leaks := row.before.leaks(row.after)):
        row.count("leak", leaks)
    row.seconds = cpu_spent() - begun
    _read_log(row, log)
    return row


def _read_log(row: ServerRow, log: Path) -> None:
    text = log.read_text(errors="replace")
    row.count("traceback", text[text.find("Traceback") :][:1500], times=text.count("Traceback (most recent call last)"))


def _settled(pid: int, before: Usage) -> Usage:
    """The usage once connections that have just ended are gone."""
    for _ in range(50):
        found = Usage.of(pid)
        if found.files <= before.files and found.threads <= before.threads:
            break
        time.sleep(0.1)
    return found


def _ready(one: Served, server: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"http://([\d.]+):(\d+)", log.read_text(errors="replace")):
            with contextlib.suppress(OSError), socket.create_connection((found[1], int(found[2])), timeout=5):
                return found[1], int(found[2])
        time.sleep(0.1)
    raise TurngymError(f"the server {one.name} did not start: {log.read_text(errors='replace')[-300:]!r}")


def main(argv: Sequence[str]) -> int:
    """`python -m turngym.scripts.bench.faults.servers REQUESTS[+INSIDE] [SEED] [SERVER...]`: the table alone."""
    requests, _, inside = argv[0].partition("+")
    seed = int(argv[1]) if len(argv) > 1 else 0
    rows = list(run_server_faults(int(requests), seed, argv[2:], int(inside or 0)))
    from turngym.envs.core.tables import markdown

    print(markdown(server_table(rows)))
    print("\n".join(note for row in rows for note in row.notes))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
