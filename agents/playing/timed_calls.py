"""Other people's code that may hang or fail: environments, rewards and judges are called with a limit on the time.

A call that takes too long cannot be ended in this process. It is given up: its thread is left to itself, and what it
returns later is dropped. A call that holds the interpreter lock cannot be given up either: it ends the process
(`turngym.core.lock_watch`).
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from turngym.core import running_clock
from turngym.core.episode import Status
from turngym.core.errors import EnvBackendError, TurngymError
from turngym.core.lock_watch import LockWatch
from turngym.core.plugin_values import failure_of
from turngym.core.redaction import said_by

STEP_TIMEOUT = 120.0
"""Seconds for one step of an environment by default."""


class CallTimeout(TurngymError, TimeoutError):
    """A call that was given up."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call returned, or what it raised; a call that was given up has a CallTimeout."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        """Why there is no value, in a line; "" if there is one.

        Raises the error if it is not the fault of what was called: an interruption, or a mistake that turngym names
        (an unknown task, a wrong channel).
        """
        error = self.error
        if error is None:
            return ""
        if isinstance(error, EnvBackendError | CallTimeout):
            return said_by(error)
        # a panic of Rust and CancelledError are no Exceptions, and still the environment's own
        if isinstance(error, TurngymError | KeyboardInterrupt):
            raise error
        return failure_of(error)

    @property
    def status(self) -> Status:
        """How an episode ends whose environment or reward gave no value."""
        return Status.ERROR_TIMEOUT if isinstance(self.error, CallTimeout) else Status.ERROR_ENV


def attempt(call: Callable[[], Any]) -> CallResult:
    """The outcome of `call` in this thread, without a limit."""
    began, folder = time.perf_counter(), _working_folder()
    try:
        return CallResult(call(), seconds=time.perf_counter() - began)
    # sys.exit in other people's code must not end the run without a word; `failure` raises what is not theirs
    except BaseException as error:
        return CallResult(error=error, seconds=time.perf_counter() - began)
    finally:
        # our own files have paths that begin there
        if folder and _working_folder() != folder:
            os.chdir(folder)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


class TimedCalls:
    """Calls functions one after the other, each for at most `seconds`; infinity is no limit.

    They run in one thread, which waits for more, so that a batch costs one change of threads. After a call that was
    given up, the rest of its batch runs in threads of their own and shares one more limit: a batch of calls that all
    hang takes twice the limit.
    """

    def __init__(self, seconds: float, what: str) -> None:
        """`what` names a call in errors: "the environment's step"."""
        if not seconds > 0:
            raise TurngymError(f"the time for {what} is {seconds:g} s; it must be more than 0 (inf is no limit)")
        self.seconds, self.what = seconds, what
        self._queue: SimpleQueue[_Batch | None] | None = None
        self._watch = LockWatch(f"{what} took more than {seconds:g} s")

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """The outcome of every call, in order. Ctrl-C lets the call under way end, for up to a second."""
        if math.isinf(self.seconds):
            return [attempt(call) for call in calls]
        try:
            return self._run(calls)
        finally:
            self._watch.done()

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        if self._queue is None:
            self._queue = _start_thread()
            # the thread of an object that nobody closed ends too
            weakref.finalize(self, self._queue.put, None)
        batch = _Batch(calls)
        self._queue.put(batch)
        try:
            # the limit is for each call: a batch that is not over is waited for as long as its calls come and go
            self._watch.expect(self.seconds)
            while not batch.over(batch.called_at + self.seconds):
                if batch.give_up(self.seconds):
                    break
                self._watch.expect(self.seconds)
        except BaseException:
            try:
                batch.over(running_clock.now() + 1.0)
            # at a second Ctrl-C, too: whatever comes next must not wait behind the call under way
            finally:
                batch.give_up(0.0)
                self.close()
            raise
        done = batch.done
        if len(done) < len(calls):
            self._queue = None
            done.append(self._given_up())
            self._watch.expect(self.seconds)
            batches = [_Batch([call]) for call in calls[len(done) :]]
            for waiting in batches:
                queue = _start_thread()
                queue.put(waiting)
                queue.put(None)
            end = running_clock.now() + self.seconds
            for waiting in batches:
                if not waiting.over(end):
                    waiting.give_up(0.0)
                done += waiting.done or [self._given_up()]
        return done

    def call(self, function: Callable[[], Any]) -> CallResult:
        return self.run([function])[0]

    def close(self) -> None:
        """End the thread."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def _given_up(self) -> CallResult:
        return CallResult(error=CallTimeout(f"{self.what} took more than {self.seconds:g} s"), seconds=self.seconds)


def close_all(envs: Sequence[Any], calls: TimedCalls) -> None:
    """Closes environments, with a warning for each that fails or hangs while it is closed."""
    for closed in calls.run([env.close for env in envs]):
        if closed.failure:
            warnings.warn(f"an environment could not be closed: {closed.failure}", stacklevel=2)


@contextmanager
def lent(make_env: Callable[[], Any], step_timeout: float = STEP_TIMEOUT) -> Iterator[Any]:
    """An environment that plays no episode, closed at the end."""
    env = make_env()
    try:
        yield env
    finally:
        close_all([env], TimedCalls(step_timeout, "closing the environment"))


class _Batch:
    """Calls for a thread, and what has come of them."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.done: list[CallResult] = []
        self.called_at = running_clock.now()
        """When the call under way began."""
        self._given_up = False
        self._lock = threading.Lock()
        # released when all calls are done
        self._over = threading.Lock()
        self._over.acquire()  # ends: nobody else knows it yet

    def over(self, end: float) -> bool:
        """Whether all calls are done by `end` (`running_clock.now`)."""
        return running_clock.acquired(self._over, end)

    def give_up(self, seconds: float) -> bool:
        """Take no more outcomes, if the call under way began `seconds` ago; returns whether it did."""
        with self._lock:
            open_ = len(self.done) < len(self.calls)
            self._given_up = open_ and running_clock.now() >= self.called_at + seconds
            return self._given_up

    def make_calls(self) -> bool:
        """Makes all calls in the thread; returns whether they are still wanted."""
        for call in self.calls:
            outcome = attempt(call)
            with self._lock:
                if self._given_up:
                    return False
                self.done.append(outcome)
                self.called_at = running_clock.now()
        self._over.release()
        return True


def _start_thread() -> SimpleQueue[_Batch | None]:
    """The queue of a new thread, which makes the calls of each batch and ends at None."""
    queue: SimpleQueue[_Batch | None] = SimpleQueue()

    def serve() -> None:
        # ends: `close`, or whoever finalizes the owner, puts None
        while (batch := queue.get()) is not None and batch.make_calls():
            # a thread that waits keeps no environment alive
            del batch

    threading.Thread(target=serve, name="turngym-calls", daemon=True).start()
    return queue
