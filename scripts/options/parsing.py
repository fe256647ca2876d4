"""From a command line and a configuration file to settings: flags override the file, old names are warned of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from turngym.envs.common.settings import from_table, read_toml
from turngym.envs.core import TurngymError
from turngym.scripts.options.aliases import current

T = TypeVar("T")
CONFIG = "--config"


def parse(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Options of class `cls` from `argv`, which may name a configuration file with `--config FILE`.

    A setting outside its range is explained, and the exit status is 2. Raises SettingsError for a file that sets what
    does not exist, or to what it cannot be.
    """
    words, files = take_option(current(argv), CONFIG)
    if not files:
        return tyro.cli(cls, args=words, prog=prog, description=_with_config(description))
    path = Path(files[-1])
    default = from_table(cls, read_toml(path), str(path), missing=tyro.MISSING)
    return tyro.cli(cls, args=words, prog=prog, description=_with_config(description), default=default)


def take_option(argv: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """`argv` without every `name VALUE` and `name=VALUE`, and the values. TurngymError where one has no value."""
    rest: list[str] = []
    values: list[str] = []
    words = iter(argv)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise TurngymError(f"{name} needs a value")
            values.append(value)
        elif word.startswith(f"{name}="):
            values.append(word.removeprefix(f"{name}="))
        else:
            rest.append(word)
    return rest, values


def _with_config(description: str) -> str:
    return f"{description} --config FILE reads options from a TOML file; those given here override it."


def flag(key: str) -> str:
    """The option that sets `key` (`grpo_kd.kl_coef`)."""
    return f"--{key.replace('_', '-')}"


def name_of(word: str) -> str:
    """The option that a word of a command line names, in dashes and without its value."""
    return word.partition("=")[0].replace("_", "-")


def is_option(word: Any) -> bool:
    """Whether a word of a command line names an option, rather than being a value (as negative numbers are)."""
    return len(word) > 2 and word.startswith("--")
