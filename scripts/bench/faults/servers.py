"""Malformed requests to every server, each in a process of its own, over real sockets: what it answers, what it keeps.

A failure is an answer of 500 and more, no answer to a complete request, a traceback in the log, a server that ended, or
one that has more threads, descriptors or memory afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from turngym.agents.evaluation.tables import Table
from turngym.envs.core import TurngymError
from turngym.scripts.bench.faults.malformed import SILENT
from turngym.scripts.bench.faults.sender import Sender
from turngym.scripts.bench.faults.served import TARGETS, Served
from turngym.scripts.bench.faults.tally import cpu_spent

BAD = ("5xx", "no answer", "traceback", "ended", "leak")
WARM = 0.2
"""Share of the requests before the first measurement: caches, pools and the interpreter's own arenas fill first."""
RSS_GROWTH = 1.1, 16.0
"""Factor and MB by which memory may be larger afterwards."""


@dataclass(slots=True)
class ServerRow:
    """What one server did."""

    what: str
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """What the first failures were."""
    before: Usage | None = None
    after: Usage | None = None
    seconds: float = 0.0
    """CPU time, that of the server included."""
    distinct: set[int] = field(default_factory=set)
    """Hashes of what was sent."""

    def count(self, outcome: str, note: str = "", times: int = 1) -> None:
        self.outcomes[outcome] += times
        if outcome in BAD and times and len(self.notes) < 5:
            self.notes.append(f"{self.what}: {outcome}: {note}")

    def answered(self, kind: str, status: int | None, sent: bytes) -> None:
        """Count the answer to a request, or that there was none."""
        self.distinct.add(hash(sent))
        if status is None:
            outcome = "closed" if kind in (*SILENT, "huge header") else "no answer"
        else:
            outcome = f"{status // 100}xx"
        # the text takes longer than the request did
        self.count(outcome, f"{status} for {kind}: {sent[:300]!r}" if outcome in BAD else "")

    @property
    def tries(self) -> int:
        return sum(count for name, count in self.outcomes.items() if name not in ("traceback", "ended", "leak"))

    @property
    def failures(self) -> int:
        return sum(self.outcomes[name] for name in BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a process."""

    rss: float
    """MB."""
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(rss=int(status["VmRSS"]) / 1024, threads=int(status["Threads"]), files=files)

    def leaks(self, later: Usage) -> str:
        """What `later` has too much of; empty for nothing."""
        factor, more = RSS_GROWTH
        found = []
        if later.threads > self.threads + 2:
            found.append(f"{self.threads} -> {later.threads} threads")
        if later.files > self.files + 4:
            found.append(f"{self.files} -> {later.files} descriptors")
        if later.rss > factor * self.rss + more:
            found.append(f"{self.rss:.0f} -> {later.rss:.0f} MB")
        return ", ".join(found)


def run_server_faults(requests: int, seed: int, only: Sequence[str] = ()) -> Iterator[ServerRow]:
    """`requests` malformed requests to each server that is installed here; a row for each, as soon as it is known.

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
            yield _tried(one, requests, np.random.default_rng((seed, place)), Path(scratch) / f"{one.name}.log")


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
        lines.append(
            [
                row.what,
                str(row.tries),
                str(len(row.distinct)),
                *(str(row.outcomes[name]) for name in classes),
                *used,
                f"{row.seconds:.0f}",
            ]
        )
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
    text = log.read_text(errors="replace")
    row.count("traceback", text[text.find("Traceback") :][:1500], times=text.count("Traceback (most recent call last)"))
    return row


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
    """`python -m turngym.scripts.bench.faults.servers REQUESTS [SEED] [SERVER...]`: the table alone."""
    rows = list(run_server_faults(int(argv[0]), int(argv[1]) if len(argv) > 1 else 0, argv[2:]))
    from turngym.agents.evaluation.tables import markdown

    print(markdown(server_table(rows)))
    print("\n".join(note for row in rows for note in row.notes))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
