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
# Nothing here takes more than linear time on any text: what a pattern has scanned it has also consumed.
_RUN = re.compile(r"[^\s\"']++")
# a password may hold any character; what a port follows is no user
_USER = re.compile(r"(?<=://)(?:[^/?#@]++|[^/?#@\[:]*+:(?!\d+[/?#])[^@]++)@")
_QUERY = re.compile(r"(://[^\s?#\"'\\]*+)(\?[^\s#\"'\\]++)?")
# tokens of a tokenizer (`eos_token`) are none; JSON often writes names in camel case, without a joint
_NAME = (
    r"(?:[\w-]*[_-])?(?:(?:api|access|private|secret)?key|(?:access|api|auth|bearer|session)token|secret"
    r"|passw(?:or)?d|pwd|passphrase|auth|authorization|bearer|cookie|credentials?|signature)"
    r"|(?:(?!(?:bos|eos|pad|unk|stop|end|start|sep|cls|mask)[_-])[\w-]*[_-])?token"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
LONGEST_NAME = 200
"""Letters of a name that may be a secret's."""
# a field of JSON, or of a dict as Python writes it, inside of any text; a value that was cut ends with its line
_FIELD = re.compile(
    rf"(\\?[\"'](?:{_NAME})\\?[\"']\s*+:\s*+)(\\?[\"'])(?:(?!\2)(?:\\.|[^\\\n]|\\\Z))*+(?:\2|(?=\n|\Z))", re.IGNORECASE
)


def _without_users(text: str) -> str:
    """`text` with *** for user and password of every address."""
    if "://" not in text or "@" not in text:
        return text

    def hide(run: re.Match[str]) -> str:
        # up to the last @: a scan for one never runs to the end in vain, from however many addresses it begins
        end = run[0].rfind("@") + 1
        return _USER.sub(f"{HIDDEN}@", run[0][:end]) + run[0][end:]

    return _RUN.sub(hide, text)


def redacted(value: Any) -> Any:
    """`value` as it may be written: texts, and those inside of mappings and sequences, without what may be a key."""
    if isinstance(value, str):
        if value.startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(value)
                hidden = redacted(parsed)
                return value if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
        text = _QUERY.sub(lambda one: one[1] + (f"?{HIDDEN}" if one[2] else ""), _without_users(value))
        return _FIELD.sub(rf"\1\2{HIDDEN}\2", text)
    if isinstance(value, Mapping):
        hide = {name for name in value if isinstance(name, str) and _is_secret(name)}
        return {
            name: HIDDEN if name in hide and item is not None and not isinstance(item, bool | float) else redacted(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(redacted, value))
    return value


def _is_secret(name: str) -> bool:
    return len(name) <= LONGEST_NAME and _SECRET_NAME.fullmatch(name) is not None


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
    elif isinstance(value, str) and _without_users(value) != value:
        raise TurngymError(
            f"{name} is {redacted(value)!r}: an address with a user or a password would be written into files. A key "
            "is read from an environment variable (an endpoint's from $OPENAI_API_KEY or --key-env, a judge's from "
            "$TURNGYM_JUDGE_KEY); for other servers, a proxy on this machine can add it"
        )
