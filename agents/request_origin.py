"""Who may ask a server on this machine: no page of another site, and no name that was rebound to this address.

A browser sends requests to 127.0.0.1 for any page that is open in it. Two headers, which no page can forge, give such
requests away: `Origin` names the page, and `Host` the name under which it found this address (DNS rebinding). Programs
send no Origin, and as Host the address that they were given.

It imports nothing of turngym: SGLang's launcher loads this file in an environment of its own.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rule of one server. Raises ValueError for values that are not names."""

    host: str
    """Address that the server listens on."""
    names: tuple[str, ...] = ()
    """Further names that clients may use, those of a reverse proxy for example."""

    def __post_init__(self) -> None:
        for name in self.names:
            if _name(name) != name:
                raise ValueError(f"--hosts {name!r} is no name of a machine; valid: shop.example.org, without a port")

    @property
    def guarded(self) -> bool:
        """Whether requests are checked. A server beyond loopback may have any name, and a key protects it instead."""
        return bool(self.names) or is_loopback(self.host)

    def refusal(self, host: str | None, origin: str | None) -> str | None:
        """Returns why a request with these headers is refused, or None if it is answered."""
        if not self.guarded:
            return None
        name = _name((host or "").lower())
        if name is None or not (name in self.names or name == self.host or is_loopback(name)):
            return (
                f"the header Host is {_shown(host)}; this server answers to localhost and 127.0.0.1"
                f"{''.join(f', {allowed}' for allowed in self.names)} (more: --hosts)"
            )
        if origin is not None and not self._same(host or "", origin.lower()):
            return f"the header Origin is {_shown(origin)}; this server answers no page of another site"
        return None

    def _same(self, host: str, origin: str) -> bool:
        scheme, _, address = origin.partition("://")
        # a reverse proxy may rewrite Host, but not what the browser says
        return scheme in ("http", "https") and (address == host.lower() or _name(address) in self.names)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str | None:
    """Returns the name in a Host header without its port, or None if the header is malformed."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1]


def _shown(value: str | None) -> str:
    if value is None:
        return "missing"
    # whole or not at all: what is cut would have to be redacted first, and nothing else of turngym can be imported here
    return ascii(value) if len(value) <= 60 else f"{len(value)} characters long"
