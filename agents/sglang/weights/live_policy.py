"""A policy on servers that answer while a model in this process learns, and get its weights when it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.sglang.policy import SglangPolicy
from turngym.envs.protocols import GenerateRequest, Generation, WeightSink


@dataclass(slots=True, kw_only=True)
class LivePolicy:
    """Implements `Policy`. `SyncedPolicy` looks at the model before each request; here it is being changed then.

    `weights_changed` may be called by another thread than the one that generates: responses that the servers are
    drawing meanwhile say which ids are whose. Nothing may be generated before its first call.
    """

    policy: SglangPolicy
    sink: WeightSink
    first: Callable[[], None] | None = None
    """Called when the servers have the weights for the first time: is what they compute what the model computes?"""
    _published: bool = field(default=False, init=False)

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.policy.max_length

    @property
    def policy_version(self) -> int:
        return self.policy.policy_version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request with the weights that the servers have."""
        return self.policy.generate(requests)

    def release(self, session: str) -> None:
        self.policy.release(session)

    def weights_changed(self, version: int) -> None:
        """Send the model's weights as they are now; returns when all servers have them.

        Raises SyncError as the sink does, and ServerError where the servers compute something else.
        """
        self.sink.publish(version)
        if not self._published and self.first is not None:
            self.first()
        self._published = True

    def as_json(self) -> dict[str, Any]:
        return {"servers_version": self.policy.policy_version}

    def close(self) -> None:
        """Close the connections; the servers go on with what they have."""
        self.sink.close()
        self.policy.fleet.close()
