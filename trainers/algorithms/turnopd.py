"""TurnOPD: on-policy distillation with an adaptive rollout depth and weights that move from trajectories to turns.

Three parts make the algorithm, and `build` at the end puts them together:

    weights     `token_weights.Blend`: from trajectory weights to turn weights over the training
    depth       `AdaptiveDepth`: measure to full depth now and then, play just deep enough in between
    token loss  the reverse KL to the teacher on its top-K (`targets.distillation`), as in vanilla OPD

Read next: trainers/token_weights.py, trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.numbers import Count, NotNegative, Number, Portion, Share
from turngym.core.setting import Within
from turngym.core.spec import Spec, Unread, changed, needing
from turngym.trainers.algorithm import Algorithm, DepthController, DepthPlan, DepthState, FixedDepth, Weight
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.run_config import RunConfig, tables_of
from turngym.trainers.targets import distillation
from turngym.trainers.token_weights import Blend, Static, TurnLevel, trajectory_weights
from turngym.trainers.turn_stats import pooled_mean, survivors

MASS_EPS = 1e-8
"""Added to the divergence mass before it divides, so that no mass at all gives depth 0."""


class DepthConfig(Spec):
    """Settings of `AdaptiveDepth`; the defaults are TurnOPD's Table 7."""

    h_min: Count = 2
    """Least depth, turns."""
    h_max: Count = 50
    """Greatest depth, turns. It is the depth of probes, and where the controller starts."""
    warmup: Within[Number] = 3
    """Steps at the start that are all probes."""
    probe_interval: Within[Count] = 8
    """Steps between probes. After warm-up every step that is a multiple of this is one."""
    rho: Share = 0.7
    """Share of the smoothed depth kept at a probe; the measured depth gets the rest."""
    p: Portion = 0.80
    """Share of successes that the depth covers. Successful episodes, that is."""
    min_successes: Count = 8
    """Fewest episodes in the coverage statistic: with fewer the last covering depth is kept."""
    cov_base: Literal[0, 1] = 0
    """0 covers the index of an episode's last turn; 1 its number of turns, one turn longer."""
    use_success: bool = True
    """Coverage looks at successful episodes; False takes all of them."""
    probe_share: Portion = 1.0
    """Share of a probe's episodes that measure. They play to full depth; the rest stop at the cap (an option of ours: a
    probe needs statistics, not every episode)."""

    def __post_init__(self) -> None:
        if self.h_min > self.h_max:
            raise ValueError(f"h_min is {self.h_min} and h_max {self.h_max}; valid: h_min <= h_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthStats:
    """What a probe measured, over all E episodes that were played to its full depth."""

    kl_T: NDArray[np.float64]
    """Token-pooled mean KL per turn, nats; NaN where a turn has no tokens."""
    survivors_T: NDArray[np.int64]
    """Episodes that reached the turn."""
    last_turn_E: NDArray[np.int64]
    """Index of each episode's last turn."""
    success_E: NDArray[np.bool_]
    cut_E: NDArray[np.bool_]
    """Stopped by the depth cap, so neither completed nor successful."""


def probe_stats(batch: RolloutBatch, kl_N: NDArray[np.floating]) -> DepthStats:
    """What `AdaptiveDepth.update` takes in: K_t, survivors, last turns and success of every episode of a probe.

    `kl_N` [N] nats per supervised token. Episodes that the probe itself cut at full depth count like all others: left
    out, the long failures would be missing, and K_t, n_t and H_eff would only know short episodes. Of a partial probe
    only the episodes that had full depth before them count, the short ones not even where they ended sooner. Episodes
    that an environment, an engine or a deadline broke off (`error_...`) are in no batch.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#turn-statistics.
    """
    include_E = ~batch.short_E
    depth_E = batch.depth_E[include_E]
    turns = int(depth_E.max(initial=0))
    return DepthStats(
        kl_T=pooled_mean(kl_N, batch.turn_N, include_E[batch.episode_N], turns),
        survivors_T=survivors(depth_E, turns),
        last_turn_E=depth_E - 1,
        success_E=batch.success_E[include_E],
        cut_E=batch.truncated_E[include_E],
    )


@dataclass(frozen=True, slots=True)
class AdaptiveDepth:
    """TurnOPD's depth controller: measure to full depth now and then, play just deep enough in between.

    Turns. Hbar_0 = H_max; cap_k = clip(round(Hbar_{k-1}) + 1, H_min, H_max);
    probe_k = k <= warmup or k mod probe_interval = 0, playing H_max turns.
    At a probe Hbar_k = rho Hbar_{k-1} + (1 - rho) max(H_eff, H_cov), otherwise Hbar_k = Hbar_{k-1}.
    Rounding is half to even. Source: [turnopd] Algorithm 1, Table 7; docs/algorithms.md#depth-controller.
    Differs from the paper: the coverage counts last turn indices (`cov_base=1` counts turns).
    """

    config: DepthConfig = field(default_factory=DepthConfig)

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.config.h_max))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """What to collect at `step`, 1-based."""
        config = self.config
        probe = step <= config.warmup or step % config.probe_interval == 0
        # + 1: hbar is the index of a turn, the cap a number of turns
        cap = min(max(round(state.hbar) + 1, config.h_min), config.h_max)
        if not probe:
            return DepthPlan(cap=cap, adaptive_cap=cap)
        short = 1.0 - config.probe_share
        return DepthPlan(cap=config.h_max, probe=True, adaptive_cap=cap, full_depth=True, short_share=short)

    def learn(
        self,
        state: DepthState,
        plan: DepthPlan,
        batch: RolloutBatch,
        episodes: Sequence[Episode],
        kl_N: NDArray[np.floating],
    ) -> DepthState:
        """The state after a step, from the statistics of its batch."""
        return self.update(state, plan, probe_stats(batch, kl_N))

    def update(self, state: DepthState, plan: DepthPlan, stats: DepthStats) -> DepthState:
        """The state after the step; unchanged unless `plan` was a probe and measured at least one episode."""
        if not plan.probe or len(stats.last_turn_E) == 0:
            return state
        h_eff = effective_depth(stats.kl_T, stats.survivors_T)
        covered = covering_depth(stats, self.config)
        h_cov = state.h_cov if covered is None else covered
        rho = self.config.rho
        hbar = rho * state.hbar + (1.0 - rho) * max(h_eff, h_cov)
        return DepthState(hbar=hbar, h_eff=h_eff, h_cov=h_cov, probes=state.probes + 1)


def divergence_mass(kl_T: NDArray[np.float64], survivors_T: NDArray[np.int64]) -> NDArray[np.float64]:
    """Where along the episode the divergence lies: float64 [T], nats per episode started.

    m_t = max(K_t, 0) n_t / n_0; turns without tokens (NaN) have none.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#depth-controller.
    """
    if len(kl_T) == 0 or survivors_T[0] == 0:
        return np.zeros(len(kl_T))
    # the raw KL of a turn may be slightly negative, which is no mass
    return np.maximum(np.nan_to_num(kl_T, nan=0.0), 0.0) * survivors_T / survivors_T[0]


def effective_depth(kl_T: NDArray[np.float64], survivors_T: NDArray[np.int64]) -> int:
    """Center of the divergence mass, turn index; 0 if there is no mass.

    H_eff = round(sum_t t q_t), q_t = m_t / (sum m + 1e-8).
    Source: [turnopd] Algorithm 1; docs/algorithms.md#depth-controller.
    """
    mass_T = divergence_mass(kl_T, survivors_T)
    share_T = mass_T / (mass_T.sum() + MASS_EPS)
    return round(float(np.arange(len(mass_T)) @ share_T))


def covering_depth(stats: DepthStats, config: DepthConfig) -> int | None:
    """Depth by which a share p of the (successful) episodes had ended; None with too few of them.

    H_cov = the smallest order statistic x_(i) of their last turn indices with i / n >= p. An episode that the depth cap
    cut is no success, and among all episodes (`use_success=False`) it never ends: where p is not reached without such
    episodes, H_cov is the last turn of full depth.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#depth-controller.
    """
    # what was cut would have gone on beyond the last turn that a probe can see
    last_turn_E = np.where(stats.cut_E, config.h_max - 1, stats.last_turn_E)
    if config.use_success:
        last_turn_E = last_turn_E[stats.success_E & ~stats.cut_E]
    count = len(last_turn_E)
    if count < config.min_successes:
        return None
    # not ceil(p * count): 0.28 * 25 is 7.000000000000001 in binary, which would round up to 8
    rank = next(i for i in range(1, count + 1) if i / count >= config.p)
    return int(np.sort(last_turn_E)[rank - 1]) + config.cov_base


class TurnOpdConfig(Spec):
    """TurnOPD and its ablations."""

    weight: Literal["blend", "trajectory", "turn"] = "blend"
    """How tokens are weighted. `trajectory` is the ablation depth only, `turn` hard turn-level weights from the first
    step."""
    blend_start: NotNegative = 0.0
    """Share of training at which weights begin to move from trajectories to turns."""
    blend_end: NotNegative = 1.0
    """Share of training at which they are turn-level."""
    n_min: Number = 8
    """Fewest episodes that reach a reliable turn; `n_min_share` of them, if that is more."""
    n_min_share: Share = 0.15
    """Least share of the episodes that reach a reliable turn."""
    depth: DepthConfig | None = DepthConfig()
    """How it is measured how deep to roll out; none: every rollout has full depth (ablation: blend only)."""

    def __post_init__(self) -> None:
        if not self.blend_start <= self.blend_end:
            raise SettingsError(
                f"blend_start is {self.blend_start} and blend_end {self.blend_end}; valid: start <= end"
            )

    def unread(self) -> Unread:
        if self.weight != "blend":
            yield from needing("weight blend", "blend_start", "blend_end")
        if self.weight == "trajectory":
            yield from needing("weight blend or turn", "n_min", "n_min_share")


def build(config: TurnOpdConfig, context: BuildContext) -> Algorithm:
    """OPD that spends rollouts and weight where along the episode student and teacher part.

    Depth: `AdaptiveDepth`, cap_k = clip(round(Hbar_{k-1}) + 1, H_min, H_max); full-depth probes at steps 1..3 and every
    8th set Hbar_k = 0.7 Hbar_{k-1} + 0.3 max(H_eff, H_cov).
    Weights: w = (1 - alpha_k) w_traj + alpha_k w_turn, alpha_k = k / K_total; w_turn gives every turn that enough
    episodes reach the same share. Token loss: `targets.distillation`, loss = sum_i w_i l_i.
    Source: [turnopd] Algorithm 1, Table 5, Table 6, Table 7; docs/algorithms.md#turnopd.
    Differs from the paper: a tail bin in the KL (the controller and K_t use the paper's raw form), and H_cov counts
    last turn indices (`depth.cov_base=1` for the literal reading); probes may play only a share of the episodes to full
    depth (`depth.probe_share`, 1 by default).
    """
    signal, token_loss = distillation(context.distill)
    return Algorithm(
        name="turnopd",
        depth=depth_controller(config, context.run),
        target_fn=signal,
        weight=token_weight(config),
        token_loss=token_loss,
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


def depth_controller(config: TurnOpdConfig, run: RunConfig) -> DepthController:
    if config.depth is None:
        return FixedDepth(h_max=run.full_depth)
    run.check_turns(config.depth, "h_min", "h_max")
    # probes cannot play more turns than the run allows, and the least depth may not exceed theirs
    h_max = min(config.depth.h_max, run.full_depth)
    return AdaptiveDepth(changed(config.depth, h_max=h_max, h_min=min(config.depth.h_min, h_max)))


def token_weight(config: TurnOpdConfig) -> Weight:
    turn = TurnLevel(n_min=config.n_min, min_share=config.n_min_share)
    blend = Blend(start=config.blend_start, end=config.blend_end, turn=turn)
    weights: dict[str, Weight] = {"blend": blend, "trajectory": Static(trajectory_weights), "turn": turn}
    return weights[config.weight]


ALGORITHM = AlgorithmSpec(
    name="turnopd",
    config=TurnOpdConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "distills", "form", "surrogate"}),
)
