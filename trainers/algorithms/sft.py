"""Supervised fine-tuning on demonstrations: makes the teachers and weak students of the embedded default.

Read next: trainers/losses.py, trainers/token_weights.py, trainers/batch.py, trainers/optimizer_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turngym.envs.core.episode import Origin
from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, BuildContext, FixedDepth
from turngym.trainers.config import fingerprint
from turngym.trainers.losses import NegativeLogLikelihood
from turngym.trainers.targets import NoTargets
from turngym.trainers.token_weights import WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations."""

    weight: Literal["token_mean", "episode_mean", "turn_mean"] = "token_mean"
    """Whether every token, every episode or every response counts the same."""
    train_on: Literal["demonstration", "policy", "both"] = "demonstration"
    """Whose responses are imitated; `policy` fits traces that a policy sampled. Noise never is."""


TRAIN_ON: dict[str, Sequence[Origin]] = {
    "demonstration": ("demonstration",),
    "policy": ("policy",),
    "both": ("demonstration", "policy"),
}


def build(config: SftConfig, context: BuildContext) -> Algorithm:
    """Maximum likelihood on the responses of demonstrations.

    l_i = -log p(label_i | everything before it); w_i = 1 / N (token mean) or 1 / (E n_tok(episode)) (episode mean).
    Only responses of the chosen origins carry loss: observations, templates and injected noise are context.
    One forward over an episode trains all of its turns.
    Source: docs/algorithms.md#sft.
    Differs from the paper: none; the papers' teachers are published models, ours must be made.
    """
    return Algorithm(
        name="sft",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=NoTargets(),
        weight=WEIGHTS[config.weight],
        token_loss=NegativeLogLikelihood(),
        origins=tuple(TRAIN_ON[config.train_on]),
        needs_teacher=False,
        collects="expert",
        cut_recorded=False,  # a demonstration is imitated to its end
        settings=fingerprint(config),
    )


ALGORITHM = AlgorithmSpec(name="sft", config=SftConfig, build=build, uses=frozenset({"expert", "noise", "shown"}))
