"""Files of settings: TOML that is read and written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.core.errors import SettingsError
from turngym.core.nested import NONE, TomlNone, at, each, put
from turngym.core.resolve import ASKED, PROVENANCE, Resolved, merged
from turngym.core.setting import settings_of
from turngym.core.spec import Spec, to_table
from turngym.core.tables import visible
from turngym.core.user_files import read_text
from turngym.core.whole_files import written_whole

RAW = "# some paths below are no UTF-8; their bytes stand here as they are\n"
"""First line of a configuration that can only be read with this in mind."""
NOT_READ = "# what people asked for, and where it ran: to change a setting, change it above\n"
"""Line in front of a record's provenance, from which no setting is read."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_toml(path: Path | str, *, provenance: bool = False) -> dict[str, Any]:
    """Reads the settings of a TOML file; its provenance only with `provenance`. Raises SettingsError."""
    text = read_text(path, SettingsError, raw=RAW)
    try:
        table = toml_of(text)
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    if not provenance:
        table.pop(PROVENANCE, None)
    return table


def toml_of(text: str) -> dict[str, Any]:
    """The table that TOML holds. Raises ValueError, for damage, deep nesting and a number of thousands of digits."""
    try:
        table: dict[str, Any] = each(tomllib.loads(text), lambda value: TomlNone(value) if value == NONE else value)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return table


def write_toml_text(path: Path, text: str) -> None:
    """Writes TOML that `read_toml` reads; the file's folder is made where it is missing, and an old file stays until
    the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # the bytes of a path may be no UTF-8, and TOML has no other way to say them
    raw = RAW if _SURROGATE.search(text) else ""
    with written_whole(path) as scratch:
        scratch.write_text(raw + text, encoding="utf-8", errors="surrogateescape", newline="\n")


def to_toml(spec: Spec | Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """A value, or its table, as TOML; with `origins` each line says where its value comes from."""
    return _toml_table(toml_table(to_table(spec), type(spec)) if isinstance(spec, Spec) else spec, "", origins or {})


def toml_table(table: Mapping[str, Any], cls: type[Spec]) -> dict[str, Any]:
    """A table of the type `cls`, or a part of one, for `to_toml`: in it a table of any keys that holds the text "none"
    is its JSON."""
    quoted = merged([table])
    for path, setting in settings_of(cls).items():
        if setting.free and _quoted(NONE) in (text := json.dumps(at(table, path))):
            put(quoted, path, text)
    return quoted


def whole_toml(resolved: Resolved[Any], but: Sequence[str] = ()) -> str:
    """Whole settings as `--config` reads them back, without those called `but`; each line says where its value comes
    from."""

    def written(table: Mapping[str, Any]) -> dict[str, Any]:
        values = toml_table(table, type(resolved.spec))
        for above, _, name in (path.rpartition(".") for path in but):
            (at(values, above) or {}).pop(name, None)
        return values

    text = to_toml(written(to_table(resolved.spec)), resolved.origins)
    if resolved.asked is None:
        return text
    return f"{text}\n{NOT_READ}" + to_toml({PROVENANCE: {ASKED: written(resolved.asked)}})


def _toml_table(table: Mapping[str, Any], name: str, origins: Mapping[str, str]) -> str:
    lines, below = list[str](), list[str]()
    for key, value in table.items():
        path = f"{name}.{toml_key(key)}" if name else toml_key(key)
        if isinstance(value, Mapping) and value:
            below.append(_toml_table(value, path, origins).rstrip("\n"))
            continue
        line = f"{toml_key(key)} = {toml_value(value)}"
        origin = origins.get(f"{name}.{key}" if name else key)
        # who gives it may be a file, in whose name anything stands
        lines.append(f"{line}  # {visible(origin)}" if origin else line)
    values_text = "\n".join(([f"[{name}]"] if name and lines else []) + lines)
    return "\n\n".join(part for part in (values_text, *below) if part) + "\n"


def toml_key(name: str) -> str:
    """A key as TOML writes it."""
    return name if name and all(char.isascii() and (char.isalnum() or char in "_-") for char in name) else _quoted(name)


def toml_value(value: Any) -> str:
    """A value as TOML writes it, in one line."""
    if value is None:
        return _quoted(NONE)
    # before the numbers: True is an int to Python
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, int | float) else _quoted(str(value))


def _quoted(text: str) -> str:
    # the one character that JSON strings may hold bare and TOML strings may not
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
