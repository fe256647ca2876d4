"""Servers that a bench starts in processes of their own: their address, CPU time and memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turngym.core.cpu_cores import environment_with_threads
from turngym.core.errors import TurngymError


class Server:
    """A server that runs: `url` is its address, `process` the process."""

    def __init__(self, command: list[str]) -> None:
        """Starts `python` with the arguments `command` and waits for its line `ready: URL`."""
        environment = environment_with_threads(1) if "--threads" in command else None
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready: (http://[^\s,]+)", line):
                self.url = found[1]
                return
        status = self.process.wait()  # ends: its output has ended
        raise TurngymError(f"{' '.join(command[1:4])} ended before it was ready, with status {status}")

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    @property
    def megabytes(self) -> float:
        """Resident memory of the server and the processes below it; 0 once it has ended."""
        return megabytes(self.process.pid)

    def end(self) -> str:
        """Asks it to end, and returns what it has printed since it was ready."""
        self.process.terminate()
        return self.process.communicate(timeout=300)[0]


def megabytes(pid: int) -> float:
    """Resident memory of process `pid` and the processes below it; 0 once it has ended."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        below = list(children(pid))
    except OSError:
        return 0.0
    return own * os.sysconf("SC_PAGE_SIZE") / 1e6 + sum(map(megabytes, below))


def children(pid: int) -> Iterator[int]:
    """The processes that process `pid` has started. Raises OSError once it has ended."""
    # each thread has a list of its own
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


@contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """A server that is ended with the block."""
    server = Server(command)
    try:
        yield server
    finally:
        server.end()


def cpu_seconds(pid: int) -> float:
    """User and system time of process `pid` and its descendants, ended ones included; NaN without /proc."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name of a program may have spaces and parentheses
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    if pid not in found:
        return float("nan")
    tree = {pid}
    while more := {child for child, (parent, _) in found.items() if parent in tree} - tree:
        tree |= more
    return float(sum(found[member][1] for member in tree)) / os.sysconf("SC_CLK_TCK")
