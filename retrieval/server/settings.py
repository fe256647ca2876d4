"""What the retrieval server may be told."""

from __future__ import annotations

from dataclasses import dataclass

from turngym.retrieval.core import RetrievalError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits, batching and memory of one server."""

    topk: int = 3
    """Passages per query where a request does not say."""
    max_topk: int = 100
    """Most passages per query that a request may ask for."""
    max_queries: int = 8192
    """Most queries in one request; Search-R1 sends a whole training batch at once."""
    max_query_chars: int = 32_768
    """Longest query, in characters."""
    max_body: int = 32 * 2**20
    """Largest request body, in bytes."""
    max_batch: int = 32
    """Most queries that one call of the retriever answers: half of the clients, so that the other half are served
    meanwhile."""
    window_ms: float = 3.0
    """How long a batch waits for company while several clients are busy; an idle server never waits."""
    workers: int = 1
    """Threads that call the retriever; faiss uses all cores in each."""
    max_waiting: int = 32_768
    """Queries that may wait; more are refused with 503 until some are answered."""
    deadline: float = 12.0
    """Seconds after which a waiting request is answered with 503; less than the client's own deadline."""
    cache: int = 16_384
    """Queries whose answers are remembered, about 3 kB each; 0 remembers none."""

    def __post_init__(self) -> None:
        for name in ("topk", "max_topk", "max_queries", "max_query_chars", "max_body", "max_batch", "workers"):
            _at_least(name, getattr(self, name), 1)
        for name in ("window_ms", "cache"):
            _at_least(name, getattr(self, name), 0)
        if not self.deadline > 0:
            raise RetrievalError(f"server setting deadline is {self.deadline!r}; it must be more than 0 seconds")
        if self.topk > self.max_topk:
            raise RetrievalError(f"server setting topk is {self.topk}, more than max_topk, {self.max_topk}")
        if self.max_waiting < self.max_queries:
            raise RetrievalError(
                f"server setting max_waiting is {self.max_waiting}, less than max_queries, {self.max_queries}: "
                "a request of allowed size would always be refused"
            )


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise RetrievalError(f"server setting {name} is {value!r}; it must be at least {least}")
