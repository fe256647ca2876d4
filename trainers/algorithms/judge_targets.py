"""Targets from judges: a turn's score on all of its tokens, and a teacher that has read the hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.judges.votes import majority
from turngym.core.episode import Episode, TopK
from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import PrivilegedText, Scorers, Targets
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.privileged import (
    Located,
    batch_turns,
    privileged_logprobs,
    privileged_turns,
    reader_of,
    score_turns,
)
from turngym.trainers.targets import combined_advantage


def turn_scores(batch: RolloutBatch, episodes: Sequence[Episode]) -> NDArray[np.float32]:
    """Majority of the judge's votes on each token's turn, in {-1, 0, 1}; 0 where it was never judged: float32 [N]."""
    score_N = np.zeros(batch.tokens, np.float32)
    for _, turn, tokens in batch_turns(batch, episodes):
        score_N[tokens] = 0.0 if turn.judge_scores is None else majority(turn.judge_scores)
    return score_N


@dataclass(frozen=True, slots=True)
class TurnScore:
    """A_i = `turn_scores`; turns that must not count are excluded before (`ScoredTurns`). Nothing is normalized.

    Source: [openclaw-rl] section 4.1; docs/algorithms.md#turn-score.
    """

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        return Targets(advantage_N=turn_scores(batch, episodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTargets:
    """What a teacher that has read the hint says of the turns that have one, beside an advantage s_t of every turn.

    With h_t 1 where the turn has `hint_prompt_ids`, else 0, and p the student before the update, nats:
    A_i = w_reward s_t + w_hint h_t (log q(label_i | prompt with the hint) - log p(label_i | prompt)).
    With `k`, the teacher's K most likely ids on hinted turns (`kl_mask_N` says where) beside A_i = s_t.
    q is the teacher, or the frozen initial policy where there is none.
    Source: [openclaw-rl] section 4.2, Option B; docs/algorithms.md#hinted-advantage, #score-and-hint.
    Raises TargetError for a teacher that does not answer exactly R finite log-probabilities for R tokens.
    """

    k: int | None = None
    """None: log-ratios at the labels."""
    reject_below: float = 0.0
    """Behind the first token of a response to which q gives less than this probability only s_t counts."""
    own: Callable[[RolloutBatch, Sequence[Episode]], NDArray[np.float32]] | None = turn_scores
    """s_t on each token: the judge's scores; None: 0."""
    w_reward: float = 1.0
    w_hint: float = 1.0
    privileged: PrivilegedText = field(default_factory=PrivilegedText)
    """Who reads the hints: the live student teaches itself ([sdpo])."""

    def __post_init__(self) -> None:
        # the teacher is asked for its 1 / reject_below most likely ids
        if self.reject_below and self.reject_below < 0.001:
            raise SettingsError(f"reject_below is {self.reject_below}; valid: 0, or 0.001 to below 1")

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        score_N = np.zeros(batch.tokens, np.float32) if self.own is None else self.own(batch, episodes)
        hinted = privileged_turns(batch, episodes)
        if self.k is not None:
            targets = self._support(self.k, batch, episodes, hinted, scorers)
            return targets if self.own is None else replace(targets, advantage_N=score_N)
        if not hinted:
            return Targets(advantage_N=np.float32(self.w_reward) * score_N)
        compared = privileged_logprobs(batch, episodes, scorers, self.privileged)
        ratio_N = compared.gap_N
        if self.reject_below:
            accepted_N = up_to_rejection(batch, episodes, compared.privileged_N, self.reject_below)
            ratio_N[~accepted_N & compared.where_N] = 0.0
        advantage_N = combined_advantage(score_N, ratio_N, w_reward=self.w_reward, w_teacher=self.w_hint)
        return Targets(advantage_N=advantage_N, label_logp_N=compared.privileged_N)

    def _support(
        self,
        k: int,
        batch: RolloutBatch,
        episodes: Sequence[Episode],
        hinted: Sequence[Located],
        scorers: Scorers,
    ) -> Targets:
        """The hinted teacher's top-K, fewer in a small vocabulary; elsewhere a placeholder that the mask takes out."""
        where_N = np.zeros(batch.tokens, np.bool_)
        for _, _, tokens in hinted:
            where_N[tokens] = True
        if not hinted:
            ids_NK, logp_NK = _placeholder(batch.tokens, 1)
            return Targets(topk_ids_NK=ids_NK, topk_logp_NK=logp_NK, kl_mask_N=where_N)
        # an id with a probability of 1 / n or more is among the n most likely ones
        count = max(k, int(1 / self.reject_below)) if self.reject_below else k
        likely: list[TopK] = []

        def ask(rows: list[NDArray[np.int32]], positions: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
            likely.extend(reader_of(self.privileged, scorers).topk(rows, positions, count))
            return [item.logp for item in likely]

        logp_HK = score_turns(hinted, ask)
        ids_HK = np.concatenate([item.ids for item in likely]).astype(np.int64)
        # a vocabulary may have fewer ids than were asked for
        ids_NK, logp_NK = _placeholder(batch.tokens, min(k, ids_HK.shape[1]))
        ids_NK[where_N], logp_NK[where_N] = ids_HK[:, :k], logp_HK[:, :k]
        tails, tail_N = [item.tail for item in likely if item.tail is not None], None
        if len(tails) == len(likely):
            tail_N = np.full(batch.tokens, -np.log(2), np.float32)
            # those that were asked for beyond the K are outside the support
            outside = np.column_stack([logp_HK[:, k:], np.concatenate(tails)])
            tail_N[where_N] = np.logaddexp.reduce(outside.astype(np.float64), axis=1)
        if self.reject_below:
            label_N = np.zeros(batch.tokens, np.float32)
            label_N[where_N] = np.where(ids_HK == batch.label_N[where_N][:, None], logp_HK, -np.inf).max(axis=1)
            where_N = where_N & up_to_rejection(batch, episodes, label_N, self.reject_below)
        return Targets(topk_ids_NK=ids_NK, topk_logp_NK=logp_NK, topk_tail_N=tail_N, kl_mask_N=where_N)


def _placeholder(tokens: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The ids and log-probabilities [tokens, width] of a support that says nothing: half of the mass is on it, so that
    every form of the KL is finite."""
    ids_NK = np.tile(np.arange(width, dtype=np.int64), (tokens, 1))
    return ids_NK, np.full((tokens, width), -np.log(2 * width), np.float32)


def up_to_rejection(
    batch: RolloutBatch, episodes: Sequence[Episode], logp_N: NDArray[np.floating[Any]], below: float
) -> NDArray[np.bool_]:
    """bool [N]: no token before it in its response has a probability (`logp_N`, nats) of less than `below`."""
    accepted_N = np.ones(batch.tokens, np.bool_)
    for _, _, tokens in batch_turns(batch, episodes):
        rejected = np.flatnonzero(logp_N[tokens] < np.log(below))
        if len(rejected):
            # the rejected token itself still teaches: up to there the prefix is one that the teacher accepts
            accepted_N[tokens.start + int(rejected[0]) + 1 : tokens.stop] = False
    return accepted_N
