"""TCOD: on-policy distillation under a curriculum of how many turns the student plays.

Read next: trainers/algorithms/opd.py, trainers/rollout_plan/curriculum.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from turngym.trainers.algorithm import Algorithm, DepthController
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.algorithms.opd import distillation
from turngym.trainers.config import DistillConfig, RunConfig, fingerprint
from turngym.trainers.losses.token_weights import Static, trajectory_weights
from turngym.trainers.rollout_plan.curriculum import BackToFront, DepthSchedule, FrontToBack


@dataclass(frozen=True, slots=True, kw_only=True)
class TcodConfig:
    """TCOD's curriculum; the defaults follow the environment."""

    direction: Literal["f2b", "b2f"] = "f2b"
    """Front to back: the student plays the first k turns. Back to front: the expert plays all but the last k."""
    schedule: DepthSchedule = field(default_factory=DepthSchedule)


def build(config: TcodConfig, distill: DistillConfig, run: RunConfig, env_id: str = "") -> Algorithm:
    """OPD whose student plays k turns, k growing with the step.

    k_n = min(k_start + floor(n / eta), k_max), n 0-based; eta and k_max are those of `env_id` where the configuration
    leaves them open. Token loss: `opd.distillation`; trajectory weights; in the
    direction back to front the expert's turns are context and carry no loss.
    Source: [tcod] eq. 3, eq. 4, eq. 5; docs/algorithms.md#tcod.
    Differs from the paper: it writes KL(teacher || student), while its published code learns from the log-ratio at
    tokens that the student sampled, as the reverse KL here does; the tail bin of the KL, as in `opd`; the expert of
    back to front is the environment's.
    """
    signal, token_loss = distillation(distill)
    schedule = config.schedule.for_env(env_id)
    depths: dict[str, DepthController] = {
        "f2b": FrontToBack(schedule=schedule),
        "b2f": BackToFront(schedule=schedule, h_max=run.full_depth),
    }
    return Algorithm(
        name="tcod",
        depth=depths[config.direction],
        target_fn=signal,
        weight=Static(trajectory_weights),
        token_loss=token_loss,
        distill_temperature=distill.temperature,
        settings={**fingerprint(replace(config, schedule=schedule)), **fingerprint(distill)},
    )


ALGORITHM = AlgorithmSpec(
    name="tcod",
    config=TcodConfig,
    build=lambda config, given: build(config, given.distill, given.run, given.env_id),
    uses=frozenset({"teacher", "distill", "expert", "shown"}),
)
