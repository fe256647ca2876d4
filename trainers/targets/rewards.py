"""What an episode is worth: the reward that group-relative algorithms optimize and filter by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.episode import Episode
from turngym.trainers.batch import RolloutBatch

Reward = Literal["return", "success", "score"]


def episode_reward(episode: Episode, kind: Reward) -> float:
    """An episode's return, its score in [0, 1], or 1.0 for success."""
    if kind == "return":
        return episode.episode_return
    return float(episode.success) if kind == "success" else episode.score


def rewards(batch: RolloutBatch, episodes: Sequence[Episode], kind: Reward) -> NDArray[np.float64]:
    """`episode_reward` of each episode of the batch: float64 [E]."""
    return np.array([episode_reward(episodes[source], kind) for source in batch.source_E], np.float64)


def demonstrated(episode: Episode) -> bool:
    """Whether a demonstrator chose some of its turns, or began one."""
    return any(turn.origin == "demonstration" or turn.begun for turn in episode.turns)
