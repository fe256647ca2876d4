"""The seam to other people's trainers: an episode that is played by handing in sampled token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core import ToolSpec, Verdict
from turngym.envs.episode import Episode, Status
from turngym.envs.protocols import GenerateRequest, Generation, PartialFailure, Policy, Sampling


class Stepped(Protocol):
    """What one response led to."""

    @property
    def observation(self) -> str:
        """What the environment says to the response."""

    @property
    def observation_ids(self) -> NDArray[np.int32]:
        """What follows the response in the token ids before the next response; empty when the episode is over."""

    @property
    def reward(self) -> float: ...

    @property
    def verdict(self) -> Verdict | None:
        """None where the environment failed before it could judge."""

    @property
    def done(self) -> bool: ...


class TokenSession(Protocol):
    """One episode in progress. Sampled ids go in as they are and stay as they are: nothing is tokenized twice."""

    @property
    def request(self) -> GenerateRequest | None:
        """What a policy must continue now; None when the episode is over or its context is full (which ends it)."""

    @property
    def done(self) -> bool: ...

    @property
    def admissible(self) -> tuple[str, ...] | None:
        """What may be done now; None where any text may be."""

    @property
    def success(self) -> bool: ...

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far as chat messages."""

    def step(self, generation: Generation) -> Stepped:
        """Answer with sampled ids. An action that cannot be read or played is data; a broken back end a status."""

    def step_text(self, text: str) -> Stepped:
        """Answer with text, for trainers that keep the ids themselves; it also works without a tokenizer."""

    def step_action(self, action: str) -> Stepped:
        """Answer with an action that the trainer has read from the response, a function call's argument."""

    def end(self, status: Status, error: str = "") -> None:
        """End the episode before its next response, for example because the engine failed."""

    def episode(self) -> Episode:
        """The record of a finished episode. Raises TurngymError before it is over."""

    def close(self) -> None:
        """Give the environment back; twice is fine."""


class TokenSessions(Protocol):
    """Opens sessions: `turngym.agents.session_pool.SessionPool` is one."""

    @property
    def tool(self) -> ToolSpec: ...

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""

    def task_ids(self) -> Sequence[str]: ...

    def open(self, task_id: str | None = None, *, seed: int = 0, sample: int = 0, group: int = 0) -> TokenSession:
        """Begin attempt `sample` at a task; None draws the task from `seed` and `sample`.

        A back end that fails at once gives a session that is over; its episode has status `error_env`.
        """


Generate = Callable[[GenerateRequest], Awaitable[Generation | Status]]
"""A server's continuation of one request, or the status with which the episode ends instead."""


def play(sessions: Sequence[TokenSession], policy: Policy) -> list[Episode]:
    """Play all sessions to their end, everything that waits answered in one batch; closes them.

    A request that fails for good ends its own episode; where all of a batch fail, the first failure is raised.
    """
    try:
        while waiting := [(session, request) for session in sessions if (request := session.request) is not None]:
            answers = _answers(policy, [request for _, request in waiting])
            for (session, request), answer in zip(waiting, answers, strict=True):
                if isinstance(answer, BaseException):
                    late = isinstance(answer, TimeoutError)
                    session.end(Status.ERROR_TIMEOUT if late else Status.ERROR_ENGINE, str(answer))
                elif len(answer.ids):
                    session.step(answer)
                else:
                    session.end(Status.ERROR_ENGINE if answer.finish == "aborted" else Status.TRUNCATED_TOKENS)
                # its cache on the engine can go at once, while the others play on
                if session.done:
                    policy.release(request.session)
        return [session.episode() for session in sessions]
    finally:
        # also after an error: an environment that is not given back is lost to the pool
        for session in sessions:
            session.close()


def _answers(policy: Policy, requests: Sequence[GenerateRequest]) -> Sequence[Generation | BaseException]:
    try:
        return policy.generate(requests)
    except PartialFailure as failure:
        if all(isinstance(result, BaseException) for result in failure.results):
            raise
        return failure.results


async def play_async(session: TokenSession, generate: Generate) -> Episode:
    """Play one session to its end with a server; closes it. Environments may wait, so they step in a thread."""
    import asyncio

    try:
        while (request := session.request) is not None:
            answer = await generate(request)
            if isinstance(answer, Status):
                session.end(answer)
            elif not len(answer.ids):
                session.end(Status.TRUNCATED_TOKENS)
            else:
                await asyncio.to_thread(session.step, answer)
        return session.episode()
    finally:
        session.close()
