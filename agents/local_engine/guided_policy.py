"""Teacher and student share an episode turn by turn: some answers are the teacher's, whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turngym.agents.agent import AgentError
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.sampling import uniforms
from turngym.agents.local_engine.two_engines import TwoEngines
from turngym.agents.model_player import ModelPlayer
from turngym.agents.rollout import PlayJobs, rollout
from turngym.envs.protocols import Engine, GenerateRequest, Generation, PartialFailure, Policy

COIN, ANSWER = 1, 2
"""What a request's stream is continued with: 0 would be the stream itself, from which the student draws."""


class GuidedPolicy(TwoEngines):
    """Each answer is the teacher's with probability `share`, else the student's, decided by the request's own stream.

    Who else is in the batch changes nothing, and without a share the student plays what it would have played alone. An
    answer of the teacher has origin `demonstration`, and no behavior probability (NaN): the student did not draw it.
    Source: [guided-opd]; docs/algorithms.md#guided-turns.

    Raises:
        AgentError: a share outside [0, 1].
    """

    def __init__(self, student: Engine, teacher: Engine, share: float) -> None:
        super().__init__(student, teacher, share, "turns")

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Raises PartialFailure where one of the two fails for some requests."""
        theirs = [bool(uniforms((*request.stream, COIN), 1)[0] < self.share) for request in requests]
        found: dict[int, Generation | BaseException] = {}
        for policy, teaches in ((self._student, False), (self._teacher, True)):
            rows = [row for row, taught in enumerate(theirs) if taught == teaches]
            asked = [_taught(requests[row]) if teaches else requests[row] for row in rows]
            answers = _answers(policy, asked) if asked else []
            for row, answer in zip(rows, answers, strict=True):
                found[row] = _shown(answer) if teaches else answer
        results = [found[row] for row in range(len(requests))]
        whole = [result for result in results if isinstance(result, Generation)]
        if len(whole) < len(results):
            raise PartialFailure(results)
        return whole


def _taught(request: GenerateRequest) -> GenerateRequest:
    return replace(request, stream=(*request.stream, ANSWER))


def _answers(policy: Policy, requests: Sequence[GenerateRequest]) -> Sequence[Generation | BaseException]:
    try:
        return policy.generate(requests)
    except PartialFailure as error:
        return error.results


def _shown(answer: Generation | BaseException) -> Generation | BaseException:
    if isinstance(answer, BaseException):
        return answer
    return replace(answer, logprobs=np.full(len(answer.ids), np.nan, np.float32), origin="demonstration")


def guided_player(
    player: ModelPlayer, teacher: Any | None, tokenizer: Any, *, slots: int, play: PlayJobs
) -> Callable[[float], ModelPlayer]:
    """Who plays when the model `teacher` takes a share of the turns: from that share to `player` and it.

    Raises AgentError for a teacher that is not in this process (None), or rollouts in other processes.
    """
    if teacher is None or play is not rollout:
        raise AgentError(
            "teacher and student share the turns of an episode, which needs --teacher FOLDER and rollouts in this "
            "process (no --teacher-server, no --workers, no --staleness)"
        )
    theirs = LocalEngine(teacher, tokenizer=tokenizer, max_length=player.engine.max_length, max_batch=slots)
    return lambda share: replace(player, engine=GuidedPolicy(player.engine, theirs, share)) if share else player
