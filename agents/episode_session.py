"""An episode turned inside out: whoever samples hands in token ids and gets the next prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from turngym.agents.agent import AgentError, Reply, ResponseWriter
from turngym.agents.episode_runner import EpisodeRunner, Job, begin, failed_episode
from turngym.envs.core import EnvBackendError, Task, TurngymError, Verdict
from turngym.envs.episode import Episode, Status
from turngym.envs.protocols import GenerateRequest, Generation

if TYPE_CHECKING:
    from turngym.agents.session_pool import SessionPool

NOTHING: NDArray[np.int32] = np.empty(0, np.int32)
NOTHING.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one response led to; see `turngym.trainers.adapters.session.Stepped`."""

    observation: str
    observation_ids: NDArray[np.int32]
    reward: float
    verdict: Verdict | None
    done: bool


class EpisodeSession:
    """One episode in progress; implements `turngym.trainers.adapters.session.EpisodeSession`."""

    def __init__(self, sessions: SessionPool, job: Job) -> None:
        self._sessions = sessions
        self._writer = ResponseWriter(sessions.renderer)
        self._messages: list[dict[str, str]] = []
        self._request: GenerateRequest | None = None
        self._episode: Episode | None = None
        self._env = sessions.take()
        self._play: EpisodeRunner | None = None
        try:
            self._play = begin(
                self._env, job, place=sessions.number(), system=sessions.system, renderer=sessions.renderer
            )
        except EnvBackendError as error:
            self._discard()
            self._episode = failed_episode(job, sessions.env_id, error, {})
            return
        except BaseException:
            self._discard()
            raise
        self._present()

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
    def task(self) -> Task | None:
        """What is played; None where the environment failed before it could say."""
        return None if self._play is None else self._play.conversation.task

    @property
    def admissible(self) -> tuple[str, ...] | None:
        return None if self._play is None else self._play.conversation.admissible

    @property
    def success(self) -> bool:
        return self._play is not None and self._play.success

    def step(self, generation: Generation) -> Stepped:
        """Answer with sampled ids; they are kept as they are. Log-probabilities that are NaN are unknown.

        A response that was broken off (finish `aborted`) does not reach the environment: it ends the episode.
        Raises AgentError after the end or without a tokenizer. Any other exception than a failing back end is a
        mistake: it propagates, and the environment is not used again.
        """
        play, renderer = self._going(), self._sessions.renderer
        if renderer is None or play.conversation.thread is None:
            raise AgentError("this session has no tokenizer: give the SessionPool a renderer, or answer with step_text()")
        ids, logprobs = np.asarray(generation.ids, np.int32), np.asarray(generation.logprobs, np.float32)
        if not len(ids) or ids.shape != logprobs.shape:
            raise AgentError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities: each id needs its own")
        with self._sessions.lock:
            text = renderer.respond(play.conversation.thread, ids)
        broken = generation.finish == "aborted"
        reply = Reply(
            text=text,
            logprobs=None if np.isnan(logprobs).any() else logprobs,
            finish=generation.finish,
            policy_version=generation.policy_version,
            version_spans=generation.version_spans,
            ends=Status.ERROR_ENGINE if broken else None,
            error="the response was broken off" if broken else "",
        )
        return self._take(play, reply)

    def step_text(self, text: str) -> Stepped:
        """Answer with text; with a tokenizer its ids are kept, too, without log-probabilities."""
        play = self._going()
        with self._sessions.lock:
            reply = self._writer.write_text(play.conversation, text)
        return self._take(play, reply)

    def step_action(self, action: str) -> Stepped:
        """Answer with an action that a trainer has already read from the response (a function call's argument)."""
        play = self._going()
        channel = play.conversation.channel
        try:
            text = action if channel is None else channel.format(action)
        except TurngymError:
            text = action  # no response can carry it: the environment then says that it cannot be read
        return self.step_text(text)

    def end(self, status: Status, error: str = "") -> None:
        """End the episode before its next response."""
        play = self._going()
        play.take(Reply(ends=status, error=error))
        self._finish(play)

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
            self._sessions.give(env)

    def _going(self) -> EpisodeRunner:
        if self._play is None or self._episode is not None or self._env is None:
            raise AgentError("the episode is over or its session closed: open another session")
        return self._play

    def _take(self, play: EpisodeRunner, reply: Reply) -> Stepped:
        turns = len(play.turns)
        try:
            play.take(reply, self._sessions.max_depth)
        except BaseException:
            self._discard()
            raise
        last = play.turns[-1] if len(play.turns) > turns and reply.ends is None else None
        if last is not None:
            self._messages += [_message("assistant", reply.text), _message("user", play.conversation.observation)]
        ids = NOTHING
        if play.status is None:
            ids = self._present()
        if play.status is not None:
            self._finish(play)
        return Stepped(
            observation=play.conversation.observation if last is not None else play.error,
            observation_ids=ids,
            reward=0.0 if last is None else last.reward,
            verdict=None if last is None else last.verdict,
            done=self.done,
        )

    def _present(self) -> NDArray[np.int32]:
        """Let the waiting observation stand as a prompt; its ids. A full context ends the episode."""
        play = self._play
        assert play is not None
        conversation = play.conversation
        if not self._messages:
            system = [_message("system", conversation.system)] if conversation.system else []
            self._messages = [*system, _message("user", conversation.observation)]
        with self._sessions.lock:
            thread = self._writer.present(conversation)
        if thread is None:
            return NOTHING
        sampling, limit = self._sessions.sampling, self._sessions.max_context
        room = sampling.max_new_tokens if limit is None else limit - thread.buffer.size
        if room < 1:
            play.take(Reply(ends=Status.TRUNCATED_TOKENS))
            self._finish(play)
            return NOTHING
        self._request = GenerateRequest(
            session=f"{conversation.key}/0",
            prompt_ids=thread.buffer.view(),
            sampling=replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens)),
            stream=conversation.stream,
        )
        return self._request.prompt_ids[slice(*thread.prompt_span)]

    def _finish(self, play: EpisodeRunner) -> None:
        self._request = None
        self._episode = play.episode({})
        if play.status is Status.ERROR_ENV:
            self._discard()

    def _discard(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
