"""Which of the collected episodes are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turngym.envs.episode import Episode
from turngym.trainers.targets.group_advantages import groups_with_spread


@dataclass(frozen=True, slots=True)
class DropUniformGroups:
    """Groups that hold both success and failure; in the others every advantage is zero. Error episodes are left out."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        # first: a failed back end would count as a failure, and give a group of successes a false contrast
        played = [episode for episode in episodes if not episode.status.is_error]
        success_E = np.array([episode.success for episode in played], np.bool_)
        keep_E = groups_with_spread(success_E, np.array([episode.group for episode in played], np.int64))
        return [episode for episode, keep in zip(played, keep_E, strict=True) if keep]
