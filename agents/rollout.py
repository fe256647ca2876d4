"""The rollout driver: many independent episodes over a pool of environments, answered in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.agent import Agent, AgentError, Conversation, Reply, reset_seed
from turngym.envs.core import EnvBackendError, Task, Verdict
from turngym.envs.episode import Episode, Status, Turn
from turngym.envs.guard import ActionGuard, guard_of

MakeEnv = Callable[[], Any]
"""Makes one environment: an `ActionGuard`, alone or inside wrappers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One episode to play."""

    task_id: str
    sample: int = 0
    """0-based number of this attempt at the task."""
    group: int = 0
    """Attempts that are compared with each other share it."""
    seed: int = 0
    demonstration: tuple[str, ...] = ()
    """Actions that are replayed first (origin `demonstration`); the agent plays the rest."""


@dataclass(slots=True)
class _Play:
    """An episode in progress."""

    place: int
    job: Job
    env: Any
    guard: ActionGuard
    talk: Conversation
    turns: list[Turn] = field(default_factory=list)
    ret: float = 0.0
    success: bool = False
    score: float = 0.0
    status: Status | None = None
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)


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

    def run(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play every job; episodes in the order of the jobs. Environments stay open for the next call."""
        done: list[Episode | None] = [None] * len(jobs)
        active: list[_Play] = []
        following = 0
        try:
            while active or following < len(jobs):
                while following < len(jobs) and len(active) < self._slots:
                    play = self._begin(following, jobs[following])
                    following += 1
                    if isinstance(play, Episode):
                        self._finish(play, done, following - 1)
                    else:
                        active.append(play)
                active = self._round(active, done)
        except BaseException:
            # Which of these already went back to the pool is unknown: none may be used again.
            for play in active:
                self._agent.release(play.talk)
                play.env.close()
            self.close()
            raise
        return [episode for episode in done if episode is not None]

    def close(self) -> None:
        """Close every environment of the pool."""
        while self._idle:
            self._idle.pop().close()

    def _begin(self, place: int, job: Job) -> _Play | Episode:
        env = self._idle.pop() if self._idle else self._make_env()
        guard = guard_of(env)
        start = time.perf_counter()
        try:
            observation, _ = env.reset(seed=reset_seed(job.task_id, job.seed), options={"task": job.task_id})
        except EnvBackendError as error:
            env.close()
            return self._stillborn(job, guard, error)
        task = guard.task
        talk = Conversation(
            task=task,
            seed=job.seed,
            sample=job.sample,
            system=self._system_text(guard),
            observation=observation,
            admissible=guard.admissible(),
            env=guard,
            key=f"{place}:{task.task_id}:{job.sample}",
        )
        play = _Play(place, job, env, guard, talk)
        play.timings = {"env": time.perf_counter() - start, "generate": 0.0}
        return play

    def _system_text(self, guard: ActionGuard) -> str:
        if self._system is not None:
            return self._system
        renderer = self._agent.scribe.renderer
        if guard.channel is None or (renderer is not None and renderer.describes_tool):
            return guard.instructions
        return f"{guard.instructions}\n\n{guard.channel.instructions(guard.tool)}"

    def _stillborn(self, job: Job, guard: ActionGuard, error: Exception) -> Episode:
        task = Task(env_id=guard.env_id, task_id=job.task_id, sha256="", split="", category="")
        return Episode(
            task=task,
            seed=job.seed,
            sample=job.sample,
            group=job.group,
            segments=(),
            turns=(),
            status=Status.ERROR_ENV,
            success=False,
            ret=0.0,
            meta={**self._meta, "error": str(error)},
        )

    def _round(self, active: list[_Play], done: list[Episode | None]) -> list[_Play]:
        """One turn for everything that waits; what goes on."""
        replies = self._answer(active)
        going: list[_Play] = []
        for play, reply in zip(active, replies, strict=True):
            self._take(play, reply)
            if play.status is None:
                going.append(play)
                continue
            self._agent.release(play.talk)
            if play.status is Status.ERROR_ENV:
                play.env.close()
            else:
                self._idle.append(play.env)
            self._finish(self._episode(play), done, play.place)
        return going

    def _answer(self, active: list[_Play]) -> list[Reply]:
        waiting = [play for play in active if play.talk.turn >= len(play.job.demonstration)]
        start = time.perf_counter()
        replied = self._agent.respond([play.talk for play in waiting]) if waiting else []
        if len(replied) != len(waiting):
            raise AgentError(f"agent {self._agent.name!r} answered {len(replied)} of {len(waiting)} conversations")
        answers = iter(replied)
        share = (time.perf_counter() - start) / max(len(waiting), 1)
        replies = []
        for play in active:
            turn = play.talk.turn
            if turn < len(play.job.demonstration):
                replies.append(self._agent.scribe.write(play.talk, play.job.demonstration[turn], "demonstration"))
            else:
                play.timings["generate"] += share
                replies.append(next(answers))
        return replies

    def _take(self, play: _Play, reply: Reply) -> None:
        """Hand one reply to the environment and record the turn."""
        if reply.ends is not None:
            play.status, play.error = reply.ends, reply.error
            return
        start = time.perf_counter()
        try:
            observation, reward, terminated, truncated, info = play.env.step(reply.text)
        except EnvBackendError as error:
            play.status, play.error = Status.ERROR_ENV, str(error)
            return
        play.timings["env"] += time.perf_counter() - start
        play.turns.append(_turn(play.talk, reply, info, float(reward)))
        play.ret += float(reward)
        play.success, play.score = bool(info["success"]), float(info["score"])
        admissible = info["admissible_actions"]
        talk = play.talk
        talk.observation, talk.admissible = observation, None if admissible is None else tuple(admissible)
        talk.turn += 1
        if terminated:
            play.status = Status.COMPLETED
        elif truncated:
            play.status = Status.TRUNCATED_TURNS
        elif self._cap is not None and talk.turn >= self._cap:
            play.status = Status.TRUNCATED_DEPTH

    def _episode(self, play: _Play) -> Episode:
        assert play.status is not None
        talk, job = play.talk, play.job
        meta = dict(self._meta)
        if play.error:
            meta["error"] = play.error
        goal_rate = getattr(play.guard.base, "goal_rate", None)
        if goal_rate is not None and play.status is not Status.ERROR_ENV:
            meta["goal_rate"] = float(goal_rate)
        return Episode(
            task=talk.task,
            seed=job.seed,
            sample=job.sample,
            group=job.group,
            segments=_segments(play),
            turns=tuple(play.turns),
            status=play.status,
            success=play.success,
            ret=play.ret,
            score=play.score,
            system=talk.system,
            final_observation=talk.observation,
            timings=play.timings,
            meta=meta,
        )

    def _finish(self, episode: Episode, done: list[Episode | None], place: int) -> None:
        done[place] = episode
        if self._on_episode is not None:
            self._on_episode(episode)


def rollout(
    jobs: Sequence[Job],
    make_env: MakeEnv,
    agent: Agent,
    slots: int = 64,
    max_turns: int | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    **options: Any,
) -> list[Episode]:
    """Play `jobs` and close the environments; see `Rollout`, which keeps them open between calls."""
    driver = Rollout(make_env, agent, slots=slots, max_turns=max_turns, on_episode=on_episode, **options)
    try:
        return driver.run(jobs)
    finally:
        driver.close()


def _segments(play: _Play) -> tuple[NDArray[np.int32], ...]:
    """Ids up to the last response that became a turn: a prompt that was never answered is nobody's."""
    thread = play.talk.thread
    if thread is None or not play.turns:
        return ()
    ends = {turn.segment: turn.response_span[1] for turn in play.turns}
    return tuple(buffer.array()[: ends[number]] for number, buffer in enumerate(thread.segments[: max(ends) + 1]))


def _turn(talk: Conversation, reply: Reply, info: dict[str, Any], reward: float) -> Turn:
    thread = talk.thread
    return Turn(
        index=talk.turn,
        observation=talk.observation,
        admissible=talk.admissible,
        response=reply.text,
        action=info["action"],
        verdict=Verdict(info["verdict"]),
        reward=reward,
        segment=0 if thread is None else thread.segment,
        prompt_span=(0, 0) if thread is None else thread.prompt_span,
        response_span=(0, 0) if thread is None else thread.response_span,
        logprobs=reply.logprobs,
        finish=reply.finish,
        policy_version=reply.policy_version,
        origin=reply.origin,
    )
