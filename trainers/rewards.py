"""What an episode is worth: its return, its success, its score, or what a function of the run's own says.

episode_reward, rewards      the number that group-relative algorithms optimize and filter by
turn_rewards                 what each turn was paid
RewardedSource               a rollout source whose episodes are worth what `--reward` says
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.playing.timed_calls import STEP_TIMEOUT, CallResult, TimedCalls
from turngym.core.episode import Episode
from turngym.core.plugins import NamedReward
from turngym.core.protocols import RolloutSource
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.batch import RolloutBatch

Reward = Literal["return", "success", "score"]


def episode_reward(episode: Episode, kind: Reward) -> float:
    """An episode's return, its score in [0, 1], or 1.0 for success."""
    if kind == "return":
        return episode.episode_return
    return float(episode.success) if kind == "success" else episode.score


def rewards(batch: RolloutBatch, episodes: Sequence[Episode], kind: Reward) -> NDArray[np.float64]:
    return np.array([episode_reward(episodes[source], kind) for source in batch.source_E], np.float64)


PAID = "environment_return"
"""Key in `meta` of a rewarded episode: the return that its environment paid."""


def turn_rewards(episode: Episode, reward: Reward = "return", invalid_cost: float = 0.0) -> NDArray[np.float64]:
    """What each turn of `episode` was paid: float64 [T], in units of reward.

    `return`: what the environment paid for it. A reward of the whole episode (its success, its score, or the run's own)
    comes at its last turn. An invalid action costs `invalid_cost`.
    """
    paid_T = np.array([turn.reward for turn in episode.turns], np.float64)
    if reward != "return" or PAID in episode.meta:
        paid_T = np.zeros(episode.depth)
        paid_T[-1:] = episode_reward(episode, reward)
    invalid_T = np.array([not turn.verdict.valid for turn in episode.turns], np.bool_)
    return paid_T - invalid_cost * invalid_T


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedSource:
    """Implements `RolloutSource`: episodes of `source` with `reward` as their return; failed ones stay as they are.

    An episode whose reward fails, or takes more than `timeout` seconds, becomes a failed one.
    So whatever reads a return reads the reward: advantages, group filters, terms of a teacher's algorithm, metrics. The
    environment's own return is kept in `meta`, and so is the reward's name; rewards of turns stay the environment's.
    """

    source: RolloutSource
    reward: NamedReward
    timeout: float = STEP_TIMEOUT

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        episodes = self.source(request)
        # a failed back end says nothing about the policy: there is nothing to reward
        played = [episode for episode in episodes if not episode.status.is_error]
        calls = TimedCalls(self.timeout, f"--reward {self.reward.name}")
        paid = iter(calls.run([partial(self.reward, episode) for episode in played]))
        calls.close()
        return [episode if episode.status.is_error else self._rewarded(episode, next(paid)) for episode in episodes]

    def _rewarded(self, episode: Episode, paid: CallResult) -> Episode:
        meta = {**episode.meta, PAID: episode.episode_return, "reward": self.reward.name}
        if paid.failure:
            return replace(episode, status=paid.status, meta={**meta, "error": paid.failure})
        return replace(episode, episode_return=paid.value, meta=meta)
