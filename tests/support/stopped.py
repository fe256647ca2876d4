"""A command whose children are stopped (SIGSTOP) must end nevertheless when it is asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_server import children

PATIENCE = 60.0
"""Seconds to the end after each of two signals; a drain has 20 or 30."""


def ends_though_stopped(
    argv: Sequence[str], folder: Path, working: Callable[[], bool], *, start: float = 120.0, traceback: bool = False
) -> int:
    """Starts Python with `argv` in `folder`, stops all of its children once it is `working`, and asks it to end.

    Returns how many were stopped.

    Args:
        argv: words after `python`; what they print is in `folder / "log"`.
        folder: where the command runs.
        working: whether it plays, or answers.
        start: seconds that this may take.
        traceback: whether it may end with one.
    """
    with (folder / "log").open("w") as log:
        child = subprocess.Popen([sys.executable, *argv], cwd=folder, stdout=log, stderr=log)
    stopped = list[int]()
    try:
        end = time.monotonic() + start
        while time.monotonic() < end and not working():
            assert child.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        stopped = list(children(child.pid))
        assert working(), (folder / "log").read_text()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(PATIENCE)
                break
            except subprocess.TimeoutExpired:
                continue
        assert child.poll() is not None, (folder / "log").read_text()
        assert traceback or "Traceback" not in (folder / "log").read_text()
        time.sleep(2.0)
        # no child is left behind, stopped or not
        assert [pid for pid in stopped if Path(f"/proc/{pid}").exists()] == []
        return len(stopped)
    finally:
        for pid in stopped:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait()
