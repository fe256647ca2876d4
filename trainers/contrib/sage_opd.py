"""SAGE-OPD: a judge chooses the turns in which the teacher intervenes, its confidence weighs the tokens.

Read next: trainers/judged_episodes.py, trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from turngym.agents import majority
from turngym.core import Episode, SettingsError, Share, Spec, Turn
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    FixedDepth,
    RolloutBatch,
    Scorers,
    Targets,
    TeacherTopK,
    TokenLoss,
    TokenLosses,
    Tokens,
    batch_turns,
    support_kl,
    tables_of,
)

FACTOR = "factor"
"""The column of `Targets.extra` that `Reweighted` multiplies with."""


def gate(turn: Turn, weak: float) -> float:
    """How much the teacher intervenes in a turn: 0 where the judge found it good, `weak` where neither, 1 where bad.

    1 too where nobody could judge: without a verdict it is plain distillation.
    Source: [sage-opd]; docs/contrib_algorithms.md#intervention-weights.
    """
    if not turn.judge_scores:
        return 1.0
    score = majority(turn.judge_scores)
    return weak if score == 0.0 else float(score < 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """The teacher's top-K, and how much each token counts: the column `factor`, mean 1.

    f_i = g_t c_i / mean(g c), g_t the turn's `gate`, c_i the probability of the teacher's most likely id (1 without
    `confidence`).
    Source: [sage-opd]; docs/contrib_algorithms.md#intervention-weights.
    """

    k: int = 50
    weak: float = 0.5
    confidence: bool = True

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = TeacherTopK(self.k)(batch, episodes, scorers)
        weight_N = np.ones(batch.tokens)
        if self.confidence and targets.topk_logp_NK is not None:
            weight_N = np.exp(targets.topk_logp_NK.max(axis=1).astype(np.float64))
        for _, turn, tokens in batch_turns(batch, episodes):
            weight_N[tokens] *= gate(turn, self.weak)
        # all 0 stay 0: the teacher has nothing to say
        factor_N = weight_N / (weight_N.mean() or 1.0)
        return replace(targets, extra={FACTOR: factor_N.astype(np.float32)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reweighted:
    """l_i = f_i loss_i, f_i the targets' column `factor`; 0 leaves a token out.

    Diagnostics: those of `loss`, unweighted, and `factor`.
    """

    loss: TokenLoss

    def __call__(self, tokens: Tokens) -> TokenLosses:
        inner, factor_n = self.loss(tokens), tokens.extra[FACTOR]
        return TokenLosses(loss_n=inner.loss_n * factor_n, diagnostics={**inner.diagnostics, FACTOR: factor_n})


class SageOpdConfig(Spec):
    """On-policy distillation of the turns that a judge found wanting."""

    weak: Share = 0.5
    """How much a turn of score 0 counts. The judge found it neither good (0) nor bad (1)."""
    confidence: bool = True
    """Weigh tokens by the teacher's confidence. It is the probability of its most likely id."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "trajectory"
    """What counts the same. Every episode, every token or every response, before turns are chosen."""


def build(config: SageOpdConfig, context: BuildContext) -> Algorithm:
    """OPD whose tokens count by the judge's verdict on their turn and the teacher's confidence.

    l_i = f_i KL_S(p || q), f_i = g_t c_i / mean(g c): g_t is 0 for a turn judged good, `weak` for one judged neither,
    1 for one judged bad, or not at all; c_i = max_v q_v.
    Source: [sage-opd]; docs/contrib_algorithms.md#sage-opd.
    Differs from the paper: only its abstract and a summary by others could be had, which have the judgment from what
    the environment said (skip, weak, strong), the teacher's top-1 probability, and a mean weight of 1 over the batch.
    The paper's judge is the teacher itself with a prompt; here it is any judge of scores (rules by default, `--judge
    model:FOLDER` for a model). That +1, 0 and -1 are skip, weak and strong, and weak = 0.5, are ours.
    """
    distill = context.distill
    if (distill.form, distill.support) != ("topk", "teacher"):
        raise SettingsError(
            f"distill.form is {distill.form} and distill.support {distill.support}; sage-opd reads the teacher's "
            "confidence from its own top-K: topk and teacher"
        )
    return Algorithm(
        name="sage-opd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=Intervention(k=distill.top_k, weak=config.weak, confidence=config.confidence),
        weight=WEIGHTS[config.weight],
        token_loss=Reweighted(loss=support_kl(distill)),
        judge="score",
        distill_temperature=distill.temperature,
        settings=tables_of(config, distill),
    )


ALGORITHM = AlgorithmSpec(
    name="sage-opd",
    config=SageOpdConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "judge", "scores", "expert"}),
)
