"""Files of settings: TOML that is read and written."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from turngym.core.spec import SettingsError, to_toml
from turngym.core.tables import written_whole
from turngym.core.user_files import read_text

PROVENANCE = "provenance"
"""The table of a configuration file that says where it came from. It sets nothing."""
RAW = "# some paths below are no UTF-8; their bytes stand here as they are\n"
"""First line of a configuration that can only be read with this in mind."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_toml(path: Path | str, *, provenance: bool = False) -> dict[str, Any]:
    """Reads the settings of a TOML file; its provenance only with `provenance`. Raises SettingsError."""
    try:
        table = tomllib.loads(read_text(path, SettingsError, raw=RAW))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    # a number of thousands of digits is a ValueError of Python's own
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply for a configuration") from None
    if not provenance:
        table.pop(PROVENANCE, None)
    return table


def write_toml(path: Path, table: Mapping[str, Any]) -> None:
    """Writes a nested table as a TOML file; its folder is made where it is missing."""
    write_toml_text(path, to_toml(table))


def write_toml_text(path: Path, text: str) -> None:
    """Writes TOML that `read_toml` reads; the file's folder is made where it is missing, and an old file stays until
    the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # the bytes of a path may be no UTF-8, and TOML has no other way to say them
    raw = RAW if _SURROGATE.search(text) else ""
    with written_whole(path) as scratch:
        scratch.write_text(raw + text, encoding="utf-8", errors="surrogateescape", newline="\n")


def type_name(kind: Any) -> str:
    """The name of a type for people who write a settings file."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(item) for item in inside)
    if origin is Literal:
        return ", ".join(map(str, inside))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list of " + ", ".join(type_name(item) for item in inside if item is not Ellipsis)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return "none" if kind is type(None) else names.get(kind, getattr(kind, "__name__", str(kind)))
