"""Circuit breaker: a dead server is not asked again by every episode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open after `failures` failures in a row; after `cooldown` seconds one caller at a time may try again."""

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._cooldown, self._clock = failures, cooldown, clock
        self._lock = threading.Lock()
        self._failed = 0
        self._reason = ""
        self._retry_at = 0.0

    def refusal(self) -> str | None:
        """Why the server should not be asked now; None if it may. A caller that may ask must report what came of it."""
        with self._lock:
            if self._failed < self._limit:
                return None
            left = self._retry_at - self._clock()
            if left > 0:
                return f"not asked: it failed {self._failed} times in a row, next try in {left:.1f} s; {self._reason}"
            # this caller tries; the others are refused for another while
            self._retry_at = self._clock() + self._cooldown
            return None

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._reason = 0, ""

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failed += 1
            self._reason = reason
            self._retry_at = self._clock() + self._cooldown
