"""Which settings does a type have, and what are they called? All of them by path (`judge.votes`).

People may write the end of a path instead of all of it: `named` and `find` say which setting a name means, `short_name`
the shortest name of one.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

from turngym.core.attribute_docs import docs_of
from turngym.core.errors import SettingsError, UnknownSettingError, did_you_mean
from turngym.core.redaction import brief

T = TypeVar("T")

POSITIONAL = "positional"
Positional = Annotated[T, POSITIONAL]
"""A setting that a command line gives as a word, without its name."""
WITHIN = "within the run"
Within = Annotated[T, WITHIN]
"""A number of training steps that a run should have: a longer one never comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a type, or a table of settings."""

    path: str
    """Names from the top, with dots between them."""
    type: Any
    default: Any
    """`NODEFAULT` if a value must be given."""
    owners: tuple[type[Struct], ...]
    """The classes that have it: several if several kinds of a union do."""
    tables: tuple[type[Struct], ...]
    """What a table may be: the kinds of a union; () for a single value."""
    optional: bool
    """Whether None is valid."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def free(self) -> bool:
        """Whether it is a table of any keys (arguments of `gym.make`)."""
        return get_origin(bare(self.type)) in (dict, Mapping)

    @property
    def many(self) -> bool:
        """Whether it holds several values."""
        return any(get_origin(kind) is tuple for kind in members_of(self.type))

    @property
    def collects(self) -> bool:
        """Whether it holds any number of values."""
        return any(get_origin(kind) is tuple and Ellipsis in get_args(kind) for kind in members_of(self.type))

    @property
    def positional(self) -> bool:
        """Whether a command line gives it as a word, without its name."""
        return POSITIONAL in getattr(self.type, "__metadata__", ())

    @property
    def within(self) -> bool:
        """Whether it is a number of steps that a run should have."""
        return WITHIN in getattr(self.type, "__metadata__", ())

    @property
    def about(self) -> str:
        """What the field's docstring says, as one line."""
        return docs_of(self.owners[0]).get(self.name, "")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Any
    default: Any


def fields_of(cls: Any) -> tuple[_Field, ...]:
    """The fields of a table."""
    return _fields_of(cls)  # to type checkers the class of an object cannot be hashed


@cache
def _fields_of(cls: Any) -> tuple[_Field, ...]:
    return tuple(
        _Field(item.name, item.type, item.default if item.default_factory is NODEFAULT else item.default_factory())
        for item in msgspec.structs.fields(cls)
    )


def tables_in(kind: Any) -> tuple[type[Struct], ...]:
    """The kinds of table that a type has room for; () for a type of single values."""
    return tuple(member for member in members_of(kind) if isinstance(member, type) and issubclass(member, Struct))


@cache
def settings_of(cls: Any) -> Mapping[str, Setting]:
    """All settings and tables of a type by path, in the order of its fields."""
    settings: dict[str, Setting] = {}
    for setting in _walk(cls, ""):
        earlier = settings.get(setting.path)
        if earlier is not None:
            both = earlier.type if earlier.type == setting.type else Union[earlier.type, setting.type]  # noqa: UP007
            setting = Setting(
                path=earlier.path,
                type=both,
                default=earlier.default,
                owners=(*earlier.owners, *setting.owners),
                tables=tuple(dict.fromkeys((*earlier.tables, *setting.tables))),
                optional=earlier.optional or setting.optional,
            )
        settings[setting.path] = setting
    return settings


def must_be_given(cls: Any, path: str) -> bool:
    """Whether the setting at `path` has no default, nor any table that it is in."""
    parts = path.split(".")
    return all(settings_of(cls)[".".join(parts[:end])].default is NODEFAULT for end in range(1, len(parts) + 1))


def _walk(cls: type[Any], above: str, usual: Any = None) -> Iterator[Setting]:
    """The settings below a table; their defaults are those of `usual`, the object that is the table's own default."""
    for field in fields_of(cls):
        path, tables = f"{above}{field.name}", tables_in(field.type)
        optional = type(None) in members_of(field.type)
        default = getattr(usual, field.name) if isinstance(usual, cls) else field.default
        yield Setting(path=path, type=field.type, default=default, owners=(cls,), tables=tables, optional=optional)
        for table in tables:
            yield from _walk(table, f"{path}.", default)


def members_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union, without annotations; for any other type the type itself."""
    kind = bare(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(member for part in get_args(kind) for member in members_of(part))
    return (kind,)


def bare(kind: Any) -> Any:
    return bare(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def choices_of(kind: Any) -> list[str]:
    """The values of the literals and enumerations in a type."""
    choices: list[str] = []
    for member in members_of(kind):
        if get_origin(member) is Literal:
            choices += map(str, get_args(member))
        elif get_origin(member) is tuple:
            choices += choices_of(get_args(member)[0])
        elif isinstance(member, type) and issubclass(member, Enum):
            choices += [str(item.value) for item in member]
    return list(dict.fromkeys(choices))


def kind_of(cls: type[Any]) -> str | None:
    """The tag of a kind of a union; None for a type that is not a kind, or that kinds extend."""
    tag = cls.__struct_config__.tag if issubclass(cls, Struct) else None
    # a class of kinds that has no tag of its own gets its name for one
    return None if tag in (None, cls.__name__) else str(tag)


@cache
def _by_ending(cls: Any) -> Mapping[str, tuple[str, ...]]:
    """Every ending of a path to the paths that end so: those with the fewest parts."""
    endings: dict[str, list[str]] = {}
    for path in settings_of(cls):
        parts = path.split(".")
        for first in range(len(parts)):
            endings.setdefault(".".join(parts[first:]), []).append(path)
    least = {name: min(path.count(".") for path in paths) for name, paths in endings.items()}
    return {name: tuple(path for path in paths if path.count(".") == least[name]) for name, paths in endings.items()}


def named(cls: type[Struct], name: str) -> Setting | None:
    """The setting that `name` means: a path, or an end of one; None where it means nothing, or several settings."""
    paths = _by_ending(cls).get(name, ())
    return settings_of(cls)[paths[0]] if len(paths) == 1 else None


def find(cls: type[Struct], name: str, where: str) -> Setting:
    """The setting that `name` means. Raises SettingsError for a name that means nothing, or several settings."""
    if (setting := named(cls, name)) is not None:
        return setting
    if paths := _by_ending(cls).get(name, ()):
        raise SettingsError(f"{where}: {name} means {' or '.join(paths)}; valid: one of these")
    alike = [ending for ending in _by_ending(cls) if ending.count(".") == name.count(".")]
    hint = did_you_mean(name, alike if "." in name else short_names(cls))
    raise UnknownSettingError(name, f"{where}: there is no setting {brief(name, 80)}.{hint}")


def short_name(cls: type[Struct], path: str) -> str:
    """The shortest end of a path that means it."""
    parts = path.split(".")
    for first in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[first:])
        if _by_ending(cls)[name] == (path,):
            return name
    return path


def short_names(cls: type[Struct]) -> list[str]:
    """The short names of all settings."""
    return [short_name(cls, path) for path in settings_of(cls)]
