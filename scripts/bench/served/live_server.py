"""`turngym serve proxy` with updates as long as `turngym bench live` wants: SECONDS, then the options of the server."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from turngym.envs.core.episode import Episode
from turngym.scripts.serve_proxy import parse, serve
from turngym.trainers.algorithm import Scorers, TargetFn, Targets
from turngym.trainers.batch import RolloutBatch

SLICE = 0.25
"""Seconds of each kind of work in turn."""


@dataclass(frozen=True, slots=True)
class LongUpdate:
    """Targets that take at least `seconds`: torch computes, Python computes, the thread sleeps, in turn."""

    inner: TargetFn
    seconds: float

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        until = time.monotonic() + self.seconds
        found = self.inner(batch, episodes, scorers)
        square = torch.rand(384, 384)
        works = (lambda: square @ square, lambda: sum(range(20_000)), lambda: time.sleep(0.01))
        while time.monotonic() < until:
            for work in works:
                end = min(until, time.monotonic() + SLICE)
                while time.monotonic() < end:
                    work()
        return found


def slow(training: Any, seconds: float) -> None:
    """Make the updates of `training` take so long."""
    algorithm = training.trainer.algorithm
    target_fn = LongUpdate(algorithm.target_fn, seconds)
    training.trainer.algorithm = replace(algorithm, target_fn=target_fn)


def main(argv: Sequence[str]) -> int:
    seconds = float(argv[0])
    return serve(parse(argv[1:]), prepare=lambda training: slow(training, seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
