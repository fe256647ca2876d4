"""The executor seam: workers somewhere, each of them one `Worker` object whose methods are called from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from turngym.agents.agent import AgentError


class ExecutorError(AgentError):
    """Workers that cannot be started, reached or sent what they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a call: a value, an exception that the worker raised, or the reason why the worker is gone."""

    worker: int
    value: Any = None
    error: Exception | None = None
    died: str = ""


class Workers(Protocol):
    """Processes on this machine or actors on a cluster, numbered from 0. Who plays what is decided by the caller."""

    @property
    def count(self) -> int: ...

    def call(self, worker: int, method: str, *args: Any) -> None:
        """Ask for `method` of `worker`; `wait` brings the answer. One call at a time and worker.

        A worker that was never started, or was stopped, is started first, with nothing in its memory.
        """

    def wait(self, timeout: float) -> list[Answer]:
        """Answers that have come, waiting at most `timeout` seconds for the first. A death answers the call too."""

    def share(self, payload: bytes) -> Any:
        """A handle of `payload`: as an argument of `call` it reaches the worker as the bytes."""

    def forget(self, handle: Any) -> None:
        """The handle is not needed any more."""

    def stop(self, worker: int) -> None:
        """End `worker` at once, alive or not; its answer will not come."""

    def close(self) -> None:
        """End every worker at once."""
