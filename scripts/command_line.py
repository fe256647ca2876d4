"""What `turngym train` and `turngym serve proxy` still need of the older reader; all others use options.py.

Last in the file: the words with which other verbs call `turngym train`.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro

from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.needed import check_needed
from turngym.core.settings import Setting, check_numbers, settings_of
from turngym.core.spec import docs_of
from turngym.core.user_files import keep_inputs, user_path
from turngym.scripts.options import CONFIG as CONFIG
from turngym.scripts.options import is_option
from turngym.scripts.options import pop_option as pop_option

T = TypeVar("T")
HELP = (tyro.conf.HelptextFromCommentsOff,)
"""For tyro: help is in docstrings, and to look for it in comments too would read every class's source at each call."""


def read(cls: Any, argv: Sequence[str], *, prog: str, description: str | None = None) -> Any:
    """Reads an object of the settings class `cls`. A path with `~` means the home folder, and a number has a range.

    Args:
        cls: a settings class.
        argv: the words behind the verb.
        prog: the command, such as `turngym serve proxy`, for its help and errors.
        description: what the help says above the options; by default the class's docstring.
    """
    check_lists(settings_of(cls), argv)
    return checked(tyro.cli(cls, args=list(argv), prog=prog, description=description, config=HELP))


def checked(settings: T, in_file: Collection[str] = ()) -> T:
    """`settings` as people mean them; `in_file` are the keys that no option sets.

    Raises SettingsError for a number that is out of its range, and for a setting that nothing would read.
    """
    check_numbers(settings, flag)
    meant = with_homes(check_needed(settings, in_file))
    out = getattr(meant, "out", None)
    # every verb writes into a folder beside what is there, or one file: that may be none that it reads
    if isinstance(out, Path) and out.is_file():
        keep_inputs(out, _named_paths(replace(meant, out=None)), TurngymError)  # type: ignore[type-var]
    return meant


def _named_paths(value: Any) -> Iterator[str | Path]:
    """What a settings object names, or may name: paths, and texts with what follows each `=` and `:` of theirs."""
    if isinstance(value, str):
        yield value
        yield from (value[place + 1 :] for place, letter in enumerate(value) if letter in "=:")
    elif isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _named_paths(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _named_paths(getattr(value, field.name))


def with_homes(settings: Any) -> Any:
    """A settings object, or a value in it, with `user_path` of every path."""
    if isinstance(settings, Path):
        return user_path(settings)
    if isinstance(settings, tuple):
        return tuple(map(with_homes, settings))
    if not is_dataclass(settings):
        return settings
    changed: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if (new := with_homes(value)) != value:
            changed[field.name] = new
    return replace(settings, **changed) if changed else settings  # type: ignore[type-var]


def check_options(
    settings: Iterable[Setting],
    words: Sequence[str],
    *,
    prog: str,
    subject: str = "there is",
    owner: Callable[[str], str] = lambda name: "",
) -> None:
    """Raises TurngymError for the first option that sets none of the `settings`, with what may have been meant.

    Args:
        settings: those that an option may set.
        words: the words behind the verb.
        prog: the command, such as `turngym train opd`, whose `--help` the error names.
        subject: the error's words before "no option NAME".
        owner: a sentence, with a space before it, that says where an option belongs; "" where nothing is known of it.
    """
    settings = list(settings)
    check_lists(settings, words)
    known = {"--help"}
    for setting in settings:
        option = flag(setting.key)
        head, _, last = option.rpartition(".")
        off = f"{head}.no-{last}" if head else f"--no-{last.removeprefix('--')}"
        known |= {option, off} if setting.type is bool else {option}
    for name in (name_of(word) for word in words if is_option(word)):
        if name not in known:
            hint = owner(name) or did_you_mean(name, sorted(known), cutoff=0.5) or f" `{prog} --help` lists them."
            raise TurngymError(f"{subject} no option {name}.{hint}")


def check_lists(settings: Iterable[Setting], words: Sequence[str]) -> None:
    """Raises TurngymError for an option of any number of values that is given twice: the first ones would be lost.

    Of other options the last one counts, as commands that are built from parts expect.
    """
    given = Counter(name_of(word) for word in words if is_option(word))
    for setting in settings:
        option = flag(setting.key)
        if given[option] < 2 or get_args(setting.type)[1:] != (Ellipsis,):
            continue
        raise TurngymError(
            f"{option} is given {given[option]} times, and only the last would be read; valid: once, with all of its "
            f"values: {option} A B"
        )


def flag(key: str) -> str:
    """The option that sets `key` (`grpo_kd.kl_coef`)."""
    return f"--{key.replace('_', '-')}"


def name_of(word: str) -> str:
    """The option that a word of a command line names, in dashes and without its value."""
    return word.partition("=")[0].replace("_", "-")


LEFT = 36
"""Width of the column of option names in help texts, in characters."""


def width() -> int:
    """Width of help texts in characters: that of the terminal, at least 40 and at most 120; 80 where there is none."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 120)


def section(title: str, settings: Sequence[Setting], *, whole: bool = False) -> Iterator[str]:
    """Yields a title, and each setting with the first sentence about it; with `whole`, all that is said of it."""
    if settings:
        yield ""
        yield f"{title}:"
    for setting in settings:
        yield from _lines(setting, whole)


def _lines(setting: Setting, whole: bool) -> Iterator[str]:
    name = setting.key if setting.in_file else flag(setting.key)
    left = f"  {name} {_default_text(setting)}".rstrip()
    # on a narrow terminal what is said stands below the name
    start = LEFT if width() >= 2 * LEFT else 6
    text, more = summary(setting), _choices(setting.type)
    if more and len(text) + len(", ".join(more)) + 3 <= width() - start:
        text = f"{text} ({', '.join(more)})"
    rows = textwrap.wrap(describe(setting) if whole else text, width() - start) or [""]
    yield f"{left:<{start}}{rows.pop(0)}" if len(left) < start else left
    yield from (f"{'':<{start}}{row}" for row in rows)


def summary(setting: Setting) -> str:
    """The first sentence about a setting, without its full stop."""
    text = docs_of(setting.group).get(setting.name, "")
    # "..." ends no sentence
    return re.split(r"(?<=[^.])\.(?:\s|$)", text, maxsplit=1)[0]


def describe(setting: Setting) -> str:
    """Returns the explanation of a setting, with the values that it accepts."""
    text = docs_of(setting.group).get(setting.name, "")
    return f"{text} ({', '.join(choices)})" if (choices := _choices(setting.type)) else text


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(item) for item in get_args(kind)]
    found = [choice for item in get_args(kind) for choice in _choices(item)] if get_origin(kind) is not tuple else []
    return list(dict.fromkeys(found))


def _default_text(setting: Setting) -> str:
    value = setting.default
    if value is MISSING:
        return "(required)"
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "(on)" if value else ""
    if isinstance(value, tuple):
        return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def train_argv(world: EmbeddedWorld, split: str | None = None, max_turns: int | None = None) -> list[str]:
    """Options of `turngym train` that select the environment and split of `world`, and its turns if not others."""
    given = world.settings(split=split)
    argv = ["--env", given["env"], "--split", given["split"], "--env-kwargs", json.dumps(given["env_kwargs"])]
    return [*argv, "--max-turns", str(max_turns or given["max_turns"])]


def distill_argv(world: EmbeddedWorld, split: str | None = None) -> list[str]:
    """Options of `turngym train` that distill the student of `world` from its teacher."""
    recipe = world.distill
    argv = [*train_argv(world, split, recipe.max_turns), "--episodes", str(recipe.episodes), "--threads", "1"]
    argv += ["--optimizer.lr", str(recipe.lr), "--optimizer.lr-warmup", str(recipe.warmup)]
    argv += ["--optimizer.schedule", "cosine", "--optimizer.weight-decay", "0"]
    argv += ["--eval-every", str(recipe.eval_every), "--eval-samples", "1"]
    for name, value in {"micro_tokens": 2048, **recipe.settings}.items():
        parts = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        for key, v in parts.items():
            # a setting that is switched on is a flag
            argv += [f"--{key.replace('_', '-')}", *([] if v is True else [str(v)])]
    return argv


def sft_argv(world: EmbeddedWorld, recipe: TinyRecipe) -> list[str]:
    """Options of `turngym train sft` that make a tiny model of `world` by supervised fine-tuning."""
    low, high = recipe.noise
    argv = ["--algorithm", "sft", "--expert", world.expert, "--sft.noise", str(low), str(high)]
    argv += ["--sft.mistakes", str(recipe.mistakes), "--steps", str(recipe.steps), "--seed", str(recipe.seed)]
    argv += ["--episodes", str(recipe.episodes), "--optimizer.lr", str(recipe.lr)]
    argv += ["--optimizer.schedule", "cosine", "--optimizer.lr-warmup", str(min(20, recipe.steps // 5))]
    argv += ["--optimizer.betas", "0.9", "0.95", "--checkpoint-every", "50", "--micro-tokens", "2048"]
    argv += ["--sft.weight", recipe.weight, "--threads", "1"]
    if recipe.players:
        argv += ["--sft.players", recipe.players, "--sft.loop-after", str(recipe.loop_after)]
        argv += ["--sft.loop-slips", str(recipe.loop_slips), "--sft.train-on", "both"]
    return [*argv, *train_argv(world)]
