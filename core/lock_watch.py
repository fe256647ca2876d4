"""Ends this process if a call with a limit holds Python's interpreter lock for good.

A regular expression that backtracks, a power of a power or a C extension may hold the lock while it works. Then no
other thread runs, the one that would give the call up included, and Ctrl-C is not heard. A small process beside this
one watches the clock: `LockWatch.expect` says by when it wants to hear more, `done` that nothing is under way.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from turngym.core.child_process import ChildProcess, is_stopped

LOCK_SECONDS = 20.0
"""Seconds beyond every limit: other threads, too, may hold the lock for a while (a checkpoint that is pickled)."""
PERIOD = 0.25
"""Seconds between two looks of the watching process."""
TELLING = 2.0
"""Seconds that telling it may take."""


class LockWatch:
    """Tells the watching process of this one what is under way; the process is started when it is first told."""

    _numbers = itertools.count()
    _lock = threading.Lock()
    _child: ChildProcess | None = None

    def __init__(self, what: str) -> None:
        """`what` is named when the process is ended: "the environment's step took more than 2 s"."""
        self._what, self._number = what, next(LockWatch._numbers)

    def expect(self, seconds: float) -> None:
        """Promises a sign of life within `seconds`. Without one this process is ended `LOCK_SECONDS` seconds later."""
        self._tell(seconds + LOCK_SECONDS, self._what)

    def done(self) -> None:
        """Marks that nothing is under way."""
        self._tell(None, "")

    def _tell(self, seconds: float | None, action: str) -> None:
        with LockWatch._lock:
            if LockWatch._child is None:
                name = multiprocessing.current_process().name
                watched = os.getpid(), name
                LockWatch._child = ChildProcess(_watch, *watched, name="turngym-watch", threads=1, patience=TELLING)
            try:
                LockWatch._child.pipe.send_bytes(json.dumps([self._number, seconds, action]).encode())
            except OSError:
                # somebody has ended it, or stopped it until its pipe was full; the next call has another one
                LockWatch._child.end()
                LockWatch._child = None


def _forget() -> None:
    """A forked process has its own."""
    LockWatch._lock, LockWatch._child = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def _watch(pipe: Connection, pid: int, name: str) -> None:
    """Runs in the watching process, until the pipe is closed."""
    ends = dict[int, tuple[float, str]]()
    looked = time.monotonic()
    while True:
        try:
            # between two looks whatever was said waits in the pipe, so that calls wake nobody; ends: with the parent
            while pipe.poll(None if not ends else 0.0):
                number, seconds, action = json.loads(pipe.recv_bytes())  # ends: something is there
                ends.pop(number, None)
                if seconds is not None:
                    ends[number] = time.monotonic() + seconds, action
        except (EOFError, OSError):
            return
        time.sleep(PERIOD)
        now = time.monotonic()
        # time in which either of the two was stopped counts for nobody
        lost = now - looked - PERIOD if now - looked > 4 * PERIOD else now - looked if is_stopped(pid) else 0.0
        looked = now
        ends = {number: (end + lost, action) for number, (end, action) in ends.items()}
        late = next((action for end, action in ends.values() if end < now), None)
        if late is not None and not pipe.poll(0.0):
            _end(pid, name, late)
            return


def _end(pid: int, name: str, action: str) -> None:
    hint = "what has finished is kept, and with --workers 1 or more" if name == "MainProcess" else "with other workers"
    message = (
        f"\nturngym: {action} and holds Python's interpreter lock: process {pid} is ended; {hint} the run goes on\n"
    )
    with contextlib.suppress(OSError):
        sys.stderr.write(message)
        sys.stderr.flush()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
