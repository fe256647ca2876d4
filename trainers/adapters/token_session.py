"""What every adapter to another trainer shares: sessions played to their end, and an episode as prompt and response.

An adapter opens an `EpisodeSession` for each episode, hands in the ids that the other trainer has sampled (they stay as
they are: nothing is tokenized twice), and gives the finished episode back as a `Trajectory`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.playing.episode_session import EpisodeSession
from turngym.core.episode import Episode, Span, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure, Policy

Generate = Callable[[GenerateRequest], Awaitable[Generation | Status]]
"""A server's continuation of one request, or the status with which the episode ends instead."""


def play(sessions: Sequence[EpisodeSession], policy: Policy) -> list[Episode]:
    """Play all sessions to their end, everything that waits answered in one batch; closes them.

    A request that fails for good ends its own episode; where all of a batch fail, the first failure is raised.
    """
    try:
        while waiting := [(session, request) for session in sessions if (request := session.request) is not None]:
            answers: Sequence[Generation | BaseException]
            try:
                answers = policy.generate([request for _, request in waiting])
            except PartialFailure as failure:
                if all(isinstance(result, BaseException) for result in failure.results):
                    raise
                answers = failure.results
            for (session, request), answer in zip(waiting, answers, strict=True):
                if isinstance(answer, BaseException):
                    timed_out = isinstance(answer, TimeoutError)
                    session.end(Status.ERROR_TIMEOUT if timed_out else Status.ERROR_ENGINE, str(answer))
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


async def play_async(session: EpisodeSession, generate: Generate) -> Episode:
    """Play one session to its end with a server; closes it. Environments may wait, so they step in a thread."""
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


def stops(params: dict[str, Any], request: GenerateRequest) -> tuple[list[str], list[int]]:
    """Texts and ids that end a response: those of the other trainer's sampling parameters, and the request's own."""
    texts, sampling = params.get("stop") or (), request.sampling
    # a single text as well as a list
    texts = (*((texts,) if isinstance(texts, str) else texts), *sampling.stop_text)
    return [*dict.fromkeys(texts)], [*dict.fromkeys((*(params.get("stop_token_ids") or ()), *sampling.stop_ids))]


# An episode as one prompt and one masked response: the shape that other people's trainers train on.


class TrajectoryError(TurngymError):
    """An episode that cannot be shown as one prompt and one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Prompt (P tokens) and response (R tokens) of an episode; the response holds all turns and what was said between.

    `prompt_ids` followed by `response_ids` are the ids of the episode up to its last response, exactly as sampled.
    """

    prompt_ids: NDArray[np.int32]
    """int32 [P]: everything before the first response."""
    response_ids: NDArray[np.int32]
    """int32 [R]."""
    response_mask: NDArray[np.bool_]
    """bool [R]: sampled by the policy and meant to be trained on; False for observations, demonstrations, noise."""
    logprobs: NDArray[np.float32] | None
    """float32 [R], nats, as sampled (temperature included), 0 outside the mask; None where a masked one is unknown."""
    policy_versions: NDArray[np.int32]
    """int32 [R]: the policy that sampled each id; -1 outside the mask."""
    turn_spans: tuple[Span, ...]
    """Where each turn's response stands in `response_ids`, in order; all turns, masked or not."""
    turn_rewards: tuple[float, ...]
    reward: float
    """Sum of the turn rewards: the return."""
    status: Status
    success: bool
    task_id: str
    task_sha: str
    seed: int
    sample: int
    """0-based number of this attempt at the task."""
    group: int
    """Attempts that are compared with each other share it."""

    @property
    def failed(self) -> bool:
        """Whether the back end or the engine failed: the reward then says nothing about the policy."""
        return self.status.is_error

    @property
    def truncated(self) -> bool:
        return self.status.is_cut

    def lists(self) -> dict[str, Any]:
        """The columns of tokens under their names, as lists of numbers: the mask as 0 and 1, None if unknown."""
        return {
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "response_mask": self.response_mask.astype(int).tolist(),
            "logprobs": None if self.logprobs is None else self.logprobs.tolist(),
            "policy_versions": self.policy_versions.tolist(),
        }

    def filled(self, token: int) -> Trajectory:
        """Puts one masked `token` in place of an empty prompt or response, which trainers cannot take."""
        blank = np.array([token], np.int32)
        changed = self if len(self.prompt_ids) else replace(self, prompt_ids=blank)
        if len(self.response_ids):
            return changed
        return replace(
            changed,
            response_ids=blank,
            response_mask=np.zeros(1, np.bool_),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.full(1, -1, np.int32),
        )

    @classmethod
    def of(cls, episode: Episode) -> Trajectory:
        """The trajectory of an episode with one token segment. An episode without turns gives an empty one.

        Raises:
            TrajectoryError: the history was rewritten (several segments), or the agent had no tokens.
        """
        if len(episode.segments) > 1:
            raise TrajectoryError(
                f"{_name(episode)} has {len(episode.segments)} token segments, because the chat template rewrites the "
                'past: play it with ChatSettings(history="append"), or train on the segments'
            )
        if not episode.turns:
            return cls._build(episode, np.empty(0, np.int32), episode.turns)
        if not episode.segments:
            raise TrajectoryError(f"{_name(episode)} was played without a tokenizer; it has text and no token ids")
        return cls._build(episode, episode.segments[0], episode.turns)

    @classmethod
    def segments_of(cls, episode: Episode) -> list[Trajectory]:
        """One trajectory per token segment: every row has the episode's reward, and only its own turns."""
        return [
            cls._build(episode, ids, [turn for turn in episode.turns if turn.segment == number])
            for number, ids in enumerate(episode.segments)
        ]

    @classmethod
    def _build(cls, episode: Episode, ids: NDArray[np.int32], turns: Sequence[Turn]) -> Trajectory:
        start = turns[0].response_span[0] if turns else len(ids)
        # what was said after the last response is left out: nothing answers it
        stop = turns[-1].response_span[1] if turns else len(ids)
        spans = tuple((turn.response_span[0] - start, turn.response_span[1] - start) for turn in turns)
        mask = np.zeros(stop - start, np.bool_)
        logprobs = np.zeros(stop - start, np.float32)
        versions = np.full(stop - start, -1, np.int32)
        all_scored = True
        for turn, (begin, end) in zip(turns, spans, strict=True):
            if turn.origin != "policy" or turn.excluded is not None:
                continue
            # what a demonstrator began is context
            own = slice(begin + turn.begun, end)
            mask[own], versions[own] = True, turn.policy_version
            # only where the weights changed while the response was drawn; else one version holds for all of it
            for version, first, last in turn.version_spans:
                versions[begin + first : begin + last] = version
            all_scored = all_scored and turn.logprobs is not None
            if turn.logprobs is not None:
                logprobs[own] = turn.logprobs[turn.begun :]
        return cls(
            prompt_ids=ids[:start],
            response_ids=ids[start:stop],
            response_mask=mask,
            logprobs=logprobs if all_scored else None,
            policy_versions=versions,
            turn_spans=spans,
            turn_rewards=tuple(turn.reward for turn in turns),
            reward=episode.episode_return,
            status=episode.status,
            success=episode.success,
            task_id=episode.task.task_id,
            task_sha=episode.task.sha256,
            seed=episode.seed,
            sample=episode.sample,
            group=episode.group,
        )


def _name(episode: Episode) -> str:
    return f"episode {episode.task.task_id} sample {episode.sample}"
