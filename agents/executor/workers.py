"""Where episodes are played: in this process, in several on this machine, or on a Ray cluster."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, Unpack

from turngym.agents.executor.errors import ExecutorError
from turngym.agents.executor.worker_count import AnyWorkers, AutoWorkers, PlayWorkload, RayActors, StartedWorkers
from turngym.agents.playing.agent import Agent, ConcurrentAgent, Conversation
from turngym.agents.playing.rollout import Job, MakeEnv, PlayJobs, RolloutSettings, rollout
from turngym.agents.playing.timed_calls import STEP_TIMEOUT
from turngym.core.episode import Episode

T = TypeVar("T")


@contextmanager
def open_workers(options: AnyWorkers, workload: PlayWorkload | None = None) -> Iterator[PlayJobs]:
    """Open a function that plays jobs as `rollout` does; its workers end with the context. `auto` uses `workload`."""
    choice = options.count(workload or PlayWorkload(episodes=0))
    if not choice.workers:
        yield partial(rollout, step_timeout=options.step_timeout)
        return
    from turngym.agents.executor.parallel import ParallelRollout, ParallelWherePossible
    from turngym.agents.executor.processes import LocalWorkers, Workers

    assert isinstance(options, StartedWorkers)
    chosen_here = isinstance(options, AutoWorkers)
    if chosen_here:
        print(f"episodes are played by {choice}; --workers 0: by this process", file=sys.stderr)
    workers: Workers
    if isinstance(options, RayActors):
        from turngym.agents.executor.ray_cluster import RayWorkers

        workers = RayWorkers(
            choice.workers, address=options.ray_address, cpus=options.worker_cpus, gpus=options.worker_gpus
        )
    else:
        workers = LocalWorkers(choice.workers)
    kind = ParallelWherePossible if chosen_here else ParallelRollout
    play = kind(
        workers,
        retries=options.retries,
        patience=options.worker_timeout,
        step_timeout=options.step_timeout,
        # numbers stay the same from run to run for users who did not ask for workers
        fixed_shares=chosen_here,
    )
    try:
        yield play
    finally:
        play.close()


class CancellableRollout:
    """A rollout in this process that another thread can cancel. Called like `rollout`."""

    def __init__(self, step_timeout: float = STEP_TIMEOUT) -> None:
        self._cancelled, self._step_timeout = threading.Event(), step_timeout

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        """Play `jobs`; see `rollout`. Raises ExecutorError before the next round of answers after `cancel`."""
        options.setdefault("step_timeout", self._step_timeout)
        return rollout(jobs, make_env, _CancellableAgent(agent, self._cancelled), **options)

    def cancel(self) -> None:
        """Make the rollout of another thread, and every later one, end with ExecutorError."""
        self._cancelled.set()


class _CancellableAgent:
    """An agent that raises instead of answering once the rollout is cancelled."""

    def __init__(self, agent: Agent, cancelled: threading.Event) -> None:
        self.name, self.writer, self.release = agent.name, agent.writer, agent.release
        self._cancelled = cancelled
        self.respond = self._unless_cancelled(agent.respond)
        if isinstance(agent, ConcurrentAgent):
            self.submit = self._unless_cancelled(agent.submit)

    def _unless_cancelled(self, answer: Callable[[Sequence[Conversation]], T]) -> Callable[[Sequence[Conversation]], T]:
        def checked(waiting: Sequence[Conversation]) -> T:
            if self._cancelled.is_set():
                raise ExecutorError("the rollout was cancelled")
            return answer(waiting)

        return checked
