"""What workers are: numbered processes, each holding a `Worker` whose methods the scheduler calls.

`Workers` is the interface (here and in `ray_cluster`), `Worker` is what runs in the other process, `LocalWorkers` are
processes on this machine, and `pack` pickles what is sent to them. A `ProcessPoolExecutor` breaks as a whole when one
process dies; here only that worker's episodes are begun again.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import _lru_cache_wrapper, lru_cache
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import gymnasium as gym

from turngym.agents.executor.errors import ExecutorError, UnsendableError, picklable
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import Job, MakeEnv, Rollout, RolloutSettings
from turngym.core.child_process import ENDING_SECONDS, ChildProcess
from turngym.core.cpu_cores import threads_each, use_threads
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError, not_written

HEARTBEAT = 2.0
"""Seconds after which a worker answers although no episode has finished, so that it is not taken for hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswer:
    """The result of a call: a value, an exception that the worker raised, or why the worker died."""

    worker: int
    value: Any = None
    error: Exception | None = None
    died: str = ""


class Workers(Protocol):
    """Processes on this machine or actors on a cluster, numbered from 0. The scheduler decides what each plays."""

    @property
    def count(self) -> int: ...

    def call(self, worker: int, method: str, *args: Any) -> None:
        """Call `method` of `worker`; `wait` returns the answer. One call at a time for each worker.

        A worker that was never started, or was stopped, is started first, with empty memory.
        """

    def wait(self, timeout: float) -> list[WorkerAnswer]:
        """Answers that have arrived; waits at most `timeout` seconds for the first. A death is an answer too."""

    def share(self, payload: bytes) -> Any:
        """Store `payload` once for all workers; if the returned handle is passed to `call`, the bytes arrive."""

    def free(self, handle: Any) -> None:
        """Free a shared payload."""

    def stop(self, worker: int) -> None:
        """End `worker` at once, alive or not; its answer will not come."""

    def close(self) -> None:
        """End every worker."""


def pack(content: Any) -> tuple[bytes, list[Any]]:
    """`content` pickled, and the local engines in it by number; engines hold weights and are sent separately."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(content)
    except TurngymError:
        raise
    except Exception as error:
        raise UnsendableError(
            f"this cannot be sent to workers: {error}. Environments are sent as EnvSpec(id, kwargs) or another "
            "picklable callable; agents must be picklable, and clients of an engine server must be as their address"
        ) from error
    return buffer.getvalue(), pickler.engines


def unpack(data: bytes, engines: Mapping[int, Any]) -> Any:
    """The content that `pack` was given, with `engines` by number in place of its own."""
    return _Unpickler(io.BytesIO(data), engines).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        # if the module was never imported no engine exists, and torch need not be loaded
        local = sys.modules.get("turngym.agents.local_engine.engine")
        if local is None or not isinstance(obj, local.LocalEngine):
            return None
        index = next((number for number, engine in enumerate(self.engines) if engine is obj), None)
        if index is None:
            self.engines.append(obj)
        return len(self.engines) - 1 if index is None else index

    def reducer_override(self, obj: Any) -> Any:
        """lru_caches (renderers have many) arrive empty; `for_workers` of an object says how its copy is made."""
        if hasattr(type(obj), "for_workers"):
            return obj.for_workers()
        if isinstance(obj, _lru_cache_wrapper):
            return _empty_cache, (obj.__wrapped__, obj.cache_parameters()["maxsize"])
        return super().reducer_override(obj)


def _empty_cache(function: Callable[..., Any], size: int | None) -> Any:
    return lru_cache(size)(function)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, engines: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._engines = engines

    def persistent_load(self, number: Any) -> Any:
        return self._engines[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything a worker needs to play, except the jobs."""

    make_env: MakeEnv
    agent: Agent
    options: RolloutSettings
    """How a worker plays: the slots are those of one worker, and there is no `on_episode`."""
    registered: Mapping[str, Any]
    """Environments that the sender has registered with Gymnasium, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One payload of a `begin` call: an engine to build (`full_engine`), or newer weights for it."""

    engine: int
    """The executor's number of the engine."""
    full_engine: bool
    version: int


class Worker:
    """Plays jobs for a scheduler in another process. Holds environments, copies of engines and the rollout.

    Methods are called one at a time with picklable arguments.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._engines: dict[int, Any] = {}
        self._rollout: Rollout | None = None
        self._waiting: deque[tuple[int, Job]] = deque()
        self._spare_env: tuple[tuple[MakeEnv, Mapping[str, Any]], Any] | None = None
        """An environment kept open between runs, so that what environments share (a shop, an index) is built once."""

    def begin(self, spec: bytes, engine_numbers: Sequence[int], loads: Sequence[Load], *payloads: bytes) -> None:
        """Start a run; an unfinished one is abandoned. Engine i of `spec` has the number `engine_numbers[i]`."""
        self.end()
        for load, payload in zip(loads, payloads, strict=True):
            # imported here, since workers without a local engine do not need torch
            from turngym.agents.local_engine.engine import load_weights, unpack_engine

            if load.full_engine:
                self._engines[load.engine] = unpack_engine(payload)
            else:
                load_weights(self._engines[load.engine], payload, load.version)
        content: RolloutSpec = unpack(
            spec, {index: self._engines[engine] for index, engine in enumerate(engine_numbers)}
        )
        if self._threads is not None:
            # torch may have come with what was unpacked, and its number of threads from a module of the user's
            use_threads(self._threads)
        gym.registry.update(content.registered)
        made_by = (content.make_env, content.registered)
        if self._spare_env is None or self._spare_env[0] != made_by:
            # the new one is made before the former is closed, so that what the two share stays built
            former, self._spare_env = self._spare_env, (made_by, content.make_env())
            if former is not None:
                former[1].close()
        self._rollout = Rollout(content.make_env, content.agent, **content.options)

    def advance(self, jobs: Sequence[tuple[int, Job]]) -> list[tuple[int, Episode]]:
        """Add `jobs` and play until episodes end; returns their numbers and records, or nothing after HEARTBEAT s."""
        assert self._rollout is not None, "begin comes first"
        self._waiting.extend(jobs)
        start = time.monotonic()
        while self._waiting or self._rollout.playing:
            done = self._rollout.advance(self._waiting)
            if done or time.monotonic() - start > HEARTBEAT:
                return done
        return []

    def end(self) -> None:
        """Abandon running episodes and close the environments."""
        self._waiting.clear()
        if self._rollout is not None:
            self._rollout.abandon()
            self._rollout = None

    def close(self) -> None:
        """Abandon everything, before the process ends."""
        self.end()
        if self._spare_env is not None:
            self._spare_env[1].close()
            self._spare_env = None


class LocalWorkers:
    """`count` processes, started when first called; each gets its share of this process's cores.

    They end with this process, however it ends. Payloads are shared as files in a temporary folder. `threads` is what
    each worker's libraries use; None: its share of the cores, at most OMP_NUM_THREADS.
    """

    def __init__(self, count: int, *, threads: int | None = None) -> None:
        if count < 1:
            raise ExecutorError(f"{count} workers: at least 1 must play")
        self.count = count
        self._threads = threads or threads_each(count)
        self._children: dict[int, ChildProcess] = {}
        self._busy: set[int] = set()
        """Workers that have not answered their call yet."""
        self._deaths: list[WorkerAnswer] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shared = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        return tuple(child.pid for child in self._children.values())

    def call(self, worker: int, method: str, *args: Any) -> None:
        assert worker not in self._busy, f"worker {worker} has not answered yet"
        if worker not in self._children:
            name = f"turngym-worker-{worker}"
            self._children[worker] = ChildProcess(serve, self._threads, name=name, threads=self._threads)
        try:
            self._children[worker].pipe.send((method, args))
            self._busy.add(worker)
        except OSError:
            self._deaths.append(WorkerAnswer(worker=worker, died=self._death_reason(worker)))

    def wait(self, timeout: float) -> list[WorkerAnswer]:
        answers, self._deaths = self._deaths, []
        pending = {self._children[worker].pipe: worker for worker in self._busy}
        if answers or not pending:
            return answers
        for ready in connection.wait(list(pending), timeout):
            worker = pending[ready]  # type: ignore[index]
            try:
                good, value = self._children[worker].pipe.recv()  # ends: it has begun, and `PIPE_WAIT` limits the rest
            except (EOFError, OSError, pickle.UnpicklingError):
                answers.append(WorkerAnswer(worker=worker, died=self._death_reason(worker)))
                continue
            self._busy.discard(worker)
            answers.append(
                WorkerAnswer(worker=worker, value=value) if good else WorkerAnswer(worker=worker, error=value)
            )
        return answers

    def share(self, payload: bytes) -> Path:
        target = Path(tempfile.gettempdir())
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="turngym-workers-")
            self._shared += 1
            path = target = Path(self._folder.name) / f"payload_{self._shared}"
            path.write_bytes(payload)
        except OSError as error:
            # half of it would take the room of the next one
            with contextlib.suppress(OSError):
                if target.is_file():
                    target.unlink()
            raise ExecutorError(
                not_written(f"what workers are given, {len(payload) / 1e6:.1f} MB,", target.parent, error)
            ) from error
        return path

    def free(self, handle: Path) -> None:
        handle.unlink(missing_ok=True)

    def stop(self, worker: int) -> None:
        self._busy.discard(worker)
        if (child := self._children.pop(worker, None)) is not None:
            child.end()

    def close(self) -> None:
        # a worker whose pipe ends closes its environments and exits
        for child in self._children.values():
            child.pipe.close()
        deadline = time.monotonic() + ENDING_SECONDS
        for child in self._children.values():
            child.end(max(0.0, deadline - time.monotonic()))
        self._children.clear()
        self._busy.clear()
        self._deaths.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _death_reason(self, worker: int) -> str:
        self._busy.discard(worker)
        return f"worker {self._children.pop(worker).death()}"


def serve(pipe: Any, threads: int) -> None:
    """Main loop of a worker process: one `Worker`, whose methods are called through `pipe`."""
    worker, folders = Worker(threads), set[Path]()
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args = pipe.recv()  # ends: with the parent, whose end of the pipe closes
            try:
                # a path stands for a shared payload
                folders |= {arg.parent for arg in args if isinstance(arg, Path)}
                plain = [arg.read_bytes() if isinstance(arg, Path) else arg for arg in args]
                answer: tuple[bool, Any] = (True, getattr(worker, method)(*plain))
            except Exception as error:
                answer = (False, picklable(error))
            pipe.send(answer)
    worker.close()
    # a parent that was killed cannot remove its payloads
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
