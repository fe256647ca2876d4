"""Guided OPD: teacher and student take turns within an episode, and the teacher's share goes down to nothing.

Read next: trainers/algorithms/opd.py, agents/mixed_policy.py, trainers/losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from turngym.core import Episode, Origin, Portion, Share, Spec
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    FixedDepth,
    TokenLoss,
    TokenLosses,
    Tokens,
    bin_forward_kl,
    distillation,
    tables_of,
    was_refused,
)

ORIGINS: tuple[Origin, ...] = ("policy", "demonstration")
"""Whose turns are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedLoss:
    """`loss` where the student chose the token; where the teacher did, the forward KL to it.

    Without a support (`form=sampled`) that is its sampled form, -log p(label): imitation of what the teacher said. The
    teacher's tokens have no importance ratio: nobody corrects for a label that stands for its own distribution.
    Source: [guided-opd]; docs/contrib_algorithms.md#guided-turns. Diagnostics: those of `loss`, and `guided` (0 or 1).
    """

    loss: TokenLoss

    def __call__(self, tokens: Tokens) -> TokenLosses:
        own_loss = self.loss(tokens)
        student, teacher = tokens.topk_logp_nK, tokens.teacher_logp_nK
        theirs_n = -tokens.logp_n
        if student is not None and teacher is not None:
            theirs_n = bin_forward_kl(student, teacher, tokens.tail_n, tokens.teacher_tail_n)
        guided = {"guided": tokens.off_policy_n.float()}
        # both sides are finite, so that where() sends no NaN into the side that it does not take
        loss_n = torch.where(tokens.off_policy_n, theirs_n, own_loss.loss_n)
        return TokenLosses(loss_n=loss_n, diagnostics={**own_loss.diagnostics, **guided})


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineGuide:
    """The teacher's share of the turns at `step` (1-based) of a run of `total` steps, in [0, start].

    share = start (1 + cos(pi min(k / (ratio K), 1))) / 2: near `start` at first, 0 from the `ratio` of training on.
    Source: [guided-opd]; docs/contrib_algorithms.md#guided-turns.
    """

    total: int
    start: float = 1.0
    ratio: float = 0.8

    def __call__(self, step: int) -> float:
        return self.start * (1.0 + math.cos(math.pi * min(step / (self.ratio * self.total), 1.0))) / 2.0


def supervised(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes in which a turn can be trained on, the policy's or the teacher's: an `EpisodeFilter`.

    A teacher whose every answer was refused leaves a step with nothing: it is then skipped, and the run goes on.
    """
    return [
        episode
        for episode in episodes
        if not episode.status.is_error
        and any(
            turn.origin in ORIGINS and turn.excluded is None and turn.response_length and not was_refused(turn)
            for turn in episode.turns
        )
    ]


class GuidedOpdConfig(Spec):
    """On-policy distillation whose early episodes the teacher helps to play."""

    start: Share = 1.0
    """The teacher's share of turns at the start. It falls from there to 0."""
    ratio: Portion = 0.8
    """Share of training with a guide. After it the student plays alone."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "trajectory"
    """What counts the same. Every episode, every token or every response."""


def build(config: GuidedOpdConfig, context: BuildContext) -> Algorithm:
    """OPD on episodes of which the teacher plays a share of the turns, whole.

    share_k = start (1 + cos(pi min(k / (ratio K), 1))) / 2. Turns of the student: the loss of opd; turns of the
    teacher, which are not on-policy: forward KL to the teacher, without an importance ratio. One mean over both.
    Source: [guided-opd]; docs/contrib_algorithms.md#guided-opd.
    Differs from the paper: its abstract was read, and its method in two descriptions by others (a share for each turn,
    the cosine, ratio 0.8, forward KL on the teacher's turns; one of them imitates what the teacher said, which is
    `form=sampled` here). The tail bin in both KLs, the mean over both kinds of turns, and that what the environment
    refused of the teacher is not imitated, are ours.
    """
    signal, token_loss = distillation(context.distill)
    return Algorithm(
        name="guided-opd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=signal,
        weight=WEIGHTS[config.weight],
        token_loss=GuidedLoss(loss=token_loss),
        origins=ORIGINS,
        select=supervised,
        guide=CosineGuide(total=context.run.steps, start=config.start, ratio=config.ratio),
        to_the_end=True,
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="guided-opd",
    config=GuidedOpdConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "distills", "form", "surrogate"}),
)
