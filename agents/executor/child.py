"""A child process at the other end of a pipe: how it begins and ends, and exceptions that cross."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any

from turngym.envs.core.errors import AgentError

GRACE = 3.0
"""Seconds that a child gets to end by itself."""


class ExecutorError(AgentError):
    """Workers that cannot be started, reached or sent what they need."""


class ChildProcess:
    """A process that runs `target(theirs, *args)`, with its end of `pipe` as `theirs`, until that pipe is closed.

    It ends with this process, however this one ends, and never hears the signals `ignored`: Ctrl-C reaches the whole
    process group, and this process first finishes what it has accepted.
    """

    def __init__(
        self, target: Callable[..., None], *args: Any, name: str, ignored: Sequence[int] = (signal.SIGINT,)
    ) -> None:
        # a forked child would inherit locks of threads that it does not have, and a CUDA context that it cannot use
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(ignored, target, theirs, *args), name=name, daemon=True)
        # starting the tracker would unblock the signals again
        resource_tracker.ensure_running()
        # blocked from its first moment on, while it imports what it needs
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # as long as this process holds the child's end too, the pipe would not end when the child dies
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def end(self, grace: float = 0.0) -> None:
        """Close the pipe, which tells the child to end; kill it if it has not after `grace` seconds."""
        self.pipe.close()
        self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def death(self) -> str:
        """End a child whose pipe has broken; returns what ended it."""
        # the pipe breaks a moment before the exit status is known
        self._process.join(GRACE)
        code = self._process.exitcode
        self.end()
        if code is None or code >= 0:
            return f"process {self.pid} ended with status {code}"
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return f"process {self.pid} was ended by {name}"


def _run(ignored: Sequence[int], target: Callable[..., None], *args: Any) -> None:
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    target(*args)


def picklable(error: Exception) -> Exception:
    """`error` with its traceback as a note, or a summary of it if it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker:\n{trace}")
    try:
        # loaded as well, since exceptions whose __init__ takes other arguments can be dumped but not loaded
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ExecutorError(f"{type(error).__name__} in a worker: {error}\n{trace}")
    return error
