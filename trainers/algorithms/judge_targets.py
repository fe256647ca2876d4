"""Targets from judges: a turn's score on all of its tokens, and a teacher that has read the hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.episode import Episode, Turn
from turngym.envs.core.protocols import Scorer
from turngym.trainers.algorithm import Scorers, TargetFn, Targets
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.judged import majority, turn_name
from turngym.trainers.losses import sampled_advantage
from turngym.trainers.targets import TargetError, label_logprobs


@dataclass(frozen=True, slots=True)
class TurnScore:
    """A_i = majority of the judge's votes on the turn of i, in {-1, 0, 1}; 0 where the turn was never judged.

    Turns that must not count are excluded before (`ScoredTurns`). Nothing is normalized.
    Source: [openclaw-rl] section 4.1; docs/algorithms.md#turn-score.
    """

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        advantage_N = np.zeros(batch.tokens, np.float32)
        for _, turn, tokens in batch_turns(batch, episodes):
            advantage_N[tokens] = 0.0 if turn.judge_scores is None else majority(turn.judge_scores)
        return Targets(advantage_N=advantage_N)


@dataclass(frozen=True, slots=True)
class HintAdvantage:
    """A_i = log q(label_i | prompt with the hint) - log p(label_i | prompt), p before the update and detached, nats.

    q is the teacher, or the frozen initial policy where there is none.
    Source: [openclaw-rl] section 4.2; docs/algorithms.md#hinted-advantage.
    Raises TargetError for a turn without `hint_prompt_ids`, or not exactly R finite log-probabilities for its R tokens.
    """

    reject_below: float = 0.0
    """A_i = 0 behind the first token of a response to which q gives less than this probability."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        teacher_logp_N = score_turns(list(batch_turns(batch, episodes)), hint_teacher(scorers).logprobs)
        advantage_N = sampled_advantage(label_logprobs(scorers.student, batch, "student"), teacher_logp_N)
        if self.reject_below:
            advantage_N[~up_to_rejection(batch, episodes, teacher_logp_N, self.reject_below)] = 0.0
        return Targets(advantage_N=advantage_N, label_logp_N=teacher_logp_N)


@dataclass(frozen=True, slots=True)
class HintTopK:
    """The K most likely ids of the teacher that has read the hint, for the reverse KL on its support.

    Source: [openclaw-rl] Option B; docs/algorithms.md#hinted-advantage.
    """

    k: int = 50
    reject_below: float = 0.0
    """What follows the first token of a response to which q gives less than this probability does not count."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        # an id with a probability of 1 / n or more is among the n most likely ones
        asked = max(self.k, int(1 / self.reject_below)) if self.reject_below else self.k
        ids, logp = hinted_topk(list(batch_turns(batch, episodes)), scorers, asked)
        kl_mask_N = None
        if self.reject_below:
            label_N = np.where(ids == batch.label_N[:, None], logp, -np.inf).max(axis=1)
            kl_mask_N = up_to_rejection(batch, episodes, label_N, self.reject_below)
        return Targets(topk_ids_NK=ids[:, : self.k], topk_logp_NK=logp[:, : self.k], kl_mask_N=kl_mask_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTaught:
    """Another target function, for which the student as it is before the update reads the hints: it teaches itself.

    Source: [sdpo]; docs/algorithms.md#hinted-advantage.
    """

    target_fn: TargetFn

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        return self.target_fn(batch, episodes, replace(scorers, teacher=scorers.student))


def up_to_rejection(
    batch: RolloutBatch, episodes: Sequence[Episode], logp_N: NDArray[np.floating[Any]], below: float
) -> NDArray[np.bool_]:
    """bool [N]: no token before it in its response has a probability (`logp_N`, nats) of less than `below`."""
    kl_mask_N = np.ones(batch.tokens, np.bool_)
    for _, _, tokens in batch_turns(batch, episodes):
        rejected = np.flatnonzero(logp_N[tokens] < np.log(below))
        if len(rejected):
            # the rejected token itself still teaches: up to there the prefix is one that the teacher accepts
            kl_mask_N[tokens.start + int(rejected[0]) + 1 : tokens.stop] = False
    return kl_mask_N


def hint_teacher(scorers: Scorers) -> Scorer:
    """The teacher, or else the frozen initial policy: self-distillation with privileged context."""
    teacher = scorers.reference if scorers.teacher is None else scorers.teacher
    if teacher is None:
        raise TargetError("opd-hints needs a teacher or the frozen initial policy, and neither was given")
    return teacher


Ask = Callable[[list[NDArray[np.int32]], list[NDArray[np.int64]]], list[NDArray[np.float32]]]


def hinted_topk(
    turns: Sequence[tuple[Episode, Turn, slice]], scorers: Scorers, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the hinted teacher's K most likely ids at each token of `turns` and their log-probabilities: [n, K]."""
    ids: list[NDArray[np.int32]] = []

    def ask(rows: list[NDArray[np.int32]], positions: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        found = hint_teacher(scorers).topk(rows, positions, k)
        ids.extend(item.ids for item in found)
        return [item.logp for item in found]

    logp = score_turns(turns, ask)
    return np.concatenate(ids).astype(np.int64), logp


def score_turns(turns: Sequence[tuple[Episode, Turn, slice]], ask: Ask) -> NDArray[np.float32]:
    """Asks about each turn's original response after its prompt with the hint: float32 [n] or [n, K], nats.

    The rows of the result are the tokens of `turns`, in order. `ask(ids, positions)` gets one row per turn: int32
    [P + R] and the R positions of the response. Raises TargetError as `HintAdvantage` does, naming the turn.
    """
    ids, positions = [], []
    for episode, turn, _ in turns:
        if turn.hint_prompt_ids is None:
            raise TargetError(f"{turn_name(episode, turn)}: it has no hint in its prompt; keep only hinted turns")
        prompt = turn.hint_prompt_ids
        ids.append(np.concatenate([prompt, episode.response_ids(turn)]).astype(np.int32))
        positions.append(np.arange(len(prompt), len(prompt) + turn.response_length, dtype=np.int64))
    found = ask(ids, positions)
    if len(found) != len(turns):
        raise TargetError(f"the teacher answered {len(found)} turns; {len(turns)} were asked")
    for (episode, turn, _), values in zip(turns, found, strict=True):
        _check(episode, turn, np.asarray(values))
    result: NDArray[np.float32] = np.concatenate(found).astype(np.float32)
    return result


def batch_turns(batch: RolloutBatch, episodes: Sequence[Episode]) -> Iterator[tuple[Episode, Turn, slice]]:
    """Each supervised turn in the order of N, and where its tokens are."""
    # one number for (episode, turn), since turns of neighboring episodes may have the same index
    keys_N = batch.episode_N * (int(batch.turn_N.max()) + 1) + batch.turn_N
    starts = np.concatenate([[0], np.flatnonzero(np.diff(keys_N)) + 1, [batch.tokens]])
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        episode = episodes[batch.source_E[batch.episode_N[start]]]
        yield episode, episode.turns[batch.turn_N[start]], slice(start, stop)


def _check(episode: Episode, turn: Turn, values: NDArray[Any]) -> None:
    if len(values) != turn.response_length:
        raise TargetError(
            f"{turn_name(episode, turn)}: the teacher answered {len(values)} log-probabilities for a response of "
            f"{turn.response_length} tokens"
        )
    if not np.isfinite(values).all():
        raise TargetError(f"{turn_name(episode, turn)}: the teacher's log-probabilities are not all finite: {values}")
