"""Privileged text: what a policy is told and the student is not, and how likely it then finds what the student said.

    --judge NAME               the source of a turn's text (`Turn.hint`): a folder of skills, an expert, a judge,
                               another attempt of the group, the finished episode, nothing
    PrivilegedText.position    where it is put (`HintPrompts` of `agents/judges/hinted_prompts.py` makes
                               `Turn.hint_prompt_ids`)
    PrivilegedText.reader      who reads it and scores the student's own tokens

opd-hints and prm-opd minimize a divergence from that reader (`algorithms/judge_targets.py`). sdar, rlsd, skill-sd, opid
and agent-opsd use its log-ratio beside a reward that is compared within the group (`contrib/privileged_group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode, Turn
from turngym.core.protocols import Scorer
from turngym.trainers.algorithm import PrivilegedText, Scorers
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.judged_episodes import turn_name
from turngym.trainers.targets import TargetError, label_logprobs

Float32N = NDArray[np.float32]
Located = tuple[Episode, Turn, slice]
"""A supervised turn, and where its tokens are in the order of N."""


def reader_of(privileged: PrivilegedText, scorers: Scorers) -> Scorer:
    """The scorer that reads the text during a step. Raises TargetError if it was not given."""
    initial = scorers.reference if scorers.teacher is None else scorers.teacher
    reader = scorers.student if privileged.reader == "live" else initial
    if reader is None:
        raise TargetError("hints need a teacher or the frozen initial policy, and neither was given")
    return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegedLogprobs:
    """The labels of a batch as student and reader find them, [N], nats, the student before the update."""

    student_N: Float32N
    privileged_N: Float32N
    """Log-probabilities [N] of the policy that was told; where nothing was told, the student's."""
    where_N: NDArray[np.bool_]
    """Whether the token's turn was told something."""

    @property
    def gap_N(self) -> Float32N:
        """log q(label | prompt with the text) - log p(label | prompt); 0 in turns without a text."""
        return self.privileged_N - self.student_N


def privileged_logprobs(
    batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers, privileged: PrivilegedText
) -> PrivilegedLogprobs:
    """Scores the labels twice: in the student's own prompts, and by the reader in those with the text.

    Raises TargetError as `score_turns` does.
    Source: [sdar]; docs/algorithms.md#told.
    """
    turns = privileged_turns(batch, episodes)
    student_N = label_logprobs(scorers.student, batch, "student")
    # as likely as the student finds it where nobody was told anything: a log-ratio of 0
    privileged_N, where_N = student_N.copy(), np.zeros(batch.tokens, np.bool_)
    for _, _, tokens in turns:
        where_N[tokens] = True
    if turns:
        privileged_N[where_N] = score_turns(turns, reader_of(privileged, scorers).logprobs)
    return PrivilegedLogprobs(student_N=student_N, privileged_N=privileged_N, where_N=where_N)


def privileged_turns(batch: RolloutBatch, episodes: Sequence[Episode]) -> list[Located]:
    """The supervised turns with a text that somebody can read (`hint_prompt_ids`)."""
    return [located for located in batch_turns(batch, episodes) if located[1].hint_prompt_ids is not None]


Ask = Callable[[list[NDArray[np.int32]], list[NDArray[np.int64]]], list[NDArray[np.float32]]]


def score_turns(turns: Sequence[Located], ask: Ask) -> Float32N:
    """Asks about each turn's original response after its prompt with the text: float32 [n] or [n, K], nats.

    The rows of the result are the tokens of `turns`, in order. `ask(ids, positions)` gets int32 [M] ids and the
    positions in them that are asked about. A turn whose prompt goes on from the turn before it shares its row: what is
    told at the opening costs one pass over the episode, as the student's own scores do.
    Raises TargetError, which names the first turn of a row, unless it answers one finite number for each token.
    """
    ids: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    first: list[Located] = []
    for located in turns:
        episode, turn, _ = located
        prompt = turn.hint_prompt_ids
        assert prompt is not None
        row = np.concatenate([prompt, episode.response_ids(turn)]).astype(np.int32)
        where = np.arange(len(prompt), len(row), dtype=np.int64)
        goes_on = bool(first) and first[-1][0] is episode and len(ids[-1]) <= len(prompt)
        if goes_on and np.array_equal(prompt[: len(ids[-1])], ids[-1]):
            ids[-1], positions[-1] = row, np.concatenate([positions[-1], where])
        else:
            ids.append(row)
            positions.append(where)
            first.append(located)
    answers = ask(ids, positions)
    if len(answers) != len(ids):
        raise TargetError(f"the teacher answered {len(answers)} rows; {len(ids)} were asked")
    for (episode, turn, _), values, wanted in zip(first, answers, positions, strict=True):
        if len(values) != len(wanted):
            raise TargetError(
                f"{turn_name(episode, turn)}: the teacher answered {len(values)} log-probabilities for a response of "
                f"{len(wanted)} tokens"
            )
        if not np.isfinite(values).all():
            raise TargetError(
                f"{turn_name(episode, turn)}: the teacher's log-probabilities are not all finite: {values}"
            )
    return np.concatenate(answers).astype(np.float32)


def batch_turns(batch: RolloutBatch, episodes: Sequence[Episode]) -> Iterator[Located]:
    """Each supervised turn in the order of N, and where its tokens are."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(batch.response_N)) + 1, [batch.tokens]])
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        episode = episodes[batch.source_E[batch.episode_N[start]]]
        yield episode, episode.turns[batch.turn_N[start]], slice(start, stop)
