"""A rollout in this process that another thread can cancel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Unpack

from turngym.agents.agent import Agent, Conversation, Reply, ResponseWriter
from turngym.agents.episode_runner import Job
from turngym.agents.executor.core import ExecutorError
from turngym.agents.rollout import MakeEnv, RolloutSettings, rollout
from turngym.envs.episode import Episode


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
