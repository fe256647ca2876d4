"""A rollout in this process that another thread can cancel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

from turngym.agents.executor.options import WorkerOptions, Workload
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.processes import ExecutorError, LocalWorkers, Workers
from turngym.agents.executor.ray_cluster import RayWorkers
from turngym.agents.playing.agent import Agent, Conversation, Reply, ResponseWriter
from turngym.agents.playing.rollout import Job, MakeEnv, PlayJobs, RolloutSettings, rollout
from turngym.envs.core.episode import Episode


class CancellableRollout:
    """Called like `rollout`; after `cancel` it ends with ExecutorError before the next round of answers."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        """Play `jobs`; see `rollout`."""
        cancellable = _CancellableAgent(agent, self._cancelled)
        return rollout(jobs, make_env, cancellable, **options)

    def cancel(self) -> None:
        """Make the rollout of another thread, and every later one, end with ExecutorError."""
        self._cancelled.set()


class _CancellableAgent:
    """An agent that raises instead of answering once the rollout is cancelled."""

    def __init__(self, agent: Agent, cancelled: threading.Event) -> None:
        self._agent = agent
        self._cancelled = cancelled

    @property
    def name(self) -> str:
        return self._agent.name

    @property
    def writer(self) -> ResponseWriter:
        return self._agent.writer

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        if self._cancelled.is_set():
            raise ExecutorError("the rollout was cancelled")
        return self._agent.respond(waiting)

    def release(self, conversation: Conversation) -> None:
        self._agent.release(conversation)


# Where episodes are played: in this process, in several on this machine, or on a Ray cluster.


@contextmanager
def open_workers(options: WorkerOptions, playing: Workload | None = None) -> Iterator[PlayJobs]:
    """What plays jobs as `rollout` does; its workers end with the context. `auto` goes by `playing`."""
    choice = options.choice(playing or Workload(episodes=0))
    if not choice.workers:
        yield rollout
        return
    unasked = options.workers == "auto"
    if unasked:
        print(f"episodes are played by {choice}; --workers 0: by this process", file=sys.stderr)
    workers: Workers
    if options.executor == "ray":
        workers = RayWorkers(
            choice.workers, address=options.ray_address, cpus=options.worker_cpus, gpus=options.worker_gpus
        )
    else:
        workers = LocalWorkers(choice.workers)
    play = ParallelRollout(workers, retries=options.retries, fixed_shares=unasked)
    try:
        yield play
    finally:
        play.close()
