"""Keys stay out of files: whatever is recorded of a command or of its settings goes through `redacted`.

Keys belong into environment variables. An address with a user or a password is refused (`refuse_credentials`). What may
hold a key without being wrong (the query of an address, a field of a request's body) is written as ***.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.envs.core.errors import TurngymError

HIDDEN = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#@\"']+@")
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#\"'\\]+\?)[^\s#\"'\\]+", re.IGNORECASE)
_NAME = (
    r"(?:[\w-]*[_-])?(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|authorization|credentials?"
    r"|(?:access|auth|bearer|session)[_-]?token)|token|key"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# a field of JSON, or of a dict as Python writes it, inside of any text
_FIELD = re.compile(rf"(\\?[\"'](?:{_NAME})\\?[\"']\s*:\s*)(\\?[\"'])((?:(?!\2).)*)\2", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """`value` as it may be written: texts, and those inside of mappings and sequences, without what may be a key."""
    if isinstance(value, str):
        text = _QUERY.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", value))
        return _FIELD.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}{found[2]}", text)
    if isinstance(value, Mapping):
        hide = {name for name in value if isinstance(name, str) and _SECRET_NAME.fullmatch(name)}
        return {
            name: HIDDEN if name in hide and isinstance(item, str) else redacted(item) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(redacted, value))
    return value


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
    elif isinstance(value, str) and _CREDENTIALS.search(value):
        raise TurngymError(
            f"{name} is {redacted(value)!r}: an address with a user or a password would be written into files. A key "
            "is read from an environment variable (an endpoint's from $OPENAI_API_KEY or --key-env, a judge's from "
            "$TURNGYM_JUDGE_KEY); for other servers, a proxy on this machine can add it"
        )
