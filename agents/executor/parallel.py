"""Rollouts in parallel workers: the same episodes as in one process, whichever worker plays them, even if some die."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from turngym.agents.agent import Agent
from turngym.agents.episode_runner import Job
from turngym.agents.executor.core import Answer, ExecutorError, Workers
from turngym.agents.executor.scheduler import JobScheduler, WorkerState
from turngym.agents.executor.serialization import pack
from turngym.agents.executor.worker import Load, RolloutSpec
from turngym.agents.rollout import SLOTS, MakeEnv, RolloutSettings
from turngym.envs.episode import Episode

POLL = 0.25
"""Seconds between looks at whether the run was cancelled or a worker hangs."""


@dataclass(slots=True)
class _SharedEngine:
    """A local engine of this process, and the payloads from which workers make and update their copies."""

    engine: Any
    stamp: int
    version: int
    packed: Any
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

    Which worker plays what depends on timing, and with it which episodes are decoded together: log-probabilities agree
    up to the rounding of batched products. With `fixed_shares` every worker has its part of the jobs, however long it
    takes: the same numbers every time, as long as none dies.

    The workers are its own: when a run is over, one of them may still owe an answer that only this rollout waits for.
    One run at a time; a second thread waits. Engines are read when a run begins: do not train them meanwhile.

    Raises:
        ExecutorError: what cannot be sent, workers that die before they are ready, a cancelled run.
        Whatever a worker raised that is neither a failed environment nor a failed engine; all workers are ended then.
    """

    def __init__(
        self, workers: Workers, *, retries: int = 2, patience: float = 600.0, fixed_shares: bool = False
    ) -> None:
        if retries < 0 or patience <= 0:
            raise ExecutorError(f"retries is {retries} and patience {patience} s; valid: at least 0, and above 0")
        self._workers = workers
        self._retries = retries
        self._patience = patience
        self._fixed_shares = fixed_shares
        self._engines: list[_SharedEngine] = []
        self._stale_handles: list[Any] = []
        self._sent_payloads: dict[int, list[Any]] = {}
        self._loaded: dict[int, dict[int, tuple[int, int]]] = {}
        self._worker_states = [WorkerState() for _ in range(workers.count)]
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self.deaths: list[str] = []
        """Why workers were lost, since construction."""

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        """Play `jobs` in the workers; options as for `rollout`."""
        slots = options.get("slots", SLOTS)
        if slots < 1:
            raise ExecutorError(f"slots is {slots}; at least 1 episode must be played at a time")
        with self._lock:
            spec = RolloutSpec(
                make_env=make_env,
                agent=agent,
                slots=-(-slots // self._workers.count),
                max_turns=options.get("max_turns"),
                system=options.get("system"),
                meta=options.get("meta") or {},
            )
            data, engines = pack(spec)
            self._free_stale_handles()
            engine_numbers = [self._engine_number(engine) for engine in engines]
            scheduler = JobScheduler(
                jobs=jobs,
                workers=self._workers,
                worker_states=self._worker_states,
                spec=spec,
                retries=self._retries,
                patience=self._patience,
                fixed_shares=self._fixed_shares,
                start_worker=lambda worker: self._start_worker(worker, data, engine_numbers),
                on_episode=options.get("on_episode"),
                on_death=self._on_death,
            )
            return self._run(scheduler)

    def prepare(self, engine: Any) -> None:
        """Copy a local engine now, from which later runs make those of the workers.

        Engines on servers are left alone: to ask one how workers reach it sends it the weights, and at this time they
        may not be the run's yet.
        """
        from turngym.agents.local_engine.engine import LocalEngine

        if isinstance(engine, LocalEngine):
            self._engine_number(engine)

    @property
    def playing(self) -> tuple[int, ...]:
        """Number of episodes that each worker plays now."""
        return tuple(len(worker_state.jobs) for worker_state in self._worker_states)

    def cancel(self) -> None:
        """Make the run of another thread, and every later one, end with ExecutorError."""
        self._cancelled.set()

    def close(self) -> None:
        """End the workers; a later run starts them again."""
        self._workers.close()
        self._loaded.clear()
        self._engines.clear()
        self._stale_handles.clear()
        self._sent_payloads.clear()
        self._worker_states = [WorkerState() for _ in range(self._workers.count)]

    def _run(self, scheduler: JobScheduler) -> list[Episode]:
        try:
            while not scheduler.finished:
                if self._cancelled.is_set():
                    raise ExecutorError("the rollout was cancelled")
                scheduler.assign()
                scheduler.collect(self._workers.wait(POLL))
                scheduler.kill_hung_workers()
        except KeyboardInterrupt:
            try:
                # what has arrived by now still reaches on_episode
                scheduler.collect(self._workers.wait(0.0))
            finally:
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        return scheduler.episodes()

    def _on_death(self, answer: Answer) -> None:
        self.deaths.append(answer.died)
        self._loaded.pop(answer.worker, None)

    def _start_worker(self, worker: int, data: bytes, engine_numbers: Sequence[int]) -> None:
        """Call `worker` to start this run, with the engines and weights that it lacks."""
        loaded, loads, payloads = self._loaded.setdefault(worker, {}), [], []
        for number in dict.fromkeys(engine_numbers):
            known = self._engines[number]
            newest = (known.stamp, known.version)
            if number not in loaded:
                loads.append(Load(engine=number, full_engine=True, version=0))
                payloads.append(known.packed)
            # the packed engine has the weights of its first run; a new worker gets the newer ones on top
            if known.weights is not None and loaded.get(number) != newest:
                loads.append(Load(engine=number, full_engine=False, version=known.version))
                payloads.append(known.weights)
            # before the worker confirms: one that dies instead is forgotten in _on_death
            loaded[number] = newest
        self._sent_payloads[worker] = payloads
        self._workers.call(worker, "begin", data, engine_numbers, loads, *payloads)

    def _free_stale_handles(self) -> None:
        """Free old weights, except those that a busy worker may still be reading."""
        busy = [worker for worker, worker_state in enumerate(self._worker_states) if worker_state.busy]
        in_use = [handle for worker in busy for handle in self._sent_payloads.get(worker, ())]
        for handle in self._stale_handles:
            if handle not in in_use:
                self._workers.free(handle)
        self._stale_handles = [handle for handle in self._stale_handles if handle in in_use]

    def _engine_number(self, engine: Any) -> int:
        """The workers' number of `engine`; its weights are shared anew if they have changed."""
        # late: needs torch, which rollouts without a local engine do without
        from turngym.agents.local_engine.replica import pack_engine, pack_weights

        for number, known in enumerate(self._engines):
            if known.engine is not engine:
                continue
            if (known.stamp, known.version) != (engine.stamp, engine.policy_version):
                if known.weights is not None:
                    self._stale_handles.append(known.weights)
                known.weights = self._workers.share(pack_weights(engine))
                known.stamp, known.version = engine.stamp, engine.policy_version
            return number
        packed = self._workers.share(pack_engine(engine))
        self._engines.append(_SharedEngine(engine, engine.stamp, engine.policy_version, packed))
        return len(self._engines) - 1
