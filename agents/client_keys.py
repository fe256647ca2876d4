"""Whose request is this? Keys tell the clients of one server apart, so that nobody acts on what another one opened.

A server asks for no key, for one that all its clients share, or for a key of each client. The last is a file with a
line for each client, its name and its key:

    ann  4f1c0a9be2d7486f
    bob  c07d5e6619aa4b2e

A line that begins with # is left out.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turngym.core.clean_keys import clean_key
from turngym.core.errors import TurngymError
from turngym.core.user_files import read_text

SHORTEST_KEY = 16
"""Fewest characters of a client's key: shorter ones can be guessed."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Maps each client's name to its key. The name "" stands for a key that all share; if empty, no key is needed."""

    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, shared: str | None, path: Path | None) -> ClientKeys:
        """Reads the keys in the file `path`, else takes the shared one. Raises TurngymError for an unusable file."""
        if path is None:
            return cls({"": shared} if shared else {})
        text, mode = read_text(path, TurngymError), path.stat().st_mode
        if mode & 0o077:
            raise TurngymError(f"--client-keys {path} can be read by others on this machine: chmod 600 {path}")
        keys: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            name, *rest = line.split()[:3] or [""]
            # a client is taken out with a # before its line
            if not name or name.startswith("#"):
                continue
            # a line is never quoted: it holds a key
            where = f"--client-keys {path}, line {number}"
            usable = name[0].isalnum() and len(rest) == 1 and len(rest[0]) >= SHORTEST_KEY
            if not usable:
                raise TurngymError(
                    f"{where}: it must be a name and a key of at least {SHORTEST_KEY} characters; a name begins with a "
                    "letter or a digit, and a line that begins with # is left out"
                )
            if name in keys or rest[0] in keys.values():
                raise TurngymError(f"{where}: its name or its key is there already; each client needs its own")
            keys[name] = clean_key(where, rest[0])
        if not keys:
            raise TurngymError(f"--client-keys {path} names no client: write a line for each, a name and a key")
        return cls(keys)

    def client_of(self, authorization: str) -> str | None:
        """Returns the client whose key is in the header `Authorization: Bearer KEY`, or None if no client has it."""
        if not self.keys:
            return ""
        scheme, _, credentials = authorization.partition(" ")
        # as the bytes that came (WSGI reads headers as Latin-1): compare_digest refuses text that is not ASCII
        sent = credentials.strip().encode("latin-1", "replace")
        same = [name for name, key in self.keys.items() if hmac.compare_digest(sent, key.encode())]
        return same[0] if same and scheme.lower() == "bearer" else None

    def share(self, limit: int) -> int:
        """Returns the part of `limit` that one client may use: the same for all, so that none starves the others."""
        return max(1, limit // max(1, len(self.keys)))
