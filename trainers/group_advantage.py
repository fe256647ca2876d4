"""How episodes of one task compare: advantages within a group, and which groups have something to compare.

grpo_advantage, grpo_split_advantage      formulas: rewards and group numbers to advantages
GroupAdvantage, SplitAdvantage            target functions with them
ComparableGroups                          leaves out groups without contrast
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.trainers.algorithm import Scorers, Targets
from turngym.trainers.batch import RolloutBatch, is_trainable
from turngym.trainers.rewards import Reward, episode_reward, rewards
from turngym.trainers.targets import initial_kl

FloatE = NDArray[np.float64]
Scale = Literal["std", "none"]
GROUP_EPS = 1e-6
"""Added to a group's standard deviation."""


class AdvantageError(TurngymError):
    """Rewards or groups that give no advantage."""


def grpo_advantage(reward_E: FloatE, group_E: NDArray[np.int64], *, scale: Scale = "std") -> FloatE:
    """Group-relative advantages: float64 [E], in standard deviations (`scale="std"`) or reward units (`"none"`).

    A_j = (r_j - mean_g) / (std_g + 1e-6), std unbiased; a group of one has mean 0 and std 1.
    Source: [grpo] section 4.1.2; docs/algorithms.md#group-relative-advantage.
    Errors: AdvantageError for rewards that are not finite.
    """
    everyone = np.ones(len(reward_E), np.bool_)
    return grpo_split_advantage(reward_E, group_E, everyone, scale=scale)


def grpo_split_advantage(
    reward_E: FloatE, group_E: NDArray[np.int64], on_policy_E: NDArray[np.bool_], *, scale: Scale = "std"
) -> FloatE:
    """Group-relative advantages whose baseline comes from the policy's own episodes only: float64 [E].

    A_j = (r_j - mean_g) / (std_g + 1e-6), mean and unbiased std over the on-policy episodes of group g, for all of its
    episodes; where they are worth the same (`has_spread`) std counts as 1; a single one has mean 0 and std 1.
    Source: [luffy] eq. 4; docs/algorithms.md#split-advantage.
    Differs from the paper: eq. 4 takes mean and deviation over all of the group; the split is its code's option.
    Errors: AdvantageError for a group without an on-policy episode, or rewards that are not finite.
    """
    if len(bad := np.flatnonzero(~np.isfinite(reward_E))):
        raise AdvantageError(f"the reward of episode {int(bad[0])} is {reward_E[bad[0]]}; rewards must be finite")
    advantage_E = np.zeros(len(reward_E))
    for group in np.unique(group_E):
        members = group_E == group
        policy_rewards = reward_E[members & on_policy_E]
        if not len(policy_rewards):
            raise AdvantageError(
                f"group {group} has {int(members.sum())} episodes, none of them on-policy: there is no baseline; "
                "leave at least one episode of every group without a demonstration"
            )
        mean = float(policy_rewards.mean()) if len(policy_rewards) > 1 else 0.0
        # equal rewards leave no spread to divide by but that of rounding: differences then stay in units of reward
        std = float(policy_rewards.std(ddof=1)) if has_spread(policy_rewards) else 1.0
        unit = (std + GROUP_EPS) if scale == "std" else 1.0
        advantage_E[members] = (reward_E[members] - mean) / unit
    return advantage_E


def has_spread(reward_E: FloatE) -> bool:
    """Whether the rewards of one group differ by more than rounding does (1e-6, what is added to their deviation)."""
    return bool(np.ptp(reward_E) > GROUP_EPS)


GroupOver = Literal["episodes", "turns"]
"""What the mean and the deviation of a group are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage:
    """Each episode's group-relative advantage on all of its tokens; `reward` names what an episode is worth.

    With `over` turns an episode counts in its group's mean and deviation as often as it has turns, as where every turn
    is a row of the batch (verl-agent). Source: docs/algorithms.md#group-relative-advantage.
    """

    reward: Reward = "return"
    scale: Scale = "std"
    over: GroupOver = "episodes"

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        times_E = batch.depth_E if self.over == "turns" else np.ones(batch.episodes, np.int64)
        row_r = np.repeat(np.arange(batch.episodes), times_E)
        advantage_E = np.zeros(batch.episodes)
        # the rows of one episode are alike
        advantage_E[row_r] = grpo_advantage(reward_E[row_r], batch.group_E[row_r], scale=self.scale)
        return Targets(advantage_N=advantage_E[batch.episode_N].astype(np.float32), reward=reward_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAdvantage:
    """LUFFY's advantages: the baseline of a group comes from episodes without a demonstration (or from all of them).

    Times `alpha` on demonstrated tokens, `beta` on the policy's own. From the reward go `kl_coef` times the k1
    estimates of the KL to the initial policy, summed over an episode's tokens, the student taken before the update.
    """

    reward: Reward = "return"
    scale: Scale = "std"
    split: bool = True
    alpha: float = 1.0
    beta: float = 1.0
    kl_coef: float = 0.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        own_E = np.ones(batch.episodes, np.bool_)
        if self.split:
            own_E = np.array([not demonstrated(episodes[source]) for source in batch.source_E], np.bool_)
        reward_E = rewards(batch, episodes, self.reward)
        if self.kl_coef:
            reward_E = reward_E - self.kl_coef * episode_kl(batch, scorers)
        advantage_E = grpo_split_advantage(reward_E, batch.group_E, own_E, scale=self.scale)
        factor_N = np.where(batch.off_policy_N, self.alpha, self.beta)
        advantage_N = (advantage_E[batch.episode_N] * factor_N).astype(np.float32)
        return Targets(advantage_N=advantage_N, reward=reward_E)


def episode_kl(batch: RolloutBatch, scorers: Scorers) -> FloatE:
    """`initial_kl` of all tokens of an episode, summed: float64 [E], nats."""
    return np.bincount(batch.episode_N, initial_kl(batch, scorers), minlength=batch.episodes).astype(np.float64)


def demonstrated(episode: Episode) -> bool:
    """Whether a demonstrator chose some of its turns, or began one."""
    return any(turn.origin == "demonstration" or turn.begun for turn in episode.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableGroups:
    """Implements `EpisodeFilter`: groups in which there is something to compare.

    Episodes that failed (status error) are left out first: they are no failures of the policy. Then go the groups of
    which less than two episodes are left, for a single one has no contrast. With `own`, groups without an episode that
    began without a demonstration go too, for there is no baseline. With `spread` go those in which all episodes are
    worth the same by `reward`, the reward that is optimized: all of their advantages are zero. Episodes that a limit
    cut short count with the reward that they reached. With `tokens` an episode is only compared if the policy chose
    tokens in it.
    Source: [dapo] section 3.2; docs/algorithms.md#group-filter.
    """

    reward: Reward = "return"
    spread: bool = True
    own: bool = False
    tokens: bool = False
    most: int | None = None
    """Most groups that are kept, the first ones; None: all."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        groups = [group for group, members in self._groups(episodes) if self._reason(members) is None][: self.most]
        return [episode for episode in episodes if self._counts(episode) and episode.group in groups]

    def row(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Counts of groups that are kept and left out in a step, by reason."""
        groups = [members for _, members in self._groups(episodes)]
        reasons = Counter(self._reason(members) for members in groups)
        same = [members for members in groups if self._reason(members) == "uniform"]
        kept_groups = reasons[None] if self.most is None else min(reasons[None], self.most)
        row = {"groups/kept": kept_groups, "groups/lost": reasons["lost"]}
        if self.spread:
            solved = sum(all(episode.success for episode in members) for members in same)
            row |= {"groups/uniform": len(same), "groups/uniform_solved": solved}
        return row

    def _reason(self, members: Sequence[Episode]) -> str | None:
        """The reason to leave a group out; None to keep it."""
        alone = len(members) < 2
        if alone or (self.own and all(demonstrated(episode) for episode in members)):
            return "lost"
        reward_E = np.array([episode_reward(episode, self.reward) for episode in members])
        return "uniform" if self.spread and not has_spread(reward_E) else None

    def _groups(self, episodes: Sequence[Episode]) -> Iterator[tuple[int, list[Episode]]]:
        for group in sorted({episode.group for episode in episodes}):
            yield group, [episode for episode in episodes if episode.group == group and self._counts(episode)]

    def _counts(self, episode: Episode) -> bool:
        if episode.status.is_error:
            return False
        return not self.tokens or any(is_trainable(turn) for turn in episode.turns)
