"""How a server is reached: through which proxy, with whose certificates, by how many connections; and why it was not.

Clients read no variable of the environment by themselves: `proxy_of` and `certificates` do it for all of them, and name
the variable where its value cannot be used. Nothing on this machine is reached through a proxy.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from turngym.core.redaction import HIDDEN, excerpt, redacted, remember_key

Cause = Literal["refused", "host", "network", "late", "certificate", "scheme", "proxy", "files", "lost"]
"""Why a server was not reached: nothing listens there, there is no such host, no way leads to it, no connection in
time, its certificate is not trusted, it speaks another protocol, a proxy or a variable that names one, no file
descriptor is left, the connection broke."""
FINAL: tuple[Cause, ...] = ("certificate", "scheme", "proxy", "host")
"""Causes that another try does not cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The proxy for a server, and the variable that names it."""

    address: str
    variable: str


class Unreachable(Exception):
    """A server cannot be reached; its text says so to people, in a clause."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(text)
        self.cause: Cause = cause


# Where.


def address_problem(url: str) -> str:
    """Says why `url` cannot be the address of a server, as the end of a sentence; empty if it can."""
    # no other white space is printable
    if not url.isprintable() or " " in url:
        return "holds a blank, or another character that no address has"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"is no address ({error})"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not parts.hostname:
        return "names no host"
    if not _can_be(parts.hostname):
        return "has a host that cannot be looked up: a part of its name is empty, or too long"
    # the port is read only here, and what is no number is a ValueError
    with suppress(ValueError):
        if parts.port != 0:
            return ""
    return "has a port that is no number from 1 to 65535"


def _can_be(host: str) -> bool:
    """Whether a name server can be asked for `host`."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


# Which way.


def proxy_of(url: str) -> Proxy | None:
    """The proxy that the environment names for `url`: `HTTPS_PROXY` or `HTTP_PROXY`, else `ALL_PROXY`, in small letters
    first, as other programs read them. None without one, for hosts of `NO_PROXY`, and for this machine.

    Raises Unreachable for a variable with a value that is no proxy.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_here(host) or _excepted(parts):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if address := os.environ.get(variable, "").strip():
                return Proxy(address=_proxy_address(address, variable), variable=variable)
    return None


def is_here(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine."""
    # RFC 6761: every name below localhost, too
    if host.lower().rstrip(".").rpartition(".")[2] == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    # a server that listens everywhere is often asked by the address that it was told (0.0.0.0)
    return address.is_loopback or address.is_unspecified


def _excepted(parts: SplitResult) -> bool:
    """Whether `NO_PROXY` has this server: its name, a domain of it, `*`, an address or a network, with or without a
    port; IPv6 with or without brackets."""
    host, port = (parts.hostname or "").lower(), parts.port or {"https": 443}.get(parts.scheme, 80)
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    for entry in (entry.strip().lower() for entry in no_proxy.replace(",", " ").split()):
        name, colon, last = entry.rpartition(":")
        if colon and last.isdigit() and (name.endswith("]") or ":" not in name):
            if int(last) != port:
                continue
            entry = name
        entry = entry.strip("[]")
        if entry in ("*", host) or (entry.strip(".") and f".{host}".endswith(f".{entry.lstrip('*').lstrip('.')}")):
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


def _proxy_address(address: str, variable: str) -> str:
    url = address if "://" in address else f"http://{address}"
    # a password may hold blanks, where an address in a text ends
    safe_url = excerpt(redacted(re.sub(r"(?<=//).*@", f"{HIDDEN}@", url, flags=re.DOTALL)), 100)
    try:
        parts = urlsplit(url)
        usable = _can_be(parts.hostname or "") and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        raise Unreachable(
            "proxy", f"the variable {variable} is {safe_url!r}, which is no proxy: write http://HOST:PORT"
        )
    if parts.scheme.startswith("socks"):
        if find_spec("socksio") is None:
            raise Unreachable(
                "proxy",
                f"the variable {variable} names a SOCKS proxy, which needs pip install 'httpx[socks]'; NO_PROXY leaves "
                "a host out",
            )
    elif parts.scheme not in ("http", "https"):
        raise Unreachable("proxy", f"the variable {variable} is {safe_url!r}; a proxy begins with http://")
    if parts.password:
        # a proxy that refuses may quote it, in either form
        remember_key(parts.password)
        remember_key(base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode())
    return url


def certificates() -> ssl.SSLContext:
    """The certificates that are trusted: those of `SSL_CERT_FILE` or `SSL_CERT_DIR`, else certifi's.

    Raises Unreachable for a variable that names none.
    """
    for variable, kind in (("SSL_CERT_FILE", "cafile"), ("SSL_CERT_DIR", "capath")):
        if path := os.environ.get(variable, "").strip():
            try:
                # a folder that is not there is no error to OpenSSL
                os.stat(path)
                if kind == "cafile":
                    return ssl.create_default_context(cafile=path)
                return ssl.create_default_context(capath=path)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise Unreachable(
                    "certificate",
                    f"the variable {variable} is {excerpt(path, 200)!r}, which holds no certificates: {why}",
                ) from None
    import httpx

    return httpx.create_ssl_context(trust_env=False)


# Why not.


def why_not(error: BaseException, url: str, proxy: Proxy | None, seconds: float) -> Unreachable:
    """Explains `error`, in which a request to `url` through `proxy` ended. `seconds` is the time limit of a
    connection."""
    parts = urlsplit(url if proxy is None else proxy.address)
    server = f"{parts.hostname}:{parts.port or {'https': 443}.get(parts.scheme, 80)}"
    cause, text = _cause(list(_chain(error)), str(parts.hostname), server, parts.scheme, seconds)
    if proxy is None:
        return Unreachable(cause, text)
    through = f"through the proxy that {proxy.variable} names (NO_PROXY leaves a host out)"
    return Unreachable(cause if cause in ("late", "lost") else "proxy", f"{text}, {through}")


def _cause(chain: list[BaseException], host: str, server: str, scheme: str, seconds: float) -> tuple[Cause, str]:
    names = {type(error).__name__ for error in chain}
    for error in chain:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message or "it cannot be verified"
            return "certificate", (
                f"the certificate of {host} is not trusted ({why}); SSL_CERT_FILE names a file with the certificates "
                "that are"
            )
        if isinstance(error, ssl.SSLError):
            return (
                "scheme",
                f"{server} does not speak TLS ({error.reason or error}): is its address http:// and not https://?",
            )
        if isinstance(error, socket.gaierror):
            passing = error.errno == socket.EAI_AGAIN
            return ("network" if passing else "host"), (
                "names of hosts cannot be looked up now" if passing else f"there is no host {host!r}"
            )
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE):
            return "files", (
                "no file descriptor is left for a connection: `ulimit -n` says how many files this process may open; "
                "raise it, or ask for fewer --slots"
            )
        if number == errno.ECONNREFUSED:
            return "refused", f"nothing listens at {server} (connection refused)"
        if number in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
            return "network", f"no way leads to {server} ({os.strerror(number)})"
    if names & {"ConnectTimeout", "PoolTimeout"}:
        return "late", f"no connection to {server} within {seconds:g} s"
    why = redacted(f"{type(chain[0]).__name__}: {chain[0]}" if str(chain[0]) else type(chain[0]).__name__)
    if "ProxyError" in names:
        return "proxy", f"refused ({why})"
    # the first bytes of a TLS alert, where an answer should begin
    if "RemoteProtocolError" in names and scheme == "http" and r"\x15\x03" in why:
        return "scheme", f"{server} speaks TLS: is its address https:// and not http://?"
    return "lost", why


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it came from, and what is grouped in them; bounded, because causes may be circles."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < 50:
        cause = waiting.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        grouped = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        waiting += [error for error in (cause.__cause__, cause.__context__, *grouped) if error is not None]


# How many connections.

SPARE_DESCRIPTORS = 24
"""Descriptors that are left for files, pipes and libraries, beside those that are open already."""


def connections(wanted: int) -> int:
    """Returns how many connections may be open at a time: at least 1, at most `wanted`. Raises the process's limit of
    open files as far as allowed, and counts the descriptors that are left."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit on sockets
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = 64
    for folder in ("/dev/fd", "/proc/self/fd"):
        with suppress(OSError):
            used = len(os.listdir(folder))
    need = used + SPARE_DESCRIPTORS + wanted
    if soft != resource.RLIM_INFINITY and soft < need:
        raised = need if hard == resource.RLIM_INFINITY else min(need, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - used - SPARE_DESCRIPTORS))
