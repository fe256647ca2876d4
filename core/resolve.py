"""The one place that knows an order: partial tables on top of each other become a value, whose origins are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, Generic

from msgspec import NODEFAULT

from turngym.core.errors import SettingsError
from turngym.core.nested import KIND, NONE, at, differing, each, flat, put
from turngym.core.redaction import brief
from turngym.core.refusal import said_by
from turngym.core.setting import fields_of, kind_of, members_of, must_be_given, short_name, tables_in
from turngym.core.spec import T, plain, read, to_table, unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A partial table of whole paths, and who gives it."""

    name: str
    """Who gives its values, for origins and errors: `panel alfworld-quickstart-v1`, `command line`."""
    table: Mapping[str, Any]
    asked: bool = False
    """Whether a person asked for these values. What the chosen kind of a union does not have is then refused; from all
    other layers it is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A whole value, and where each of its settings comes from."""

    spec: T
    origins: Mapping[str, str]
    """Path to the name of the layer that gave its value; the type's own defaults have none."""
    asked: Mapping[str, Any] | None = None
    """What people gave, as a partial table; the rest follows from it. None: nobody knows what they gave."""


def resolve(cls: type[T], layers: Sequence[Layer]) -> Resolved[T]:
    """The value that the layers give together: each stands on top of those before it.

    Tables are merged key by key. A table of another kind takes the place of the whole table below it. What nothing
    reads (`unread`) is left out where nobody asked for it. Raises SettingsError, which names the layer.
    """
    resolved, askers = _resolved(cls, layers), {layer.name for layer in layers if layer.asked}
    below = merged([layer.table for layer in layers if not layer.asked])
    # what must be given is as by default where it is as nobody asked for it
    idle = {
        path: needed
        for path, needed in unread(resolved.spec)
        if not must_be_given(cls, path) or at(below, path) != at(to_table(resolved.spec), path)
    }
    for path, needed in idle.items():
        if (origin := said_by(resolved.origins, path)) in askers:
            raise SettingsError(f"{origin}: {_idle(resolved.spec, path, needed)}")
    return _resolved(cls, [_without(layer, idle) for layer in layers]) if idle else resolved


PROVENANCE, ASKED, FOUND = "provenance", "asked", "found"
"""The table of a record that says where it comes from and sets nothing; in it what people gave (`Resolved.asked`), and
the paths of what opening has found out."""


def asked_in(resolved: Resolved[T], given: Sequence[Layer]) -> Resolved[T]:
    """`resolved`, with what the layers `given` have given it."""
    names, values, asked = {layer.name for layer in given}, flat(to_table(resolved.spec)), dict[str, Any]()
    for path, value in flat(merged([layer.table for layer in given])).items():
        if path in values and resolved.origins.get(path) in names:
            put(asked, path, value)
    return replace(resolved, asked=asked)


def read_back(
    record: Mapping[str, Any], again: Callable[[Mapping[str, Any]], Any], top: Collection[str] = ()
) -> dict[str, Any]:
    """Returns what people asked for in a `record` of whole settings, as a partial table. A table without that record is
    returned as it is.

    What follows from it is left out: it is to follow from what is put on top, too. What follows no longer, since
    another version or a changed file says otherwise, is as recorded. What opening had found out is kept where nothing
    is put `top` in its table, or above it: there it is to be found anew.

    Args:
        record: as TOML gives it.
        again: resolves what was asked for to the whole value.
        top: paths of what is put on top.
    """
    table = {name: value for name, value in record.items() if name != PROVENANCE}
    about = record.get(PROVENANCE, {})
    if ASKED not in about:
        return table
    asked = merged([about[ASKED]])
    # what there is to say of it is said where all of it is resolved
    with redirect_stderr(StringIO()):
        # as TOML gives it back
        current = each(to_table(again(about[ASKED])), lambda value: NONE if value is None else value)
    tables = [path.rpartition(".")[0] for path in top]
    anew = {path for path in about.get(FOUND, ()) if any(not name or path.startswith(f"{name}.") for name in tables)}
    for path, (_, recorded) in differing(current, table).items():
        if path.rpartition(".")[2] == KIND:
            path = path.removesuffix(f".{KIND}")
            recorded = at(table, path)
        if recorded is not None and path not in anew:
            put(asked, path, recorded)
    return asked


def checked(value: T) -> T:
    """`value`, which was made in Python. Raises SettingsError for a setting that nothing reads."""
    for path, needed in unread(value):
        raise SettingsError(f"{type(value).__name__}: {_idle(value, path, needed)}")
    return value


def _idle(value: Any, path: str, needed: str) -> str:
    setting = f"{short_name(type(value), path)} is {brief(at(to_table(value), path), 60)}"
    return f"{setting}; it needs {needed}, without which nothing reads it"


def _resolved(cls: type[T], layers: Sequence[Layer]) -> Resolved[T]:
    table, origins = _merged(layers)
    _fit(cls, table, origins, {layer.name for layer in layers if layer.asked})
    return Resolved(spec=read(cls, table, "", origins), origins=origins)


def _without(layer: Layer, paths: Collection[str]) -> Layer:
    def remaining(table: Mapping[str, Any], above: str) -> dict[str, Any]:
        values = dict[str, Any]()
        for name, value in table.items():
            inner = remaining(value, f"{above}{name}.") if isinstance(value, Mapping) else value
            # a table of which nothing is left is none: it may need what was left out
            if f"{above}{name}" not in paths and (inner or not value):
                values[name] = inner
        return values

    return Layer(name=layer.name, table=remaining(layer.table, ""), asked=layer.asked)


def merged(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Partial tables on top of each other."""
    return _merged([Layer(name="", table=table) for table in tables])[0]


def _merged(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(table, layer.table, origins, layer.name, "")
    return table, origins


def _merge(table: dict[str, Any], top: Mapping[str, Any], origins: dict[str, str], layer: str, above: str) -> None:
    """Puts the table `top` of a `layer` on `table`, whose keys have the path `above` in front of them."""
    for key, value in top.items():
        path, old = f"{above}{key}", table.get(key)
        if not isinstance(value, Mapping):
            _forget(origins, path)
            table[key], origins[path] = value, layer
            continue
        # an empty table, such as {} of free keys, must not hide what is below
        other_kind = isinstance(old, dict) and KIND in value and value[KIND] != old.get(KIND, value[KIND])
        if not isinstance(old, dict) or other_kind:
            _forget(origins, path)
            old = table[key] = {}
            origins[path] = layer
        _merge(old, value, origins, layer, f"{path}.")


def _forget(origins: dict[str, str], path: str) -> None:
    for given in [given for given in origins if given == path or given.startswith(f"{path}.")]:
        del origins[given]


def _fit(
    cls: type[Any],
    table: dict[str, Any],
    origins: Mapping[str, str],
    askers: set[str],
    above: str = "",
    usual: Any = None,
) -> None:
    """Completes a table by the defaults of its fields, and leaves out what a chosen kind lacks, if nobody asked for it.

    A union gets the kind that it has by default, and a table that is given in part keeps the rest of its own default:
    that of `usual`, the object whose place `table` takes, if it is one of `cls`.
    """
    for field in fields_of(cls):
        path, tables = f"{above}{field.name}", tables_in(field.type)
        default = getattr(usual, field.name) if isinstance(usual, cls) else field.default
        # what a table must be given is said of its settings, not of the table
        if default is NODEFAULT and len(tables) == 1 and type(None) not in members_of(field.type):
            table.setdefault(field.name, {})
        inner = table.get(field.name)
        if not tables or not isinstance(inner, dict):
            continue
        chosen = tables[0]
        if kind_of(chosen) is not None:
            kind = inner.setdefault(KIND, kind_of(type(default)))
            if kind is None:
                del inner[KIND]
                if not any(_asked(origins, askers, f"{path}.{key}") for key in inner):
                    del table[field.name]
                continue
            fitting = [member for member in tables if kind_of(member) == kind]
            if not fitting:
                continue  # `read` refuses it
            chosen = fitting[0]
        defaults = {inner_field.name: inner_field.default for inner_field in fields_of(chosen)}
        for key in [key for key in inner if key != KIND and key not in defaults]:
            if not _asked(origins, askers, f"{path}.{key}"):
                del inner[key]
        for name in defaults if isinstance(default, chosen) else ():
            if (value := getattr(default, name)) != defaults[name]:
                inner.setdefault(name, plain(value))
        _fit(chosen, inner, origins, askers, f"{path}.", default)


def _asked(origins: Mapping[str, str], askers: set[str], path: str) -> bool:
    """Whether a person gave the value at `path`, or one in the table there."""
    return any(layer in askers for given, layer in origins.items() if given == path or given.startswith(f"{path}."))
