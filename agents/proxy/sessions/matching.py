"""Finds the session of a conversation that names none: the one whose history the request goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from turngym.agents.proxy.conversation.messages import ChatMessage


class HistoryMatch:
    """Names of sessions by what was said in them. Not for several threads at once: its owner has a lock.

    Two clients whose conversations were the same word for word are one session until one of them goes on; the other
    one then begins a session of its own. Conversations of different owners are never the same.
    """

    def __init__(self) -> None:
        self._by_history: dict[str, str] = {}
        self._history_of: dict[str, str] = {}

    def find(self, owner: str, messages: Sequence[ChatMessage]) -> str | None:
        """The session of `owner` that `messages` go on; None where there is none."""
        digests = _digests(owner, messages)
        # the whole list is no continuation: it asks for an answer that was given, perhaps to somebody else
        for digest in reversed(digests[:-1]):
            if digest in self._by_history:
                return self._by_history[digest]
        return None

    def note(self, name: str, owner: str, messages: Sequence[ChatMessage]) -> None:
        """The conversation of the session `name`, the last answer included."""
        self.forget(name)
        digest = _digests(owner, messages)[-1]
        # the first to say it keeps it
        if self._by_history.setdefault(digest, name) == name:
            self._history_of[name] = digest

    def forget(self, name: str) -> None:
        """The session is over."""
        digest = self._history_of.pop(name, None)
        if digest is not None:
            del self._by_history[digest]


def _digests(owner: str, messages: Sequence[ChatMessage]) -> list[str]:
    """Of every beginning of the conversation, from its first message alone to all of it."""
    running = hashlib.sha256(json.dumps(owner).encode())
    found = []
    for message in messages:
        running.update(json.dumps(message.identity, ensure_ascii=True).encode() + b"\n")
        found.append(running.hexdigest())
    return found
