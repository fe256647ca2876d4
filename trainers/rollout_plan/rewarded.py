"""A rollout source whose episodes are worth what a function says, not what their environment paid."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turngym.envs.common.rewards import NamedReward
from turngym.envs.episode import Episode
from turngym.envs.protocols import Collect, CollectRequest

PAID = "environment_return"
"""In `meta` of a rewarded episode: the return that its environment paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedCollect:
    """Implements `Collect`: episodes of `collect` with `reward` as their return; failed ones stay as they are.

    So whatever reads a return reads the reward: advantages, group filters, terms of a teacher's algorithm, metrics. The
    environment's own return is kept in `meta`, and so is the reward's name; rewards of turns stay the environment's.
    """

    collect: Collect
    reward: NamedReward

    def __call__(self, request: CollectRequest) -> list[Episode]:
        return [self._rewarded(episode) for episode in self.collect(request)]

    def _rewarded(self, episode: Episode) -> Episode:
        # a failed back end says nothing about the policy: there is nothing to reward
        if episode.status.is_error:
            return episode
        meta = {**episode.meta, PAID: episode.episode_return, "reward": self.reward.name}
        return replace(episode, episode_return=self.reward(episode), meta=meta)
