"""One episode driven from outside: a trainer that samples by itself hands in token ids and gets the next prompt."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents.playing.agent import Reply, ResponseWriter
from turngym.agents.playing.rollout import EpisodeRunner, Job, begin, failed_episode
from turngym.agents.rendering.chat_settings import ChatSettings, open_renderer, resolved
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.core.episode import Episode, Status
from turngym.envs.core.errors import AgentError, EnvBackendError, TurngymError
from turngym.envs.core.protocols import GenerateRequest, Generation, Sampling
from turngym.envs.core.task import Task, ToolSpec, Verdict
from turngym.envs.guard import ActionGuard, guard_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)
NO_IDS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one response led to."""

    observation: str
    observation_ids: NDArray[np.int32]
    reward: float
    verdict: Verdict | None
    done: bool


class SessionOwner(Protocol):
    """What a session needs of the pool that opened it: an environment, and the settings that all sessions share."""

    @property
    def renderer(self) -> ChatRenderer | None: ...

    @property
    def system(self) -> str | None: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def max_context(self) -> int | None: ...

    @property
    def max_depth(self) -> int | None: ...

    @property
    def env_id(self) -> str: ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while tokens are made."""

    def number(self) -> int:
        """A number that no other session has."""

    def acquire_env(self) -> Any:
        """An environment that no other session uses."""

    def return_env(self, env: Any) -> None:
        """Give back an environment that still works."""


class EpisodeSession:
    """One episode in progress. Sampled ids go in as they are and stay as they are: nothing is tokenized twice."""

    def __init__(self, pool: SessionOwner, job: Job) -> None:
        self._pool = pool
        self._writer = ResponseWriter(pool.renderer)
        self._messages: list[dict[str, str]] = []
        self._request: GenerateRequest | None = None
        self._episode: Episode | None = None
        self._env = pool.acquire_env()
        self._runner: EpisodeRunner | None = None
        try:
            self._runner = begin(self._env, job, number=pool.number(), system=pool.system, renderer=pool.renderer)
        except EnvBackendError as error:
            self._discard()
            self._episode = failed_episode(job, pool.env_id, error, {})
            return
        except BaseException:
            self._discard()
            raise
        self._render_prompt()

    @property
    def request(self) -> GenerateRequest | None:
        """What must be continued now; None when the episode is over, and in sessions without a tokenizer."""
        return self._request

    @property
    def done(self) -> bool:
        return self._episode is not None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far: system, user, assistant, user, ...; the last observation included."""
        return [dict(message) for message in self._messages]

    @property
    def turns(self) -> int:
        """How many turns were played."""
        return 0 if self._runner is None else len(self._runner.turns)

    @property
    def task(self) -> Task | None:
        """What is played; None where the environment failed before it could say."""
        return None if self._runner is None else self._runner.conversation.task

    @property
    def admissible(self) -> tuple[str, ...] | None:
        return None if self._runner is None else self._runner.conversation.admissible

    @property
    def success(self) -> bool:
        return self._runner is not None and self._runner.success

    def step(self, generation: Generation) -> Stepped:
        """Answer with sampled ids; they are kept as they are. Log-probabilities that are NaN are unknown.

        A response that was broken off (finish `aborted`) does not reach the environment: it ends the episode.
        Raises AgentError after the end or without a tokenizer. Any other exception than a failing back end is a
        mistake: it propagates, and the environment is not used again.
        """
        runner, renderer = self._in_progress(), self._pool.renderer
        if renderer is None or runner.conversation.thread is None:
            raise AgentError(
                "this session has no tokenizer: give the SessionPool a renderer, or answer with step_text()"
            )
        ids, logprobs = np.asarray(generation.ids, np.int32), np.asarray(generation.logprobs, np.float32)
        if not len(ids) or ids.shape != logprobs.shape:
            raise AgentError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities: each id needs its own")
        with self._pool.lock:
            text = renderer.respond(runner.conversation.thread, ids)
        aborted = generation.finish == "aborted"
        reply = Reply(
            text=text,
            logprobs=None if np.isnan(logprobs).any() else logprobs,
            finish=generation.finish,
            policy_version=generation.policy_version,
            version_spans=generation.version_spans,
            ends=Status.ERROR_ENGINE if aborted else None,
            error="the response was broken off" if aborted else "",
        )
        return self._step(runner, reply)

    def step_text(self, text: str) -> Stepped:
        """Answer with text; with a tokenizer its ids are kept, too, without log-probabilities."""
        runner = self._in_progress()
        with self._pool.lock:
            reply = self._writer.write_text(runner.conversation, text)
        return self._step(runner, reply)

    def step_action(self, action: str) -> Stepped:
        """Answer with an action that a trainer has already read from the response (a function call's argument)."""
        runner = self._in_progress()
        channel = runner.conversation.channel
        try:
            text = action if channel is None else channel.format(action)
        except TurngymError:
            text = action  # no response can carry it: the environment then says that it cannot be read
        return self.step_text(text)

    def end(self, status: Status, error: str = "") -> None:
        """End the episode before its next response."""
        runner = self._in_progress()
        runner.step(Reply(ends=status, error=error))
        self._finish(runner)

    def episode(self) -> Episode:
        """The record. Raises AgentError while the episode goes on."""
        if self._episode is None:
            raise AgentError("the episode goes on: step the session until it is done, or end() it")
        return self._episode

    def close(self) -> None:
        """Give the environment back; twice is fine. An episode that goes on stays unfinished."""
        self._request = None
        env, self._env = self._env, None
        if env is not None:
            self._pool.return_env(env)

    def _in_progress(self) -> EpisodeRunner:
        if self._runner is None or self._episode is not None or self._env is None:
            raise AgentError("the episode is over or its session closed: open another session")
        return self._runner

    def _step(self, runner: EpisodeRunner, reply: Reply) -> Stepped:
        turns = len(runner.turns)
        try:
            runner.step(reply, self._pool.max_depth)
        except BaseException:
            self._discard()
            raise
        last = runner.turns[-1] if len(runner.turns) > turns and reply.ends is None else None
        if last is not None:
            self._messages += [_message("assistant", reply.text), _message("user", runner.conversation.observation)]
        ids = NO_IDS
        if runner.status is None:
            ids = self._render_prompt()
        # asked again: a full context ends the episode while its prompt is rendered
        if runner.status is not None:
            self._finish(runner)
        return Stepped(
            observation=runner.conversation.observation if last is not None else runner.error,
            observation_ids=ids,
            reward=0.0 if last is None else last.reward,
            verdict=None if last is None else last.verdict,
            done=self.done,
        )

    def _render_prompt(self) -> NDArray[np.int32]:
        """Let the waiting observation stand as a prompt; its ids. A full context ends the episode."""
        runner = self._runner
        assert runner is not None
        conversation = runner.conversation
        if not self._messages:
            system = [_message("system", conversation.system)] if conversation.system else []
            self._messages = [*system, _message("user", conversation.observation)]
        with self._pool.lock:
            thread = self._writer.present(conversation)
        if thread is None:
            return NO_IDS
        sampling, limit = self._pool.sampling, self._pool.max_context
        room = sampling.max_new_tokens if limit is None else limit - thread.buffer.size
        if room < 1:
            runner.step(Reply(ends=Status.TRUNCATED_TOKENS))
            self._finish(runner)
            return NO_IDS
        self._request = GenerateRequest(
            # with an append-only history there is one segment, and so one engine session
            session=f"{conversation.key}/0",
            prompt_ids=thread.buffer.view(),
            sampling=replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens)),
            stream=conversation.stream,
        )
        return self._request.prompt_ids[slice(*thread.prompt_span)]

    def _finish(self, runner: EpisodeRunner) -> None:
        self._request = None
        self._episode = runner.episode({})
        if runner.status is Status.ERROR_ENV:
            self._discard()

    def _discard(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# Opens sessions: one environment made ready for trainers that sample by themselves.


class SessionPool:
    """Opens sessions on one environment; sessions that are closed give their environment to the next.

    Sessions may be stepped from several threads, each by one at a time. With a tokenizer the history is never rewritten
    (`history="append"`), so an episode is one growing row of ids; without one, sessions are text only.

    Args:
        make_env: makes an `ActionGuard`, alone or inside wrappers.
        renderer: shared by all sessions; None for text.
        system: the system message; None: the environment's instructions and the channel's.
        sampling: how responses are drawn; stop ids and stop strings are filled in.
        max_context: most ids of an episode, prompt and responses together.
        max_depth: most turns, where the trainer wants fewer than the environment; the episode ends `truncated_depth`.
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
    ) -> None:
        self.make_env = make_env
        self.renderer = renderer
        self.system = system
        self.max_context = max_context
        self.max_depth = max_depth
        self.lock = threading.Lock()
        """Held while tokens are made: fast tokenizers and caches are shared."""
        self._idle: deque[Any] = deque()
        self._count = itertools.count()
        probe = make_env()
        guard = guard_of(probe)
        self.tool: ToolSpec = guard.tool
        self.env_id = guard.env_id
        self._task_ids = guard.task_ids()
        self._idle.append(probe)
        self.sampling = _stops(sampling or Sampling(), guard, renderer)

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
        """A pool on `gym.make(env_id, **make)`, spoken to as `settings` say (`ChatSettings.load(model folder)`).

        `stop_ids` are further ids that end a response, where the model's generation config names some.
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
            settings = resolved(settings, tokenizer, tool)
            renderer = open_renderer(tokenizer, settings, tool, history="append", stop_ids=stop_ids)

        def make_env() -> Any:
            return gym.make(env_id, **make, channel=settings.channel)

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

        Raises TaskError if it is unknown, or has another hash than the `sha256` that is asked for.
        """
        if task_id is None:
            task_id = self._task_ids[int(np.random.default_rng((seed, sample)).integers(len(self._task_ids)))]
        return EpisodeSession(self, Job(task_id=task_id, seed=seed, sample=sample, group=group, sha256=sha256))

    def number(self) -> int:
        """Another number at each call: engines keep what they hold for a session under its name."""
        return next(self._count)

    def acquire_env(self) -> Any:
        """An environment that no session uses; a new one where none is idle."""
        try:
            # not `if self._idle`: another thread may take the last one in between; pop() alone is atomic
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


def _stops(sampling: Sampling, guard: ActionGuard, renderer: ChatRenderer | None) -> Sampling:
    """`sampling` with the stop ids of the renderer and the stop strings of the channel."""
    ids = () if renderer is None else renderer.stop_ids
    text = sampling.stop_text or (() if guard.channel is None else guard.channel.stop_text)
    return replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *ids))), stop_text=text)
