"""Settings that nothing would read without another one: each class says which, and one function refuses them.

    class Adapters:                           a class that `check_needed` is given, or one inside of it
        rank: int = 0
        alpha: int = 32
        needs: ClassVar[Needs] = (
            (("alpha",), "--lora.rank", lambda adapters: adapters.rank > 0),
        )

Only values other than the default are refused. A settings object does not know what was written down: a configuration
file holds every value, and a default that is given changes nothing that anybody would miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import MISSING, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from turngym.core.redaction import excerpt
from turngym.core.settings import Needs, SettingsError, chosen, inner_groups, settings_of
from turngym.core.spec import NONE, to_toml

T = TypeVar("T")
LONGEST = 60
"""Most characters of a value in an error."""


def check_needed(settings: T, in_file: Collection[str] = ()) -> T:
    """`settings`, which must be whole. Raises SettingsError for the first setting that nothing would read.

    It is an object of a settings class; what the classes of its groups say holds, too. `in_file` are the keys that no
    option sets: an error writes them as a file does.
    """
    for key, value, needed in unread(settings):
        said = _in_file(key, value) if key in in_file else _as_option(key, value)
        raise SettingsError(f"{said} needs {needed}, without which nothing reads it")
    return settings


def unread(settings: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, what must be given) of every setting of `settings` that nothing would read."""
    for table, group, default in _groups(settings):
        given = chosen(group, default=default)
        for keys, needed, holds in needs_of(type(group)):
            found = [key for key in given if _is_one(key, keys)]
            if found and not holds(group):
                yield from ((f"{table}.{key}" if table else key, given[key], needed) for key in found)


def needs_of(cls: type[Any]) -> Needs:
    """What a settings class says of its settings."""
    return getattr(cls, "needs", ())


def needed_keys(cls: type[Any], table: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, what must be given) of every setting of `cls` and of its groups that needs another one."""
    names = [setting.key for setting in settings_of(cls)]
    for keys, needed, _ in needs_of(cls):
        yield from ((f"{table}.{name}" if table else name, needed) for name in names if _is_one(name, keys))
    for _, below, group, _ in inner_groups(cls, table):
        yield from needed_keys(group, below)


def _is_one(key: str, keys: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in keys)


def _groups(settings: Any, table: str = "", default: Any = MISSING) -> Iterator[tuple[str, Any, Any]]:
    """Yields (table, object, default) of `settings` and of all groups in it."""
    yield table, settings, default
    for name, below, _, made in inner_groups(type(settings), table):
        value = getattr(settings, name)
        if is_dataclass(value):
            yield from _groups(value, below, made if default is MISSING else getattr(default, name))


def _in_file(key: str, value: Any) -> str:
    """A setting as a line of a file."""
    table, _, name = key.rpartition(".")
    line = excerpt(to_toml({name: NONE if value is None else value}).rstrip("\n"), LONGEST)
    return f"{table}.{line}" if table else line


def _as_option(key: str, value: Any) -> str:
    """A setting as an option with its value."""
    option = f"--{key.replace('_', '-')}"
    if value is True:
        return option
    if value is False:
        head, _, last = option.rpartition(".")
        return f"{head}.no-{last}" if head else f"--no-{last.removeprefix('--')}"
    return f"{option} {excerpt(' '.join(map(str, value)) if isinstance(value, tuple) else str(value), LONGEST)}"
