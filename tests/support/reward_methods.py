"""What tests of algorithms that learn from the reward share: tokens with chosen ratios, and a run of two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import toy_run as toy
from tiny_runs import untimed

from turngym.trainers.algorithm import Algorithm, Tokens
from turngym.trainers.run_config import OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer

RUN = RunConfig(steps=2, episodes=8, max_turns=3, tracker=None)


def tokens(ratios: Sequence[float], advantages: Sequence[float], **more: Any) -> Tokens:
    """Tokens that the policy gives 1/4, and the behavior 1/4 over their ratio; the entropy is 2 nats."""
    logp_n = torch.full((len(ratios),), 0.25).log().requires_grad_()
    return Tokens(
        logp_n=logp_n,
        sampled_logp_n=logp_n,
        behavior_logp_n=(0.25 / torch.tensor(ratios)).log(),
        advantage_n=torch.tensor(advantages),
        off_policy_n=torch.zeros(len(ratios), dtype=torch.bool),
        entropy_n=torch.full((len(ratios),), 2.0),
        **more,
    )


def two_steps(algorithm: Algorithm, out: Path) -> tuple[list[dict[str, Any]], float]:
    """The rows of two training steps, and how far weights moved.

    Every fourth episode of the toy is paid 1, half of them are cut.
    """
    initial = toy.tiny(1)
    trainer = toy.trainer(
        out,
        run=RUN,
        algorithm=algorithm,
        optimizer=OptimizerConfig(lr=3e-3, ppo_epochs=2, minibatches=2),
        teacher=None,
        reference=LocalScorer(model=initial),
        evaluate=None,
    )
    trainer.train()
    pairs = zip(initial.parameters(), trainer.model.parameters(), strict=True)
    moved = sum(float((before - after).detach().abs().sum()) for before, after in pairs)
    return untimed(out, "train"), moved


def assert_trains(make: Callable[..., Algorithm], options: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Two steps move the weights, and each of the `options` moves them another way."""
    far = two_steps(make(), out / "default")[1]
    assert far > 1e-3
    for place, given in enumerate(options):
        other, moved = two_steps(make(**given), out / f"{place}")
        assert moved not in (0.0, far), given
        assert [row["loss"] is None for row in other] == [False, False]
