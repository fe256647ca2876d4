"""Keys stay out of files: whatever is recorded of a command or of its settings goes through `redacted`.

Keys belong into environment variables. An address with a user or a password is refused (`refuse_credentials`). What may
hold a key without being wrong (the query of an address, a field of a request's body) is written as ***.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.envs.core.errors import TurngymError

HIDDEN = "***"
# a password may hold any character; what a port follows is no user
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/?#@\"']+|[^\s/?#@\"'\[]*:(?!\d+[/?#])[^\s@\"']+)@")
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#\"'\\]+\?)[^\s#\"'\\]+", re.IGNORECASE)
# tokens of a tokenizer (`eos_token`) are none; JSON often writes names in camel case, without a joint
_NAME = (
    r"(?:[\w-]*[_-])?(?:(?:api|access|private|secret)?key|(?:access|api|auth|bearer|session)token|secret"
    r"|passw(?:or)?d|pwd|passphrase|auth|authorization|bearer|cookie|credentials?|signature)"
    r"|(?:(?!(?:bos|eos|pad|unk|stop|end|start|sep|cls|mask)[_-])[\w-]*[_-])?token"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# a field of JSON, or of a dict as Python writes it, inside of any text
_FIELD = re.compile(rf"(\\?[\"'](?:{_NAME})\\?[\"']\s*:\s*)(\\?[\"'])(?:(?!\2)\\.|(?!\2).)*\2", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """`value` as it may be written: texts, and those inside of mappings and sequences, without what may be a key."""
    if isinstance(value, str):
        if value.startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(value)
                hidden = redacted(parsed)
                return value if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
        text = _QUERY.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", value))
        return _FIELD.sub(rf"\1\2{HIDDEN}\2", text)
    if isinstance(value, Mapping):
        hide = {name for name in value if isinstance(name, str) and _SECRET_NAME.fullmatch(name)}
        return {
            name: HIDDEN if name in hide and item is not None and not isinstance(item, bool | float) else redacted(item)
            for name, item in value.items()
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
