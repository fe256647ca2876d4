"""The learning rate: of a run that names none, of a step, and what is said of one that moves no loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.run_config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Learning rate of `step` (1-based): linear warm-up, then constant, linear or cosine to zero after `total`."""
    # + 1: the first step learns already, and the first one after warm-up has the full rate
    factor = min(1.0, step / (config.lr_warmup + 1))
    # step - 1: the first step after warm-up still has the full rate, and zero is reached after the last
    share = max(0.0, (step - 1 - config.lr_warmup) / max(1, total - config.lr_warmup))
    if config.schedule == "linear":
        factor *= 1.0 - share
    elif config.schedule == "cosine":
        factor *= 0.5 * (1.0 + float(np.cos(np.pi * share)))
    return config.lr * factor


def usual_lr(algorithm: AlgorithmSpec, *, adapters: bool) -> float:
    """The learning rate of a run that names none: the reference's, ten times that to imitate, where every token says
    what is right, and ten times more for adapters."""
    return float(f"1e{-6 + ('imitates' in algorithm.reads) + adapters}")


def lr_that_suits(parameters: int, *, adapters: bool = False) -> tuple[float, float]:
    """The least and the greatest learning rate that usually suit AdamW on a model of so many `parameters`.

    The greatest is 1e-2 up to a million parameters and falls with their power 2/3 (1e-4 at a thousand million); the
    least is a hundredth of it. Adapters, which learn in place of the weights, take ten times as much. Ours: a rule of
    thumb that holds for what is shipped and recorded here (tiny models 2e-4 to 3e-3, 135 million 1e-4 and with adapters
    1e-3) and for the reference (1e-6 at two thousand million).
    """
    most = 1e-2 * max(parameters / 1e6, 1.0) ** (-2 / 3) * (10.0 if adapters else 1.0)
    return most / 100.0, most


def unsuited_lr(lr: float, parameters: int, *, adapters: bool = False) -> str:
    """A warning about a learning rate that does not suit the size of the model; "" for one that does, and for 0."""
    least, most = lr_that_suits(parameters, adapters=adapters)
    # a rate on the border suits, however it was rounded
    if not lr or least * 0.99 <= lr <= most * 1.01:
        return ""
    what = "the adapters" if adapters else "all weights"
    return (
        f"--optimizer.lr is {lr:g}: too {'small' if lr < least else 'large'}, as a rule, for {what} of a model of "
        f"{parameters / 1e6:.3g} million parameters; {least:.0e} to {most:.0e} suit it"
        f"{'' if adapters else ', adapters (--lora.rank) ten times as much'}"
    )


def unmoved_loss(losses: Sequence[float], lr: float) -> str:
    """A warning where the loss at the end of a run is within a tenth of that at its beginning (means over a fifth of
    the steps each); "" for one that moved, and for fewer than four steps."""
    size = max(1, len(losses) // 5)
    first, last = (sum(part) / size for part in (losses[:size], losses[-size:]))
    if len(losses) < 4 or not first > 0 or abs(last - first) > 0.1 * first:
        return ""
    return (
        f"the loss hardly moved: {first:.3g} at the first of {len(losses)} steps, {last:.3g} at the last; if it should "
        f"move, raise --optimizer.lr, which is {lr:g}"
    )
