"""Settings as typed values: one value says everything on which a number depends, and it stands whole in every record.

    class Rules(Judge, tag="rules"):                 a kind of judge, without settings
        pass
    class Model(Judge, tag="model"):                 another kind, with its own
        folder: str
        votes: Annotated[int, Meta(ge=1)] = 3
    class Run(Spec):
        steps: Count = 100
        judge: Rules | Model = Rules()

A setting that needs another one lives inside it: `votes` exists for a model alone. `settings_of` lists the settings of
a type by path (`judge.votes`). People may write the end of a path instead of all of it, and a table as the text of its
kind: `judge = "model:FOLDER"`. `expand` turns what they write into a partial table of whole paths, `resolve`
(core/resolve.py) puts partial tables on top of each other, `read` makes the value, and `diff` is the only comparison of
two values.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, dataclass_transform, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

from turngym.core.errors import SettingsError, TurngymError, did_you_mean
from turngym.core.nested import KIND, NONE, TomlNone, at, differing, each, put
from turngym.core.numbers import FINITE
from turngym.core.redaction import brief
from turngym.core.refusal import refusal_of, valid_for
from turngym.core.setting import Setting, bare, fields_of, find, kind_of, members_of, settings_of, tables_in
from turngym.core.strict_json import json_object
from turngym.core.user_files import user_path

T = TypeVar("T")


@dataclass_transform(field_specifiers=(msgspec.field,), frozen_default=True, kw_only_default=True)
class _Checked(msgspec.StructMeta):
    """Settings that Python makes are read as those of a file are: none holds what its type does not allow."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        # msgspec would take it for a value
        if wrong := [field_name for field_name, value in namespace.items() if isinstance(value, dataclasses.Field)]:
            raise SettingsError(f"{name}: {wrong[0]} has the field of a dataclass; valid: msgspec.field")
        # fields without a default may stand behind others in every subclass: msgspec asks each class for that
        return super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **options})

    if not TYPE_CHECKING:  # checkers know the fields

        def __call__(cls, **settings: Any) -> Any:
            kind = kind_of(cls)
            return read(cls, settings if kind is None else {KIND: kind, **settings}, cls.__name__)


class Spec(Struct, frozen=True, forbid_unknown_fields=True, metaclass=_Checked):
    """Base of all settings. Raises SettingsError for what a field cannot hold, whoever makes one."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """The table that a text stands for: `VALUE` of the first field, of a kind `KIND` or `KIND:VALUE`."""
        kinds = _kinds_of(cls)
        if not kinds:
            return _main_table(cls, text)
        kind, colon, value = text.partition(":")
        if kind not in kinds:
            raise SettingsError(
                f"{brief(text, 80)} is not known; valid: {', '.join(kinds)}.{did_you_mean(kind, kinds)}"
            )
        return {KIND: kind, **(_main_table(kinds[kind], value) if colon else {})}


def _kinds_of(cls: type[Spec]) -> dict[str, type[Spec]]:
    """The kinds below a base class of kinds, by tag."""
    kinds = dict[str, type[Spec]]()
    for below in cls.__subclasses__():
        tag = kind_of(below)
        kinds |= _kinds_of(below) if tag is None else {tag: below}
    return kinds


def _base_of(cls: Any) -> Any:
    """The class that all kinds of a union extend; `cls` itself if it is not a kind."""
    if kind_of(cls) is None:
        return cls
    return next(base for base in reversed(cls.__mro__) if issubclass(base, Spec) and base is not Spec)


def _main(cls: type[Any]) -> str:
    """The field that a text stands for: the first one that the class does not inherit; "" if there is none."""
    shared = {field.name for field in fields_of(cls.__mro__[1])} if kind_of(cls) is not None else set()
    return next((field.name for field in fields_of(cls) if field.name not in shared), "")


def _main_table(cls: Any, text: str) -> dict[str, Any]:
    if not _main(cls):
        raise SettingsError(f"{kind_of(cls)} takes no value; given is {brief(text, 80)}")
    name = _main(cls)
    setting = settings_of(cls)[name]
    return {name: _table_of(setting, text, name) if setting.tables else read_word(setting, [text], name)}


# From what people write to a partial table of whole paths.


def expand(cls: type[Spec], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A partial table of whole paths from one that may use short names, and texts in place of tables.

    Raises SettingsError for a name that means nothing, for a setting that is given twice, and for one of a table that
    shall be none.

    Args:
        cls: the type that the table is a part of.
        table: values by name; tables may be nested.
        where: the source (a file, `evaluate()`), for errors.
    """
    expanded: dict[str, Any] = {}
    names: dict[str, str] = {}
    items = list(_named(cls, table, where, ""))
    absent = [setting.path for _, setting, value in items if value is None]
    for name, setting, value in items:
        path = setting.path
        if nothing := [empty for empty in absent if path.startswith(f"{empty}.")]:
            raise SettingsError(
                f"{where}: {nothing[0]} is none and {path} is {brief(value, 80)}; valid: one of the two"
            )
        if path in names:
            raise SettingsError(f"{where}: {path} is given as {names[path]} and as {name}; valid: once")
        names[path] = name
        put(expanded, path, _table_of(setting, value, f"{where}: {name}") if setting.tables else value)
    return _with_kinds(cls, expanded)


def _named(cls: type[Spec], table: Mapping[str, Any], where: str, above: str) -> Iterator[tuple[str, Setting, Any]]:
    for key, value in table.items():
        name = f"{above}{key}"
        # the kind of a union, beside the settings of that kind
        if key == KIND and above:
            yield name, find(cls, above[:-1], where), {KIND: value}
            continue
        setting = find(cls, name, where)
        if isinstance(value, Mapping) and setting.tables:
            # in one piece, so that a kind and its settings stay together
            inner: dict[str, Any] = {}
            for inner_name, below, item in _named(cls, value, where, f"{setting.path}."):
                if below.path == setting.path:
                    inner |= item
                else:
                    part = _table_of(below, item, f"{where}: {inner_name}") if below.tables else item
                    put(inner, below.path.removeprefix(f"{setting.path}."), part)
            yield name, setting, inner
        elif value is None and not setting.optional:
            continue  # in Python: as if it were not given
        elif setting.free:
            yield name, setting, _free(value, f"{where}: {name}")
        else:
            yield name, setting, None if setting.optional and value == NONE else value


def _free(value: Any, where: str) -> Any:
    """A table of any keys, which may be written as JSON."""
    if not isinstance(value, str):
        return each(value, lambda item: None if isinstance(item, TomlNone) else item)
    try:
        # not msgspec's: a path may hold bytes that are no UTF-8
        return json_object(where, value)
    except TurngymError as error:
        raise SettingsError(str(error)) from None


def _table_of(setting: Setting, value: Any, where: str) -> Any:
    """The table that a text or None stands for."""
    if isinstance(value, setting.tables):
        return msgspec.to_builtins(value, enc_hook=plain_name)
    base = _base_of(setting.tables[0])
    if len(setting.tables) == 1 and not _has_text(base, setting.name):
        if value is None or isinstance(value, Mapping):
            return value
        raise SettingsError(f"{where} is {brief(value, 80)}; valid: a table of settings")
    # a number stands for what its text does: `tasks = 20`
    number = isinstance(value, int) and kind_of(setting.tables[0]) is not None
    if isinstance(value, str | Path) or number:
        try:
            return base.table_of(str(value))
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from None
    if value is None or isinstance(value, Mapping):
        return value
    # several values stand for the kind whose first field holds several: `tasks = ["a", "b"]`
    if len(setting.tables) > 1 and isinstance(value, list | tuple):
        for kind in setting.tables:
            if _main(kind) and get_origin(bare(settings_of(kind)[_main(kind)].type)) is tuple:
                return {KIND: kind_of(kind), _main(kind): value}
    # a value of the first field that is no text: `workers = 2`
    if len(setting.tables) == 1 and isinstance(value, int | float | list | tuple):
        return {_main(setting.tables[0]): value}
    raise SettingsError(f"{where} is {brief(value, 80)}; valid: a text, or a table of settings")


def _has_text(cls: Any, name: str) -> bool:
    """Whether a table called `name` may be written as one value: of a field of the same name, of a field that must be
    given, or by a `table_of` of its own."""
    main = _main(cls)
    if main in _needed(cls):
        return True
    own_text = cls.table_of.__func__ is not Spec.table_of.__func__  # type: ignore[attr-defined]
    return own_text or main == name or (bool(main) and bool(settings_of(cls)[main].tables))


def _with_kinds(cls: type[Spec], table: dict[str, Any]) -> dict[str, Any]:
    """`table` with the kind of each union that it does not name, where one kind alone has the fields given."""
    for path, setting in settings_of(cls).items():
        inner = at(table, path)
        # tables of several owners may be no kinds of one union
        is_union = len(setting.tables) > 1 and kind_of(setting.tables[0]) is not None
        if not is_union or not isinstance(inner, dict) or KIND in inner:
            continue
        fits = [kind for kind in setting.tables if _may_be(kind, inner)]
        if not fits:
            # what the kind that is meant does not have is refused later
            fits = [kind for kind in setting.tables if _needed(kind) and _needed(kind) <= inner.keys()]
        if len(fits) == 1 and inner.keys() & ({_main(fits[0])} | _needed(fits[0])):
            inner[KIND] = kind_of(fits[0])
    return table


def _may_be(kind: type[Any], table: Mapping[str, Any]) -> bool:
    """Whether `table` has all that this kind needs, and nothing that it does not have."""
    return _needed(kind) <= table.keys() <= {field.name for field in fields_of(kind)}


def _needed(kind: type[Any]) -> set[str]:
    return {field.name for field in fields_of(kind) if field.default is NODEFAULT}


def read_word(setting: Setting, words: Sequence[str], where: str) -> Any:
    """The value that words of a command line stand for. Raises SettingsError.

    A list takes any number of words, every other setting one.
    """
    if not setting.many and len(words) != 1:
        raise SettingsError(f"{where} needs {'one value' if len(words) else 'a value'}; it is given {len(words)}")
    if setting.tables:
        return words[0]
    if setting.optional and list(words) == [NONE]:
        return None
    value: Any = list(words) if setting.many else words[0]
    if setting.many and _holds_none(setting.type):
        value = [None if word == NONE else word for word in words]
    if setting.free:
        return _free(value, where)
    # msgspec reads numbers as JSON has them, people write .5
    if any(_holds_float(member) for member in members_of(setting.type)):
        value = list(map(_with_zero, value)) if setting.many else _with_zero(value)
    try:
        return _converted(value, setting.type, strict=False)
    except msgspec.ValidationError as error:
        text = " ".join(words)
        raise SettingsError(f"{where} is {brief(text, 80)}; valid: {valid_for(setting, text, str(error))}") from None


def _holds_float(kind: Any) -> bool:
    """Whether a type is a number, or a list that holds some."""
    parts = get_args(kind) if get_origin(kind) is tuple else ()
    return kind is float or any(_holds_float(member) for part in parts for member in members_of(part))


def _holds_none(kind: Any) -> bool:
    """Whether a type is a list that may hold None."""
    lists = [member for member in members_of(kind) if get_origin(member) is tuple]
    return any(type(None) in members_of(part) for member in lists for part in get_args(member))


def _with_zero(word: str | None) -> str | None:
    return word.replace(".", "0.", 1) if word is not None and re.match(r"[-+]?\.\d", word) else word


# What nothing reads.


def unread(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (path, what is needed) of the settings in `value` that are not as by default and that nothing reads.

    A class says it in a method `unread`, which yields (name or path below it, what is needed) for itself; `../NAME` is
    beside its own table.
    """
    kind: Any = type(value)
    usual = {path: plain(setting.default) for path, setting in settings_of(kind).items() if not setting.tables}
    values = {path: at(plain(value), path) for path in usual}
    for idle, needed in _idle(value, ""):
        below = [path for path in usual if f"{path}.".startswith(f"{idle}.")]
        # None also of what the kinds that are chosen do not have
        yield from ((path, needed) for path in below if values[path] is not None and values[path] != usual[path])


Unread = Iterator[tuple[str, str]]


def needing(needed: str, *names: str) -> Unread:
    """Settings that nothing reads without what is `needed`, for a method `unread`."""
    yield from ((name, needed) for name in names)


def _idle(value: Any, above: str) -> Iterator[tuple[str, str]]:
    for name, needed in value.unread() if hasattr(value, "unread") else ():
        beside = name.removeprefix("../")
        table = above if beside == name else above[: above[:-1].rfind(".") + 1]
        yield f"{table}{beside}", needed
    for field in fields_of(type(value)):
        inner = getattr(value, field.name)
        if isinstance(inner, tables_in(field.type)):
            yield from _idle(inner, f"{above}{field.name}.")


# Reading and writing whole values.


def read(cls: type[T], table: Mapping[str, Any], where: str, origins: Mapping[str, str] | None = None) -> T:
    """The value of a whole table. Raises SettingsError: what, which value, whose, what would be valid.

    Args:
        cls: its type.
        table: nested, as TOML and JSON give it; "none" stands for None.
        where: the source, for errors; "" where `origins` says it.
        origins: who gave each setting; None: all of it comes from `where`.
    """
    try:
        table = _without_none(cls, each(table, _scalar))
        return _converted(table, cls)
    except msgspec.ValidationError as error:
        raise SettingsError(refusal_of(cls, table, str(error), where, origins or {})) from None  # type: ignore[arg-type]
    except TurngymError as error:
        raise SettingsError(f"{where}: {error}" if where else str(error)) from None


def changed(value: T, **settings: Any) -> T:
    """`value` with other settings. Raises SettingsError for what a field cannot hold."""
    return type(value)(**{**msgspec.structs.asdict(value), **settings})  # type: ignore[arg-type]


def _scalar(value: Any) -> Any:
    """Returns the Python value of a NumPy scalar, which JSON does not know; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _without_none(cls: type[Any], table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`table` with None in place of the text that stands for it."""
    values = dict(table)
    kinds = {field.name: field.type for field in fields_of(cls)}
    for name, value in values.items():
        kind = kinds.get(name)
        # no type of a float without a range knows that
        if _any_float(kind) and not all(math.isfinite(item) for item in _many(value) if isinstance(item, float)):
            raise msgspec.ValidationError(f"Expected `float` <= {FINITE} - at `$.{above}{name}`")
        if isinstance(value, str) and value == NONE and type(None) in members_of(kind):
            values[name] = None
        elif isinstance(value, list | tuple) and _holds_none(kind):
            values[name] = [None if isinstance(item, str) and item == NONE else item for item in values[name]]
        elif isinstance(value, Mapping):
            tables = tables_in(kind)
            # in a table of any keys a text is a text (`_free` has read the nulls of TOML)
            if fitting := [member for member in tables if kind_of(member) == value.get(KIND)] or list(tables):
                values[name] = _without_none(fitting[0], value, f"{above}{name}.")
    return values


def _any_float(kind: Any) -> bool:
    """Whether a type has room for a number without a range."""
    if get_origin(kind) in (Union, types.UnionType, tuple):
        return any(map(_any_float, get_args(kind)))
    return kind is float


def _many(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def to_table(spec: Any) -> dict[str, Any]:
    """A value as a nested table of plain values, defaults included."""
    table: dict[str, Any] = msgspec.to_builtins(spec, enc_hook=plain_name)
    return table


def _converted(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """The typed value. Raises ValidationError."""
    try:
        return msgspec.convert(value, kind, strict=strict, dec_hook=_path_of)
    except UnicodeEncodeError:
        # msgspec cannot look for a number, or for one of a few words, in bytes that are no UTF-8
        texts = each(value, lambda item: re.sub("[\ud800-\udfff]", "\ufffd", item) if isinstance(item, str) else item)
        return msgspec.convert(texts, kind, strict=strict, dec_hook=_path_of)


def _path_of(kind: type[Any], value: Any) -> Any:
    """The path that a text of a table or a command line stands for: `~` is the home folder."""
    if kind is not Path:
        raise NotImplementedError(kind)
    # the one character that no file system allows; "" is what a shell makes of a variable that is not set, and would
    # mean the working directory
    if not isinstance(value, str | Path) or "\0" in str(value) or value == "":
        raise ValueError("Expected `path`")
    return user_path(value)


def plain(value: Any) -> Any:
    """A value of a setting as it stands in a table."""
    return None if value is NODEFAULT else msgspec.to_builtins(value, enc_hook=plain_name)


def plain_name(value: Any) -> Any:
    """Writes an object that msgspec does not know: a path as text, a NumPy scalar as its value, a function or class as
    its import path, any other object as that of its class."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, Path | TomlNone):
        return str(value)
    # two functions are not one setting
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


# One comparison.


def diff(first: Spec, second: Spec) -> dict[str, tuple[Any, Any]]:
    """The paths at which two values of one type differ, with both values; None where one of them has no such setting.

    Of tables of different kinds only the kinds are named.
    """
    return differing(to_table(first), to_table(second))
