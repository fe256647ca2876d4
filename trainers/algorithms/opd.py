"""Vanilla on-policy distillation: the student imitates the teacher on the states that the student itself reaches.

Read next: trainers/targets.py, trainers/token_losses.py, trainers/lm_head.py, trainers/token_weights.py.
"""

from __future__ import annotations

from typing import Literal

from turngym.core.spec import Spec
from turngym.trainers.algorithm import Algorithm, FixedDepth
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import distillation
from turngym.trainers.token_weights import WEIGHTS


class OpdConfig(Spec):
    """Vanilla on-policy distillation."""

    weight: Literal["trajectory", "token_mean", "turn_mean"] = "trajectory"
    """What counts the same. Every episode, every token or every response."""


def build(config: OpdConfig, context: BuildContext) -> Algorithm:
    """Reverse KL to the teacher at every token of the student's own full-depth rollouts.

    loss = sum_i w_i l_i, l_i from `distillation`, w_i = 1 / (E n_tok(episode of i)) (trajectory weights).
    Source: [gkd] Algorithm 1, [opd-post], [turnopd]; docs/algorithms.md#opd (TurnOPD's baseline).
    Differs from the paper: the mass outside the support is one more bin (`tail=raw` leaves it out), and l_i keeps the
    whole distribution rather than the sampled token's log-ratio (`form=sampled`).
    """
    signal, token_loss = distillation(context.distill)
    return Algorithm(
        name="opd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=signal,
        weight=WEIGHTS[config.weight],
        token_loss=token_loss,
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="opd", config=OpdConfig, build=build, uses=frozenset({"teacher", "distill", "distills", "form", "surrogate"})
)
