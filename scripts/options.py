"""A command line as settings: words become a partial table of whole paths, and help is made from the types.

    turngym eval --panel alfworld-quickstart --max-turns 30 --agent model:FOLDER --agent.engine.dtype bfloat16 --print

An option is the end of a setting's path, with dashes (`--max-turns` for `play.env.max_turns`). What only the verb has
(`--out`) is a type of its own. `--config FILE` reads a file of settings; options stand on top of it. `--print` shows
the whole settings with the origin of every line, which `--config` reads again.
"""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar, get_origin

from msgspec import NODEFAULT

from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.settings import read_toml
from turngym.core.spec import (
    Setting,
    Spec,
    choices_of,
    expand,
    find,
    kind_of,
    merged,
    read,
    read_word,
    settings_of,
    short_name,
    short_names,
    toml_value,
)
from turngym.core.tables import table_text

T = TypeVar("T", bound=Spec)
CONFIG, PRINT, HELP, HELP_ALL = "--config", "--print", ("--help", "-h"), "--help-all"
ON, OFF = ("on", "true", "yes"), ("off", "false", "no")
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[T]):
    """What a command line asks for."""

    own: T
    """What the verb alone has."""
    layers: list[tuple[str, Mapping[str, Any]]]
    """Settings with who gives them: the file, then the command line."""
    show: bool
    """Whether the settings are only to be shown (`--print`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Generic[T]):
    """A verb whose settings are values of a type."""

    name: str
    """The command, such as `turngym eval`."""
    about: str
    """What it does, in a line; examples may follow."""
    own: type[T]
    spec: type[Spec]
    first: Sequence[str]
    """Options that `--help` shows, by their short names with underscores."""

    def asked(self, argv: Sequence[str]) -> Asked[T] | None:
        """Reads a command line; None where it asked for help, which is printed.

        Raises TurngymError for an option that does not exist, or that cannot have its value.
        """
        if any(word in (*HELP, HELP_ALL) for word in argv):
            print("\n".join(self._help(whole=HELP_ALL in argv)))
            return None
        own: dict[str, Any] = {}
        given: dict[str, Any] = {}
        layers: list[tuple[str, Mapping[str, Any]]] = []
        show, file = False, None
        asked = list(_options(argv))
        for option, count in Counter(option for option, _ in asked).items():
            if count > 1:
                raise TurngymError(f"{option} is given {count} times; valid: once")
        for option, words in asked:
            if option == PRINT:
                show = True
            elif option == CONFIG:
                file = _single(option, words)
            else:
                self._put(own, given, option, words)
        if file is not None:
            table = read_toml(file)
            mine = {name: value for name, value in table.items() if name in self.own.__struct_fields__}
            layers.append((file, {name: value for name, value in table.items() if name not in mine}))
            own = merged([expand(self.own, mine, file), own])
        layers.append((COMMAND_LINE, given))
        return Asked(own=read(self.own, own, COMMAND_LINE), layers=layers, show=show)

    def _put(self, own: dict[str, Any], given: dict[str, Any], option: str, words: list[str]) -> None:
        """Puts the value of an option into the table that it belongs to."""
        name = option.removeprefix("--").replace("-", "_")
        off = name.startswith("no_") and name not in short_names(self.spec)
        kind = self.own if name.removeprefix("no_") in self.own.__struct_fields__ else self.spec
        try:
            setting = find(kind, name.removeprefix("no_") if off else name, self.name)
        except TurngymError:
            known = sorted({*self.own.__struct_fields__, *short_names(self.spec)})
            shown = [f"--{one.replace('_', '-')}" for one in known]
            hint = did_you_mean(option, shown, cutoff=0.5) or f" `{self.name} --help-all` lists them."
            raise TurngymError(f"there is no option {option}.{hint}") from None
        table = own if kind is self.own else given
        if setting.path in table:
            raise TurngymError(f"{option} is given twice, and only the last would be read; valid: once")
        if is_switch(setting):
            value = not off if not words else _switched(option, words)
        else:
            value = read_word(setting, words, option)
        table[setting.path] = value

    # Help.

    def _help(self, *, whole: bool) -> Iterator[str]:
        yield f"usage: {self.name} [options]"
        yield ""
        yield self.about
        yield ""
        own = settings_of(self.own)
        every = {**{name: own[name] for name in own}, **settings_of(self.spec)}
        if whole:
            yield from self._section("options", [own[name] for name in own])
            top = [path for path in settings_of(self.spec) if "." not in path]
            for group in top:
                inside = [one for path, one in settings_of(self.spec).items() if f"{path}.".startswith(f"{group}.")]
                yield from self._section(group, inside)
            return
        named = {short_name(self.spec, path): one for path, one in every.items() if path not in own}
        yield from self._section("options", [own[name] if name in own else named[name] for name in self.first])
        yield ""
        yield f"  {CONFIG} FILE   settings in TOML; options stand on top of them"
        yield f"  {PRINT}         show all settings, with where each comes from, and do nothing"
        yield f"  {HELP_ALL}      every option"

    def _section(self, title: str, settings: Sequence[Setting]) -> Iterator[str]:
        yield f"{title}:"
        for one in settings:
            # a table without a text form has only its settings
            if one.tables and not one.about:
                continue
            kind = self.own if one.owners[0] is self.own else self.spec
            name = f"--{short_name(kind, one.path).replace('_', '-')}"
            kinds = [str(kind_of(owner)) for owner in one.owners if kind_of(owner) is not None]
            left = f"  {name} {_default(one)}".rstrip()
            about = one.about + (f" ({', '.join(choices_of(one.type))})" if choices_of(one.type) else "")
            about += f" [of {', '.join(kinds)}]" if kinds else ""
            rows = textwrap.wrap(about, max(_width() - 34, 40)) or [""]
            yield f"{left:<34}{rows.pop(0)}" if len(left) < 34 else left
            yield from (f"{'':<34}{row}" for row in rows)


def is_switch(setting: Setting) -> bool:
    """Whether a setting is on or off."""
    return setting.type is bool


def _switched(option: str, words: Sequence[str]) -> bool:
    word = _single(option, words)
    if word not in (*ON, *OFF):
        raise TurngymError(f"{option} is {word!r}; valid: on, off, or the option alone")
    return word in ON


def _single(option: str, words: Sequence[str]) -> str:
    if len(words) != 1:
        raise TurngymError(f"{option} needs one value; it is given {len(words)}")
    return words[0]


def _options(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The options of a command line with the words behind each."""
    option, words = "", list[str]()
    for word in argv:
        # a negative number is a value
        if word.startswith("--") and len(word) > 2:
            if option:
                yield option, words
            option, equals, value = word.partition("=")
            words = [value] if equals else []
        elif not option:
            raise TurngymError(f"{word!r} stands before any option; valid: --OPTION VALUE")
        else:
            words.append(word)
    if option:
        yield option, words


def _default(setting: Setting) -> str:
    value = setting.default
    if value is NODEFAULT or value is None or value in ((), "", {}) or isinstance(value, Spec):
        return ""
    if setting.tables or get_origin(setting.type) is dict:
        return ""
    if isinstance(value, bool):
        return "(on)" if value else ""
    return value if isinstance(value, str) else toml_value(value)


def _width() -> int:
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 120)


def list_presets(argv: Sequence[str]) -> bool:
    """Prints the table of presets if `argv` asks for `--preset list`, and returns whether it did."""
    from turngym.agents.presets import preset_table

    asked = "--preset=list" in argv or ("--preset", "list") in pairwise(argv)
    # one of two would not be read
    asked = asked and sum(word.partition("=")[0] == "--preset" for word in argv) == 1
    if asked:
        print(table_text(preset_table(), "presets (docs/presets.md says where they come from)"), end="")
    return asked
