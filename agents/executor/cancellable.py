"""A rollout in this process that another thread may break off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from turngym.agents.agent import Agent, Conversation, Reply, ResponseWriter
from turngym.agents.episode_runner import Job
from turngym.agents.executor.core import ExecutorError
from turngym.agents.rollout import MakeEnv, rollout
from turngym.envs.episode import Episode


class CancellableRollout:
    """Called like `rollout`; after `cancel` it ends with ExecutorError before the next round of answers."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

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
        watched = _Watched(agent, self._cancelled)
        return rollout(jobs, make_env, watched, slots, max_turns, on_episode, system, meta)

    def cancel(self) -> None:
        """End the run of another thread, and every later one."""
        self._cancelled.set()


class _Watched:
    """An agent that answers until it is told to stop."""

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
