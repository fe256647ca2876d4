"""Settings of a client of SGLang servers."""

from __future__ import annotations

from dataclasses import dataclass

from turngym.agents.sglang.errors import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """Limits of one client; they hold for each server alone."""

    parallel: int = 64
    """Requests in flight at a time on each server; the server batches them."""
    deadline: float = 600.0
    """Seconds for one request, retries included; a server that is being restarted is waited for that long."""
    connect_timeout: float = 10.0
    """Seconds to reach a server."""
    backoff: float = 0.2
    """Seconds before the second attempt; doubled with each further one, up to 5."""
    admin_timeout: float = 300.0
    """Seconds for an update of the weights and other questions to the server itself."""
    resume_aborted: bool = True
    """Continue a response that the server broke off (to change weights): what was drawn is kept, the rest is drawn by
    the new weights, and the turn says which ids are whose."""

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("deadline", 0.01), ("connect_timeout", 0.01), ("admin_timeout", 0.01)):
            if getattr(self, name) < least:
                raise ServerError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.backoff < 0:
            raise ServerError(f"backoff is {self.backoff}; it must not be negative")
