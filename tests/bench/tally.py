"""Counts the outcomes of one kind of fault and makes the table of all kinds."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turngym.envs.core.tables import Table


@dataclass(slots=True)
class Tally:
    """Counts tries of one kind by outcome. Outcomes in `bad` are failures."""

    what: str
    bad: tuple[str, ...]
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """The first five failures."""
    seconds: float = 0.0
    """CPU time, including child processes."""

    def count(self, outcome: str, note: str = "", times: int = 1) -> None:
        self.outcomes[outcome] += times
        if outcome in self.bad and times and len(self.notes) < 5:
            self.notes.append(f"{self.what}: {outcome}: {note}")

    @property
    def tries(self) -> int:
        return self.outcomes.total()

    @property
    def failures(self) -> int:
        return sum(self.outcomes[name] for name in self.bad)


def cpu_spent() -> float:
    """CPU seconds of this process, its ended children and, on Linux, its living children and their ended children."""
    kinds = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks, own = 0, str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            # fields: state, parent, ...; from the twelfth on: user and system time, and both of ended children
            ticks += sum(map(int, fields[11:15])) if fields[1] == own else 0
    return sum(one.ru_utime + one.ru_stime for one in kinds) + ticks / os.sysconf("SC_CLK_TCK")


def fault_table(found: Sequence[Tally]) -> Table:
    """Makes a row per kind: tries, failures, all outcomes, CPU seconds."""
    rows = []
    for one in found:
        kinds = ", ".join(f"{name} {count}" for name, count in one.outcomes.most_common() if count)
        rows.append([one.what, str(one.tries), str(one.failures), kinds, f"{one.seconds:.1f}"])
    return ["fault", "tries", "failures", "outcomes", "CPU s"], rows
