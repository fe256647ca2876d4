"""A student that has seen text: imitation with language modeling beside it, from which L_PT's scenario starts."""

from __future__ import annotations

from dataclasses import replace

from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, BuildContext
from turngym.trainers.algorithms import sft
from turngym.trainers.lm_loss import LmLoss

NAME = "turngym.scripts.study.reader:READER"
"""As `turngym train --algorithm` takes it."""


def build(config: sft.SftConfig, given: BuildContext) -> Algorithm:
    """Supervised fine-tuning with lambda L_PT added (`--lm-loss.*`)."""
    return replace(sft.build(config, given.run), terms=(LmLoss.of(given),))


READER = AlgorithmSpec(
    name="sft-text",
    config=sft.SftConfig,
    build=build,
    section="sft",
    uses=frozenset({"expert", "noise", "text"}),
    about="Supervised fine-tuning on demonstrations and on text.",
)
