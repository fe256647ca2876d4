"""Which tasks a training step takes: epochs of permutations that a seed fixes."""

from __future__ import annotations

import numpy as np


def task_order(count: int, *, seed: int, step: int, batch: int) -> list[int]:
    """Which of `count` items step `step` (1-based) takes: items (step - 1) * batch onwards of the epochs, in a row.

    Every epoch is a permutation of its own, fixed by (seed, epoch), so a resumed run needs no saved position.
    """
    places = range((step - 1) * batch, step * batch)
    epochs = {place // count for place in places}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(count) for epoch in epochs}
    return [int(orders[place // count][place % count]) for place in places]
