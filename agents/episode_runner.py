"""Runs one episode: the job that describes it, its state while it is played, and the finished record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.agent import Conversation, Reply, reset_seed
from turngym.agents.rendering.memory import PastTurn, without
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.shown import Ids, Shown
from turngym.envs.core import EnvBackendError, Task, TaskError, Verdict
from turngym.envs.episode import SHORT, Episode, Status, Turn
from turngym.envs.guard import ActionGuard, guard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One episode to play."""

    task_id: str
    sample: int = 0
    """0-based number of this attempt at the task."""
    group: int = 0
    """Attempts that are compared with each other share it."""
    seed: int = 0
    sha256: str = ""
    """What the task's hash must be; empty: not checked."""
    demonstration: tuple[str | Shown, ...] = ()
    """Actions, or turns in the agent's own ids, that are replayed first (origin `demonstration`); the agent plays the
    rest."""
    begun: Ids = ()
    """Ids with which the agent's first response begins, after the demonstration; it goes on from them."""
    max_turns: int | None = None
    """A depth cap of its own in place of the rollout's; the episode says so in `meta`."""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner:
    """An episode in progress."""

    number: int
    """Number of the job."""
    job: Job
    env: Any
    """What is stepped: the guard, or whatever wraps it."""
    guard: ActionGuard
    conversation: Conversation
    turns: list[Turn] = field(default_factory=list)
    episode_return: float = 0.0
    success: bool = False
    score: float = 0.0
    goal_rate: float | None = None
    """Share of goal conditions met, where the environment tells."""
    status: Status | None = None
    """None while the episode runs."""
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)

    def step(self, reply: Reply, max_turns: int | None = None) -> None:
        """Hand `reply` to the environment and record the turn; `max_turns`: the depth cap of jobs without their own."""
        max_turns = self.job.max_turns or max_turns
        if reply.ends is not None:
            self.status, self.error = reply.ends, reply.error
            if reply.logprobs is not None:
                self.turns.append(
                    replace(_turn(self.conversation, reply, _info_of_aborted(self), 0.0), excluded="broken off")
                )
            return
        start = time.perf_counter()
        try:
            observation, reward, terminated, truncated, info = self.env.step(reply.text)
        except EnvBackendError as error:
            self.status, self.error = Status.ERROR_ENV, str(error)
            return
        self.timings["env"] += time.perf_counter() - start
        self.record(reply, observation, float(reward), info)
        if terminated:
            self.status = Status.COMPLETED
        elif truncated:
            self.status = Status.TRUNCATED_TURNS
        elif max_turns is not None and self.conversation.turn >= max_turns:
            self.status = Status.TRUNCATED_DEPTH

    def record(self, reply: Reply, observation: str, reward: float, info: Mapping[str, Any]) -> None:
        """Add the turn that `reply` made, and what waits next."""
        conversation = self.conversation
        self.turns.append(_turn(conversation, reply, info, reward))
        self.episode_return += reward
        self.success, self.score = bool(info["success"]), float(info["score"])
        self.goal_rate = info.get("goal_rate")
        admissible = info["admissible_actions"]
        conversation.past.append(
            PastTurn(
                observation=conversation.observation,
                response=reply.text,
                action=self.turns[-1].action,
                listing=conversation.listing,
                channel=conversation.channel,
            )
        )
        conversation.observation, conversation.listing = observation, self.guard.listing()
        conversation.admissible = None if admissible is None else tuple(admissible)
        conversation.played = self.turns[-1].action if self.turns[-1].verdict.valid else None
        conversation.turn += 1

    def episode(self, meta: Mapping[str, Any]) -> Episode:
        """The finished record."""
        assert self.status is not None
        conversation, job = self.conversation, self.job
        extra: dict[str, Any] = {"error": self.error} if self.error else {}
        if self.goal_rate is not None:
            extra["goal_rate"] = float(self.goal_rate)
        if job.max_turns is not None:
            extra[SHORT] = job.max_turns
        extra |= conversation.notes
        return Episode(
            task=conversation.task,
            seed=job.seed,
            sample=job.sample,
            group=job.group,
            segments=_segments(self),
            turns=tuple(self.turns),
            status=self.status,
            success=self.success,
            episode_return=self.episode_return,
            score=self.score,
            system=conversation.system,
            final_observation=conversation.observation,
            timings=self.timings,
            meta={**meta, **extra},
        )


def begin(env: Any, job: Job, *, number: int = 0, system: str | None, renderer: ChatRenderer | None) -> EpisodeRunner:
    """Reset `env` to the job's task; the first observation waits for an answer.

    `system` None: the environment's instructions, and the channel's where the renderer's template does not give them.
    Raises EnvBackendError where the environment fails, TaskError where the task is not the one that the job means.
    """
    guard = guard_of(env)
    start = time.perf_counter()
    observation, _ = env.reset(seed=reset_seed(job.task_id, job.seed), options={"task": job.task_id})
    task = guard.task
    if job.sha256 not in ("", task.sha256):
        raise TaskError(
            f"{task.env_id}: task {task.task_id!r} has sha256 {task.sha256} here, but {job.sha256} is asked for; "
            "the data differ from those that the list of tasks was made from"
        )
    listing = guard.listing()
    conversation = Conversation(
        task=task,
        seed=job.seed,
        sample=job.sample,
        system=_system_text(guard, renderer) if system is None else system,
        observation=observation,
        admissible=guard.admissible(),
        env=guard,
        key=f"{number}:{task.task_id}:{job.sample}",
        statement=guard.base.statement or without(observation, listing),
        listing=listing,
    )
    timings = {"env": time.perf_counter() - start, "generate": 0.0}
    return EpisodeRunner(number=number, job=job, env=env, guard=guard, conversation=conversation, timings=timings)


def failed_episode(
    job: Job, env_id: str, error: object, meta: Mapping[str, Any], status: Status = Status.ERROR_ENV
) -> Episode:
    """The record of an episode of which nothing is known but why it failed, by default before its first observation."""
    return Episode(
        task=Task(env_id=env_id, task_id=job.task_id, sha256="", split="", category=""),
        seed=job.seed,
        sample=job.sample,
        group=job.group,
        segments=(),
        turns=(),
        status=status,
        success=False,
        episode_return=0.0,
        meta={**meta, "error": str(error)},
    )


def _system_text(guard: ActionGuard, renderer: ChatRenderer | None) -> str:
    if guard.channel is None or (renderer is not None and renderer.describes_tool):
        return guard.instructions
    return f"{guard.instructions}\n\n{guard.channel.instructions(guard.tool)}"


def _segments(runner: EpisodeRunner) -> tuple[NDArray[np.int32], ...]:
    """Ids up to the last response that became a turn: a prompt without a response is left out."""
    history = runner.conversation.thread
    if history is None or not runner.turns:
        return ()
    ends = {turn.segment: turn.response_span[1] for turn in runner.turns}
    return tuple(buffer.array()[: ends[number]] for number, buffer in enumerate(history.segments[: max(ends) + 1]))


def _info_of_aborted(runner: EpisodeRunner) -> Mapping[str, Any]:
    """Stands in for `info` where a response was aborted: the environment was never given it."""
    return {"action": None, "verdict": Verdict.MALFORMED, "score": runner.score, "goal_rate": runner.goal_rate}


def _turn(conversation: Conversation, reply: Reply, info: Mapping[str, Any], reward: float) -> Turn:
    history = conversation.thread
    goals = info.get("goal_rate")
    return Turn(
        index=conversation.turn,
        observation=conversation.observation,
        admissible=conversation.admissible,
        response=reply.text,
        action=info["action"],
        verdict=Verdict(info["verdict"]),
        reward=reward,
        progress=float(info["score"] if goals is None else goals),
        segment=0 if history is None else history.segment,
        prompt_span=(0, 0) if history is None else history.prompt_span,
        response_span=(0, 0) if history is None else history.response_span,
        logprobs=reply.logprobs,
        finish=reply.finish,
        policy_version=reply.policy_version,
        version_spans=reply.version_spans,
        origin=reply.origin,
        begun=reply.begun,
    )
