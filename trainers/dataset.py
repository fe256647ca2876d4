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
    """Implements `Collect` over a fixed list, in the order that `draw` gives."""

    episodes: Sequence[Episode]
    seed: int = 0

    def __call__(self, request: CollectRequest) -> list[Episode]:
        """`request.episodes` episodes; depth cap and temperature do not apply to what was recorded."""
        if not self.episodes:
            raise TurngymError("the data set has no episodes; give a trace file with at least one")
        places = draw(len(self.episodes), seed=self.seed, step=request.step, batch=request.episodes)
        return [self.episodes[place] for place in request.own(places)]


def draw(count: int, *, seed: int, step: int, batch: int) -> list[int]:
    """Which of `count` items step `step` (1-based) takes: items (step - 1) * batch onwards of the epochs, in a row.

    Every epoch is a permutation of its own, fixed by (seed, epoch), so a resumed run needs no saved position.
    """
    places = range((step - 1) * batch, step * batch)
    epochs = {place // count for place in places}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(count) for epoch in epochs}
    return [int(orders[place // count][place % count]) for place in places]


def steps_for(epochs: float, episodes: int, batch: int) -> int:
    """Training steps that go through `episodes` recorded episodes `epochs` times; at least 1."""
    return max(1, -(-round(epochs * episodes) // batch))
