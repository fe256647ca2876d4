"""Settings: frozen dataclasses that can be written as TOML, read back, and checked with errors that name the key.

    class Run:                    learning_rate = 0.1     # a field of its own
        learning_rate: float      steps = 100             # of the flat group `schedule`
        schedule: Schedule        [optimizer]             # of the group `optimizer`
        optimizer: Optimizer      beta = 0.9

A field that is a dataclass becomes a table of its own, unless it is flat (`field(metadata=FLAT)`): then its settings
stand beside the others. A field that only some readers have (`read_by`) does not exist for a class whose `uses` name
none of them. One that hardly anybody varies from run to run (`IN_FILE`) is a key of the file and no option of `turngym
train`. TOML has no null, so None is written as "none" where it is not the default.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.secrets import refuse_credentials
from turngym.core.spec import MOST as MOST
from turngym.core.spec import NONE, Range, to_toml
from turngym.core.tables import written_whole
from turngym.core.user_files import read_text, user_path

T = TypeVar("T")
FLAT: Mapping[str, Any] = types.MappingProxyType({"flat": True})
IN_FILE: Mapping[str, Any] = types.MappingProxyType({"in_file": True})
"""Marks a setting, or a group of them, that a file and a Python call may set, but no option of `turngym train`.

Other verbs have an option for it: they have few, and a server is rarely started from a file."""
Needs = tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...]
"""The class attribute `needs` of a settings class (`core.needed`): (keys, what must be given, whether it is). Keys
are those of the class, or patterns of them (`run.*`); the function is given the object of that class."""
PROVENANCE = "provenance"
"""The table of a configuration file that says where it came from. It sets nothing."""
RAW = "# some paths below are no UTF-8; their bytes stand here as they are\n"
"""First line of a configuration that can only be read with this in mind."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_VALUE = object()


class SettingsError(TurngymError, ValueError):
    """A setting does not exist, or its value has the wrong type."""


def read_by(*uses: str) -> Mapping[str, Any]:
    """Marks a setting, or a group of them, that exists only for a settings class with one of these `uses`.

    A settings class without the attribute `uses` has all settings.
    """
    return {"uses": frozenset(uses)}


Seed = Annotated[int, Range(most=math.inf)]
"""A seed, which may have any number of digits."""
Length = Annotated[int, Range(1)]
Count = Annotated[int, Range(1, 10**6)]
"""Number of things that take memory and time one by one: episodes, clients."""
Threads = Annotated[int, Range(1, 1024)]
Processes = Annotated[int, Range(most=1024)]
"""Processes or threads, where 0 means something."""
Port = Annotated[int, Range(most=65535)]
Share = Annotated[float, Range(most=1)]
Above0 = Annotated[float, Range(above=True)]
Signed = Annotated[float, Range(-sys.float_info.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a settings class."""

    name: str
    type: Any
    default: Any
    """MISSING if a value must be given."""
    group: type[Any]
    """The dataclass that has the field."""
    table: str
    """Dotted name of the TOML table; empty at the top."""
    range: Range
    """What its numbers may be."""
    in_file: bool = False
    """Whether `turngym train` has no option for it (`IN_FILE`)."""

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


def settings_of(cls: type[Any], table: str = "") -> Iterator[Setting]:
    """Yields every single setting of a settings class, depth first, in the order of its fields."""
    yield from _settings_of(cls, table, _uses(cls), in_file=False)


def _settings_of(cls: type[Any], table: str, uses: frozenset[str] | None, *, in_file: bool) -> Iterator[Setting]:
    for field in _fields(cls, uses):
        inner, hidden = _dataclass(field.type), in_file or field.in_file
        if inner is not None:
            below = table if field.flat else f"{table}.{field.name}" if table else field.name
            yield from _settings_of(inner, below, uses, in_file=hidden)
        else:
            yield Setting(
                name=field.name,
                type=field.type,
                default=field.default,
                group=cls,
                table=table,
                range=field.range,
                in_file=hidden,
            )


def inner_groups(cls: type[Any], table: str = "") -> Iterator[tuple[str, str, type[Any], Any]]:
    """Yields (field, table, class, default) of each group of a settings class; MISSING where it has no default."""
    for field in _fields(cls, _uses(cls)):
        if (inner := _dataclass(field.type)) is not None:
            below = table if field.flat else f"{table}.{field.name}" if table else field.name
            make = cls.__dataclass_fields__[field.name].default_factory
            yield field.name, below, inner, field.default if make is MISSING else make()


def chosen(settings: Any, table: str = "", default: Any = MISSING) -> dict[str, Any]:
    """Maps the keys of all settings that differ from those of `default`, or from their defaults, to their values."""
    found: dict[str, Any] = {}
    inner = {name: (below, usual) for name, below, _, usual in inner_groups(type(settings), table)}
    for field in _fields(type(settings), _uses(type(settings))):
        value, key = getattr(settings, field.name), f"{table}.{field.name}" if table else field.name
        usual = field.default if default is MISSING else getattr(default, field.name)
        if field.name in inner and is_dataclass(value):
            below, made = inner[field.name]
            found |= chosen(value, below, made if default is MISSING else usual)
        elif value != usual:
            found[key] = value
    return found


def check_numbers(settings: Any, name: Callable[[str], str], table: str = "") -> None:
    """Raises SettingsError for the first number in a settings object that is out of its range.

    `name` makes the name in the error of a setting's key.
    """
    for field in _fields(type(settings)):
        value, key = getattr(settings, field.name), f"{table}.{field.name}" if table else field.name
        if is_dataclass(value) and _dataclass(field.type) is not None:
            check_numbers(value, name, table if field.flat else key)
        else:
            _check_number(value, field.range, lambda key=key: name(key))  # type: ignore[misc]


def _check_number(value: Any, numbers: Range, name: Callable[[], str]) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, int | float) and not isinstance(item, bool) and (wanted := numbers.refuses(item)):
            text = f"{item:g}" if isinstance(item, float) else str(item)
            shown = text if len(text) < 30 else f"{text[:10]}... ({len(text)} characters)"
            raise SettingsError(f"{name()} is {shown}; it must be {wanted}")


def to_table(value: Any) -> dict[str, Any]:
    """Turns a settings object into a nested table of plain values."""
    return _to_table(value, _uses(type(value)))


def _to_table(value: Any, uses: frozenset[str] | None) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in _fields(type(value), uses):
        item = getattr(value, field.name)
        if is_dataclass(item) and _dataclass(field.type) is not None:
            inner = _to_table(item, uses)
            table.update(inner) if field.flat else table.update({field.name: inner})
        elif item is not None or field.default is not None:
            table[field.name] = _plain(item)
    return table


def from_table(
    cls: type[T],
    table: Mapping[str, Any],
    where: str,
    *,
    missing: Any = _NO_VALUE,
    hint: Callable[[str], str] = lambda _: "",
) -> T:
    """Makes a settings object from a nested table; each value is checked against the type of its field.

    Raises SettingsError.

    Args:
        cls: settings class, a dataclass.
        table: settings by name, with a table inside it for each group, as TOML gives them.
        where: the source (a file, a flag), for errors.
        missing: value of a setting without a default that the table lacks; not given: that is an error.
        hint: what the error says about where a setting belongs that `cls` does not know, by its key; "" if nothing.
    """
    uses = _uses(cls)
    _check_keys(cls, table, where, "", hint, uses)
    refuse_credentials("", table)
    return _build(cls, table, where, "", missing, uses)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """What a settings class says about one of its fields."""

    name: str
    type: Any
    """The type without notes."""
    flat: bool
    in_file: bool
    default: Any
    """MISSING if there is none, or if it is a group."""
    range: Range


def _uses(cls: type[Any]) -> frozenset[str] | None:
    """The readers that a settings class has; None: all."""
    return getattr(cls, "uses", None)


def _fields(cls: Any, uses: frozenset[str] | None = None) -> tuple[_Field, ...]:
    """The fields of a settings class that one of `uses` reads; None: all of them."""
    return _noted_fields(cls, uses)


# reading the notes of a class takes a millisecond, and a check asks for them many times
@cache
def _noted_fields(cls: Any, uses: frozenset[str] | None) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for item in fields(cls):
        readers: frozenset[str] = item.metadata.get("uses", frozenset())
        if readers and uses is not None and not readers & uses:
            continue
        kind = hints[item.name]
        notes = list(_notes(kind))
        # a command line marks flat groups by an empty name (`tyro.conf.arg(name="")`)
        flat = bool(item.metadata.get("flat")) or any(getattr(note, "name", None) == "" for note in notes)
        kind = _bare(kind)
        default = item.default
        if item.default_factory is not MISSING and _dataclass(kind) is None:
            default = item.default_factory()
        found.append(
            _Field(
                name=item.name,
                type=kind,
                flat=flat,
                in_file=bool(item.metadata.get("in_file")),
                default=default,
                range=next((note for note in notes if isinstance(note, Range)), Range()),
            )
        )
    return tuple(found)


def _notes(kind: Any) -> Iterator[Any]:
    """The notes of a type, and of those of a union."""
    if get_origin(kind) is Annotated:
        yield from kind.__metadata__
    elif get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _notes(one)


def _bare(kind: Any) -> Any:
    """A type without notes."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(map(_bare, get_args(kind)))]  # noqa: UP007
    return kind


def _dataclass(kind: Any) -> type[Any] | None:
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _names(cls: type[Any], uses: frozenset[str] | None) -> dict[str, Any]:
    """The keys that the table of `cls` may have, with their types."""
    names: dict[str, Any] = {}
    for field in _fields(cls, uses):
        inner = _dataclass(field.type)
        names.update(_names(inner, uses) if field.flat and inner is not None else {field.name: field.type})
    return names


def _check_keys(
    cls: type[Any],
    table: Mapping[str, Any],
    where: str,
    above: str,
    hint: Callable[[str], str],
    uses: frozenset[str] | None,
) -> None:
    known = _names(cls, uses)
    for key, value in table.items():
        if key not in known:
            # settings of tables below are candidates, too: `lr` is optimizer.lr
            names = dict.fromkeys((*known, *(setting.key for setting in settings_of(cls))))
            said, (head, dot, last) = hint(f"{above}{key}"), str(key).rpartition(".")
            if dot and key in names:  # as one name: a TOML key in quotes, or a keyword
                said = f"Write it as a table: {head} = {{ {last} = ... }}"
            where_it_is = f" {said}" if said else did_you_mean(str(key), names)
            raise SettingsError(f"{where}: there is no setting {above}{key!s}.{where_it_is}")
        inner = _dataclass(known[key])
        if inner is not None and not isinstance(value, inner):
            if not isinstance(value, Mapping):
                shown = type(value).__name__ if is_dataclass(value) else repr(value)
                raise SettingsError(
                    f"{where}: {above}{key} is {shown}; valid: a table of settings, or {inner.__name__}"
                )
            _check_keys(inner, value, where, f"{above}{key}.", hint, uses)


def _build(
    cls: type[T], table: Mapping[str, Any], where: str, above: str, missing: Any, uses: frozenset[str] | None
) -> T:
    values: dict[str, Any] = {}
    for field in _fields(cls, uses):
        name, inner = field.name, _dataclass(field.type)
        if inner is not None and field.flat:
            values[name] = _build(inner, table, where, above, missing, uses)
        elif inner is not None:
            given = table.get(name, {})
            below = f"{above}{name}."
            values[name] = given if is_dataclass(given) else _build(inner, given, where, below, missing, uses)
        elif name in table:
            values[name] = _convert(field.type, table[name], f"{where}: {above}{name}")
            _check_number(values[name], field.range, lambda name=name: f"{where}: {above}{name}")  # type: ignore[misc]
        elif field.default is MISSING:
            if missing is _NO_VALUE:
                raise SettingsError(f"{where}: {above}{name} must be given")
            values[name] = missing
    try:
        return cls(**values)
    # a SettingsError is a ValueError too, but one that names its setting already
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{where}: {above}{error}") from error


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Returns `value` as the type `kind`. Raises SettingsError, which names the setting."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if type(None) in inside and (value is None or value == NONE):
            return None
        first: SettingsError | None = None
        for one in inside:
            if one is not type(None):
                try:
                    return _convert(one, value, name)
                except SettingsError as error:
                    first = first or error
        assert first is not None
        raise first
    if origin is Literal:
        if value not in inside:
            names = ", ".join(map(str, inside))
            raise SettingsError(f"{name} is {value!r}; valid: {names}.{did_you_mean(str(value), map(str, inside))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inside[0]] * len(value) if inside[-1] is Ellipsis else list(inside)
        if len(kinds) != len(value):
            raise SettingsError(f"{name} is {list(value)!r}; valid: {len(kinds)} values")
        return tuple(_convert(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    # the one character that no file system allows
    if kind is Path and isinstance(value, str | Path) and "\0" not in str(value):
        return user_path(value)
    # TOML's `1` is a whole number; True is one to Python
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    # a setting that is JSON on the command line may be a table elsewhere
    if kind is str and isinstance(value, Mapping):
        try:
            return json.dumps(value)
        # TOML has dates, and JSON has none
        except TypeError as error:
            raise SettingsError(f"{name} is {value!r}; valid: a table of JSON's values ({error})") from error
    if kind is str and isinstance(value, Path):
        return str(value)
    plain = isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if plain and kind is not float:
        return value
    raise SettingsError(f"{name} is {value!r}; valid: {type_name(kind)}")


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


def _plain(value: Any) -> Any:
    if value is None:
        return NONE
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
