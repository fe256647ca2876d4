"""GiGPO: a GRPO whose turns are compared too, with what other attempts at the task did in the same situation.

Read next: trainers/group_advantage.py, trainers/token_losses.py, agents/playing/rollout.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.playing.rollout import STATES
from turngym.core.episode import Episode
from turngym.core.numbers import Group, NotNegative, Portion, Share
from turngym.core.plugin_values import checked_texts
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, FixedDepth, Scorers, Targets
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.batch import RolloutBatch, is_trainable
from turngym.trainers.group_advantage import GROUP_EPS, ComparableGroups
from turngym.trainers.losses import KL_ESTIMATORS
from turngym.trainers.returns import rewards_to_go
from turngym.trainers.rewards import Reward, turn_rewards
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.targets import TargetError, WithReference
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS

FloatT = NDArray[np.float64]
IntT = NDArray[np.int64]
Anchor = Literal["observation", "state"]
Scale = Literal["none", "std"]


def clusters(anchors: Sequence[str], similarity: float = 1.0) -> list[int]:
    """Which cluster each text belongs to, numbered from 0 in order of appearance.

    Equal texts are one cluster. Below a `similarity` of 1 a text joins the first cluster whose first text is at least
    so similar (`difflib.SequenceMatcher.ratio`), as in the published code.
    """
    cluster_of: dict[str, int] = {}
    first: list[str] = []
    for text in anchors:
        if text in cluster_of:
            continue
        alike = (SequenceMatcher(None, earlier, text).ratio() >= similarity for earlier in first if similarity < 1.0)
        cluster = next((n for n, close in enumerate(alike) if close), None)
        if cluster is None:
            cluster = len(first)
            first.append(text)
        cluster_of[text] = cluster
    return [cluster_of[text] for text in anchors]


def episode_advantage(
    total_E: FloatT,
    group_E: IntT,
    depth_E: IntT,
    scale: Scale = "none",
    baseline: Literal["episodes", "turns"] = "episodes",
) -> FloatT:
    """How much better an episode went than the other attempts of its group: float64 [E].

    A_j = (R_j - mean_g R) / F_g; F_g = 1, or std_g R + 1e-6 with `scale="std"` (unbiased). `baseline="turns"` takes
    mean and deviation over the turns of the group, each with the return of its episode: long episodes count more.
    Source: [gigpo] eq. 3; docs/algorithms.md#step-advantage (`turns` is the published code's default).
    """
    if baseline == "episodes":
        return centered(total_E, group_E, scale)
    episode_T = np.repeat(np.arange(len(total_E)), depth_E)
    advantage_E = np.zeros(len(total_E))
    # the turns of an episode all say the same; an episode without any is in no comparison
    advantage_E[episode_T] = centered(total_E[episode_T], group_E[episode_T], scale)
    return advantage_E


def centered(value_t: FloatT, group_t: IntT, scale: Scale = "none") -> FloatT:
    """Values less their group's mean, 0 where a group has one: float64 [t]. Of returns by anchor group, GiGPO's A^S.

    A_t = (R_t - mean_a R) / F_a; F_a = 1, or std_a R + 1e-6 with `scale="std"` (unbiased).
    Source: [gigpo] eq. 7; docs/algorithms.md#step-advantage.
    """
    _, index_t, count_g = np.unique(group_t, return_inverse=True, return_counts=True)
    gap_t: FloatT = value_t - (np.bincount(index_t, value_t) / count_g)[index_t]
    # rounding must not turn equal returns into a contrast, which a deviation near 0 would blow up
    gap_t = np.where(np.abs(gap_t) > GROUP_EPS**2, gap_t, 0.0)
    if scale == "none":
        return gap_t
    std_g = np.sqrt(np.bincount(index_t, gap_t**2) / np.maximum(count_g - 1, 1))
    return gap_t / (std_g + GROUP_EPS)[index_t]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdvantage:
    """GiGPO's advantage, one number for every token of a turn: A_jt = A_j + w_step A_jt.

    A_j is `episode_advantage` of the episode's undiscounted sum of rewards; A_jt is `centered` of the discounted
    return from turn t on, among the turns of the group's attempts that the policy chose in the same situation: with the
    same observation before them, or in the same exact state of the environment.
    Source: [gigpo] eq. 3, eq. 5, eq. 6, eq. 7, eq. 8; docs/algorithms.md#step-advantage.
    """

    reward: Reward = "return"
    invalid_cost: float = 0.0
    gamma: float = 0.95
    w_step: float = 1.0
    scale: Scale = "none"
    baseline: Literal["episodes", "turns"] = "episodes"
    anchor: Anchor = "observation"
    similarity: float = 1.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        played = [episodes[source] for source in batch.source_E]
        paid = [turn_rewards(episode, self.reward, self.invalid_cost) for episode in played]
        total_E = np.array([reward_T.sum() for reward_T in paid])
        own_E = episode_advantage(total_E, batch.group_E, batch.depth_E, self.scale, self.baseline)

        # Step advantages of the turns that the policy chose, over all episodes; the others are in no comparison.
        episode_T = np.repeat(np.arange(len(paid)), [len(reward_T) for reward_T in paid])
        return_T = rewards_to_go(np.concatenate(paid), episode_T, gamma=self.gamma)
        chosen_t = np.flatnonzero([is_trainable(turn) for episode in played for turn in episode.turns])
        anchor_t = self._anchors(played, batch)[chosen_t]
        step_T = np.zeros(len(return_T))
        step_T[chosen_t] = centered(return_T[chosen_t], anchor_t, self.scale)

        # A turn's place among all turns is its episode's first place and its index.
        first_E = np.cumsum(batch.depth_E) - batch.depth_E
        step_N = step_T[first_E[batch.episode_N] + batch.turn_N]
        own_T = np.repeat(own_E, batch.depth_E)[chosen_t]
        count_a = np.unique(anchor_t, return_counts=True)[1]
        return Targets(
            advantage_N=(own_E[batch.episode_N] + self.w_step * step_N).astype(np.float32),
            reward=total_E,
            log={
                "anchors/size": float(count_a.mean()),
                "anchors/largest": int(count_a.max()),
                "anchors/alone": float((count_a == 1).sum() / len(anchor_t)),
                "anchors/step_std": float(step_T[chosen_t].std()),
                "anchors/episode_std": float(own_T.std()),
            },
        )

    def _anchors(self, played: Sequence[Episode], batch: RolloutBatch) -> IntT:
        """The number of each turn's anchor group, [T] over all episodes; groups of different tasks never meet."""
        numbers: dict[Hashable, int] = {}
        situations = [list(self._situations(episode)) for episode in played]
        anchors: list[list[int]] = [[] for _ in played]
        for group in np.unique(batch.group_E):
            members = np.flatnonzero(batch.group_E == group)
            texts = [text for member in members for text in situations[member]]
            cluster = iter(clusters(texts, self.similarity))
            for member in members:
                keys = [(int(group), next(cluster)) for _ in situations[member]]
                anchors[member] = [numbers.setdefault(key, len(numbers)) for key in keys]
        return np.array([number for row in anchors for number in row], np.int64)

    def _situations(self, episode: Episode) -> Iterator[str]:
        """Yields a mark for each turn of `episode` that is equal in equal situations."""
        if self.anchor == "observation":
            return (turn.observation for turn in episode.turns)
        where = f"the states of {episode.task.task_id} sample {episode.sample}"
        states = checked_texts(where, episode.meta.get(STATES), error=TargetError) or ()
        # a response that was broken off never reached the environment; it is in no comparison
        missing = episode.depth - len(states)
        if missing > sum(turn.excluded is not None for turn in episode.turns):
            raise TargetError(
                f"{episode.task.task_id} sample {episode.sample} has {len(states)} states for {episode.depth} turns; "
                "anchor=state needs episodes that were played for it (recorded ones: anchor=observation)"
            )
        return iter([*states, *[""] * missing])


class GigpoConfig(Spec):
    """Group-in-group policy optimization: attempts are compared as wholes, and turn by turn where they meet."""

    n: Group = 8
    """Episodes per task. They are one group."""
    gamma: Share = 0.95
    """Discount per turn. It is that of the returns that turns are compared by."""
    w_step: NotNegative = 1.0
    """Weight of the step advantage (omega). It stands beside the episode's."""
    anchor: Anchor = "observation"
    """What makes two turns comparable. The observation before them, or (ours) the exact state of the environment, which
    tells situations apart that read alike."""
    similarity: Portion = 1.0
    """How similar observations must be; 1: identical, below: by `difflib`, as the published code's option (0.95)."""
    reward: Reward = "return"
    """Reward. `return`: the environment's, turn by turn; `score`, or `success` (1): at the last turn."""
    invalid_cost: NotNegative = 0.0
    """What an invalid action costs. 0.1 in the published scripts, whose success is worth 10."""
    scale: Literal["none", "std"] = "none"
    """What both advantages are divided by. Their group's standard deviation, or nothing."""
    baseline: Literal["episodes", "turns"] = "episodes"
    """Mean over a group's episodes, or over their turns, as the published code's default: long episodes count more."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the initial policy. 0 needs no copy of it."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; k3 is the published code's `low_var_kl`."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""

    def unread(self) -> Unread:
        if self.anchor == "state":
            yield from needing("an anchor other than state: states are equal or not", "similarity")
        yield from near_initial(self.kl_coef, "kl")
        if not self.w_step:
            yield from needing("w_step above 0", "gamma", "anchor", "similarity")


def build(config: GigpoConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on the sum of an episode's and a turn's group-relative advantage.

    A = (R_j - mean_g) / F_g + w_step (R_jt - mean_a) / F_a, R_jt the discounted return from turn t on, a its anchor
    group; l_i = max(-A r_i, -A clip(r_i, 1 - eps, 1 + eps)) + kl_coef KL_i.
    Source: [gigpo] eq. 8; docs/algorithms.md#gigpo.
    Differs from the paper: a success is worth what the environment pays (1; 10 there), the baseline of an episode is
    the mean over episodes (`baseline=turns` is its code's), groups of which failed episodes leave one are left out.
    Groups whose returns do not differ stay: their turns may.
    """
    signal = TurnAdvantage(
        reward=config.reward,
        invalid_cost=config.invalid_cost,
        gamma=config.gamma,
        w_step=config.w_step,
        scale=config.scale,
        baseline=config.baseline,
        anchor=config.anchor,
        similarity=config.similarity,
    )
    return Algorithm(
        name="gigpo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(
            clip=config.clip,
            kl_coef=config.kl_coef,
            kl=KL_ESTIMATORS[config.kl],
            entropy_coef=config.entropy_coef,
        ),
        group=config.n,
        states=config.anchor == "state",
        select=ComparableGroups(spread=False),
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="gigpo", config=GigpoConfig, build=build, uses=frozenset({"reward", "reference", "surrogate"})
)
