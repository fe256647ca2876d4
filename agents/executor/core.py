"""Protocol of an executor: numbered workers, each a `Worker` object elsewhere whose methods are called from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from turngym.agents.agent import AgentError


class ExecutorError(AgentError):
    """Workers that cannot be started, reached or sent what they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a call: a value, an exception that the worker raised, or why the worker died."""

    worker: int
    value: Any = None
    error: Exception | None = None
    died: str = ""


class Workers(Protocol):
    """Processes on this machine or actors on a cluster, numbered from 0. The scheduler decides what each plays."""

    @property
    def count(self) -> int: ...

    def call(self, worker: int, method: str, *args: Any) -> None:
        """Call `method` of `worker`; `wait` returns the answer. One call at a time for each worker.

        A worker that was never started, or was stopped, is started first, with nothing in its memory.
        """

    def wait(self, timeout: float) -> list[Answer]:
        """Answers that have come, waiting at most `timeout` seconds for the first. A death answers the call too."""

    def share(self, payload: bytes) -> Any:
        """Store `payload` once for all workers; passed to `call`, the returned handle arrives as the bytes."""

    def free(self, handle: Any) -> None:
        """Free a shared payload."""

    def stop(self, worker: int) -> None:
        """End `worker` at once, alive or not; its answer will not come."""

    def close(self) -> None:
        """End every worker at once."""
