"""The process of the `turngym` command: what a signal does before `main` and after it, and threads that others left.

It imports next to nothing by itself, so that Ctrl-C in the first moment is one line, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from turngym.core.signals import ending_at_once, on_signals

THREADS_WAIT = 5.0
"""Seconds that threads of others have at the end of a command."""


def command() -> NoReturn:
    """Runs `main` as a process, which ends with it even if threads of other libraries still run."""
    with ending_at_once("turngym: stopped\n"):
        from turngym.core.redaction import redacted
        from turngym.scripts.main import main

    status = main()
    try:
        sys.stderr.flush()
    # Python would try once more, and end with a status of its own
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # everything is said and kept: Ctrl-C once more is no reason for another line
    on_signals(lambda number: os._exit(status))
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    end = time.monotonic() + THREADS_WAIT
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    if going_on := [thread.name for thread in left if thread.is_alive()]:
        print(f"turngym: ended, although the thread {redacted(going_on[0])} goes on", file=sys.stderr, flush=True)
        os._exit(status)
    sys.exit(status)
