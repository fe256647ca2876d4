"""TCOD: on-policy distillation under a curriculum of how many turns the student plays.

Read next: trainers/algorithms/opd.py, trainers/targets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turngym.core.errors import SettingsError
from turngym.core.numbers import Count
from turngym.core.setting import Within
from turngym.core.spec import Spec, Unread, changed, needing
from turngym.trainers.algorithm import Algorithm, DepthPlan, DepthState
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import distillation
from turngym.trainers.token_weights import Static, trajectory_weights

ALFWORLD = (6, 30)
SCHEDULES: Mapping[str, tuple[int, int]] = {
    "turngym/ALFWorld": ALFWORLD,
    "turngym/WebShop": (4, 15),
    # the paper has no search task: the faster of its schedules is taken, that of the other short task
    "turngym/Search": (4, 15),
}
"""Environment, without its version -> (eta, k_max) of the paper."""


class DepthSchedule(Spec):
    """Depth that grows by one turn every `eta` steps; what is None is TCOD's value for the environment (`for_env`)."""

    k_start: Count = 1
    """Turns in the first step."""
    eta: Within[Count | None] = None
    """Steps per additional turn. By default TCOD's: 6 in ALFWorld and unknown environments, 4 in WebShop and Search."""
    k_max: Count | None = None
    """Greatest depth, turns. By default TCOD's: 30 in ALFWorld and unknown environments, 15 in WebShop and Search."""

    def __post_init__(self) -> None:
        if self.k_max is not None and self.k_start > self.k_max:
            raise SettingsError(f"k_start is {self.k_start} and k_max {self.k_max}; valid: k_start <= k_max")

    def for_env(self, env_id: str) -> DepthSchedule:
        """This schedule with TCOD's values for an environment (`package:namespace/Name-v0`) where it has none."""
        family = env_id.rpartition(":")[2].partition("-v")[0]
        eta, k_max = self._values(SCHEDULES.get(family, ALFWORLD))
        return DepthSchedule(k_start=self.k_start, eta=eta, k_max=k_max)

    def _values(self, default: tuple[int, int]) -> tuple[int, int]:
        return default[0] if self.eta is None else self.eta, default[1] if self.k_max is None else self.k_max

    def depth(self, n: int) -> int:
        """Turns at step `n`, 0-based: k = min(k_start + floor(n / eta), k_max).

        Source: [tcod] eq. 4; docs/algorithms.md#depth-curriculum.
        Differs from the paper: steps count from 0, as in its published code, 1 + n // eta; in the paper from 1.
        """
        eta, k_max = self._values(ALFWORLD)
        return min(self.k_start + n // eta, k_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """TCOD as a depth controller, whose k turns follow the step alone.

    F2B: the student plays the first k turns, then the episode ends. B2F: a demonstration plays the first L - k turns
    (masked), the student the rest.
    """

    schedule: DepthSchedule = field(default_factory=DepthSchedule)
    back_to_front: bool = False
    h_max: int
    """The run's limit of turns, in B2F the demonstration's included."""

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.schedule.k_start))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """What to play at `step`, 1-based."""
        # the paper's greatest depth may be beyond the run's
        turns = min(self.schedule.depth(step - 1), self.h_max)
        if self.back_to_front:
            return DepthPlan(cap=self.h_max, demonstration_turns=turns)
        return DepthPlan(cap=turns, full_depth=turns == self.h_max)

    def learn(self, state: DepthState, *measured: object) -> DepthState:
        """Learns nothing: this depth depends on the step alone."""
        return state


class TcodConfig(Spec):
    """TCOD's curriculum; the defaults follow the environment."""

    direction: Literal["f2b", "b2f"] = "f2b"
    """Which turns the student plays. Front to back: the first k. Back to front: the expert plays all but the last k."""
    schedule: DepthSchedule = DepthSchedule()

    def unread(self) -> Unread:
        if self.direction != "b2f":
            yield from needing("direction b2f", "../demonstrations", "../expert")


def build(config: TcodConfig, context: BuildContext) -> Algorithm:
    """OPD whose student plays k turns, k growing with the step.

    k_n = min(k_start + floor(n / eta), k_max), n 0-based; eta and k_max are those of `env_id` where the configuration
    leaves them open. Token loss: `targets.distillation`; trajectory weights. Back to front, the expert's turns are
    context and carry no loss.
    Source: [tcod] eq. 3, eq. 4, eq. 5; docs/algorithms.md#tcod.
    Differs from the paper: it writes KL(teacher || student), while its published code learns from the log-ratio at
    tokens that the student sampled, as the reverse KL here does; the tail bin of the KL, as in `opd`; the expert of
    back to front is the environment's.
    """
    context.run.check_turns(config.schedule, "k_start", "k_max")
    signal, token_loss = distillation(context.distill)
    schedule = config.schedule.for_env(context.env_id)
    return Algorithm(
        name="tcod",
        depth=Curriculum(schedule=schedule, back_to_front=config.direction == "b2f", h_max=context.run.full_depth),
        target_fn=signal,
        weight=Static(trajectory_weights),
        token_loss=token_loss,
        distill_temperature=context.distill.temperature,
        settings=tables_of(changed(config, schedule=schedule), context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="tcod",
    config=TcodConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "distills", "form", "expert", "shown", "surrogate"}),
)
