"""A clock that stops with the process: seconds in which its machine was suspended, or it was stopped, are nobody's."""

from __future__ import annotations

import threading
import time

PERIOD = 0.25
"""Seconds of one wait."""
LATE = 1.0
"""Seconds by which a wait ends too late where the process stood still. On a busy machine it is late by less, mostly."""
_stood = 0.0


def now() -> float:
    """Seconds for which this process has been running, as far as somebody has waited in it; only differences count."""
    return time.monotonic() - _stood


def acquired(lock: threading.Lock, end: float) -> bool:
    """Whether `lock` could be had until `end` of this clock; it is the caller's then."""
    global _stood
    while (left := end - now()) > 0:
        part, began = min(left, PERIOD), time.monotonic()
        if lock.acquire(timeout=part):
            return True
        late = time.monotonic() - began - part
        if late > LATE:
            _stood += late
    return lock.acquire(blocking=False)
