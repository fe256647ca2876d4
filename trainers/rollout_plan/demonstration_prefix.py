"""How much of a demonstration LUFFY's prefixed episodes begin with, by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from turngym.trainers.config import ConfigError

WINDOWS = 10
"""Of `linear_max` and `reverse_linear`: the training is cut into so many parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSchedule:
    """Ratios in [low, high] for `count` prefixed episodes of each group.

    With t = min((step - 1) / steps, 1): random U(low, high); linear high (1 - t); in the i-th tenth of the training
    (from 0; a step on a border belongs to the earlier one) linear_max U(0, (10 - i) high / 10) and reverse_linear
    U(0, (i + 1) high / 10); fixed low + j (high - low) / (count - 1) for the j-th prefixed episode, high if there is
    only one.
    Source: [luffy] section 3.1; docs/algorithms.md#demonstration-prefixes.
    Differs from the paper: it has whole demonstrations only; the strategies are its published code's, where one
    prefixed episode divides by zero in `fixed`.
    """

    strategy: Literal["random", "linear", "linear_max", "reverse_linear", "fixed"] = "random"
    """How ratios follow the step."""
    count: int = 1
    """Prefixed episodes per group (n_prefix)."""
    low: float = 1.0
    """Smallest ratio."""
    high: float = 1.0
    """Largest ratio; 1.0 is the whole demonstration."""
    steps: int = 100
    """Steps over which linear strategies run (S)."""
    unit: Literal["turns", "tokens"] = "turns"
    """What a ratio is a share of: the demonstration's turns, or the tokens of its responses (the paper's code); then a
    prefix may end within a response, which the policy completes."""
    share: bool = False
    """One draw per group instead of one per prefixed episode."""
    seed: int = 0
    """Of the random strategies."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(f"prefix ratios are {self.low} to {self.high}; valid: 0 <= low <= high <= 1")
        if self.count < 1 or self.steps < 1:
            raise ConfigError(f"prefix count is {self.count} and steps {self.steps}; both must be at least 1")

    def ratios(self, step: int, groups: int) -> tuple[tuple[float, ...], ...]:
        """[groups][count], for `step` (1-based)."""
        done = min((step - 1) / self.steps, 1.0)
        low, high = self.low, self.high
        if self.strategy == "linear":
            low = high = high * (1.0 - done)
        elif self.strategy in ("linear_max", "reverse_linear"):
            # whole numbers: a share in floating point would miss borders
            window = min(max(-(-(step - 1) * WINDOWS // self.steps) - 1, 0), WINDOWS - 1)
            parts = WINDOWS - window if self.strategy == "linear_max" else window + 1
            low, high = 0.0, high * parts / WINDOWS
        elif self.strategy == "fixed":
            width = (high - low) / max(self.count - 1, 1)
            # from above, so that the last one is exactly `high`, and an only one too
            return (tuple(high - width * (self.count - 1 - j) for j in range(self.count)),) * groups
        # a stream of its own for each step: a resumed run draws what it would have drawn
        drawn = np.random.default_rng([self.seed, step]).uniform(low, high, (groups, 1 if self.share else self.count))
        return tuple(tuple(float(value) for value in np.broadcast_to(row, self.count)) for row in drawn)
