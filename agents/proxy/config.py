"""Settings of the proxy, and its errors in the JSON form of the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.settings import Above0, Count, Length


class ProxyError(TurngymError):
    """A proxy that cannot be started as asked."""


class ApiError(TurngymError):
    """A request that gets no completion: an HTTP status and the four fields that OpenAI clients read.

    `retry_after` (seconds) tells a client that the same request will work later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def as_json(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that will never work: 400."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, *, status: int = 429, seconds: int = 1) -> ApiError:
    """The error of a request that will work later: 429 if there are too many, 503 if the server cannot answer now."""
    code = "too_many_requests" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, retry_after=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Limits and sessions of one proxy."""

    name: str | None = None
    """Name of the model, as clients ask for it; None: that of its folder."""
    max_tokens: Length | None = None
    """Most tokens of an answer where a request does not say; None: as the model was trained."""
    max_waiting: Count = 128
    """Requests under way; more are refused with 429 until some are answered."""
    max_batch: Count = 64
    """Most requests generated together."""
    window_ms: float = 5.0
    """How long a batch waits for further requests while several clients are busy; an idle engine never waits."""
    deadline: Above0 = 300.0
    """Seconds that a request may wait for its turn, an update of the weights included; then 503."""
    idle: Above0 = 900.0
    """Seconds without a request after which a session has ended."""
    max_sessions: Count = 1024
    """Open sessions; the least recently used one is ended to make room."""
    unnamed: Literal["match", "side"] = "match"
    """Clients that name no session: `match` tells their conversations apart by their history (a request that goes on
    where an answer ended is the same session) and trains on them; `side` answers them and trains on nothing."""
    session_turns: Length = 50
    """Turns after which a session is handed on in parts, so that long ones are trained on before they end."""
    max_body: Length = 8 * 2**20
    """Largest request body, in bytes."""
    max_messages: Length = 4096
    """Most messages in one request."""
    max_tools: Length = 128
    """Most tools in one request."""

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_batch", "max_sessions", "session_turns", "max_body"):
            _check(name, getattr(self, name) >= 1, getattr(self, name), "at least 1")
        for name in ("deadline", "idle"):
            _check(name, getattr(self, name) > 0, getattr(self, name), "more than 0 seconds")
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, self.max_tokens, "at least 1")
        _check("name", self.name is None or (self.name != "" and self.name.isprintable()), self.name, "printable text")


def _check(name: str, fine: bool, value: object, valid: str) -> None:
    if not fine:
        raise ProxyError(f"proxy setting {name} is {value!r}; it must be {valid}")
