"""Background threads that go on after a failure: a disk that is full for a moment must not end them for good."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from turngym.core.redaction import excerpt

FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
"""Seconds between a failure and the next try; doubled each time."""
CALM = 60.0
"""Seconds after which a failure is a new one."""
_THREADS: weakref.WeakSet[SupervisedThread] = weakref.WeakSet()


def say(text: str, to: TextIO | None = None) -> None:
    """Writes a line to standard error, or to `to`, from work that goes on.

    A log on a disk that is full, or a reader that has gone, must not end the thread that says something.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if to is None else to, flush=True)


class SupervisedThread(threading.Thread):
    """Runs `work`, and again whenever it fails, until it returns. `work` keeps what it has not finished.

    A failure is said once on standard error, and `failures_of_threads` tells it as long as the process lives.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._said = work, ""
        self.failures, self.error = 0, ""
        _THREADS.add(self)

    def run(self) -> None:
        wait = FIRST_WAIT
        while True:
            begun = time.monotonic()
            try:
                self._work()
                return
            # a Rust panic is no Exception, and nothing above would see it
            except BaseException as error:
                self.fail(error)
            wait = FIRST_WAIT if time.monotonic() - begun > CALM else min(2 * wait, LONGEST_WAIT)
            time.sleep(wait)

    def fail(self, error: BaseException) -> None:
        """Counts a failure, and reports it unless the one before was the same."""
        self.failures += 1
        self.error = excerpt(f"{type(error).__name__}: {error}", 500)
        if self.error != self._said:
            self._said = self.error
            say(f"{self.name}: {self.error}; it goes on")


def failures_of_threads() -> dict[str, Any]:
    """How often each background thread of this process has failed, and its last error, by name; {} if none has."""
    return {
        thread.name: {"failures": thread.failures, "error": thread.error}
        for thread in list(_THREADS)
        if thread.failures
    }
