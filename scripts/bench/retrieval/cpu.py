"""CPU time of a server: of its process and of all that it started."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """User and system time of process `pid` and its descendants, those that ended included; NaN without /proc."""
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
