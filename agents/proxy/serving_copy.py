"""A copy of a model in training that answers while the model learns; new weights are swapped in between two tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.proxy.errors import ProxyError
from turngym.envs.protocols import WeightSource


class Follower(Protocol):
    """An engine over the copy's parameters."""

    def weights_changed(self, version: int) -> None:
        """The parameters have other values; what is generated from now on is theirs, as `version`."""


@dataclass(slots=True, kw_only=True)
class ServingCopy:
    """Publishes the weights of a model in training to the copy that answers.

    Only copying happens while nothing is generated; what must be computed first (adapters merged in) is computed
    before. Called in the trainer's thread, between two updates.
    """

    engine: Follower
    copy: Any
    """The model that `engine` runs."""
    weights: WeightSource
    """Of the model in training."""
    patience: float = 0.5
    """Seconds that responses being drawn get to end; then they are held, and continued by the new weights."""
    clock: Callable[[], float] = time.monotonic
    queue: EngineQueue | None = None
    """In front of `engine`; nothing may be published without it."""
    swaps: int = field(default=0, init=False)
    last_pause: float = field(default=0.0, init=False)
    """Seconds for which requests waited at the last swap, `patience` included."""
    longest_pause: float = field(default=0.0, init=False)

    def publish(self, version: int) -> None:
        """Put the model's weights as they are now in place, as `version`.

        Raises ProxyError where the model has parameters that the copy lacks, or the other way round.
        """
        assert self.queue is not None
        new, own = dict(self.weights.named_weights()), dict(self.copy.named_parameters())
        if new.keys() != own.keys():
            odd = sorted(new.keys() ^ own.keys())
            raise ProxyError(f"the model in training and its serving copy differ in parameters: {', '.join(odd[:3])}")
        began = self.clock()
        self.queue.pause(self.patience)
        try:
            with torch.no_grad():
                for name, value in new.items():
                    own[name].copy_(value)
            self.engine.weights_changed(version)
        finally:
            self.queue.resume()
        self.swaps += 1
        self.last_pause = self.clock() - began
        self.longest_pause = max(self.longest_pause, self.last_pause)

    def as_json(self) -> dict[str, Any]:
        return {"swaps": self.swaps, "last_pause_s": self.last_pause, "longest_pause_s": self.longest_pause}
