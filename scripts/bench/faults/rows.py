"""What came of the requests to one server."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turngym.scripts.bench.faults.malformed import SILENT
from turngym.scripts.bench.faults.tally import Tally

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

    def tally(self) -> Tally:
        """For the table of all faults; its tries include what is counted besides requests."""
        return Tally(what=self.what, bad=BAD, outcomes=self.outcomes, notes=self.notes)

    def as_json(self) -> dict[str, Any]:
        """What another process needs to go on with it."""
        pairs = (("before", self.before), ("after", self.after))
        usage = {name: None if one is None else asdict(one) for name, one in pairs}
        return {"outcomes": self.outcomes, "notes": self.notes, "distinct": sorted(self.distinct), **usage}

    def add_json(self, found: dict[str, Any]) -> None:
        """Take over what `as_json` gave."""
        self.outcomes.update(found["outcomes"])
        self.notes += found["notes"]
        self.distinct.update(found["distinct"])
        usages = [None if found[name] is None else Usage(**found[name]) for name in ("before", "after")]
        self.before, self.after = usages

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
    def of(cls, pid: int, *, less: int = 0) -> Usage:
        """Now; without `less` bytes of the bench's own."""
        status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(rss=int(status["VmRSS"]) / 1024 - less / 2**20, threads=int(status["Threads"]), files=files)

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
