"""The rollout driver: many independent episodes over a pool of environments, answered in batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from turngym.agents.agent import Agent, AgentError, Reply
from turngym.agents.episode_runner import EpisodeRunner, Job, begin, failed_episode
from turngym.envs.core import EnvBackendError
from turngym.envs.episode import Episode, Status
from turngym.envs.guard import guard_of

__all__ = ["Job", "MakeEnv", "PlayJobs", "Rollout", "rollout"]

MakeEnv = Callable[[], Any]
"""Makes one environment: an `ActionGuard`, alone or inside wrappers."""


class PlayJobs(Protocol):
    """Whoever plays jobs: `rollout` in this process, or `executor.ParallelRollout` in others."""

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
        """Episodes in the order of the jobs; `on_episode` is called in this process as each one finishes."""


class Rollout:
    """Plays jobs in `slots` environments. Episodes depend on their job alone, not on slots, order or batch.

    Every round, all conversations that wait are answered together, then each environment takes its step; finished
    episodes leave and the next jobs take their places. Environments are made when first needed and used again.

    - the environment's limit of turns: `truncated_turns`; the depth cap `max_turns`: `truncated_depth` (the turn at the
      cap is finished first); a full context: `truncated_tokens`
    - EnvBackendError: `error_env` with the turns so far, and a fresh environment in that slot
    - what the agent reports: `error_engine`, `error_timeout`; every other exception is a mistake and propagates

    `on_episode` is called as each episode finishes, so what is finished is kept when a run is interrupted.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        agent: Agent,
        *,
        slots: int = 64,
        max_turns: int | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        system: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        if slots < 1:
            raise AgentError(f"slots is {slots}; at least 1 episode must be played at a time")
        if max_turns is not None and max_turns < 1:
            raise AgentError(f"max_turns is {max_turns}; the depth cap must be at least 1, or None for no cap")
        self._make_env = make_env
        self._agent = agent
        self._slots = slots
        self._cap = max_turns
        self._on_episode = on_episode
        self._system = system
        self._meta = {"agent": agent.name, **(meta or {})}
        self._idle: list[Any] = []
        self._active: list[EpisodeRunner] = []

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play every job; episodes in the order of the jobs. Environments stay open for the next call."""
        waiting = deque(enumerate(jobs))
        done: dict[int, Episode] = {}
        try:
            while waiting or self._active:
                done.update(self.advance(waiting))
        except BaseException:
            self.abandon()
            raise
        return [done[place] for place in range(len(jobs))]

    def advance(self, waiting: deque[tuple[int, Job]]) -> list[tuple[int, Episode]]:
        """Begin what fits of `waiting` (numbered jobs, taken from the left) and play one round of everything begun.

        Returns the numbers and episodes that finished. Numbers must differ among all that is being played. After an
        exception only `abandon` may be called.
        """
        done: list[tuple[int, Episode]] = []
        while waiting and len(self._active) < self._slots:
            place, job = waiting.popleft()
            play = self._begin(place, job)
            if isinstance(play, Episode):
                self._finish(play, done, place)
            else:
                self._active.append(play)
        if self._active:
            self._active = self._round(self._active, done)
        return done

    @property
    def playing(self) -> int:
        """Episodes that have begun and not ended."""
        return len(self._active)

    def abandon(self) -> None:
        """Give up every episode in progress and close every environment."""
        # Which of these already went back to the pool is unknown: none may be used again.
        for play in self._active:
            self._agent.release(play.conversation)
            play.env.close()
        self._active = []
        self.close()

    def close(self) -> None:
        """Close every environment of the pool."""
        while self._idle:
            self._idle.pop().close()

    def _begin(self, place: int, job: Job) -> EpisodeRunner | Episode:
        env = self._idle.pop() if self._idle else self._make_env()
        try:
            return begin(env, job, place=place, system=self._system, renderer=self._agent.writer.renderer)
        except EnvBackendError as error:
            env.close()
            return failed_episode(job, guard_of(env).env_id, error, self._meta)

    def _round(self, active: list[EpisodeRunner], done: list[tuple[int, Episode]]) -> list[EpisodeRunner]:
        """One turn for everything that waits; what goes on."""
        replies = self._answer(active)
        going: list[EpisodeRunner] = []
        for play, reply in zip(active, replies, strict=True):
            play.take(reply, self._cap)
            if play.status is None:
                going.append(play)
                continue
            self._agent.release(play.conversation)
            if play.status is Status.ERROR_ENV:
                play.env.close()
            else:
                self._idle.append(play.env)
            self._finish(play.episode(self._meta), done, play.place)
        return going

    def _answer(self, active: list[EpisodeRunner]) -> list[Reply]:
        waiting = [play for play in active if play.conversation.turn >= len(play.job.demonstration)]
        start = time.perf_counter()
        replied = self._agent.respond([play.conversation for play in waiting]) if waiting else []
        if len(replied) != len(waiting):
            raise AgentError(f"agent {self._agent.name!r} answered {len(replied)} of {len(waiting)} conversations")
        answers = iter(replied)
        share = (time.perf_counter() - start) / max(len(waiting), 1)
        replies = []
        for play in active:
            turn = play.conversation.turn
            if turn < len(play.job.demonstration):
                replies.append(
                    self._agent.writer.write(play.conversation, play.job.demonstration[turn], "demonstration")
                )
            else:
                play.timings["generate"] += share
                replies.append(next(answers))
        return replies

    def _finish(self, episode: Episode, done: list[tuple[int, Episode]], place: int) -> None:
        done.append((place, episode))
        if self._on_episode is not None:
            self._on_episode(episode)


def rollout(
    jobs: Sequence[Job],
    make_env: MakeEnv,
    agent: Agent,
    slots: int = 64,
    max_turns: int | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    system: str | None = None,
    meta: dict[str, Any] | None = None,
) -> list[Episode]:
    """Play `jobs` and close the environments; see `Rollout`, which keeps them open between calls."""
    driver = Rollout(make_env, agent, slots=slots, max_turns=max_turns, on_episode=on_episode, system=system, meta=meta)
    try:
        return driver.run(jobs)
    finally:
        driver.close()
