"""What a proxy counts about its requests, and what it says of clients that name no session."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from turngym.agents.proxy.errors import busy

CLIENTS = 100
"""Most clients that are counted by name."""
SHOWN = ("main", "side", "sessions_ended", "underway")
"""Counts that /healthz has under other names."""


class RequestCounts:
    """Counters of one service. Safe for several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        """Fields of requests that were not honored."""
        self.unnamed: Counter[str] = Counter()
        """Requests that named no session, by what their client calls itself."""
        self.notice: Callable[[str], None] = lambda text: None
        """Gets lines for the log of the server."""
        self._lock = threading.Lock()

    def add(self, what: str) -> None:
        """One more of `what`."""
        with self._lock:
            self.counts[what] += 1

    def begin(self, most: int) -> None:
        """One more request is under way. Raises ApiError (429) where `most` are already."""
        with self._lock:
            if self.counts["underway"] >= most:
                self.counts["turned_away"] += 1
                raise busy(f"{most} requests are under way already; ask again later")
            self.counts["underway"] += 1

    def end(self, dropped: str) -> None:
        """A request is over; `dropped` says why it was not answered, if it was not."""
        with self._lock:
            self.counts["underway"] -= 1
            if dropped:
                self.counts[dropped] += 1

    def note_ignored(self, fields: Sequence[str]) -> None:
        with self._lock:
            self.ignored.update(fields)

    def note_unnamed(self, client: str, main: bool) -> None:
        """Count a request that names no session, and say once of each client that it does not."""
        with self._lock:
            # what clients call themselves is theirs to choose: the table must not grow without end
            client = client if len(self.unnamed) < CLIENTS else "others"
            self.unnamed[client] += 1
            new = self.unnamed[client] == 1
        if new:
            way = "told apart by their history" if main else "answered and not trained on"
            self.notice(f"{client!r} names no session; its conversations are {way}. X-Session-Id names them exactly")

    def as_json(self) -> tuple[Counter[str], dict[str, Any]]:
        """(all counts, those that /healthz shows as they are, after the two tables)."""
        with self._lock:
            counts, tables = Counter(self.counts), {"ignored": dict(self.ignored), "unnamed": dict(self.unnamed)}
        return counts, {**tables, **{name: value for name, value in sorted(counts.items()) if name not in SHOWN}}
