"""Episodes driven from outside: a trainer that samples by itself passes in token ids and gets the next prompt.

`SessionPool` opens sessions and shares their environments; `EpisodeSession` is one episode in progress.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents.playing.agent import Reply, ResponseWriter, with_stops
from turngym.agents.playing.rollout import EpisodeRunner, Job, begin, failed_episode
from turngym.agents.playing.timed_calls import STEP_TIMEOUT, CallTimeout, TimedCalls
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.open_renderer import complete_settings, open_renderer
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.episode import Episode, Status, wrong_numbers
from turngym.core.errors import AgentError, TurngymError
from turngym.core.nested import NONE
from turngym.core.protocols import GenerateRequest, Generation, Sampling
from turngym.core.task import Task, Verdict
from turngym.core.tools import Tools
from turngym.envs.channels import ToolChannel
from turngym.envs.guard import guard_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
NO_IDS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one response led to."""

    observation: str
    """The next observation, or the error if the response did not reach the environment."""
    observation_ids: NDArray[np.int32]
    """Ids to append before the next response; empty without a tokenizer and at the end of the episode."""
    reward: float
    verdict: Verdict | None
    """None if the response did not become a turn."""
    done: bool


class EpisodeSession:
    """One episode in progress, opened by `SessionPool.open`. Sampled ids are kept as they are, never re-tokenized."""

    def __init__(self, pool: SessionPool, job: Job) -> None:
        self._pool = pool
        self._writer = ResponseWriter(pool.renderer)
        self.request: GenerateRequest | None = None
        """The prompt to continue now; None when the episode is over, and in sessions without a tokenizer."""
        self._episode: Episode | None = None
        self._calls = TimedCalls(pool.step_timeout, "the environment's step or reset")
        self._env = pool.acquire_env()
        self._runner: EpisodeRunner | None = None
        begun = self._calls.call(
            partial(begin, self._env, job, number=pool.number(), system=pool.system, renderer=pool.renderer)
        )
        try:
            failure = begun.failure
        except BaseException:
            self._discard()
            raise
        if failure:
            status = begun.status
            self._discard(hangs=status is Status.ERROR_TIMEOUT)
            self._episode = failed_episode(job, pool.env_id, failure, {}, status)
            return
        self._runner = begun.value
        self._render_prompt()

    @property
    def done(self) -> bool:
        return self._episode is not None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far (system, user, assistant, user, ...), the last observation included."""
        return [] if self._runner is None else self._runner.conversation.messages()

    @property
    def turns(self) -> int:
        """Number of turns played."""
        return 0 if self._runner is None else len(self._runner.turns)

    @property
    def task(self) -> Task | None:
        """The task that is played; None if the environment failed at its reset."""
        return None if self._runner is None else self._runner.conversation.task

    @property
    def admissible(self) -> tuple[str, ...] | None:
        return None if self._runner is None else self._runner.conversation.admissible

    @property
    def success(self) -> bool:
        return self._runner is not None and self._runner.success

    def step(self, generation: Generation) -> Stepped:
        """Answer with sampled ids, which are kept unchanged. NaN stands for unknown log-probabilities.

        An aborted response (finish `aborted`) does not reach the environment and ends the episode. Raises AgentError
        after the end, without a tokenizer, and for ids or log-probabilities that cannot be.
        """
        runner, renderer = self._in_progress(), self._pool.renderer
        if renderer is None or runner.conversation.thread is None:
            raise AgentError(
                "this session has no tokenizer: give the SessionPool a renderer, or answer with step_text()"
            )
        ids, logprobs = np.asarray(generation.ids, np.int32), np.asarray(generation.logprobs, np.float32)
        if not len(ids) or ids.shape != logprobs.shape:
            raise AgentError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities: each id needs its own")
        given_logprobs = None if np.isnan(logprobs).any() else logprobs
        if (problem := wrong_numbers(ids, given_logprobs)) is not None:
            raise AgentError(problem)
        with self._pool.lock:
            text = renderer.respond(runner.conversation.thread, ids)
        aborted = generation.finish == "aborted"
        reply = Reply(
            text=text,
            logprobs=given_logprobs,
            finish=generation.finish,
            policy_version=generation.policy_version,
            version_spans=generation.version_spans,
            ends=Status.ERROR_ENGINE if aborted else None,
            error="the response was broken off" if aborted else "",
        )
        return self._step(runner, reply)

    def step_text(self, text: str) -> Stepped:
        """Answer with text. With a tokenizer its ids are recorded too, without log-probabilities."""
        runner = self._in_progress()
        with self._pool.lock:
            reply = self._writer.write_text(runner.conversation, text)
        return self._step(runner, reply)

    def step_action(self, action: str) -> Stepped:
        """Answer with an action that a trainer has already read from the response."""
        runner = self._in_progress()
        channel = runner.conversation.channel
        try:
            text = action if channel is None else channel.format(action)
        except TurngymError:
            # the channel cannot express the action; the environment then reports that it cannot read it
            text = action
        return self.step_text(text)

    def step_call(self, name: str, arguments: Mapping[str, Any]) -> Stepped:
        """Answer with a call that a trainer has already read from the response. Raises AgentError without a channel of
        calls."""
        channel = self._in_progress().conversation.channel
        if not isinstance(channel, ToolChannel):
            form = "bare actions" if channel is None else f"channel {channel.name!r}"
            raise AgentError(f"these sessions read {form} and no calls: give them channel 'tool'")
        return self.step_text(channel.dialect.write(name, arguments))

    def outside(self, text: str) -> str:
        """What the environment says, `text`, for a trainer that tokenizes by itself: without control tokens, if the
        sessions know the tokenizer (`TextEncoder.broken`)."""
        renderer = self._pool.renderer
        return text if renderer is None else renderer.template.encoder.broken(text)

    def end(self, status: Status, error: str = "") -> None:
        """End the episode before its next response."""
        runner = self._in_progress()
        runner.take(Reply(ends=status, error=error), None)
        self._finish(runner)

    def episode(self) -> Episode:
        """The finished record. Raises AgentError while the episode is still in progress."""
        if self._episode is None:
            raise AgentError("the episode is still in progress: step the session until it is done, or end() it")
        return self._episode

    def close(self) -> None:
        """Return the environment to the pool; idempotent. An episode in progress stays unfinished."""
        self.request = None
        env, self._env = self._env, None
        self._calls.close()
        if env is not None:
            self._pool.return_env(env)

    def _in_progress(self) -> EpisodeRunner:
        if self._runner is None or self._episode is not None or self._env is None:
            raise AgentError("the episode is over or its session closed: open another session")
        return self._runner

    def _step(self, runner: EpisodeRunner, reply: Reply) -> Stepped:
        turns = len(runner.turns)
        stepped = None if reply.ends is not None else self._calls.call(partial(runner.step, reply.text))
        try:
            runner.take(reply, stepped, self._pool.max_depth)
        except BaseException:
            self._discard()
            raise
        last = runner.turns[-1] if len(runner.turns) > turns and reply.ends is None else None
        ids = NO_IDS
        if runner.status is None:
            ids = self._render_prompt()
        # checked again, since a full context ends the episode while its prompt is rendered
        if runner.status is not None:
            self._finish(runner, hangs=stepped is not None and isinstance(stepped.error, CallTimeout))
        return Stepped(
            observation=runner.conversation.observation if last is not None else runner.error,
            observation_ids=ids,
            reward=0.0 if last is None else last.reward,
            verdict=None if last is None else last.verdict,
            done=self.done,
        )

    def _render_prompt(self) -> NDArray[np.int32]:
        """Make the waiting observation the next prompt and return its new ids. A full context ends the episode."""
        runner = self._runner
        assert runner is not None
        conversation = runner.conversation
        with self._pool.lock:
            thread = self._writer.present(conversation)
        if thread is None:
            return NO_IDS
        sampling, limit = self._pool.sampling, self._pool.max_context
        room = sampling.max_new_tokens if limit is None else limit - thread.buffer.size
        if room < 1:
            runner.take(Reply(ends=Status.TRUNCATED_TOKENS), None)
            self._finish(runner)
            return NO_IDS
        self.request = GenerateRequest(
            # with an append-only history there is one segment, and so one engine session
            session=f"{conversation.key}/0",
            prompt_ids=thread.buffer.view(),
            sampling=replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens)),
            stream=conversation.stream,
        )
        return self.request.prompt_ids[slice(*thread.prompt_span)]

    def _finish(self, runner: EpisodeRunner, *, hangs: bool = False) -> None:
        self.request = None
        self._episode = runner.episode({})
        if hangs or runner.status is Status.ERROR_ENV:
            self._discard(hangs=hangs)

    def _discard(self, *, hangs: bool = False) -> None:
        """Use the environment no more; one that hangs is not touched again."""
        env, self._env = self._env, None
        if env is not None and not hangs:
            # that it fails has been said
            self._calls.call(env.close)


class SessionPool:
    """Opens sessions on one environment; a closed session leaves its environment to the next.

    Different sessions may be stepped from different threads. With a tokenizer the history is never rewritten
    (`history="append"`), so an episode is one growing row of ids; without one, sessions are text only.

    Args:
        renderer: shared by all sessions; None for text.
        system: the system message; None for the environment's instructions and the channel's.
        sampling: how responses are drawn; stop ids and stop strings are filled in.
        max_depth: most turns, if fewer than the environment allows; the episode then ends as `truncated_depth`.
        step_timeout: most seconds of a step or reset; a longer one ends the episode as `error_timeout`.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        renderer: ChatRenderer | None = None,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_context: int | None = None,
        max_depth: int | None = None,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        self.make_env = make_env
        self.renderer = renderer
        self.system = system
        self.max_context = max_context
        self.max_depth = max_depth
        self.step_timeout = step_timeout
        self.lock = threading.Lock()
        """Held while text is tokenized, since fast tokenizers and caches are shared."""
        self._idle: deque[Any] = deque()
        self._count = itertools.count()
        probe = make_env()
        guard = guard_of(probe)
        self.tool: Tools = guard.tool
        self.env_id = guard.env_id
        self.scoring: dict[str, str] = guard.base.scoring
        self._task_ids = guard.task_ids()
        self._idle.append(probe)
        self.sampling = with_stops(sampling or Sampling(), guard.channel, renderer)

    @classmethod
    def of(
        cls,
        env_id: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        settings: ChatSettings | None = None,
        *,
        temperature: float = 1.0,
        max_depth: int | None = None,
        stop_ids: Sequence[int] = (),
        **make: Any,
    ) -> SessionPool:
        """A pool on `gym.make(env_id, **make)` with the chat settings of a model (`ChatSettings.load(model folder)`).

        Raises AgentError for settings whose `memory` is not `all`.

        Args:
            stop_ids: further ids that end a response, if the model's generation config names some.
        """
        settings = settings or ChatSettings()
        if settings.memory != "all":
            raise AgentError(
                f"memory is {settings.memory!r}: sessions keep an episode as one growing row of ids; valid: all"
            )
        renderer = None
        make = {"disable_env_checker": True, **make}
        if tokenizer is not None:
            probe = gym.make(env_id, **make)
            tool = guard_of(probe).tool
            probe.close()
            settings = complete_settings(settings, tokenizer, tool)
            renderer = open_renderer(tokenizer, settings, tool, history="append", stop_ids=stop_ids)

        def make_env() -> Any:
            return gym.make(env_id, **make, channel=None if settings.channel == NONE else settings.channel)

        return cls(
            make_env,
            renderer,
            system=settings.system,
            sampling=Sampling(temperature=temperature, max_new_tokens=settings.max_new_tokens),
            max_context=settings.max_context,
            max_depth=max_depth,
        )

    def task_ids(self) -> Sequence[str]:
        """All tasks of the environment's split."""
        return self._task_ids

    def open(
        self, task_id: str | None = None, *, seed: int = 0, sample: int = 0, group: int = 0, sha256: str = ""
    ) -> EpisodeSession:
        """Begin attempt `sample` at a task; None draws the task from (seed, sample).

        Raises TaskError if the task is unknown, or its hash is not `sha256`.

        Args:
            group: attempts that are compared with each other have the same group.
            sha256: required hash of the task; "" if it is not checked.
        """
        if task_id is None:
            task_id = self._task_ids[int(np.random.default_rng((seed, sample)).integers(len(self._task_ids)))]
        return EpisodeSession(self, Job(task_id=task_id, seed=seed, sample=sample, group=group, sha256=sha256))

    def number(self) -> int:
        """A new number at each call, so that session names are unique in an engine's cache."""
        return next(self._count)

    def acquire_env(self) -> Any:
        """An environment that no session uses; a new one where none is idle."""
        try:
            # no `if self._idle` before it: another thread could take the last one in between; pop() alone is atomic
            return self._idle.pop()
        except IndexError:
            with self.lock:
                return self.make_env()

    def return_env(self, env: Any) -> None:
        """Take back an environment that still works."""
        self._idle.append(env)

    def close(self) -> None:
        """Close every environment that no session holds."""
        while self._idle:
            self._idle.pop().close()
