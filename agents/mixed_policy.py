"""How a student and a teacher share an episode: whole turns (`GuidedPolicy`) or single ids (`MixedPolicy`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.sampling import uniforms
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.playing.rollout import PlayJobs, rollout
from turngym.agents.rendering.stop_text import StopText
from turngym.core.errors import AgentError
from turngym.core.protocols import Engine, GenerateRequest, Generation, PartialFailure, Policy

COIN, ANSWER = 1, 2
"""Appended to a request's stream. 0 is not used: that is the stream from which the student draws."""


class TwoEngines:
    """A student, a teacher, and the teacher's share of `what` (turns, ids). Raises AgentError outside [0, 1]."""

    def __init__(self, student: Engine, teacher: Engine, share: float, what: str) -> None:
        if not 0.0 <= share <= 1.0:
            raise AgentError(f"the teacher's share of the {what} is {share}; valid: 0 to 1")
        self._student, self._teacher, self.share = student, teacher, share

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together that both engines can hold."""
        return min(self._student.max_length, self._teacher.max_length)

    @property
    def vocab_size(self) -> int | None:
        """Number of ids that both engines draw from, counted from id 0."""
        return self._student.vocab_size

    def weights_changed(self, version: int) -> None:
        self._student.weights_changed(version)

    def release(self, session: str) -> None:
        self._student.release(session)
        self._teacher.release(session)


class GuidedPolicy(TwoEngines):
    """Each answer is the teacher's with probability `share`, else the student's, decided by the request's own stream.

    The rest of the batch changes nothing, and with share 0 the student plays what it would have played alone. A
    teacher's answer has origin `demonstration` and NaN as log-probabilities, since the student did not draw it.
    Source: [guided-opd]; docs/contrib_algorithms.md#guided-turns. Raises AgentError for a share outside [0, 1].
    """

    def __init__(self, student: Engine, teacher: Engine, share: float) -> None:
        super().__init__(student, teacher, share, "turns")

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Raises PartialFailure if one of the two fails for some requests."""
        theirs = [bool(uniforms((*request.stream, COIN), 1)[0] < self.share) for request in requests]
        answers: dict[int, Generation | BaseException] = {}
        for policy, teaches in ((self._student, False), (self._teacher, True)):
            rows = [row for row, taught in enumerate(theirs) if taught == teaches]
            batch = [requests[row] for row in rows]
            if teaches:
                batch = [replace(request, stream=(*request.stream, ANSWER)) for request in batch]
            for row, answer in zip(rows, _answers(policy, batch), strict=True):
                if teaches and isinstance(answer, Generation):
                    unknown = np.full(len(answer.ids), np.nan, np.float32)
                    answer = replace(answer, logprobs=unknown, origin="demonstration")
                answers[row] = answer
        results = [answers[row] for row in range(len(requests))]
        generations = [result for result in results if isinstance(result, Generation)]
        if len(generations) < len(results):
            raise PartialFailure(results)
        return generations


def _answers(policy: Policy, requests: Sequence[GenerateRequest]) -> Sequence[Generation | BaseException]:
    try:
        return policy.generate(requests) if requests else []
    except PartialFailure as error:
        return error.results


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
        """Number of ids that one model draws before it is the other's turn."""
        remaining = self.theirs[len(self.tokens) :]
        changes = np.flatnonzero(remaining != remaining[0])
        return int(changes[0]) if len(changes) else len(remaining)

    def part(self) -> GenerateRequest:
        """The request for the ids of this run."""
        position = len(self.tokens)
        return replace(
            self.request,
            prompt_ids=np.concatenate((self.request.prompt_ids, np.array(self.tokens, np.int32))),
            sampling=replace(self.request.sampling, max_new_tokens=self.run),
            # 0 is the stream of the coins; a position is never drawn twice
            stream=(*self.request.stream, 1 + position),
        )


class MixedPolicy(TwoEngines):
    """MiniLLM's teacher-mixed sampling: every id is drawn from p~ = share p_teacher + (1 - share) p_student.

    The request's own stream decides beforehand who draws each id, which is the same as drawing from the mixture.
    Consecutive ids of one model are one request to it, so both may be any policies, each with its own KV cache.
    `logprobs` are the student's, and NaN where the teacher drew; the trainer computes the correcting weight
    p_student / p~ from both models' log-probabilities.
    Source: [minillm] eq. 4; docs/algorithms.md#teacher-mixed-sampling (its share is 0.2).

    Args:
        tokenizer: needed for stop texts, which may begin in ids of one model and end in ids of the other.

    Raises AgentError for a share outside [0, 1].
    """

    def __init__(self, student: Engine, teacher: Engine, share: float, *, tokenizer: Any = None) -> None:
        super().__init__(student, teacher, share, "ids")
        self._stop_text = None if tokenizer is None else StopText(tokenizer)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Raises PartialFailure if one of the two fails for some requests."""
        rows = [self._row(request) for request in requests]
        while any(not row.over for row in rows):
            for policy, teaches in ((self._student, False), (self._teacher, True)):
                turn = [row for row in rows if not row.over and row.theirs[len(row.tokens)] == teaches]
                for row, result in zip(turn, _answers(policy, [row.part() for row in turn]), strict=True):
                    if isinstance(result, BaseException):
                        row.error = result
                    else:
                        self._take(row, result, teaches)
        if any(row.error is not None for row in rows):
            raise PartialFailure([_generation(row) if row.error is None else row.error for row in rows])
        return [_generation(row) for row in rows]

    def _row(self, request: GenerateRequest) -> _Row:
        sampling = request.sampling
        if sampling.stop_text and self._stop_text is None:
            raise AgentError(f"stop_text {sampling.stop_text!r} needs decoding: build the policy with tokenizer=...")
        room = min(sampling.max_new_tokens, self.max_length - len(request.prompt_ids))
        # all coins are drawn at once from the request's own stream, so the rest of the batch changes nothing
        coins = uniforms((*request.stream, 0), max(room, 0))
        return _Row(request, coins < self.share, finish="" if room > 0 else "length")

    def _take(self, row: _Row, result: Generation, teaches: bool) -> None:
        # computed before the ids are appended, since `run` counts from the row's end
        cut_short = len(result.ids) < row.run
        row.version = row.version if teaches else result.policy_version
        for token, logprob in zip(result.ids.tolist(), result.logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(float("nan") if teaches else logprob)
            # an engine sees only its own ids, so a stop text that the other one began is found here
            stops = row.request.sampling.stop_text
            if stops and self._stop_text is not None and self._stop_text.hit(row.tokens, stops):
                row.finish = "stop"
                return
        # `length` after a whole run is only the run's own limit; a shorter one means that the context is full
        if result.finish != "length" or cut_short:
            row.finish = result.finish
        elif len(row.tokens) == len(row.theirs):
            row.finish = "length"


def _generation(row: _Row) -> Generation:
    ids, logprobs = np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32)
    return Generation(ids=ids, logprobs=logprobs, finish=row.finish, policy_version=row.version)


def guided_player(
    player: ModelPlayer, teacher: Any | None, tokenizer: Any, *, slots: int, play: PlayJobs
) -> Callable[[float], ModelPlayer]:
    """A function from the teacher's share of the turns to the player that plays with it.

    Raises AgentError for a teacher that is not in this process (None), or rollouts in other processes.
    """
    purpose = "teacher and student share the turns of an episode"
    theirs = _teacher_engine(player, teacher, tokenizer, slots, play, purpose)
    return lambda share: replace(player, engine=GuidedPolicy(player.engine, theirs, share)) if share else player


def mixed_player(
    player: ModelPlayer, share: float, teacher: Any | None, tokenizer: Any, *, slots: int, play: PlayJobs
) -> ModelPlayer:
    """The player of the episodes to train on: `player` itself, or mixed with the model `teacher` if `share` is above 0.

    Raises AgentError for a teacher that is not in this process (None), or rollouts in other processes.
    """
    if not share:
        return player
    purpose = f"teacher_mix is {share}: teacher and student take turns within an answer"
    theirs = _teacher_engine(player, teacher, tokenizer, slots, play, purpose)
    return replace(player, engine=MixedPolicy(player.engine, theirs, share, tokenizer=tokenizer))


def _teacher_engine(
    player: ModelPlayer, teacher: Any | None, tokenizer: Any, slots: int, play: PlayJobs, purpose: str
) -> LocalEngine:
    # `rollout`, with or without arguments of its own, plays in this thread
    if teacher is None or getattr(play, "func", play) is not rollout:
        raise AgentError(
            f"{purpose}, which needs --teacher FOLDER and rollouts in this process (no --teacher-server, no --workers, "
            "no --staleness)"
        )
    engine = player.engine
    # an id that the student cannot draw could not be scored as its own
    drawn, room = engine.vocab_size, engine.max_length
    return LocalEngine(teacher, tokenizer=tokenizer, max_length=room, max_batch=slots, vocab_size=drawn)
