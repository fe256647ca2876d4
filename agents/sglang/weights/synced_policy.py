"""A policy on servers whose weights follow a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.sglang.policy import SglangPolicy
from turngym.envs.protocols import GenerateRequest, Generation, WeightSink


@dataclass(slots=True, kw_only=True)
class SyncedPolicy:
    """Implements `Policy`: the servers get the model's weights before the first request, and after each change.

    A change that was not announced is noticed, too (`stamp` differs), so that a resumed run and an evaluation
    before the first update never play with what the servers happened to have.
    """

    policy: SglangPolicy
    sink: WeightSink
    stamp: Callable[[], int]
    """Changes whenever the model's weights do; what it says counts beside the announced version."""
    first: Callable[[], None] | None = None
    """Called when the servers have the weights for the first time: is what they compute what the model computes?"""
    version: int = 0
    """Of the model's weights, as they were last announced."""
    _sent: tuple[int, int] | None = field(default=None, init=False)

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together."""
        return self.policy.max_length

    @property
    def policy_version(self) -> int:
        return self.policy.policy_version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request with the model's weights as they are now."""
        self._publish()
        return self.policy.generate(requests)

    def for_workers(self) -> Any:
        """How worker processes make clients of the same servers, which get the model's weights as they are now."""
        self._publish()
        return self.policy.for_workers()

    def release(self, session: str) -> None:
        self.policy.release(session)

    def weights_changed(self, version: int) -> None:
        """The model has new weights; they are sent, as `version`, before the next request."""
        self.version = version

    def publish_now(self) -> tuple[str | None, int]:
        """Send the weights if others have been announced since; what the servers have then, for `adopt` elsewhere.

        For several processes that share the servers: one of them calls this before any of them plays.
        """
        if self._sent is None or self._sent[0] != self.version:
            self._publish()
        self._sent = self.version, self.stamp()
        return self.policy.fleet.versions.current, self.policy.fleet.versions.version

    def adopt(self, name: str, version: int) -> None:
        """The servers have the weights `name`, which another process has sent; this one does not send its own."""
        if name != self.policy.fleet.versions.current:
            self.policy.fleet.versions.add(name, version)
        self.version = version
        self._sent = version, self.stamp()

    def close(self) -> None:
        """Close the connections; the servers go on with what they have."""
        self.sink.close()
        self.policy.fleet.close()

    def _publish(self) -> None:
        now = self.version, self.stamp()
        if now == self._sent:
            return
        self.sink.publish(self.version)
        new = self._sent is None
        self._sent = now
        if new and self.first is not None:
            self.first()
