"""A clock that stops with the process: seconds in which its machine was suspended, or it was stopped, are nobody's."""

from __future__ import annotations

import os
import threading
import time

PERIOD = 0.25
"""Seconds between two looks at the system's clock."""
LATE = 1.0
"""Seconds by which a look is late where the process stood still. On a busy machine it is late by less, mostly."""
_lock = threading.Lock()
_looks = False
"""Whether a thread looks every `PERIOD`."""
_looked = _stood = 0.0


def now() -> float:
    """Seconds for which this process has been running; only differences count."""
    global _looks, _looked, _stood
    with _lock:
        moment = time.monotonic()
        if not _looks:
            _looks, _looked = True, moment
            try:
                threading.Thread(target=_look, name="turngym-clock", daemon=True).start()
            # where no thread can be had nobody looks, and all time counts
            except RuntimeError:
                _looks = False
        late = moment - _looked - PERIOD
        _stood += late if late > LATE else 0.0
        _looked = moment
        return moment - _stood


def _look() -> None:
    while True:
        time.sleep(PERIOD)
        now()


def acquired(lock: threading.Lock, end: float) -> bool:
    """Whether `lock` could be had until `end` of this clock; it is the caller's then."""
    while (left := end - now()) > 0:
        if lock.acquire(timeout=min(left, PERIOD)):
            return True
    return lock.acquire(blocking=False)


def _forget() -> None:
    """A forked process has no thread that looks."""
    global _lock, _looks
    _lock, _looks = threading.Lock(), False


os.register_at_fork(after_in_child=_forget)
