"""Who plays what: jobs given out to workers, taken back from the dead, and kept in order when they are done."""

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
    """A worker as the scheduler knows it. Seats outlive a run: a slow starter may owe an answer to the run before."""

    asked: bool = False
    """A call has not been answered."""
    state: Literal["away", "beginning", "ready"] = "away"
    """How far it is with this run."""
    since: float = 0.0
    """When it was last asked."""
    jobs: set[int] = field(default_factory=set)
    """What it plays."""


@dataclass(slots=True, kw_only=True)
class JobScheduler:
    """One run. Which worker plays a job, and when, is left to chance and changes no episode."""

    jobs: Sequence[Job]
    workers: Workers
    seats: Sequence[WorkerState]
    spec: RolloutSpec
    retries: int
    patience: float
    begin: Callable[[int], None]
    """Sends a worker what it needs for this run."""
    lost: Callable[[Answer], None]
    """Told of every death."""
    on_episode: Callable[[Episode], None] | None
    _fresh: deque[int] = field(init=False)
    _alone: deque[int] = field(default_factory=deque)
    """On their last chance: each is played by itself."""
    _losses: Counter[int] = field(default_factory=Counter)
    _arrived: deque[tuple[int, Episode]] = field(default_factory=deque)
    _done: dict[int, Episode] = field(default_factory=dict)
    _bad_starts: int = 0

    def __post_init__(self) -> None:
        self._fresh = deque(range(len(self.jobs)))
        for seat in self.seats:
            seat.state = "away"
            seat.jobs.clear()

    @property
    def finished(self) -> bool:
        return len(self._done) == len(self.jobs)

    def episodes(self) -> list[Episode]:
        """In the order of the jobs."""
        return [self._done[number] for number in range(len(self.jobs))]

    def assign(self) -> None:
        """Ask every worker that waits: to begin, or to play on with as many jobs as it should have."""
        for worker, seat in enumerate(self.seats):
            if seat.asked:
                continue
            if seat.state == "ready":
                chosen = self._choose(seat)
                seat.jobs.update(chosen)
                if seat.jobs:
                    self._stamp(seat)
                    self.workers.call(worker, "advance", [(number, self.jobs[number]) for number in chosen])
            elif len(self._fresh) + len(self._alone) > sum(other.state == "beginning" for other in self.seats):
                seat.state = "beginning"
                self._stamp(seat)
                self.begin(worker)

    def take(self, answers: Iterable[Answer]) -> None:
        """What the workers said. Raises what one of them raised, after everything that finished has been kept."""
        errors = []
        for answer in answers:
            seat = self.seats[answer.worker]
            seat.asked = False
            if answer.died:
                self._on_worker_death(answer, seat)
            elif answer.error is not None:
                errors.append(answer.error)
            elif seat.state == "beginning":
                seat.state, self._bad_starts = "ready", 0
            elif seat.state == "ready":
                seat.jobs.difference_update(number for number, _ in answer.value)
                self._arrived.extend(answer.value)
        self.keep()
        if errors:
            raise errors[0]

    def keep(self) -> None:
        """Hand on what has arrived."""
        while self._arrived:
            number, episode = self._arrived[0]
            if number not in self._done:
                self._done[number] = episode
                if self.on_episode is not None:
                    self.on_episode(episode)
            self._arrived.popleft()

    def kill_hung_workers(self) -> None:
        """End workers that have not answered in time; ExecutorError if none has even begun."""
        now = time.monotonic()
        for worker, seat in enumerate(self.seats):
            if not seat.asked or now - seat.since <= self.patience:
                continue
            reason = f"worker {worker} gave no answer for {self.patience:g} s"
            if seat.state == "ready":
                self.workers.stop(worker)
                self.take([Answer(worker=worker, died=reason)])
            elif all(other.state != "ready" for other in self.seats):
                raise ExecutorError(f"{reason} while it started: are there processors (and accelerators) for it?")

    def _stamp(self, seat: WorkerState) -> None:
        seat.asked, seat.since = True, time.monotonic()

    def _choose(self, seat: WorkerState) -> list[int]:
        """Numbers of the jobs that `seat` gets now: its fair share of what is open, as far as it has room."""
        if any(self._last_chance(number) for number in seat.jobs):
            return []
        if not self._fresh:
            return [self._alone.popleft()] if self._alone and not seat.jobs else []
        share = -(-(len(self.jobs) - len(self._done)) // len(self.seats))
        room = max(min(self.spec.slots, share) - len(seat.jobs), 0)
        return [self._fresh.popleft() for _ in range(min(room, len(self._fresh)))]

    def _last_chance(self, number: int) -> bool:
        return 0 < self._losses[number] == self.retries

    def _on_worker_death(self, answer: Answer, seat: WorkerState) -> None:
        """Give the jobs of a dead worker to others, as long as they have tries left."""
        self.lost(answer)
        if seat.state == "beginning":
            self._bad_starts += 1
            if self._bad_starts > self.retries * len(self.seats):
                raise ExecutorError(f"workers die before they are ready, {self._bad_starts} in a row: {answer.died}")
        lost, seat.state = sorted(seat.jobs, reverse=True), "away"
        seat.jobs.clear()
        for number in lost:
            self._losses[number] += 1
            if self._losses[number] > self.retries:
                self._arrived.append((number, self._failed(number, answer.died)))
            elif self._last_chance(number):
                self._alone.append(number)
            else:
                self._fresh.appendleft(number)

    def _failed(self, number: int, reason: str) -> Episode:
        meta = {"agent": self.spec.agent.name, **self.spec.meta}
        error = f"lost {self._losses[number]} times with its worker; last: {reason}"
        env_id = str(getattr(self.spec.make_env, "env_id", ""))
        return failed_episode(self.jobs[number], env_id, error, meta, Status.ERROR_ENGINE)
