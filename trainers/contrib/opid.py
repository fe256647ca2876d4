"""OPID: GRPO whose advantage has a small addition, the log-ratio of the policy told what the episode itself teaches.

Read next: trainers/privileged.py, agents/judges/env_judges.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core import NotNegative, Position
from turngym.trainers import Algorithm, BuildContext, PrivilegedLogprobs, RolloutBatch
from turngym.trainers.contrib.privileged_group import (
    PrivilegedAdvantage,
    PrivilegedGroupConfig,
    privileged_group,
    told_in_groups,
)

Float64N = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A_i = A_j + w_told (log q - log p): float64 [N]; the second in nats, 0 where nothing was told.

    Source: [opid]; docs/contrib_algorithms.md#added-log-ratio.
    """

    w_told: float

    def __call__(self, advantage_N: Float64N, logp: PrivilegedLogprobs, batch: RolloutBatch, step: int) -> Float64N:
        return advantage_N + self.w_told * logp.gap_N.astype(np.float64)


class OpidConfig(PrivilegedGroupConfig):
    """GRPO plus the log-ratio of a policy that was told what the finished episode teaches."""

    w_told: NotNegative = 0.001
    """Weight of the told policy's log-ratio."""
    scale: Literal["std", "none"] = "std"
    """What the advantage is divided by. The group's standard deviation, or nothing (published in WebShop)."""
    position: Position = "last_user"
    """Which message gets what the student is not told: the first observation, the last of role user, the last."""


def build(config: OpidConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on A_i = (R_j - mean_g) / (std_g + 1e-6) + w_told h_t (log q - log p).

    q is the policy with the text in its prompt, before the update; h_t is 1 on turns that were told something.
    Source: [opid]; docs/contrib_algorithms.md#opid.
    Differs from the paper: its code was read, not its text. There a model draws a skill of the episode and up to five
    of steps, with a weight each (both 0.001 in its scripts); `--judge episode` has rules for both scopes (a judge of
    yours may be a model), and there is one weight. Its step advantage and its loss of distillation are 0 in all its
    scripts and left out. What the harness of all five does otherwise: `PrivilegedGroupConfig`.
    """
    signal = config.compared(config.scale)
    return privileged_group(
        config,
        context,
        name="opid",
        target_fn=PrivilegedAdvantage(
            target_fn=signal, privileged=config.privileged, change=Added(w_told=config.w_told)
        ),
        token_loss=config.surrogate,
    )


ALGORITHM = told_in_groups("opid", OpidConfig, build)
