"""Keys stay out of files: a recorded command is redacted, and an address with a user or a password is refused.

Keys belong into environment variables. `clean_key` sees every key of ours, and `clean_address` every address of a
server, wherever they come from: both often carry the end of a line, and an error names the variable or the option. What
may hold a key without being wrong (the query of an address, a field of a request's body) is written as ***, by
`turngym.core.redaction`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.core.errors import TurngymError
from turngym.core.http_connection import address_problem
from turngym.core.redaction import redacted, without_users


def key_of(variable: str, error: type[TurngymError] = TurngymError) -> str:
    """The key in the environment variable of this name, as `clean_key` leaves it; empty if there is none."""
    return clean_key(f"the environment variable {variable}", os.environ.get(variable, ""), error)


def clean_key(source: str, key: str, error: type[TurngymError] = TurngymError) -> str:
    """The key that `source`, a variable or the line of a file, holds, without white space around it.

    Raises `error`, which does not show it, for what no header can hold, and for quotes: a shell takes them off, the
    readers of many files do not.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()) or set(key) & set(" \"'"):
        raise error(f"{source} holds no key: a key is printable ASCII without blanks and quotes")
    return key


def clean_address(source: str, address: str, error: type[TurngymError] = TurngymError) -> str:
    """The address of a server that `source`, an option or a variable, names, without white space around it.

    Raises TurngymError for a user or a password in it, and `error` for what is no address.
    """
    address = address.strip()
    refuse_credentials(source, address)
    if problem := address_problem(address):
        raise error(f"{source} {redacted(address)!r} {problem}")
    return address


def recorded_command(argv: Sequence[str] | str) -> str:
    """A command line, or the call of a function, as files keep it."""
    return str(redacted(argv)) if isinstance(argv, str) else shlex.join(redacted(word) for word in argv)


def refuse_credentials(name: str, value: Any) -> None:
    """Raises TurngymError if `value`, or a text inside of it, is or has an address with a user or a password."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_credentials(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_credentials(name, item)
    elif isinstance(value, str) and without_users(value) != value:
        raise TurngymError(
            f"{name} is {redacted(value)!r}: an address with a user or a password would be written into files. A key "
            "is read from an environment variable (an endpoint's from $OPENAI_API_KEY or --key-env, a judge's from "
            "$TURNGYM_JUDGE_KEY); for other servers, a proxy on this machine can add it"
        )
