"""AgentOPSD: GRPO whose advantage is larger in turns that move a belief in success the way the episode went.

Read next: trainers/privileged.py, trainers/contrib/rlsd.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.core import Share
from turngym.trainers import Algorithm, BuildContext, PrivilegedLogprobs, RolloutBatch
from turngym.trainers.contrib.privileged_group import (
    PrivilegedAdvantage,
    PrivilegedGroupConfig,
    privileged_group,
    told_in_groups,
)

Float64N = NDArray[np.float64]
PRIOR_LEAST, BELIEF_LEAST = 1e-4, 1e-6
"""A belief is kept this far from 0 and 1: the prior, and those after each turn."""


def belief_moves(gap_T: Float64N, prior: float) -> Float64N:
    """How far each turn moves the belief in success: float64 [T], in [-1, 1].

    logit V_t = logit V_{t-1} + gap_t, V_{-1} = `prior`; the move is V_t - V_{t-1}. `gap_T` is the sum of log q - log p
    over a turn's tokens, nats. A belief near 0 or 1 hardly moves.
    Source: [agent-opsd]; docs/contrib_algorithms.md#belief-moves.
    """
    prior = min(max(prior, PRIOR_LEAST), 1.0 - PRIOR_LEAST)
    logit_T = np.log(prior / (1.0 - prior)) + np.cumsum(gap_T)
    # cut so that exp does not overflow; the belief is cut closer anyway
    belief_T = np.clip(1.0 / (1.0 + np.exp(-np.clip(logit_T, -50.0, 50.0))), BELIEF_LEAST, 1.0 - BELIEF_LEAST)
    return np.diff(belief_T, prepend=prior)


def turn_factors(move_T: Float64N, sign: float, *, lam: float, eps: float) -> Float64N:
    """1 - lam + lam clip(1 + eps sign z_t, 1 - eps, 1 + eps), z the moves as z-scores in their episode: float64 [T].

    z_t = (move_t - mean) / (std + 1e-6), the deviation that of the population; a single turn has 0.
    Source: [agent-opsd]; docs/contrib_algorithms.md#belief-moves.

    Args:
        move_T: how far each turn [T] of one episode moved the belief in success.
        sign: 1 where the episode did better than its group, -1 where worse, 0 where alike.
        lam: share of the advantage that is directed, in [0, 1].
        eps: most that a factor differs from 1 before it is mixed.
    """
    z_T = (move_T - move_T.mean()) / (move_T.std() + BELIEF_LEAST)
    return (1.0 - lam) + lam * np.clip(1.0 + eps * sign * z_T, 1.0 - eps, 1.0 + eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """A_i = A_j times the `turn_factors` of its turn; the prior of a group is its share of successes.

    Source: [agent-opsd]; docs/contrib_algorithms.md#belief-moves.
    """

    lam: float
    eps: float

    def __call__(self, advantage_N: Float64N, logp: PrivilegedLogprobs, batch: RolloutBatch, step: int) -> Float64N:
        changed_N, gap_N = advantage_N.copy(), logp.gap_N.astype(np.float64)
        for episode in np.unique(batch.episode_N):
            mine_N = np.flatnonzero(batch.episode_N == episode)
            _, turn_n = np.unique(batch.turn_N[mine_N], return_inverse=True)
            prior = float(batch.success_E[batch.group_E == batch.group_E[episode]].mean())
            move_T = belief_moves(np.bincount(turn_n, gap_N[mine_N]).astype(np.float64), prior)
            sign = float(np.sign(advantage_N[mine_N[0]]))
            changed_N[mine_N] *= turn_factors(move_T, sign, lam=self.lam, eps=self.eps)[turn_n]
        return changed_N


class AgentOpsdConfig(PrivilegedGroupConfig):
    """GRPO whose advantage is directed to turns by how they move a belief in success."""

    lam: Share = 0.5
    """Share of the advantage that is directed (lambda)."""
    eps: Share = 0.2
    """Most that a turn's factor differs from 1."""


def build(config: AgentOpsdConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on A_i = A_j (1 - lam + lam clip(1 + eps sign(A_j) z_t, 1 - eps, 1 + eps)).

    A_j is the group-relative advantage, z_t the z-score, among the turns of the episode, of how far turn t moves the
    belief V: logit V_t = logit V_{t-1} + sum_i (log q - log p) over its tokens, from the group's share of successes on.
    Source: [agent-opsd]; docs/contrib_algorithms.md#agent-opsd.
    Differs from the paper: its code was read, not its text. There the prior is the group's mean return, cut to below 1,
    which with 10 for a success is the cut in nearly every group; here it is the share of successes that its comments
    mean. Its scripts for WebShop and Search move a belief token by token within a turn; here it is always turn by turn,
    as in its script for ALFWorld and as its page describes it. What the harness of all five does otherwise:
    `PrivilegedGroupConfig`.
    """
    change = Believed(lam=config.lam, eps=config.eps)
    return privileged_group(
        config,
        context,
        name="agent-opsd",
        target_fn=PrivilegedAdvantage(target_fn=config.compared(), privileged=config.privileged, change=change),
        token_loss=config.surrogate,
    )


ALGORITHM = told_in_groups("agent-opsd", AgentOpsdConfig, build)
