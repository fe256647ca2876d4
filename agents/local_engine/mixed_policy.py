"""Two policies take turns within an answer: each id is the teacher's with a fixed probability, else the student's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.agent import AgentError
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.sampling import Decoder, StopText, uniforms
from turngym.agents.local_engine.two_engines import TwoEngines
from turngym.agents.model_player import ModelPlayer
from turngym.agents.rollout import PlayJobs, rollout
from turngym.envs.protocols import Engine, GenerateRequest, Generation, PartialFailure, Policy


@dataclass(slots=True, eq=False)
class _Row:
    """One request under way."""

    request: GenerateRequest
    theirs: NDArray[np.bool_]
    """[max_new_tokens]: whether the teacher draws the id at this place."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    finish: str = ""
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.finish != "" or self.error is not None

    @property
    def run(self) -> int:
        """How many ids the one whose turn it is draws before the other's turn comes."""
        rest = self.theirs[len(self.tokens) :]
        other = np.flatnonzero(rest != rest[0])
        return int(other[0]) if len(other) else len(rest)

    def part(self) -> GenerateRequest:
        """The request for those ids."""
        place = len(self.tokens)
        return replace(
            self.request,
            prompt_ids=np.concatenate((self.request.prompt_ids, np.array(self.tokens, np.int32))),
            sampling=replace(self.request.sampling, max_new_tokens=self.run),
            # 0 is the stream of the coins, and a place is never drawn twice
            stream=(*self.request.stream, 1 + place),
        )


class MixedPolicy(TwoEngines):
    """MiniLLM's teacher-mixed sampling: every id is drawn from p~ = share p_teacher + (1 - share) p_student.

    Whether the teacher or the student draws an id is decided beforehand, by the request's own stream; drawing from the
    chosen one is drawing from the mixture. Runs of ids that fall to one of them are one request to it, so both may be
    any policies, each with its own KV cache. `logprobs` are the student's, NaN where the teacher drew: the weight
    p_student / p~ that corrects for it (`kd_signals.mixture_weight`) follows from both models' log-probabilities.
    Source: [minillm] eq. 4; docs/algorithms.md#teacher-mixed-sampling (its share is 0.2).

    Args:
        tokenizer: needed for stop texts, which may begin in one's ids and end in the other's.

    Raises:
        AgentError: a share outside [0, 1].
    """

    def __init__(self, student: Engine, teacher: Engine, share: float, *, tokenizer: Decoder | None = None) -> None:
        super().__init__(student, teacher, share, "ids")
        self._stop_text = None if tokenizer is None else StopText(tokenizer)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Raises PartialFailure where one of the two fails for some requests."""
        rows = [self._row(request) for request in requests]
        while any(not row.over for row in rows):
            for policy, teaches in ((self._student, False), (self._teacher, True)):
                turn = [row for row in rows if not row.over and row.theirs[len(row.tokens)] == teaches]
                if turn:
                    self._draw(policy, turn, teaches)
        if any(row.error is not None for row in rows):
            raise PartialFailure([_generation(row) if row.error is None else row.error for row in rows])
        return [_generation(row) for row in rows]

    def _row(self, request: GenerateRequest) -> _Row:
        sampling = request.sampling
        if sampling.stop_text and self._stop_text is None:
            raise AgentError(f"stop_text {sampling.stop_text!r} needs decoding: build the policy with tokenizer=...")
        room = min(sampling.max_new_tokens, self.max_length - len(request.prompt_ids))
        # all coins at once from the request's own stream: who else is in the batch changes nothing
        coins = uniforms((*request.stream, 0), max(room, 0))
        return _Row(request, coins < self.share, finish="" if room > 0 else "length")

    def _draw(self, policy: Policy, rows: Sequence[_Row], teaches: bool) -> None:
        results: Sequence[Generation | BaseException]
        try:
            results = policy.generate([row.part() for row in rows])
        except PartialFailure as error:
            results = error.results
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, BaseException):
                row.error = result
            else:
                self._take(row, result, teaches)

    def _take(self, row: _Row, result: Generation, teaches: bool) -> None:
        # before the ids are taken: `run` is counted from the row's end
        cut_short = len(result.ids) < row.run
        row.version = row.version if teaches else result.policy_version
        for token, logprob in zip(result.ids.tolist(), result.logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(float("nan") if teaches else logprob)
            if row.request.sampling.stop_text and self._stops(row):
                row.finish = "stop"
                return
        # `length` after a whole run is only the run's own limit; a shorter one means that the context is full
        if result.finish != "length" or cut_short:
            row.finish = result.finish
        elif len(row.tokens) == len(row.theirs):
            row.finish = "length"

    def _stops(self, row: _Row) -> bool:
        # an engine sees only its own run: a stop text that the other one began is found here
        return self._stop_text is not None and self._stop_text.hit(row.tokens, row.request.sampling.stop_text)


def _generation(row: _Row) -> Generation:
    ids, logprobs = np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32)
    return Generation(ids=ids, logprobs=logprobs, finish=row.finish, policy_version=row.version)


def mixed_player(
    player: ModelPlayer, share: float, teacher: Any | None, tokenizer: Any, *, slots: int, play: PlayJobs
) -> ModelPlayer:
    """Who plays the episodes to train on: `player` itself, or it and the model `teacher` mixed for a `share` above 0.

    Raises AgentError for a teacher that is not in this process (None), or rollouts in other processes.
    """
    if not share:
        return player
    if teacher is None or play is not rollout:
        raise AgentError(
            f"teacher_mix is {share}: teacher and student take turns within an answer, which needs "
            "--teacher FOLDER and rollouts in this process (no --teacher-server, no --workers)"
        )
    limit = player.engine.max_length
    theirs = LocalEngine(teacher, tokenizer=tokenizer, max_length=limit, max_batch=slots)
    return replace(player, engine=MixedPolicy(player.engine, theirs, share, tokenizer=tokenizer))
