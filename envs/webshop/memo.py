"""A memory of searches, bounded by entries and by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from threading import Lock

Found = tuple[str, ...]


class SizedMemo:
    """`find`, which remembers what was asked last: at most `entries` answers, about `size` bytes with their queries.

    Threads may share it; `find` itself runs unguarded.
    """

    def __init__(self, find: Callable[[str], Found], *, entries: int, size: int) -> None:
        self._find = find
        self._entries = entries
        self._size = size
        self._kept: OrderedDict[str, Found] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def __call__(self, query: str) -> Found:
        with self._lock:
            known = self._kept.get(query)
            if known is not None:
                self._kept.move_to_end(query)
                return known
        found = self._find(query)
        cost = _cost(query, found)
        # one that would drive out everything else is not worth it
        if cost <= self._size // 16:
            self._keep(query, found, cost)
        return found

    def __len__(self) -> int:
        return len(self._kept)

    def cache_clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def _keep(self, query: str, found: Found, cost: int) -> None:
        with self._lock:
            # another thread may have asked the same
            if query in self._kept:
                return
            self._kept[query] = found
            self.bytes += cost
            while len(self._kept) > self._entries or self.bytes > self._size:
                self.bytes -= _cost(*self._kept.popitem(last=False))


def _cost(query: str, found: Found) -> int:
    return getsizeof(query) + getsizeof(found) + sum(map(getsizeof, found))
