"""How episodes are played in parallel workers: the same episodes as in one process, even if some workers die.

`ParallelRollout` is what callers use; it sends agents, environments and weights to the workers. `JobScheduler` holds
the schedule of one run: it assigns jobs, retries those of a dead worker, and keeps results in job order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

from turngym.agents.executor.errors import ExecutorError, UnsendableError
from turngym.agents.executor.processes import Load, RolloutSpec, WorkerAnswer, Workers, pack
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import SLOTS, Job, MakeEnv, RolloutSettings, failed_episode, rollout
from turngym.agents.playing.timed_calls import STEP_TIMEOUT
from turngym.core.episode import Episode, Status
from turngym.envs.registration import own_registrations

POLL = 0.25
"""Seconds between checks for a cancelled run or a hung worker."""


@dataclass(slots=True)
class WorkerState:
    """A worker as the scheduler knows it. It outlives a run: a slow worker may still owe the previous run an answer."""

    busy: bool = False
    """Whether a call has not been answered yet."""
    phase: Literal["not_started", "starting", "ready"] = "not_started"
    """How far the worker is in this run."""
    called_at: float = 0.0
    """Time of the last call (time.monotonic)."""
    jobs: set[int] = field(default_factory=set)
    """Numbers of the jobs that it plays."""


@dataclass(slots=True, kw_only=True)
class JobScheduler:
    """The schedule of one run. Episodes do not depend on which worker plays a job, or when."""

    pool: ParallelRollout
    jobs: Sequence[Job]
    spec: RolloutSpec
    data: bytes
    """The packed `spec`."""
    engine_numbers: Sequence[int]
    """Numbers of its local engines."""
    on_episode: Callable[[Episode], None] | None
    _queue: deque[int] = field(init=False)
    _solo_queue: deque[int] = field(default_factory=deque)
    """Jobs on their last attempt. Each is played alone, so that a job which kills its worker takes no other with it."""
    _worker_deaths: Counter[int] = field(default_factory=Counter)
    _arrived: deque[tuple[int, Episode]] = field(default_factory=deque)
    _done: dict[int, Episode] = field(default_factory=dict)
    _failed_starts: int = 0

    def __post_init__(self) -> None:
        self._queue = deque(range(len(self.jobs)))
        for worker_state in self.pool.worker_states:
            worker_state.phase = "not_started"
            worker_state.jobs.clear()

    def run(self) -> list[Episode]:
        """Play all jobs; episodes in the order of the jobs. Whatever is raised, the workers are stopped."""
        try:
            while len(self._done) < len(self.jobs):
                if self.pool.cancelled.is_set():
                    raise ExecutorError("the rollout was cancelled")
                self.assign()
                self.collect(self.pool.workers.wait(POLL))
                self.kill_hung_workers()
        except KeyboardInterrupt:
            try:
                # what has arrived by now still reaches on_episode
                self.collect(self.pool.workers.wait(0.0))
            finally:
                self.pool.close()
            raise
        except BaseException:
            self.pool.close()
            raise
        return [self._done[number] for number in range(len(self.jobs))]

    def assign(self) -> None:
        """Call every idle worker: to start, or to continue with as many jobs as it should have."""
        for worker, worker_state in enumerate(self.pool.worker_states):
            if worker_state.busy:
                continue
            if worker_state.phase == "ready":
                chosen = self._next_jobs(worker)
                worker_state.jobs.update(chosen)
                if worker_state.jobs:
                    worker_state.busy, worker_state.called_at = True, time.monotonic()
                    self.pool.workers.call(worker, "advance", [(number, self.jobs[number]) for number in chosen])
                continue
            # another worker is started only if there are more waiting jobs than workers on their way
            starting = sum(state.phase == "starting" for state in self.pool.worker_states)
            if len(self._queue) + len(self._solo_queue) > starting:
                worker_state.phase = "starting"
                worker_state.busy, worker_state.called_at = True, time.monotonic()
                self.pool.start_worker(worker, self.data, self.engine_numbers)

    def collect(self, answers: Iterable[WorkerAnswer]) -> None:
        """Process the workers' answers. Raises what a worker raised, after all finished episodes are recorded."""
        errors = []
        for answer in answers:
            worker_state = self.pool.worker_states[answer.worker]
            worker_state.busy = False
            if answer.died:
                self._on_worker_death(answer, worker_state)
            # an answer (or error) to a call of the previous run is dropped; that run's phase was reset
            elif worker_state.phase == "not_started":
                continue
            elif answer.error is not None:
                errors.append(answer.error)
            elif worker_state.phase == "starting":
                worker_state.phase, self._failed_starts = "ready", 0
            else:
                worker_state.jobs.difference_update(number for number, _ in answer.value)
                self._arrived.extend(answer.value)
        self._flush()
        if errors:
            raise errors[0]

    def _flush(self) -> None:
        """Record arrived episodes and call `on_episode`; if it raises, the rest stays for the next call."""
        while self._arrived:
            number, episode = self._arrived[0]
            # an episode for which on_episode raised is already recorded, but still at the front
            if number not in self._done:
                self._done[number] = episode
                if self.on_episode is not None:
                    self.on_episode(episode)
            self._arrived.popleft()

    def kill_hung_workers(self) -> None:
        """Stop workers that have not answered in time. Raises ExecutorError if none of them ever became ready."""
        checked_at = time.monotonic()
        for worker, worker_state in enumerate(self.pool.worker_states):
            if not worker_state.busy or checked_at - worker_state.called_at <= self.pool.patience:
                continue
            reason = f"worker {worker} gave no answer for {self.pool.patience:g} s"
            if worker_state.phase == "ready":
                self.pool.workers.stop(worker)
                self.collect([WorkerAnswer(worker=worker, died=reason)])
            # a starting worker may wait long for a free node, which is no error while others play
            elif all(state.phase != "ready" for state in self.pool.worker_states):
                raise ExecutorError(f"{reason} while it started: are there processors (and accelerators) for it?")

    def _next_jobs(self, worker: int) -> list[int]:
        """Numbers of the jobs that a worker gets now: its fair share of the unfinished ones, up to its free slots."""
        worker_state, workers = self.pool.worker_states[worker], len(self.pool.worker_states)
        if any(self._is_last_attempt(number) for number in worker_state.jobs):
            return []
        if not self._queue:
            return [self._solo_queue.popleft()] if self._solo_queue and not worker_state.jobs else []
        if self.pool.fixed_shares:
            # all of a worker's jobs at once, so that timing does not decide which of them are decoded together
            fixed_share = [number for number in self._queue if number % workers == worker]
            self._queue = deque(number for number in self._queue if number % workers != worker)
            return fixed_share
        share = -(-(len(self.jobs) - len(self._done)) // workers)
        room = max(min(self.spec.options["slots"], share) - len(worker_state.jobs), 0)
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def _is_last_attempt(self, number: int) -> bool:
        # without retries every attempt would be the last and all jobs would be played alone, hence 0 <
        return 0 < self._worker_deaths[number] == self.pool.retries

    def _on_worker_death(self, answer: WorkerAnswer, worker_state: WorkerState) -> None:
        """Queue the jobs of a dead worker again, as long as they have attempts left."""
        self.pool.deaths.append(answer.died)
        self.pool.loaded.pop(answer.worker, None)
        if worker_state.phase == "starting":
            self._failed_starts += 1
            if self._failed_starts > self.pool.retries * len(self.pool.worker_states):
                raise ExecutorError(f"workers die before they are ready, {self._failed_starts} in a row: {answer.died}")
        # reversed, so that appendleft below leaves them in job order
        unfinished, worker_state.phase = sorted(worker_state.jobs, reverse=True), "not_started"
        worker_state.jobs.clear()
        for number in unfinished:
            self._worker_deaths[number] += 1
            if self._worker_deaths[number] > self.pool.retries:
                meta = {"agent": self.spec.agent.name, **(self.spec.options.get("meta") or {})}
                error = f"lost {self._worker_deaths[number]} times with its worker; last: {answer.died}"
                env_id = str(getattr(self.spec.make_env, "env_id", ""))
                lost = failed_episode(self.jobs[number], env_id, error, meta, Status.ERROR_ENGINE)
                self._arrived.append((number, lost))
            elif self._is_last_attempt(number):
                self._solo_queue.append(number)
            else:
                self._queue.appendleft(number)


@dataclass(slots=True)
class _SharedEngine:
    """A local engine of this process, and the payloads from which workers build and update their copies."""

    engine: Any
    stamp: int
    version: int
    packed: Any
    """Handle of the packed engine."""
    weights: Any = None
    """Handle of newer weights, if they have changed since the engine was packed."""


class ParallelRollout:
    """Called like `rollout`, it returns the same episodes in the same order; `slots` are shared among the workers.

    Workers have their own environments and their own copies of local engines, whose weights are updated at the next run
    after they have changed; turns record the version. If a worker dies, or does not answer for `patience` seconds, its
    unfinished episodes are restarted elsewhere (same seed, same episode), at most `retries` times. The last attempt is
    played alone, so that an episode which kills its worker takes no other with it. After that it ends as
    `error_engine`. `on_episode` is called in this process as each episode comes back.

    Timing decides which worker plays what, and so which episodes are decoded together; log-probabilities agree up to
    the rounding of batched products. With `fixed_shares` every worker has a fixed part of the jobs, and the numbers are
    the same every time, as long as no worker dies.

    One run at a time; a second thread waits. Weights are read when a run begins: do not train during a run. Do not pass
    `workers` to anything else: after a run, one of them may still owe an answer that only this object waits for.

    Raises:
        ExecutorError: something that cannot be pickled, workers that die before they are ready, or a cancelled run.
        Exception: of a worker other than a failed environment or engine; all workers are stopped then.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        retries: int = 2,
        patience: float = 600.0,
        step_timeout: float = STEP_TIMEOUT,
        fixed_shares: bool = False,
    ) -> None:
        if retries < 0 or patience <= 0:
            raise ExecutorError(f"retries is {retries} and patience {patience} s; valid: at least 0, and above 0")
        self.workers = workers
        self.retries = retries
        self.patience = patience
        self.step_timeout = step_timeout
        self.fixed_shares = fixed_shares
        self._engines: list[_SharedEngine] = []
        self._stale_handles: list[Any] = []
        self._sent_payloads: dict[int, list[Any]] = {}
        self.loaded: dict[int, dict[int, tuple[int, int]]] = {}
        self.worker_states = [WorkerState() for _ in range(workers.count)]
        self._lock = threading.Lock()
        self.cancelled = threading.Event()
        self.deaths: list[str] = []
        """The reason for every worker lost since construction."""

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        """Play `jobs` in the workers; options as for `rollout`."""
        slots, on_episode = options.get("slots", SLOTS), options.pop("on_episode", None)
        if slots < 1:
            raise ExecutorError(f"slots is {slots}; at least 1 episode must be played at a time")
        options["slots"] = -(-slots // self.workers.count)
        options.setdefault("step_timeout", self.step_timeout)
        with self._lock:
            registered = own_registrations()
            spec = RolloutSpec(make_env=make_env, agent=agent, options=options, registered=registered)
            data, engines = pack(spec)
            self._free_stale_handles()
            return JobScheduler(
                pool=self,
                jobs=jobs,
                spec=spec,
                data=data,
                engine_numbers=[self._engine_number(engine) for engine in engines],
                on_episode=on_episode,
            ).run()

    def prepare(self, engine: Any) -> None:
        """Copy a local engine now; later runs build the workers' engines from this copy.

        Clients of engine servers are left alone: pickling one sends it the weights, which may not be final yet.
        """
        from turngym.agents.local_engine.engine import LocalEngine

        if isinstance(engine, LocalEngine):
            self._engine_number(engine)

    @property
    def playing(self) -> tuple[int, ...]:
        """Number of episodes that each worker plays now."""
        return tuple(len(worker_state.jobs) for worker_state in self.worker_states)

    def cancel(self) -> None:
        """Make the run of another thread, and every later one, end with ExecutorError."""
        self.cancelled.set()

    def close(self) -> None:
        """End the workers; a later run starts them again."""
        self.workers.close()
        self.loaded.clear()
        self._engines.clear()
        self._stale_handles.clear()
        self._sent_payloads.clear()
        self.worker_states = [WorkerState() for _ in range(self.workers.count)]

    def start_worker(self, worker: int, data: bytes, engine_numbers: Sequence[int]) -> None:
        """Call `worker` to start this run, with the engines and weights that it does not have yet."""
        loaded, loads, payloads = self.loaded.setdefault(worker, {}), [], []
        for number in dict.fromkeys(engine_numbers):
            engine_state = self._engines[number]
            newest = (engine_state.stamp, engine_state.version)
            if number not in loaded:
                loads.append(Load(engine=number, full_engine=True, version=0))
                payloads.append(engine_state.packed)
            # the packed engine has the weights of its first run, so a new worker also needs the newer ones
            if engine_state.weights is not None and loaded.get(number) != newest:
                loads.append(Load(engine=number, full_engine=False, version=engine_state.version))
                payloads.append(engine_state.weights)
            # set before the worker confirms; the scheduler removes it if the worker dies instead
            loaded[number] = newest
        self._sent_payloads[worker] = payloads
        self.workers.call(worker, "begin", data, engine_numbers, loads, *payloads)

    def _free_stale_handles(self) -> None:
        """Free old weights, except those that a busy worker may still be reading."""
        busy = [worker for worker, worker_state in enumerate(self.worker_states) if worker_state.busy]
        in_use = [handle for worker in busy for handle in self._sent_payloads.get(worker, ())]
        for handle in self._stale_handles:
            if handle not in in_use:
                self.workers.free(handle)
        self._stale_handles = [handle for handle in self._stale_handles if handle in in_use]

    def _engine_number(self, engine: Any) -> int:
        """The workers' number of `engine`; its weights are shared again if they have changed."""
        # imported here, since rollouts without a local engine do not need torch
        from turngym.agents.local_engine.engine import pack_engine, pack_weights
        from turngym.agents.local_engine.model import EngineError

        for number, engine_state in enumerate(self._engines):
            if engine_state.engine is not engine:
                continue
            if (engine_state.stamp, engine_state.version) != (engine.stamp, engine.policy_version):
                if engine_state.weights is not None:
                    self._stale_handles.append(engine_state.weights)
                engine_state.weights = self.workers.share(pack_weights(engine))
                engine_state.stamp, engine_state.version = engine.stamp, engine.policy_version
            return number
        try:
            packed = self.workers.share(pack_engine(engine))
        except EngineError as error:
            raise UnsendableError(str(error)) from error
        self._engines.append(_SharedEngine(engine, engine.stamp, engine.policy_version, packed))
        return len(self._engines) - 1


class ParallelWherePossible(ParallelRollout):
    """Plays in this process what cannot be sent to workers, and says so: nobody asked for workers."""

    _said = False

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        try:
            return super().__call__(jobs, make_env, agent, **options)
        except UnsendableError as error:
            if not self._said:
                print(f"episodes are played by this process: {error}", file=sys.stderr)
                self._said = True
            options.setdefault("step_timeout", self.step_timeout)
            return rollout(jobs, make_env, agent, **options)

    def prepare(self, engine: Any) -> None:
        with suppress(UnsendableError):
            super().prepare(engine)
