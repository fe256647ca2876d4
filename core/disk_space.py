"""Waiting for room on a disk: a server that learns goes on where one that trains alone would end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from turngym.core.background_threads import say
from turngym.core.errors import is_disk_full

T = TypeVar("T")

FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
"""Seconds between two tries; doubled each time."""


class RoomToWrite:
    """Calls a function that writes until the disk has room for what it writes, or until `close`.

    What is called leaves nothing behind when it fails. Threads may share one.
    """

    def __init__(self) -> None:
        self._closed = threading.Event()
        self.waiting = 0
        """Threads that wait for room."""

    def __call__(self, write: Callable[[], T]) -> T:
        """Returns what `write` returns. Raises its errors; a full disk is raised only after `close`, and waited for
        until then."""
        wait, reported = FIRST_WAIT, False
        while True:
            try:
                return write()
            except Exception as error:
                if not is_disk_full(error) or self._closed.is_set():
                    raise
                if not reported:
                    reported = True
                    say(f"no room: {error}; it is tried again until there is")
            self.waiting += 1
            self._closed.wait(wait)
            self.waiting -= 1
            wait = min(2 * wait, LONGEST_WAIT)

    def close(self) -> None:
        """Each write is tried once more, and then fails as it would."""
        self._closed.set()


def at_once(write: Callable[[], Any]) -> Any:
    """Calls `write` once: what stands in the place of `RoomToWrite` where a full disk ends a run."""
    return write()
