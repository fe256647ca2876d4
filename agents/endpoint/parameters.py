"""What every request to an endpoint asks for besides its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turngym.envs.core import content_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParameters:
    """What every request asks for besides its messages, and what is done with the answers."""

    model: str
    temperature: float = 0.85
    max_tokens: int = 4096
    max_context: int | None = None
    """Most tokens of history and answer together, by the server's count; None: what the server takes."""
    send_stop: bool = True
    send_seed: bool = True
    reasoning_back: Literal["drop", "send"] = "drop"
    token_ids: bool = False
    memory: str = "all"
    """What of the episode a request holds (`memory_of`)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body."""

    def fingerprint(self, channel: str, system: str | None) -> str:
        """Of all that changes answers; where the endpoint is does not."""
        names = ("model", "temperature", "max_tokens", "max_context", "send_stop", "send_seed", "reasoning_back")
        known = {name: getattr(self, name) for name in names} | {"extra": dict(self.extra)}
        if self.memory != "all":  # what was recorded before there was a choice keeps its name
            known["memory"] = self.memory
        return content_hash({"engine": "openai", **known, "channel": channel, "system": system})[:16]
