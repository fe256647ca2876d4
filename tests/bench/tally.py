"""Counts the outcomes of one kind of fault and makes the table of all kinds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench_server import cpu_seconds

from turngym.core.tables import Table


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
    """CPU seconds of this process and of all below it."""
    return cpu_seconds(os.getpid())


def fault_table(found: Sequence[Tally]) -> Table:
    """Makes a row per kind: tries, failures, all outcomes, CPU seconds."""
    rows = []
    for one in found:
        kinds = ", ".join(f"{name} {count}" for name, count in one.outcomes.most_common() if count)
        rows.append([one.what, str(one.tries), str(one.failures), kinds, f"{one.seconds:.1f}"])
    return ["fault", "tries", "failures", "outcomes", "CPU s"], rows
