"""Which conversation a request belongs to, as far as the client says so, and what the client calls itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from turngym.agents.proxy.errors import invalid
from turngym.agents.proxy.http.read_messages import shown

SESSION = "X-Session-Id"
MAX_SESSION_ID = 256


class Headers(Protocol):
    """HTTP headers, whatever their case."""

    def get(self, key: str, /) -> str | None: ...


def read_session(fields: Mapping[str, Any], headers: Headers) -> str | None:
    """The session's id, None without one: the header, else `session_id`, `metadata.session_id`,
    `metadata.conversation_id`, `conversation` (an id, or an object with one), `conversation_id`.

    Raises ApiError for one that is no short text.
    """
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise invalid(f"metadata is {shown(metadata)}; it must be an object", "metadata")
    more = metadata or {}
    conversation = fields.get("conversation")
    named = {
        "session_id": headers.get(SESSION) or fields.get("session_id"),
        "metadata.session_id": more.get("session_id"),
        "metadata.conversation_id": more.get("conversation_id"),
        "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation,
        "conversation_id": fields.get("conversation_id"),
    }
    for name, value in named.items():
        if value is not None:
            return _short(value, name)
    return None


def read_user(fields: Mapping[str, Any]) -> str:
    """OpenAI's `user`, or `metadata.user_id`: whose conversations are told apart by their history. "" without one."""
    value = fields.get("user") or (fields.get("metadata") or {}).get("user_id")
    return "" if value is None else _short(value, "user")


def client_name(headers: Headers) -> str:
    """What the client says that it is, in at most 60 printable characters."""
    said = headers.get("User-Agent") or "a client without a name"
    return "".join(char if char.isprintable() else " " for char in said)[:60].strip()


def _short(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_SESSION_ID:
        raise invalid(f"{name} is {shown(value)}; it must be text of 1 to {MAX_SESSION_ID} letters", name)
    return value
