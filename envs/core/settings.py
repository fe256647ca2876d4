"""Nested settings (frozen dataclasses) as flat tables: TOML files, keyword arguments, and errors that name the key.

A field that is a dataclass is a table of its own, `[optimizer]`, unless it is flat (`field(metadata=FLAT)`): then its
settings stand beside the others. None is written as "none" where it is not the default, for TOML has no null.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from turngym.envs.core.errors import TurngymError, did_you_mean


def json_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TurngymError(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TurngymError(f'{flag} {text!r} must be a JSON object, for example \'{{"split": "valid_seen"}}\'')
    return value


T = TypeVar("T")
FLAT: Mapping[str, Any] = types.MappingProxyType({"flat": True})
PROVENANCE = "provenance"
"""The table of a configuration file that says where it came from, and sets nothing."""
NONE = "none"
_NO_VALUE = object()


class SettingsError(TurngymError, ValueError):
    """A setting that does not exist, or has a value of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a settings class; `group` is the class that is a table, or is flat."""

    name: str
    type: Any
    default: Any
    """MISSING where a value must be given."""
    group: type[Any]
    table: str
    """Dotted name of the table; empty at the top."""

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


def settings_of(cls: type[Any], table: str = "") -> Iterator[Setting]:
    """Every single setting of a settings class, depth first, in the order of its fields."""
    for name, kind, flat, default in _fields(cls):
        inner = _dataclass(kind)
        if inner is not None:
            below = table if flat else f"{table}.{name}" if table else name
            yield from settings_of(inner, below)
        else:
            yield Setting(name=name, type=kind, default=default, group=cls, table=table)


def to_table(value: Any) -> dict[str, Any]:
    """A settings object as a nested table of plain values, as TOML and keyword arguments have it."""
    table: dict[str, Any] = {}
    for name, kind, flat, default in _fields(type(value)):
        item = getattr(value, name)
        if is_dataclass(item) and _dataclass(kind) is not None:
            inner = to_table(item)
            table.update(inner) if flat else table.update({name: inner})
        elif item is not None or default is not None:
            table[name] = _plain(item)
    return table


def from_table(
    cls: type[T],
    table: Mapping[str, Any],
    where: str,
    *,
    missing: Any = _NO_VALUE,
    hint: Mapping[str, str] | None = None,
) -> T:
    """A settings object from a nested table, each value checked against the type of its field.

    `where` names the source in errors, `hint` says of keys that do not exist here where they do. A setting without
    default that the table lacks gets `missing`, or is an error. Raises SettingsError.
    """
    _check_keys(cls, table, where, "", hint or {})
    return _build(cls, table, where, "", missing)


def read_toml(path: Path | str) -> dict[str, Any]:
    """The settings of a file, without what it says about its provenance. Raises SettingsError."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    table.pop(PROVENANCE, None)
    return table


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A nested table as TOML: values first, then the tables within."""
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    parts = ["\n".join(([f"[{name}]"] if name and lines else []) + lines)] if lines else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts.append(to_toml(value, f"{name}.{_key(key)}" if name else _key(key)).rstrip("\n"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _fields(cls: type[Any]) -> Iterator[tuple[str, Any, bool, Any]]:
    """(name, type, whether flat, default or MISSING) of each field."""
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        kind, flat = hints[item.name], bool(item.metadata.get("flat"))
        if get_origin(kind) is Annotated:
            # a command line marks flat groups by an empty name (`tyro.conf.arg(name="")`)
            flat = flat or any(getattr(note, "name", None) == "" for note in kind.__metadata__)
            kind = get_args(kind)[0]
        default = item.default
        if item.default_factory is not MISSING and _dataclass(kind) is None:
            default = item.default_factory()
        yield item.name, kind, flat, default


def _dataclass(kind: Any) -> type[Any] | None:
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _names(cls: type[Any]) -> dict[str, Any]:
    """What may stand in the table of `cls`: name -> type."""
    found: dict[str, Any] = {}
    for name, kind, flat, _ in _fields(cls):
        inner = _dataclass(kind)
        found.update(_names(inner) if flat and inner is not None else {name: kind})
    return found


def _check_keys(cls: type[Any], table: Mapping[str, Any], where: str, above: str, hint: Mapping[str, str]) -> None:
    known = _names(cls)
    for key, value in table.items():
        if key not in known:
            said = f" {hint[key]}" if key in hint else did_you_mean(str(key), known)
            raise SettingsError(f"{where}: there is no setting {above}{key!s}.{said}")
        inner = _dataclass(known[key])
        if inner is not None and not isinstance(value, inner):
            if not isinstance(value, Mapping):
                shown = type(value).__name__ if is_dataclass(value) else repr(value)
                raise SettingsError(
                    f"{where}: {above}{key} is {shown}; valid: a table of settings, or {inner.__name__}"
                )
            _check_keys(inner, value, where, f"{above}{key}.", {})


def _build(cls: type[T], table: Mapping[str, Any], where: str, above: str, missing: Any) -> T:
    values: dict[str, Any] = {}
    for name, kind, flat, default in _fields(cls):
        inner = _dataclass(kind)
        if inner is not None and flat:
            values[name] = _build(inner, table, where, above, missing)
        elif inner is not None:
            given = table.get(name, {})
            below = f"{above}{name}."
            values[name] = given if is_dataclass(given) else _build(inner, given, where, below, missing)
        elif name in table:
            values[name] = _convert(kind, table[name], f"{where}: {above}{name}")
        elif default is MISSING:
            if missing is _NO_VALUE:
                raise SettingsError(f"{where}: {above}{name} must be given")
            values[name] = missing
    try:
        return cls(**values)
    # a ValueError itself, but one that names its setting already
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{where}: {above}{error}") from error


def _convert(kind: Any, value: Any, name: str) -> Any:
    """`value` as `kind`; SettingsError that names the setting where it is none."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _either(inside, value, name)
    if origin is Literal:
        if isinstance(value, bool) and "on" in inside:
            return "on" if value else "off"  # a choice that once was true or false
        if value not in inside:
            names = ", ".join(map(str, inside))
            raise SettingsError(f"{name} is {value!r}; valid: {names}.{did_you_mean(str(value), map(str, inside))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inside[0]] * len(value) if inside[-1] is Ellipsis else list(inside)
        if len(kinds) != len(value):
            raise SettingsError(f"{name} is {list(value)!r}; valid: {len(kinds)} values")
        return tuple(_convert(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    # TOML's `1` is a whole number; True is one to Python
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, Mapping):
        return json.dumps(value)  # a setting that is JSON on the command line may be a table elsewhere
    if kind is str and isinstance(value, Path):
        return str(value)
    plain = isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if plain and kind is not float:
        return value
    raise SettingsError(f"{name} is {value!r}; valid: {type_name(kind)}")


def _either(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    if type(None) in kinds and (value is None or value == NONE):
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    error: SettingsError | None = None
    for kind in rest:
        try:
            return _convert(kind, value, name)
        except SettingsError as found:
            error = error or found
    assert error is not None
    raise error


def type_name(kind: Any) -> str:
    """A type in the words of a settings file."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(item) for item in inside)
    if origin is Literal:
        return ", ".join(map(str, inside))
    if origin is tuple:
        return "a list of " + ", ".join(type_name(item) for item in inside if item is not Ellipsis)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return "none" if kind is type(None) else names.get(kind, getattr(kind, "__name__", str(kind)))


def _plain(value: Any) -> Any:
    if value is None:
        return NONE
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _key(name: str) -> str:
    return name if name and all(char.isascii() and (char.isalnum() or char in "_-") for char in name) else _text(name)


def _text(value: str) -> str:
    # the one character that JSON strings may hold bare and TOML strings may not
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    # before the numbers: True is an int to Python
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value) if isinstance(value, int | float) else _text(str(value))


# Where numbers come from: command line, versions, commit, machine; written beside a run's configuration.

FILE = "config.toml"
PACKAGES = ("turngym", "torch", "transformers", "numpy", "gymnasium", "textworld", "sglang", "peft", "ray")
"""Packages whose versions may change numbers; those that are not installed are left out."""


def provenance(command: str | Sequence[str] | None = None, **about: Any) -> dict[str, Any]:
    """What is known about this process: a table for `write_config`. `command` is the command line, in words or as
    it is to be shown; by default argv. `about`: what else is known, such as the seed."""
    commit = git_commit(Path(__file__).resolve().parent)
    versions = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {
        "command": command if isinstance(command, str) else shlex.join(sys.argv if command is None else command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **about,
        **({} if commit is None else {"git_commit": commit}),
        "packages": versions,
    }


def loaded_versions() -> dict[str, str]:
    """Versions of what this process has loaded: Python, turngym, and those of `PACKAGES` that are in use."""
    found = {name: _version(name) for name in PACKAGES if name == "turngym" or name in sys.modules}
    return {"python": platform.python_version(), **{name: known for name, known in found.items() if known is not None}}


def write_config(path: Path, config: Any, command: str | Sequence[str] | None = None, **about: Any) -> None:
    """Write the complete settings `config`, an object or its table, as a TOML file with their provenance.

    `--config` reads it back.
    """
    settings = config if isinstance(config, Mapping) else to_table(config)
    table: Mapping[str, Any] = {**settings, PROVENANCE: provenance(command, **about)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(table), encoding="utf-8")


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with `+changes` if files differ; None outside of one."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# JSON from outside, read strictly: what comes through can be computed with, shown in an error, and written again.

MAX_DEPTH = 64
"""Arrays and objects inside each other. Far below what Python's own recursion bears, since readers recurse too."""
MAX_DIGITS = 400
"""Digits of a number: a float has at most 309 before its point, and reading long integers takes quadratic time."""


class JsonError(TurngymError):
    """A body that is no JSON, or JSON that could not be written again: one line that says what and where."""


def strict_json(body: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value in `body` (RFC 8259).

    Raises:
        JsonError: not UTF-8, not JSON (NaN and Infinity are not), half a surrogate pair, a number that no float holds,
            or more than `max_depth` arrays and objects inside each other.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    if not text.strip():
        raise JsonError("the body is empty")
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_integer)
    # json answers deep nesting with RecursionError
    except RecursionError:
        raise JsonError(f"the body is nested too deeply; at most {max_depth} levels are read") from None
    except ValueError as error:
        raise JsonError(f"the body is not JSON: {error}") from None
    _check(value, max_depth)
    return value


def _no_number(name: str) -> Any:
    raise JsonError(f"the body has {name}, which is no JSON number")


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise JsonError(f"the body has the number {digits[:20]}..., which is beyond what a float holds")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise JsonError(f"the body has a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _check(value: Any, max_depth: int) -> None:
    """Level by level, without recursion: the depth is the client's."""
    level = [value]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        nested = False
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict | list):
                nested = True
                below += item
                below += item.values() if isinstance(item, dict) else ()
        if not nested:
            return
        level = below
    raise JsonError(f"the body is nested too deeply; at most {max_depth} levels are read")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise JsonError(f"the body has half a surrogate pair, \\u{half:04x}, which is no text") from None
