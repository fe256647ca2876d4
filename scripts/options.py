"""A command line as settings: words become a partial table of whole paths, and help is made from the types.

    turngym eval --panel alfworld-quickstart --max-turns 30 --agent model:FOLDER --agent.engine.dtype bfloat16 --print
    turngym trace print runs/a/eval.jsonl --outcome lost --category heat --category cool

An option is the end of a setting's path, with dashes (`--max-turns` for `play.env.max_turns`). Most verbs have one type
of settings (`read_options`), or one for each verb below them (`run_verb`). `turngym eval` and `rollout` have a type of
their own for what is no setting of a result (`--out`), and `--print` shows the whole settings with the origin of every
line. `--config FILE` reads a file of settings; options stand on top of it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

from msgspec import NODEFAULT

from turngym.core.clean_keys import refuse_credentials
from turngym.core.errors import SettingsError, TurngymError, did_you_mean
from turngym.core.nested import at, flat
from turngym.core.resolve import Layer, merged, resolve
from turngym.core.setting import Setting, choices_of, find, kind_of, must_be_given, settings_of, short_name
from turngym.core.settings import read_toml
from turngym.core.spec import Spec, expand, read_word, to_table
from turngym.core.tables import table_text
from turngym.core.user_files import goal_of, keep_inputs, user_path

T = TypeVar("T", bound=Spec)
CONFIG, PRINT, HELP, HELP_ALL = "--config", "--print", ("--help", "-h"), "--help-all"
ON, OFF = ("on", "true", "yes"), ("off", "false", "no")
COMMAND_LINE = "command line"
LEFT = 34
"""Width of the column of option names in help texts, in characters."""


def read_options(
    cls: type[T], argv: Sequence[str], *, prog: str, about: str | None, below: Mapping[str, Any] | None = None
) -> T:
    """The settings of a verb that has one type of them. Help is printed, and ends the process.

    Raises TurngymError for an option that does not exist, that cannot have its value, or that nothing would read.

    Args:
        cls: a Spec; the docstrings of its fields are the help.
        argv: the words behind the verb.
        prog: the command, such as `turngym plan`, for its help and errors.
        about: what the help says above the options.
        below: a table whose values hold where neither the command line nor a file says otherwise.
    """
    verb: Verb[T] = Verb(name=prog, about=about or "", own=cls, below=below or {})
    return verb.asked(argv).own


def run_verb(verbs: Mapping[type, Callable[[Any], int]], argv: Sequence[str], *, prog: str, about: str | None) -> int:
    """Reads one of several types, which the first word names, and runs its function. Returns its exit status.

    The name of a type on a command line is that of its class in lower case with dashes: `export-prompts`.
    """
    named = {re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower(): cls for cls in verbs}
    if not argv or argv[0] in (*HELP, HELP_ALL):
        print(f"usage: {prog} VERB [options]\n\n{(about or '').strip()}\n")
        print("\n".join(_rows(name, _first_sentence(cls.__doc__ or "")) for name, cls in named.items()))
        raise SystemExit(0 if argv else 2)
    cls = named.get(argv[0])
    if cls is None:
        hint = did_you_mean(argv[0], named)
        raise TurngymError(f"there is no verb {argv[0]!r}; valid: {', '.join(named)}.{hint}")
    return verbs[cls](read_options(cls, argv[1:], prog=f"{prog} {argv[0]}", about=cls.__doc__))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine(Generic[T]):
    """What a command line asks for."""

    own: T
    """The settings of the verb's own type."""
    layers: list[tuple[str, Mapping[str, Any]]]
    """Those of its other type with who gives them: the file, then the command line."""
    show: bool
    """Whether the settings are only to be shown (`--print`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Generic[T]):
    """A verb whose settings are values of a type, or of two."""

    name: str
    """The command, such as `turngym eval`."""
    about: str
    """What it does, in a line; examples may follow."""
    own: Any
    """A class of settings, that of `T`."""
    spec: Any = None
    """The type of what is played; None where `own` has everything."""
    first: Sequence[str] = ()
    """Options that `--help` shows, by their short names with underscores; (): all."""
    below: Mapping[str, Any] = field(default_factory=dict)
    """Values of `own` that hold where neither the command line nor a file says otherwise."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Values that hold where nobody says otherwise, for the help."""
    means: Callable[[Any, str, str], Setting] = find
    """What a name means in a type; `find`, or what knows more."""
    named: Callable[[Any, str], str] = short_name
    """What a setting is called; any end of its path that means it is understood."""
    last_counts: bool = False
    """Whether an option may be given again, in the place of the value before: commands are built from parts."""

    def asked(self, argv: Sequence[str]) -> CommandLine[T]:
        """Reads a command line. Help is printed, and ends the process.

        Raises TurngymError for an option that does not exist, that cannot have its value, or that nothing would read.
        """
        if any(word in (*HELP, HELP_ALL) for word in argv):
            print("\n".join(self._help(whole=HELP_ALL in argv)))
            raise SystemExit(0)
        argv, file = pop_option(argv, CONFIG)
        # a verb of one type may have an option of its own that is called so
        show = self.spec is not None and PRINT in argv
        given = self.given([word for word in argv if not (show and word == PRINT)])
        layers: list[tuple[str, Mapping[str, Any]]] = []
        mine = [Layer(name="", table=self.below)]
        if file is not None:
            table = read_toml(file, provenance=self.spec is not None)
            refuse_credentials("", table)
            owned = {name: value for name, value in table.items() if self.spec is None or name in settings_of(self.own)}
            mine.append(Layer(name=file, table=expand(self.own, owned, file), asked=True))
            layers.append((file, {name: value for name, value in table.items() if name not in owned}))
        layers.append((COMMAND_LINE, given.get(self.spec, {})))
        own_words = expand(self.own, given.get(self.own, {}), COMMAND_LINE)
        mine.append(Layer(name=COMMAND_LINE, table=own_words, asked=True))
        tables = merged([layer.table for layer in mine])
        for setting in settings_of(self.own).values():
            if _required(self.own, setting) and at(tables, setting.path) is None:
                raise TurngymError(f"{self._name(self.own, setting)} must be given")
        own: T = resolve(self.own, mine).spec
        _keep_inputs(own, file, [table for _, table in layers])
        return CommandLine(own=own, layers=layers, show=show)

    def given(self, argv: Sequence[str]) -> dict[Any, dict[str, Any]]:
        """The values of a command line by type and path.

        A list takes all words up to the next option, of several options those of all. While the words that stand by
        themselves have not come, it takes one: `--category heat eval.jsonl`.
        """
        positional = next((setting for setting in settings_of(self.own).values() if setting.positional), None)
        # by type and path: the option as it was written, its setting, its words, and whether it turns it off
        occurrences: dict[tuple[Any, str], tuple[str, Setting, list[str], bool]] = {}
        left = list(argv)
        while left:
            word = left.pop(0)
            option, equals, value = word.partition("=")
            if is_option(option):
                kind, setting, off = self._find(option)
                waits = positional is not None and (self.own, positional.path) not in occurrences
                words = [value] if equals else []
                most = 0 if equals else len(left) if setting.many and not waits else 1
                while len(words) < most and left and not is_option(left[0]):
                    # the next word may be one that stands by itself
                    if is_switch(setting) and (off or left[0] not in (*ON, *OFF)):
                        break
                    words.append(left.pop(0))
            elif positional is None:
                raise TurngymError(f"{word!r} belongs to no option; valid: --OPTION VALUE")
            else:
                kind, setting, off = self.own, positional, False
                option, words = positional.name.upper(), [word]
            earlier = occurrences.get((kind, setting.path))
            if earlier is not None and (setting.collects or not self.last_counts):
                words = [*earlier[2], *words]
                if not setting.many:
                    values = " ".join(words)
                    raise TurngymError(f"{option} is given twice{f' ({values})' if values else ''}; valid: once")
            occurrences[kind, setting.path] = option, setting, words, off
        tables: dict[Any, dict[str, Any]] = {}
        for (kind, path), (option, setting, words, off) in occurrences.items():
            table = tables.setdefault(kind, {})
            if is_switch(setting):
                table[path] = _switched(option, words, off=off) if words else not off
            else:
                table[path] = read_word(setting, words, option)
        return tables

    def _find(self, option: str) -> tuple[Any, Setting, bool]:
        """The type and the setting that an option means, and whether it turns it off (`--no-verify`)."""
        name = option.removeprefix("--").replace("-", "_")
        kinds = [self.own] if self.spec is None else [self.own, self.spec]
        # --no-verify, --play.no-recompute
        on = re.sub(r"^no_|(?<=\.)no_(?=[^.]+$)", "", name, count=1)
        for kind in kinds:
            for word in (name, on):
                with suppress(SettingsError):
                    setting = self.means(kind, word, self.name)  # type: ignore[type-var]
                    if word == name or is_switch(setting):
                        return kind, setting, word != name
        options = sorted({self._option_of(kind, path) for kind in kinds for path in settings_of(kind)})
        hint = did_you_mean(option, options, cutoff=0.5) or f" `{self.name} {self._all}` lists them."
        raise TurngymError(f"there is no option {option}.{hint}")

    # Help.

    @property
    def _all(self) -> str:
        """The option that lists all options."""
        return HELP_ALL if self.first else HELP[0]

    def _help(self, *, whole: bool) -> Iterator[str]:
        own = list(settings_of(self.own).values())
        positional = [setting for setting in own if setting.positional]
        words = "".join(f" {setting.name.upper()}{'...' if setting.many else ''}" for setting in positional)
        yield from (f"usage: {self.name}{words} [options]", "", textwrap.dedent(self.about).strip(), "")
        if whole or not self.first:
            yield from self.section("options", own, whole=whole)
        if whole and self.spec is not None:
            every = settings_of(self.spec)
            for group in [path for path in every if "." not in path]:
                inside = [setting for path, setting in every.items() if f"{path}.".startswith(f"{group}.")]
                yield from self.section(group, inside, whole=True)
        elif self.first:
            kinds = (self.spec, self.own)
            named = {short_name(kind, path): setting for kind in kinds for path, setting in settings_of(kind).items()}
            yield from self.section("options", [named[name] for name in self.first])
            yield ""
            yield _rows(PRINT, "show all settings, with where each comes from, and do nothing")
        yield _rows(f"{CONFIG} FILE", "settings in TOML; options stand on top of them")
        yield _rows(HELP_ALL, "every option, with all that is said of it")

    def _option_of(self, kind: Any, path: str) -> str:
        return f"--{self.named(kind, path).replace('_', '-')}"

    def _name(self, kind: Any, setting: Setting) -> str:
        """What help and errors call a setting: `--max-turns`, or `FILES` for words that stand by themselves."""
        return setting.name.upper() if setting.positional else self._option_of(kind, setting.path)

    def section(self, title: str, settings: Sequence[Setting], *, whole: bool = False) -> Iterator[str]:
        yield f"{title}:"
        for setting in settings:
            # a table without a text form has only its settings
            if setting.tables and not setting.about:
                continue
            of_verb = setting is settings_of(self.own).get(setting.path)
            kind = self.own if of_verb else self.spec
            kinds = [str(kind_of(owner)) for owner in setting.owners if kind_of(owner) is not None]
            tables = [str(kind_of(table)) for table in setting.tables if of_verb and kind_of(table)]
            choices = choices_of(setting.type) or tables
            about = setting.about if whole else _first_sentence(setting.about)
            about += f" ({', '.join(choices)})" if choices else ""
            usual = flat(self.usual).get(setting.path, setting.default)
            # what is played has presets and panels, too
            needed = of_verb and not setting.positional and usual is NODEFAULT and _required(kind, setting)
            default_text = "(required)" if needed else "" if setting.tables else _shown(usual)
            # an option of one kind chooses that kind
            note = f" [only for {', '.join(kinds)}]" if kinds and (whole or len(kinds) > 1) else ""
            yield _rows(f"{self._name(kind, setting)} {default_text}", about + note)


def _rows(left: str, right: str) -> str:
    """A name with its description beside it, or below it on a narrow terminal."""
    start, left = LEFT if width() >= 2 * LEFT else 6, f"  {left}".rstrip()
    rows = textwrap.wrap(right, width() - start) or [""]
    first = f"{left:<{start}}{rows.pop(0)}" if len(left) < start else left
    return "\n".join([first, *(f"{'':<{start}}{row}" for row in rows)])


def width() -> int:
    """Width of help texts in characters: that of the terminal, at least 40 and at most 120; 80 where there is none."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 120)


def _first_sentence(text: str) -> str:
    # "..." ends no sentence
    return re.split(r"(?<=[^.])\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


def _required(kind: Any, setting: Setting) -> bool:
    return not setting.tables and must_be_given(kind, setting.path)


def _shown(value: Any) -> str:
    """A default as the help shows it."""
    if value in (NODEFAULT, None, (), "", {}) or isinstance(value, bool):
        return "(on)" if value is True else ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def is_switch(setting: Setting) -> bool:
    return setting.type is bool


def _switched(option: str, words: Sequence[str], *, off: bool) -> bool:
    if off or words[0] not in (*ON, *OFF):
        raise TurngymError(f"{option} is {words[0]!r}; valid: {'' if off else 'on, off, or '}the option alone")
    return words[0] in ON


def is_option(word: str) -> bool:
    """Whether a word of a command line names an option, rather than being a value (as negative numbers are)."""
    return len(word) > 2 and word.startswith("--")


def pop_option(argv: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Removes `name VALUE` or `name=VALUE` from `argv`; returns what is left and the value, None if there is none.

    Raises TurngymError if the option is given without a value, or twice: no value would be read but the last.
    """
    others: list[str] = []
    values: list[str] = []
    remaining = iter(argv)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option != name:
            others.append(word)
            continue
        value = value if equals else next(remaining, "")
        if not value or (not equals and is_option(value)):
            raise TurngymError(f"{name} needs a value")
        values.append(value)
    if len(values) > 1:
        raise TurngymError(f"{name} is given {len(values)} times ({', '.join(values)}); valid: once")
    return others, values[0] if values else None


def _keep_inputs(options: Any, config: str | None, tables: Sequence[Mapping[str, Any]]) -> None:
    """Raises TurngymError where `--out` is a file that a setting names: a path, or a text behind a `=` or `:` of it."""
    out = getattr(options, "out", None)
    # every verb writes into a folder beside what is there, or one file
    if out is None or not goal_of(out := user_path(out)).is_file():
        return
    values = [value for path, value in flat(to_table(options)).items() if path != "out"]
    values += [config, *(value for table in tables for value in flat(table).values())]
    items = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    texts = [item for item in items if isinstance(item, str)]
    texts += [text[index + 1 :] for text in texts for index, letter in enumerate(text) if letter in "=:"]
    keep_inputs(out, texts, TurngymError)


def list_presets(argv: Sequence[str]) -> bool:
    """Prints the table of presets if `argv` asks for `--preset list`, and returns whether it did."""
    from turngym.agents.presets import preset_table

    wanted = "--preset=list" in argv or ("--preset", "list") in pairwise(argv)
    # one of two would not be read
    wanted = wanted and sum(word.partition("=")[0] == "--preset" for word in argv) == 1
    if wanted:
        print(table_text(preset_table(), "presets (docs/presets.md says where they come from)"), end="")
    return wanted
