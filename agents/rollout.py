"""The rollout: many independent episodes over a pool of environments, with responses generated in batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from turngym.agents.agent import Agent, AgentError, Reply
from turngym.agents.episode_runner import EpisodeRunner, Job, begin, failed_episode
from turngym.envs.core import EnvBackendError
from turngym.envs.episode import Episode, Status
from turngym.envs.guard import guard_of

__all__ = ["SLOTS", "Job", "MakeEnv", "PlayJobs", "Rollout", "RolloutSettings", "rollout"]

MakeEnv = Callable[[], Any]
"""Makes one environment: an `ActionGuard`, alone or inside wrappers."""


SLOTS = 64
"""Episodes that are played at the same time, where the caller does not say."""


class RolloutSettings(TypedDict, total=False):
    """Keyword options of every rollout; all may be left out."""

    slots: int
    """Most episodes that are played at the same time."""
    max_turns: int | None
    """Depth cap: an episode that reaches it ends as `truncated_depth`. None: only the environment's own limit."""
    on_episode: Callable[[Episode], None] | None
    """Called in the caller's process as each episode finishes."""
    system: str | None
    """The system message. None: the environment's instructions, and the channel's."""
    meta: dict[str, Any] | None
    """Added to every episode's `meta`."""


class PlayJobs(Protocol):
    """A function that plays jobs: `rollout` in this process, `executor.ParallelRollout` in worker processes."""

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
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
        slots: int = SLOTS,
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
        self._max_turns = max_turns
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
        return [done[number] for number in range(len(jobs))]

    def advance(self, waiting: deque[tuple[int, Job]]) -> list[tuple[int, Episode]]:
        """Begin what fits of `waiting` (numbered jobs, taken from the left) and play one round of everything begun.

        Returns the numbers and episodes that finished. Numbers must differ among all that is being played. After an
        exception only `abandon` may be called.
        """
        done: list[tuple[int, Episode]] = []
        while waiting and len(self._active) < self._slots:
            number, job = waiting.popleft()
            runner = self._begin(number, job)
            if isinstance(runner, Episode):
                self._finish(runner, done, number)
            else:
                self._active.append(runner)
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
        for runner in self._active:
            self._agent.release(runner.conversation)
            runner.env.close()
        self._active = []
        self.close()

    def close(self) -> None:
        """Close every environment of the pool."""
        while self._idle:
            self._idle.pop().close()

    def _begin(self, number: int, job: Job) -> EpisodeRunner | Episode:
        env = self._idle.pop() if self._idle else self._make_env()
        try:
            return begin(env, job, number=number, system=self._system, renderer=self._agent.writer.renderer)
        except EnvBackendError as error:
            env.close()
            return failed_episode(job, guard_of(env).env_id, error, self._meta)

    def _round(self, active: list[EpisodeRunner], done: list[tuple[int, Episode]]) -> list[EpisodeRunner]:
        """One turn for everything that waits; what goes on."""
        replies = self._answer(active)
        continuing: list[EpisodeRunner] = []
        for runner, reply in zip(active, replies, strict=True):
            runner.step(reply, self._max_turns)
            if runner.status is None:
                continuing.append(runner)
                continue
            self._agent.release(runner.conversation)
            if runner.status is Status.ERROR_ENV:
                runner.env.close()
            else:
                self._idle.append(runner.env)
            self._finish(runner.episode(self._meta), done, runner.number)
        return continuing

    def _answer(self, active: list[EpisodeRunner]) -> list[Reply]:
        waiting = [runner for runner in active if runner.conversation.turn >= len(runner.job.demonstration)]
        for runner in waiting:
            first = runner.conversation.turn == len(runner.job.demonstration)
            runner.conversation.begun = runner.job.begun if first else ()
        start = time.perf_counter()
        generated = self._agent.respond([runner.conversation for runner in waiting]) if waiting else []
        if len(generated) != len(waiting):
            raise AgentError(f"agent {self._agent.name!r} answered {len(generated)} of {len(waiting)} conversations")
        answers = iter(generated)
        seconds_each = (time.perf_counter() - start) / max(len(waiting), 1)
        replies = []
        for runner in active:
            turn = runner.conversation.turn
            if turn < len(runner.job.demonstration):
                replies.append(self._shown(runner, turn))
            else:
                runner.timings["generate"] += seconds_each
                replies.append(next(answers))
        return replies

    def _shown(self, runner: EpisodeRunner, turn: int) -> Reply:
        """A turn of the job's demonstration."""
        shown, writer = runner.job.demonstration[turn], self._agent.writer
        if isinstance(shown, str):
            return writer.write(runner.conversation, shown, "demonstration")
        return writer.show(runner.conversation, shown)

    def _finish(self, episode: Episode, done: list[tuple[int, Episode]], number: int) -> None:
        done.append((number, episode))
        if self._on_episode is not None:
            self._on_episode(episode)


def rollout(jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]) -> list[Episode]:
    """Play `jobs` and close the environments; see `Rollout`, which keeps them open between calls."""
    driver = Rollout(make_env, agent, **options)
    try:
        return driver.run(jobs)
    finally:
        driver.close()
