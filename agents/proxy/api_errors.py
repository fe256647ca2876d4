"""Errors of the proxy, in the JSON form of the OpenAI API."""

from __future__ import annotations

from typing import Any

from turngym.core.errors import TurngymError


class ProxyError(TurngymError):
    """A proxy that cannot be started as asked."""


class ApiError(TurngymError):
    """A request that gets no completion: an HTTP status and the four fields that OpenAI clients read."""

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
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


UNSUPPORTED = "unsupported_value"
"""The `code` where a client asks for what this server does not do; /healthz counts the fields."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that will never work: 400."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, *, status: int = 429, seconds: int = 1) -> ApiError:
    """The error of a request that will work later: 429 if there are too many, 503 if the server cannot answer now."""
    code = "too_many_requests" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, retry_after=seconds)
