"""Binary PRM-RL: a judge that has seen what came next scores every response, and that is its advantage.

Read next: trainers/judged_episodes.py, trainers/algorithms/judge_targets.py, trainers/token_losses.py.
"""

from __future__ import annotations

from typing import Literal

from turngym.core.numbers import NotNegative
from turngym.core.spec import Spec, Unread
from turngym.trainers.algorithm import Algorithm, FixedDepth
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms.judge_targets import TurnScore
from turngym.trainers.judged_episodes import ScoredTurns
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.targets import WithReference
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


class PrmRlConfig(Spec):
    """Reinforcement learning from a process judge's votes."""

    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.02
    """Weight of the KL to the initial policy. It is k3, cut to 10 nats; 0 needs no copy of the policy."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    mask_neutral: bool = False
    """Also leave out turns with a score of 0."""
    exclude: Literal["none", "openclaw"] = "none"
    """`openclaw`: neutral turns are left out, except an episode's first judged turn, as in the published code."""
    weight: Literal["turn_mean", "trajectory", "token_mean"] = "turn_mean"
    """What counts the same. Every response, every episode or every token."""

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef)


def build(config: PrmRlConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient whose advantage is the judge's score of the turn, in {-1, 0, 1}.

    l_i = max(-A_t r_i, -A_t clip(r_i, 1 - eps_low, 1 + eps_high)) + kl_coef KL_i(policy, initial) - entropy_coef H_i,
    A_t the majority of the votes on the response of i; it is not normalized.
    Source: [openclaw-rl] section 4.1; docs/algorithms.md#prm-rl.
    Differs from the paper: in an environment the next observation is the next state; a judge that fails gives no score,
    so its turn is left out (the published code counts it as 0).
    """
    return Algorithm(
        name="prm-rl",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=TurnScore()) if config.kl_coef else TurnScore(),
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef),
        select=ScoredTurns(mask_neutral=config.mask_neutral, exclude=config.exclude),
        needs_teacher=False,
        judge="score",
        needs_reference=bool(config.kl_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="prm-rl",
    config=PrmRlConfig,
    build=build,
    uses=frozenset({"judge", "scores", "expert", "reference", "surrogate"}),
)
