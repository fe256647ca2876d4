"""Settings of the proxy: limits of requests and sessions."""

from __future__ import annotations

from typing import Literal

from turngym.core.errors import SettingsError
from turngym.core.numbers import Count, Million, NotNegative, Positive
from turngym.core.spec import Spec


class ProxySettings(Spec):
    """Limits and sessions of one proxy."""

    name: str | None = None
    """Name of the model, as clients ask for it; None: that of its folder."""
    max_tokens: Count | None = None
    """Most tokens of an answer where a request does not say; None: as the model was trained."""
    max_waiting: Million = 128
    """Requests under way; more are refused with 429 until some are answered."""
    max_batch: Million = 64
    """Most requests generated together."""
    window_ms: NotNegative = 5.0
    """How long a batch waits for further requests while several clients are busy; an idle engine never waits."""
    deadline: Positive = 300.0
    """Seconds that a request may wait for its turn, an update of the weights included; then 503."""
    idle: Positive = 900.0
    """Seconds without a request after which a session has ended."""
    max_sessions: Million = 1024
    """Open sessions; the least recently used one is ended to make room."""
    unnamed: Literal["match", "side"] = "match"
    """Clients that name no session: `match` tells their conversations apart by their history (a request that goes on
    where an answer ended is the same session) and trains on them; `side` answers them and trains on nothing."""
    session_turns: Count = 50
    """Turns after which a session is handed on in parts, so that long ones are trained on before they end."""
    max_body: Count = 8 * 2**20
    """Largest request body, in bytes."""
    max_messages: Count = 4096
    """Most messages in one request."""
    max_tools: Count = 128
    """Most tools in one request."""

    def __post_init__(self) -> None:
        if self.name is not None and not (self.name and str(self.name).isprintable()):
            raise SettingsError(f"proxy setting name is {self.name!r}; it must be printable text")
