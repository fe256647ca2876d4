"""A rollout source that plays nothing: recorded episodes, shuffled epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import CollectRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCollect:
    """Implements `Collect` over a fixed list; step k always gets the same episodes, so no position needs saving.

    Every epoch is a permutation of its own, fixed by (seed, epoch); a batch may reach into the next epoch.
    """

    episodes: Sequence[Episode]
    seed: int = 0

    def __call__(self, request: CollectRequest) -> list[Episode]:
        """`request.episodes` episodes; depth cap and temperature do not apply to what was recorded."""
        if not self.episodes:
            raise TurngymError("the data set has no episodes; give a trace file with at least one")
        first = (request.step - 1) * request.episodes
        places = range(first, first + request.episodes)
        epochs = {place // len(self.episodes) for place in places}
        orders = {epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self.episodes)) for epoch in epochs}
        return [self.episodes[orders[p // len(self.episodes)][p % len(self.episodes)]] for p in places]


def steps_for(epochs: float, episodes: int, batch: int) -> int:
    """Training steps that go through `episodes` recorded episodes `epochs` times; at least 1."""
    return max(1, -(-round(epochs * episodes) // batch))
