"""Workers as processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from turngym.agents.executor.core import Answer, ExecutorError
from turngym.agents.executor.cores import available_cores
from turngym.agents.executor.worker import Worker

GRACE = 3.0
"""Seconds that workers get to end by themselves."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A payload on disk."""

    path: str


@dataclass(slots=True)
class _Child:
    process: Any
    pipe: Any
    busy: bool = False
    """A call has not been answered."""


class LocalWorkers:
    """`count` processes, started when first called; each gets its share of this process's cores.

    Processes are spawned: a script that uses them needs the usual `if __name__ == "__main__":`. They end with this
    process, however it ends. Payloads are shared as files in a temporary folder.
    """

    def __init__(self, count: int, *, threads: int | None = None) -> None:
        if count < 1:
            raise ExecutorError(f"{count} workers: at least 1 must play")
        self._count = count
        self._threads = threads or max(1, available_cores() // count)
        # a forked child would inherit locks of threads that it does not have, and a CUDA context that it cannot use
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[int, _Child] = {}
        self._deaths: list[Answer] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shared = 0

    @property
    def count(self) -> int:
        return self._count

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run."""
        return tuple(child.process.pid for child in self._children.values())

    def call(self, worker: int, method: str, *args: Any) -> None:
        child = self._children.get(worker) or self._start(worker)
        assert not child.busy, f"worker {worker} has not answered yet"
        try:
            child.pipe.send((method, args))
            child.busy = True
        except OSError:
            self._deaths.append(Answer(worker=worker, died=self._death_reason(worker)))

    def wait(self, timeout: float) -> list[Answer]:
        answers, self._deaths = self._deaths, []
        pending = {child.pipe: number for number, child in self._children.items() if child.busy}
        if answers or not pending:
            return answers
        for ready in connection.wait(list(pending), timeout):
            worker = pending[ready]  # type: ignore[index]
            try:
                good, value = self._children[worker].pipe.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                answers.append(Answer(worker=worker, died=self._death_reason(worker)))
                continue
            self._children[worker].busy = False
            answers.append(Answer(worker=worker, value=value) if good else Answer(worker=worker, error=value))
        return answers

    def share(self, payload: bytes) -> SharedFile:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="turngym-workers-")
        self._shared += 1
        path = Path(self._folder.name) / f"payload_{self._shared}"
        path.write_bytes(payload)
        return SharedFile(str(path))

    def free(self, handle: SharedFile) -> None:
        Path(handle.path).unlink(missing_ok=True)

    def stop(self, worker: int) -> None:
        child = self._children.pop(worker, None)
        if child is not None:
            child.process.kill()
            child.process.join()
            child.pipe.close()

    def close(self) -> None:
        for child in self._children.values():
            child.pipe.close()  # the end of its pipe tells a worker to close its environments
        deadline = time.monotonic() + GRACE
        for worker, child in list(self._children.items()):
            child.process.join(max(0.0, deadline - time.monotonic()))
            self.stop(worker)
        self._deaths.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, worker: int) -> _Child:
        ours, theirs = self._context.Pipe()
        name = f"turngym-worker-{worker}"
        process = self._context.Process(target=serve, args=(theirs, self._threads), name=name, daemon=True)
        process.start()
        # while this process holds the child's end too, the death of the child is no end of the pipe
        theirs.close()
        self._children[worker] = _Child(process, ours)
        return self._children[worker]

    def _death_reason(self, worker: int) -> str:
        process = self._children[worker].process
        # the pipe breaks a moment before the exit status is known
        process.join(5.0)
        self.stop(worker)
        code = process.exitcode
        if code is None or code >= 0:
            return f"worker process {process.pid} ended with status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"worker process {process.pid} was ended by {name}"


def serve(pipe: Any, threads: int) -> None:
    """Main loop of a worker process: one `Worker`, whose methods are called through `pipe`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent is not for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; only the parent handles it
    # before torch is loaded, which reads them once
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    worker = Worker()
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, OSError):
            worker.close()
            return
        try:
            plain = [Path(arg.path).read_bytes() if isinstance(arg, SharedFile) else arg for arg in args]
            answer: tuple[bool, Any] = (True, getattr(worker, method)(*plain))
        except Exception as error:
            answer = (False, picklable(error))
        try:
            pipe.send(answer)
        except OSError:
            return


def picklable(error: Exception) -> Exception:
    """`error` with its traceback as a note, or a summary of it where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker:\n{trace}")
    try:
        # both ways: exceptions whose __init__ takes other arguments can be dumped, but not loaded
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ExecutorError(f"{type(error).__name__} in a worker: {error}\n{trace}")
    return error
