"""Rollouts by several workers: the same episodes as in one process, whoever plays them and whoever dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.agent import Agent
from turngym.agents.episode_runner import Job
from turngym.agents.executor.core import Answer, ExecutorError, Workers
from turngym.agents.executor.scheduler import JobScheduler, WorkerState
from turngym.agents.executor.serialization import pack
from turngym.agents.executor.worker import Load, RolloutSpec
from turngym.agents.rollout import MakeEnv
from turngym.envs.episode import Episode

POLL = 0.25
"""Seconds between looks at whether the run was cancelled or a worker hangs."""


@dataclass(slots=True)
class _Engine:
    """An engine of this process as the workers know it."""

    engine: Any
    stamp: int
    version: int
    whole: Any
    """Handle of the packed engine."""
    weights: Any = None
    """Handle of newer weights, if they have changed since."""


class ParallelRollout:
    """Called like `rollout`, it returns the same episodes in the same order; `slots` are shared among the workers.

    Workers make their own environments and hold their own copies of local engines, whose weights follow the original's
    whenever they have changed; turns carry the version. A worker that dies, or does not answer for `patience` seconds,
    loses only its unfinished episodes: they are begun again elsewhere (same seed, same episode), at most `retries`
    times and the last time alone, so that an episode which kills its worker takes no other with it. After that they end
    as `error_engine`. `on_episode` is called here as each episode comes back.

    The workers are its own: when a run is over, one of them may still owe an answer that only this rollout waits for.
    One run at a time; a second thread waits. Engines are read when a run begins: do not train them meanwhile.

    Raises:
        ExecutorError: what cannot be sent, workers that die before they are ready, a cancelled run.
        Whatever a worker raised that is neither a failed environment nor a failed engine; all workers are ended then.
    """

    def __init__(self, workers: Workers, *, retries: int = 2, patience: float = 600.0) -> None:
        if retries < 0 or patience <= 0:
            raise ExecutorError(f"retries is {retries} and patience {patience} s; valid: at least 0, and above 0")
        self._workers = workers
        self._retries = retries
        self._patience = patience
        self._engines: list[_Engine] = []
        self._unneeded: list[Any] = []
        self._reading: dict[int, list[Any]] = {}
        self._held: dict[int, dict[int, tuple[int, int]]] = {}
        self._seats = [WorkerState() for _ in range(workers.count)]
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self.deaths: list[str] = []
        """Why workers were lost, since construction."""

    def __call__(
        self,
        jobs: Sequence[Job],
        make_env: MakeEnv,
        agent: Agent,
        slots: int = 64,
        max_turns: int | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        system: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> list[Episode]:
        """Play `jobs`; see `rollout`."""
        if slots < 1:
            raise ExecutorError(f"slots is {slots}; at least 1 episode must be played at a time")
        with self._lock:
            spec = RolloutSpec(
                make_env=make_env,
                agent=agent,
                slots=-(-slots // self._workers.count),
                max_turns=max_turns,
                system=system,
                meta=meta or {},
            )
            data, engines = pack(spec)
            self._forget()
            places = [self._number(engine) for engine in engines]
            scheduler = JobScheduler(
                jobs=jobs,
                workers=self._workers,
                seats=self._seats,
                spec=spec,
                retries=self._retries,
                patience=self._patience,
                begin=lambda worker: self._begin(worker, data, places),
                on_episode=on_episode,
                lost=self._lost,
            )
            return self._run(scheduler)

    @property
    def playing(self) -> tuple[int, ...]:
        """How many episodes each worker has in hand."""
        return tuple(len(seat.jobs) for seat in self._seats)

    def cancel(self) -> None:
        """Make the run of another thread, and every later one, end with ExecutorError."""
        self._cancelled.set()

    def close(self) -> None:
        """End the workers; a later run starts them again."""
        self._workers.close()
        self._held.clear()
        self._engines.clear()
        self._unneeded.clear()
        self._reading.clear()
        self._seats = [WorkerState() for _ in range(self._workers.count)]

    def _run(self, scheduler: JobScheduler) -> list[Episode]:
        try:
            while not scheduler.finished:
                if self._cancelled.is_set():
                    raise ExecutorError("the rollout was cancelled")
                scheduler.assign()
                scheduler.take(self._workers.wait(POLL))
                scheduler.kill_hung_workers()
        except KeyboardInterrupt:
            try:
                scheduler.take(self._workers.wait(0.0))
            finally:
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        return scheduler.episodes()

    def _lost(self, answer: Answer) -> None:
        self.deaths.append(answer.died)
        self._held.pop(answer.worker, None)

    def _begin(self, worker: int, data: bytes, places: Sequence[int]) -> None:
        """Ask `worker` to begin, with whatever it lacks of the engines."""
        held, loads, payloads = self._held.setdefault(worker, {}), [], []
        for number in dict.fromkeys(places):
            known = self._engines[number]
            newest = (known.stamp, known.version)
            if number not in held:
                loads.append(Load(engine=number, whole=True, version=0))
                payloads.append(known.whole)
            if known.weights is not None and held.get(number) != newest:
                loads.append(Load(engine=number, whole=False, version=known.version))
                payloads.append(known.weights)
            held[number] = newest
        self._reading[worker] = payloads
        self._workers.call(worker, "begin", data, places, loads, *payloads)

    def _forget(self) -> None:
        """Drop old weights, but for those that a slow worker may still be reading."""
        slow = [worker for worker, seat in enumerate(self._seats) if seat.asked]
        read = [handle for worker in slow for handle in self._reading.get(worker, ())]
        for handle in self._unneeded:
            if handle not in read:
                self._workers.forget(handle)
        self._unneeded = [handle for handle in self._unneeded if handle in read]

    def _number(self, engine: Any) -> int:
        """The workers' number of `engine`; its weights are shared anew if they have changed."""
        from turngym.agents.local_engine.replica import pack_engine, pack_weights

        for number, known in enumerate(self._engines):
            if known.engine is not engine:
                continue
            if (known.stamp, known.version) != (engine.stamp, engine.policy_version):
                if known.weights is not None:
                    self._unneeded.append(known.weights)
                known.weights = self._workers.share(pack_weights(engine))
                known.stamp, known.version = engine.stamp, engine.policy_version
            return number
        whole = self._workers.share(pack_engine(engine))
        self._engines.append(_Engine(engine, engine.stamp, engine.policy_version, whole))
        return len(self._engines) - 1
