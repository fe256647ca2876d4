"""GRPO and on-policy distillation in one advantage: the reward says whether, the teacher says which token.

Read next: trainers/group_advantage.py, trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core import Episode, Group, NotNegative, SettingsError, Spec
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    ComparableGroups,
    FixedDepth,
    GroupAdvantage,
    PolicyGradient,
    Reward,
    RolloutBatch,
    Scorers,
    Targets,
    combined_advantage,
    label_logprobs,
    tables_of,
)

Float64N = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedAdvantage:
    """`combined_advantage` of the group-relative advantage of the episode and the teacher's log-ratio at the label.

    The student is taken before the update.
    Source: [openclaw-rl], [slime]; docs/contrib_algorithms.md#combined-advantage.
    """

    reward: Reward = "return"
    scale: Literal["std", "none"] = "std"
    w_reward: float = 1.0
    w_teacher: float = 1.0
    annealing: Callable[[int], tuple[float, float]] | None = None
    """Step (1-based) to (w_reward, w_teacher), in place of the two above."""
    factor: Callable[[RolloutBatch, Float64N, Float64N], Float64N] | None = None
    """Makes the factor of the log-ratio from the batch and the labels' log-probabilities under student and teacher,
    nats."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = GroupAdvantage(reward=self.reward, scale=self.scale)(batch, episodes, scorers)
        assert targets.advantage_N is not None
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        mine_N = label_logprobs(scorers.student, batch, "student").astype(np.float64)
        theirs_N = teacher_logp_N.astype(np.float64)
        ratio_N = theirs_N - mine_N
        if self.factor is not None:
            ratio_N = self.factor(batch, mine_N, theirs_N) * ratio_N
        w_reward, w_teacher = self.w_reward, self.w_teacher
        if self.annealing is not None:
            w_reward, w_teacher = self.annealing(scorers.step)
        advantage_N = combined_advantage(
            targets.advantage_N, ratio_N.astype(np.float32), w_reward=w_reward, w_teacher=w_teacher
        )
        return replace(targets, advantage_N=advantage_N, label_logp_N=teacher_logp_N)


class CombinedConfig(Spec):
    """What methods share that add a teacher's log-ratio to a group-relative advantage: grpo-opd, sod and atod."""

    n: Group = 8
    """Episodes per task. They are one group."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    scale: Literal["std", "none"] = "std"
    """What the advantage is divided by. The group's standard deviation, or nothing."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response, before a method weighs turns."""


def combination(
    config: CombinedConfig, context: BuildContext, *, name: str, signal: CombinedAdvantage, to_the_end: bool = False
) -> Algorithm:
    """The composition that these methods share. Groups whose rewards do not differ stay: the teacher's part still
    teaches there. Groups of which failed episodes leave less than two go.
    """
    return Algorithm(
        name=name,
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip),
        group=config.n,
        select=ComparableGroups(spread=False),
        to_the_end=to_the_end,
        settings=tables_of(config),
    )


class GrpoOpdConfig(CombinedConfig):
    """A reward's group-relative advantage plus the teacher's log-ratio."""

    w_reward: NotNegative = 1.0
    """Weight of the group-relative advantage."""
    w_teacher: NotNegative = 1.0
    """Weight of the teacher's log-ratio. The ratio is log q - log p of the sampled token."""

    def __post_init__(self) -> None:
        if not self.w_reward + self.w_teacher:
            raise SettingsError(f"w_reward is {self.w_reward} and w_teacher {self.w_teacher}; valid: not both 0")


def build(config: GrpoOpdConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on the sum of both advantages.

    A_i = w_reward (r_j - mean_g) / (std_g + 1e-6) + w_teacher (log q - log p); l_i = max(-A r_i, -A clip(r_i, 1 -
    eps_low, 1 + eps_high)), r_i the probability ratio to the behavior policy. p is the student before the update.
    Source: [openclaw-rl], [slime]; docs/contrib_algorithms.md#grpo-opd.
    Differs from the paper: every token gets both parts. OpenClaw-RL's code gives a turn's judged score without a group
    and the log-ratio of a teacher that has read a hint, each mostly on samples of its own; slime subtracts the k1
    estimate of the KL, which is the same sum. No KL to the initial policy.
    """
    signal = CombinedAdvantage(
        reward=config.reward, scale=config.scale, w_reward=config.w_reward, w_teacher=config.w_teacher
    )
    return combination(config, context, name="grpo-opd", signal=signal)


ALGORITHM = AlgorithmSpec(
    name="grpo-opd", config=GrpoOpdConfig, build=build, uses=frozenset({"teacher", "reward", "surrogate"})
)
