"""Schedules jobs on workers: assigns them, retries those of a dead worker, and keeps results in job order."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turngym.agents.episode_runner import Job, failed_episode
from turngym.agents.executor.core import Answer, ExecutorError, Workers
from turngym.agents.executor.worker import RolloutSpec
from turngym.envs.episode import Episode, Status


@dataclass(slots=True)
class WorkerState:
    """A worker as the scheduler knows it. It outlives a run: a slow one may still owe an answer to the run before."""

    busy: bool = False
    """A call has not been answered."""
    phase: Literal["not_started", "starting", "ready"] = "not_started"
    """Where the worker is in this run."""
    called_at: float = 0.0
    """When it was last called (time.monotonic)."""
    jobs: set[int] = field(default_factory=set)
    """Numbers of the jobs that it plays."""


@dataclass(slots=True, kw_only=True)
class JobScheduler:
    """The schedule of one run. Which worker plays a job, and when, changes no episode."""

    jobs: Sequence[Job]
    workers: Workers
    worker_states: Sequence[WorkerState]
    spec: RolloutSpec
    retries: int
    patience: float
    start_worker: Callable[[int], None]
    """Sends a worker what it needs for this run."""
    on_death: Callable[[Answer], None]
    """Called for every worker that died."""
    on_episode: Callable[[Episode], None] | None
    fixed_shares: bool = False
    """Job n is worker n's, counted round and round, and all of its jobs are handed over at once: which episodes are
    decoded together then does not depend on timing."""
    _queue: deque[int] = field(init=False)
    _solo_queue: deque[int] = field(default_factory=deque)
    """Jobs on their last attempt: each is played alone in its worker, so that a job which kills it takes no other."""
    _worker_deaths: Counter[int] = field(default_factory=Counter)
    _arrived: deque[tuple[int, Episode]] = field(default_factory=deque)
    _done: dict[int, Episode] = field(default_factory=dict)
    _failed_starts: int = 0

    def __post_init__(self) -> None:
        self._queue = deque(range(len(self.jobs)))
        for worker_state in self.worker_states:
            worker_state.phase = "not_started"
            worker_state.jobs.clear()

    @property
    def finished(self) -> bool:
        return len(self._done) == len(self.jobs)

    def episodes(self) -> list[Episode]:
        """In the order of the jobs."""
        return [self._done[number] for number in range(len(self.jobs))]

    def assign(self) -> None:
        """Call every idle worker: to start, or to go on with as many jobs as it should have."""
        for worker, worker_state in enumerate(self.worker_states):
            if worker_state.busy:
                continue
            if worker_state.phase == "ready":
                chosen = self._next_jobs(worker)
                worker_state.jobs.update(chosen)
                if worker_state.jobs:
                    self._mark_called(worker_state)
                    self.workers.call(worker, "advance", [(number, self.jobs[number]) for number in chosen])
            elif len(self._queue) + len(self._solo_queue) > sum(
                other.phase == "starting" for other in self.worker_states
            ):
                worker_state.phase = "starting"
                self._mark_called(worker_state)
                self.start_worker(worker)

    def collect(self, answers: Iterable[Answer]) -> None:
        """Take in the workers' answers. Raises what a worker raised, after all finished episodes are recorded."""
        errors = []
        for answer in answers:
            worker_state = self.worker_states[answer.worker]
            worker_state.busy = False
            if answer.died:
                self._on_worker_death(answer, worker_state)
            # an answer that was owed to the run before, an error too, finds the phase reset, and is dropped
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
        """Record arrived episodes and call `on_episode`; what it raises leaves the rest for the next call."""
        while self._arrived:
            number, episode = self._arrived[0]
            # an episode on which on_episode raised is recorded, and still at the front
            if number not in self._done:
                self._done[number] = episode
                if self.on_episode is not None:
                    self.on_episode(episode)
            self._arrived.popleft()

    def kill_hung_workers(self) -> None:
        """End workers that have not answered in time; ExecutorError if none has even begun."""
        now = time.monotonic()
        for worker, worker_state in enumerate(self.worker_states):
            if not worker_state.busy or now - worker_state.called_at <= self.patience:
                continue
            reason = f"worker {worker} gave no answer for {self.patience:g} s"
            if worker_state.phase == "ready":
                self.workers.stop(worker)
                self.collect([Answer(worker=worker, died=reason)])
            # a worker that starts may wait long for a free node, which is no error while others play
            elif all(other.phase != "ready" for other in self.worker_states):
                raise ExecutorError(f"{reason} while it started: are there processors (and accelerators) for it?")

    def _mark_called(self, worker_state: WorkerState) -> None:
        worker_state.busy, worker_state.called_at = True, time.monotonic()

    def _next_jobs(self, worker: int) -> list[int]:
        """Numbers of the jobs that a worker gets now: its fair share of the unfinished ones, up to its free slots."""
        worker_state = self.worker_states[worker]
        if any(self._is_last_attempt(number) for number in worker_state.jobs):
            return []
        if not self._queue:
            return [self._solo_queue.popleft()] if self._solo_queue and not worker_state.jobs else []
        if self.fixed_shares:
            return self._own_jobs(worker)
        share = -(-(len(self.jobs) - len(self._done)) // len(self.worker_states))
        room = max(min(self.spec.slots, share) - len(worker_state.jobs), 0)
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def _own_jobs(self, worker: int) -> list[int]:
        own = [number for number in self._queue if number % len(self.worker_states) == worker]
        self._queue = deque(number for number in self._queue if number % len(self.worker_states) != worker)
        return own

    def _is_last_attempt(self, number: int) -> bool:
        # 0 <: without retries every attempt is the last, and all jobs would be played alone
        return 0 < self._worker_deaths[number] == self.retries

    def _on_worker_death(self, answer: Answer, worker_state: WorkerState) -> None:
        """Queue the jobs of a dead worker again, as long as they have attempts left."""
        self.on_death(answer)
        if worker_state.phase == "starting":
            self._failed_starts += 1
            if self._failed_starts > self.retries * len(self.worker_states):
                raise ExecutorError(f"workers die before they are ready, {self._failed_starts} in a row: {answer.died}")
        # reversed: appendleft below then leaves them in job order
        unfinished, worker_state.phase = sorted(worker_state.jobs, reverse=True), "not_started"
        worker_state.jobs.clear()
        for number in unfinished:
            self._worker_deaths[number] += 1
            if self._worker_deaths[number] > self.retries:
                self._arrived.append((number, self._failed_episode(number, answer.died)))
            elif self._is_last_attempt(number):
                self._solo_queue.append(number)
            else:
                self._queue.appendleft(number)

    def _failed_episode(self, number: int, reason: str) -> Episode:
        meta = {"agent": self.spec.agent.name, **self.spec.meta}
        error = f"lost {self._worker_deaths[number]} times with its worker; last: {reason}"
        env_id = str(getattr(self.spec.make_env, "env_id", ""))
        return failed_episode(self.jobs[number], env_id, error, meta, Status.ERROR_ENGINE)
