"""How episodes are played: many independent jobs over a pool of environments, answered in batches or each by itself.

`Job` describes one episode, `EpisodeRunner` is the episode while it is played, `Rollout` plays many at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypedDict, Unpack

from turngym.agents.playing.agent import (
    Agent,
    ConcurrentAgent,
    Conversation,
    Reply,
    ResponseWriter,
    reset_seed,
    system_message,
)
from turngym.agents.playing.timed_calls import STEP_TIMEOUT, CallResult, TimedCalls, attempt, close_all
from turngym.agents.rendering.memory import PastTurn, without
from turngym.agents.rendering.renderer import ChatRenderer, Ids, Shown
from turngym.core.episode import LENIENT, SHORT, Episode, Status, Turn
from turngym.core.errors import AgentError, TaskError
from turngym.core.loops import loop_end
from turngym.core.plugin_values import (
    StepResult,
    answers,
    checked_number,
    checked_task,
    checked_text,
    checked_texts,
    failures_of,
)
from turngym.core.progress import ACTIVITY
from turngym.core.redaction import brief, excerpt
from turngym.core.task import Task, Verdict
from turngym.envs.guard import ActionGuard, guard_of

MakeEnv = Callable[[], Any]
"""Makes one environment: an `ActionGuard`, alone or inside wrappers."""
SLOTS = 64
"""Default number of episodes that are played at the same time."""
LISTEN = 1.0
"""Seconds that a round waits for the first answer of a `ConcurrentAgent`. Workers give a sign of life in between."""
STATES = "states"
"""Key in `meta` of an episode whose job asked for it: the hash of the environment's state before each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One episode to play."""

    task_id: str
    sample: int = 0
    """0-based number of this attempt at the task."""
    group: int = 0
    """Attempts that are compared with each other have the same group."""
    seed: int = 0
    sha256: str = ""
    """Required hash of the task; empty if it is not checked."""
    demonstration: tuple[str | Shown, ...] = ()
    """Actions, or turns in the agent's own ids, that are replayed first (origin `demonstration`); the agent plays the
    rest."""
    begun: Ids = ()
    """Ids with which the agent's first response after the demonstration begins; the agent continues them."""
    max_turns: int | None = None
    """This job's own depth cap, which overrides the rollout's and is recorded in the episode's `meta`."""
    leave_loops: bool = False
    """The episode ends where it begins to loop, as if that turn were its depth cap."""
    states: bool = False
    """Note `state_hash` before every turn; `STATES` in the episode's `meta`."""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner:
    """An episode in progress."""

    number: int
    """Number of the job."""
    job: Job
    env: Any
    """The environment that is stepped: the guard, or a wrapper around it."""
    guard: ActionGuard
    conversation: Conversation
    turns: list[Turn] = field(default_factory=list)
    episode_return: float = 0.0
    success: bool = False
    score: float = 0.0
    goal_rate: float | None = None
    """Share of goal conditions met, if the environment reports it."""
    answer_f1: float | None = None
    """F1 of the answer, if the environment asks for one."""
    status: Status | None = None
    """None while the episode runs."""
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    left_loop: bool = False
    """Whether it ended because it looped."""

    def step(self, text: str) -> Any:
        """What the environment's step with `text` returns, for `take`; may hang or raise."""
        if self.job.states:
            self.states.append(state_hash(self.guard))
        return self.env.step(text)

    def take(self, reply: Reply, stepped: CallResult | None, max_turns: int | None = None) -> None:
        """Record `reply` and what the environment's step with it gave; None if `reply` ends the episode.

        `max_turns` caps jobs without a cap of their own.
        """
        max_turns = self.job.max_turns or max_turns
        if stepped is None:
            assert reply.ends is not None
            self.status, self.error = reply.ends, reply.error
            # an aborted response is recorded although the environment never sees it
            if reply.logprobs is not None:
                progress = self.score if self.goal_rate is None else self.goal_rate
                turn = _turn(self.conversation, reply, None, Verdict.MALFORMED, 0.0, progress)
                self.turns.append(replace(turn, excluded="broken off"))
            return
        self.timings["env"] += stepped.seconds
        if stepped.failure:
            self.status, self.error = stepped.status, stepped.failure
            return
        # what an environment returns is as little known as what it raises
        recorded = attempt(lambda: self._record(reply, StepResult.of(stepped.value)))
        if recorded.failure:
            self.status, self.error = Status.ERROR_ENV, recorded.failure
            return
        terminated, truncated = recorded.value
        if terminated:
            self.status = Status.COMPLETED
        elif truncated:
            self.status = Status.TRUNCATED_TURNS
        elif max_turns is not None and self.conversation.turn >= max_turns:
            self.status = Status.TRUNCATED_DEPTH
        elif self.job.leave_loops and loop_end(self.turns) is not None:
            self.status, self.left_loop = Status.TRUNCATED_DEPTH, True

    def _record(self, reply: Reply, stepped: StepResult) -> tuple[bool, bool]:
        """Record the turn that `reply` made and the observation that waits next; (terminated, truncated)."""
        conversation = self.conversation
        total = checked_number("the sum of rewards", self.episode_return + stepped.reward)
        progress = stepped.score if stepped.goal_rate is None else stepped.goal_rate
        turn = _turn(conversation, reply, stepped.action, stepped.verdict, stepped.reward, progress)
        listing = self.guard.listing()
        # nothing below can fail: a turn is recorded whole or not at all
        ACTIVITY.turns += 1
        ACTIVITY.malformed += turn.verdict == Verdict.MALFORMED
        self.turns.append(turn)
        self.episode_return = total
        self.success, self.score, self.goal_rate = stepped.success, stepped.score, stepped.goal_rate
        self.answer_f1 = stepped.answer_f1
        if stepped.reading == "lenient":
            conversation.notes[LENIENT] = conversation.notes.get(LENIENT, 0) + 1
        channel = conversation.channel
        conversation.past.append(
            PastTurn(
                observation=conversation.observation,
                response=reply.text,
                action=turn.action,
                listing=conversation.listing,
                thought=(channel.parse(reply.text).thought or "") if channel is not None else "",
            )
        )
        conversation.observation, conversation.listing = stepped.observation, listing
        conversation.admissible = stepped.admissible
        conversation.played = turn.action if turn.verdict.valid else None
        conversation.turn += 1
        return stepped.terminated, stepped.truncated

    def episode(self, meta: Mapping[str, Any]) -> Episode:
        """The finished record."""
        assert self.status is not None
        conversation, job = self.conversation, self.job
        extra: dict[str, Any] = {"error": self.error} if self.error else {}
        if self.goal_rate is not None:
            extra["goal_rate"] = self.goal_rate
        if self.answer_f1 is not None:
            extra["answer_f1"] = self.answer_f1
        if self.left_loop or job.max_turns is not None:
            extra[SHORT] = len(self.turns) if self.left_loop else job.max_turns
        if job.states:
            extra[STATES] = self.states
        extra |= conversation.notes
        return Episode(
            task=conversation.task,
            seed=job.seed,
            sample=job.sample,
            group=job.group,
            segments=() if conversation.thread is None else conversation.thread.said(self.turns),
            turns=tuple(self.turns),
            status=self.status,
            success=self.success,
            episode_return=self.episode_return,
            score=self.score,
            system=conversation.system,
            final_observation=conversation.observation,
            timings=self.timings,
            meta={**self.guard.base.scoring, **meta, **extra},
        )


def state_hash(guard: ActionGuard) -> str:
    """A hash of everything that playing has changed in the environment: its snapshot without counters of steps, frame
    and random stream. Equal states have equal hashes in every process."""
    state = json.dumps(guard.base.get_state()["inner"], sort_keys=True)
    return hashlib.blake2b(state.encode(), digest_size=8).hexdigest()


def begin(env: Any, job: Job, *, number: int = 0, system: str | None, renderer: ChatRenderer | None) -> EpisodeRunner:
    """Reset `env` to the job's task; the first observation waits for an answer.

    With `system` None the system message is the environment's instructions, and the channel's unless the renderer's
    template gives them. Raises EnvBackendError if the environment fails, TaskError if the task has another hash.

    Args:
        number: of the job; an engine knows the conversation by it, the task and the sample.
    """
    guard = guard_of(env)
    start = time.perf_counter()
    observation, _ = env.reset(seed=reset_seed(job.task_id, job.seed), options={"task": job.task_id})
    task = checked_task(guard.task)
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
        system=system_message(guard, guard.channel, renderer) if system is None else system,
        observation=checked_text("the first observation", observation),
        admissible=checked_texts("the admissible actions", guard.admissible()),
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
    """The record of an episode that failed before its first observation (or whose turns were lost)."""
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


def _turn(
    conversation: Conversation, reply: Reply, action: str | None, verdict: Verdict, reward: float, progress: float
) -> Turn:
    history = conversation.thread
    return Turn(
        index=conversation.turn,
        observation=conversation.observation,
        admissible=conversation.admissible,
        response=reply.text,
        action=action,
        verdict=verdict,
        reward=reward,
        progress=progress,
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


FAILURES = 16
"""A run stops if this many episodes have finished and all of them failed."""


@dataclass(slots=True)
class FailureWatch:
    """An `on_episode` that hands episodes on to `then`, and ends a run whose episodes all fail."""

    then: Callable[[Episode], None]
    succeeded: bool = False
    """Whether any episode did not fail."""
    failures: list[str] = field(default_factory=list)
    """Why the episodes before the first that did not fail failed."""

    def __call__(self, episode: Episode) -> None:
        """Raises AgentError with the first reason where `FAILURES` have failed and none succeeded."""
        self.then(episode)
        self.succeeded = self.succeeded or not episode.status.is_error
        if not self.succeeded:
            self.failures.append(str(episode.meta.get("error", episode.status.value)))
            if len(self.failures) >= FAILURES:
                self.check()

    def check(self) -> None:
        """Called at the end of a run: raises AgentError if all of its episodes failed."""
        if self.failures and not self.succeeded:
            raise AgentError(f"all {len(self.failures)} episodes failed; the first: {self.failures[0]}")


class RolloutSettings(TypedDict, total=False):
    """Keyword options of every rollout; all are optional."""

    slots: int
    """Most episodes that are played at the same time."""
    max_turns: int | None
    """Depth cap: an episode that reaches it ends as `truncated_depth`. None leaves the environment's own limit."""
    on_episode: Callable[[Episode], None] | None
    """Called in the caller's process as each episode finishes."""
    system: str | None
    """The system message; None for the environment's instructions and the channel's."""
    meta: dict[str, Any] | None
    """Added to every episode's `meta`."""
    step_timeout: float
    """Seconds for one step of an environment, or its reset; a longer one ends its episode as `error_timeout`."""


class PlayJobs(Protocol):
    """A function that plays jobs: `rollout` in this process, `executor.ParallelRollout` in worker processes."""

    def __call__(
        self, jobs: Sequence[Job], make_env: MakeEnv, agent: Agent, **options: Unpack[RolloutSettings]
    ) -> list[Episode]:
        """Episodes in the order of the jobs; `on_episode` is called in this process as each one finishes."""


class Rollout:
    """Plays jobs in `slots` environments. Episodes depend on their job alone, not on slots, order or batch.

    In every round all waiting conversations are answered together, then each environment takes its step. With a
    `ConcurrentAgent` a round is the conversations whose answers are there by now: the others stay under way, and none
    is waited for. Finished episodes leave and the next jobs take their places. Environments are made when first needed
    and reused.

    How an episode ends, besides `completed`:

    - `truncated_turns` at the environment's limit of turns, `truncated_depth` at the cap `max_turns` (the turn at the
      cap is finished first), `truncated_tokens` with a full context
    - `error_env` with the turns so far if the environment raises, exits or returns a senseless reward; `error_timeout`
      if a step or reset takes longer than `step_timeout`. The slot gets a new environment
    - `error_engine` and `error_timeout` as the agent reports them; any other exception is a bug and propagates, and so
      do mistakes that turngym names (a TurngymError that is no EnvBackendError), such as an unknown task

    `on_episode` is called as each episode finishes, so that finished ones are kept when a run is interrupted.
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
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        if slots < 1:
            raise AgentError(f"slots is {slots}; at least 1 episode must be played at a time")
        if max_turns is not None and max_turns < 1:
            raise AgentError(f"max_turns is {max_turns}; the depth cap must be at least 1, or None for no cap")
        self._make_env = make_env
        self._agent = agent
        self._submit = agent.submit if isinstance(agent, ConcurrentAgent) else None
        with failures_of("an agent's name and writer", agent, AgentError):
            name = checked_text("an agent's name", agent.name, error=AgentError)
            if not isinstance(agent.writer, ResponseWriter):
                raise AgentError(f"the writer of agent {name!r} is {brief(agent.writer, 80)}; valid: a ResponseWriter")
        self._whose = f"agent {excerpt(name, 80)!r}"
        self._slots = slots
        self._max_turns = max_turns
        self._on_episode = on_episode
        self._system = system
        self._meta = {"agent": name, **(meta or {})}
        self._calls = TimedCalls(step_timeout, "the environment's step or reset")
        self._idle: list[Any] = []
        self._active: list[EpisodeRunner] = []
        self._asked: dict[int, Future[Reply]] = {}
        """Answers of a `ConcurrentAgent` that are under way, by the episode's number."""
        self._arrived: SimpleQueue[tuple[int, float]] = SimpleQueue()
        """Numbers of episodes whose answers are there, and the seconds that each took."""

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
        """Begin as many jobs of `waiting` as fit (taken from the left) and play one round.

        Returns the numbers and episodes that finished: none, after `LISTEN` seconds, if no answer has come. Numbers
        must differ among all active episodes. After an exception only `abandon` may be called.
        """
        done: list[tuple[int, Episode]] = []
        begun = [waiting.popleft() for _ in range(min(len(waiting), self._slots - len(self._active)))]
        if begun:
            self._begin(begun, done)
        if self._active:
            self._round(done)
        return done

    @property
    def playing(self) -> int:
        """Episodes that have begun and not ended."""
        return len(self._active)

    def abandon(self) -> None:
        """Give up every episode in progress and close every environment."""
        for future in self._asked.values():
            future.cancel()
        # answers that come nevertheless are of a queue that nobody reads
        self._asked, self._arrived = {}, SimpleQueue()
        # it is unknown which environments already went back to the pool, so none may be used again
        for runner in self._active:
            with contextlib.suppress(AgentError):
                self._release(runner)
        close_all([runner.env for runner in self._active], self._calls)
        self._active = []
        self.close()

    def close(self) -> None:
        """Close every environment of the pool."""
        close_all(self._idle, self._calls)
        self._idle = []
        self._calls.close()

    def _begin(self, jobs: Sequence[tuple[int, Job]], done: list[tuple[int, Episode]]) -> None:
        """Begin `jobs`; those whose environment fails are done."""
        envs = [self._idle.pop() if self._idle else self._make_env() for _ in jobs]
        renderer = self._agent.writer.renderer
        outcomes = self._calls.run(
            [
                partial(begin, env, job, number=number, system=self._system, renderer=renderer)
                for env, (number, job) in zip(envs, jobs, strict=True)
            ]
        )
        try:
            failures = [outcome.failure for outcome in outcomes]
        except BaseException:
            # for `abandon` to close
            self._idle += envs
            raise
        failed = []
        for env, (number, job), outcome, failure in zip(envs, jobs, outcomes, failures, strict=True):
            if not failure:
                self._active.append(outcome.value)
                continue
            status = outcome.status
            # one that hangs would hang again
            failed += [env] if status is Status.ERROR_ENV else []
            episode = failed_episode(job, guard_of(env).env_id, failure, self._meta, status)
            self._finish(episode, done, number)
        close_all(failed, self._calls)

    def _round(self, done: list[tuple[int, Episode]]) -> None:
        """Play one turn of every active episode whose answer is there."""
        active = self._active
        limits = [limit for limit in (self._max_turns, guard_of(active[0].env).max_turns) if limit is not None]
        ACTIVITY.playing, ACTIVITY.limit = len(active), min(limits, default=None)
        ACTIVITY.deepest = max(runner.conversation.turn for runner in active)
        replies = self._answers()
        going = [(runner, reply) for runner, reply in replies if reply.ends is None]
        stepped = iter(self._calls.run([partial(runner.step, reply.text) for runner, reply in going]))
        for runner, reply in replies:
            outcome = None if reply.ends is not None else next(stepped)
            runner.take(reply, outcome, self._max_turns)
            if runner.status is None:
                continue
            self._release(runner)
            if runner.status is Status.ERROR_ENV:
                close_all([runner.env], self._calls)
            # an environment that hangs is not touched again
            elif outcome is None or outcome.error is None:
                self._idle.append(runner.env)
            self._finish(runner.episode(self._meta), done, runner.number)
        self._active = [runner for runner in active if runner.status is None]
        ACTIVITY.playing = len(self._active)

    def _answers(self) -> list[tuple[EpisodeRunner, Reply]]:
        """The replies that are there, in the order of the active episodes: turns of demonstrations and the agent's."""
        replies: dict[int, Reply] = {}
        waiting = []
        for runner in self._active:
            turn, demonstration = runner.conversation.turn, runner.job.demonstration
            if turn < len(demonstration):
                writer, next_turn = self._agent.writer, demonstration[turn]
                replies[runner.number] = (
                    writer.write(runner.conversation, next_turn, "demonstration")
                    if isinstance(next_turn, str)
                    else writer.show(runner.conversation, next_turn)
                )
            elif runner.number not in self._asked:
                runner.conversation.begun = runner.job.begun if turn == len(demonstration) else ()
                waiting.append(runner)
        if self._submit is None:
            replies |= self._respond(waiting)
        else:
            replies |= self._ask(waiting, wait=not replies)
        return [(runner, replies[runner.number]) for runner in self._active if runner.number in replies]

    def _respond(self, waiting: Sequence[EpisodeRunner]) -> dict[int, Reply]:
        """The agent's replies to all of `waiting`, by number."""
        start = time.perf_counter()
        replies: object = []
        with self._theirs():
            replies = self._agent.respond([runner.conversation for runner in waiting]) if waiting else []
        replies = answers(self._whose, replies, len(waiting), Reply, AgentError)
        seconds_each = (time.perf_counter() - start) / max(len(waiting), 1)
        for runner in waiting:
            runner.timings["generate"] += seconds_each
        return {runner.number: reply for runner, reply in zip(waiting, replies, strict=True)}

    def _ask(self, waiting: Sequence[EpisodeRunner], *, wait: bool) -> dict[int, Reply]:
        """Ask about `waiting`, and return what has arrived, whoever asked; with `wait` there is one at least, or
        `LISTEN` seconds have passed."""
        assert self._submit is not None
        start, arrived = time.perf_counter(), self._arrived
        futures: Sequence[Future[Reply]] = []
        with self._theirs():
            futures = self._submit([runner.conversation for runner in waiting]) if waiting else []
        self._asked |= {runner.number: future for runner, future in zip(waiting, futures, strict=False)}
        answers(self._whose, futures, len(waiting), Future, AgentError)
        for number in [runner.number for runner in waiting]:
            note = lambda _, number=number: arrived.put((number, time.perf_counter() - start))  # noqa: E731
            self._asked[number].add_done_callback(note)
        seconds: dict[int, float] = {}
        with contextlib.suppress(Empty):
            # one by one: an answer that comes later than the first belongs to the next round, and nobody waits for it
            while True:
                number, took = arrived.get(timeout=LISTEN) if wait and not seconds else arrived.get_nowait()
                seconds[number] = took
        runners = {runner.number: runner for runner in self._active}
        replies = {}
        for number, took in seconds.items():
            runners[number].timings["generate"] += took
            with self._theirs():
                # raises what the agent raised; ends: it has arrived
                reply = self._asked.pop(number).result()
            [replies[number]] = answers(self._whose, [reply], 1, Reply, AgentError)
        return replies

    def _release(self, runner: EpisodeRunner) -> None:
        with self._theirs():
            self._agent.release(runner.conversation)

    def _theirs(self) -> AbstractContextManager[None]:
        """Inside, what an agent of another package raises is its failure."""
        return failures_of(self._whose, self._agent, AgentError)

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
