"""What docs/algorithms.md and docs/contrib_algorithms.md say to type is what `turngym train` takes.

Names are checked in project/test_sources.py.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from turngym.core.errors import SettingsError
from turngym.scripts import train
from turngym.trainers.algorithm_spec import BUILT_IN
from turngym.trainers.train_config import has_setting, train_config

pytestmark = pytest.mark.long
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("algorithms.md", "contrib_algorithms.md"))
OPTIONS = sorted(set(re.findall(r"`(--[^`]+)`", " ".join(PAGE.split()))))
LINES = sorted(set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)* = [^`]+)`", PAGE)))
GIVEN = """
--lm-loss.files a.txt; --judge rules; --opd.weight trajectory;
--judge-votes 5; --prm-rl.weight trajectory; --optimizer.ppo-epochs 2
"""
VALUES = dict(words.split(maxsplit=1) for words in GIVEN.split(";"))
"""What an option is given where the page names no value and it takes no single fraction."""
PAIRS = ("clip",)
FLAGS = ("no-", "share", "bootstrap")


def command(option: str) -> list[str]:
    name, *given = option.split()
    last = name.removeprefix("--").split(".")[-1]
    if not given and not last.startswith(FLAGS):
        given = VALUES.get(name, "0.1 0.3" if last in PAIRS else "4" if last == "n" else "0.5").split()
    return [name, *given]


def test_the_command_takes_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of the page, given to an algorithm that has it: an unknown one ends the process."""
    given: dict[str, list[list[str]]] = defaultdict(list)
    for option in OPTIONS:
        name = option.split()[0]
        if name != "--algorithm":
            given[owner(name)].append(command(option))
    for algorithm, options in given.items():
        rounds: list[list[str]] = []
        for words in options:  # an option that stands twice on the page is given in two commands
            free = next((row for row in rounds if words[0] not in row), None)
            if free is None:
                rounds.append(list(words))
            else:
                free += words
        for words in rounds:
            known(
                lambda words=words, algorithm=algorithm: (
                    train.resolved([algorithm, "--student", "s", "--out", "o", *words]).spec
                )
            )
    assert len(OPTIONS) > 60
    assert len(given) > 8


def test_a_file_takes_every_setting_that_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in LINES:
        key = line.partition(" = ")[0]
        algorithm = owner(key)
        table = tomllib.loads(f"student = 's'\nout = 'o'\n{line}\n")
        known(partial(train_config, algorithm, table, "the page"))
    assert len(LINES) > 20


def known(read: Callable[[], Any]) -> None:
    """Settings that exist; here they stand without what they need beside them."""
    try:
        read()
        said = "nothing reads it"
    except SettingsError as error:
        said = str(error)
    assert re.search("nothing reads it|is a setting of|must be given|valid: one of the two", said), said


def owner(name: str) -> str:
    """A built-in algorithm that has an option, or a setting of a file."""
    key = name.removeprefix("--").replace("-", "_")
    keys = (key, key.replace(".no_", "."))
    return [algorithm for algorithm in BUILT_IN if any(has_setting(algorithm, one) for one in keys)][-1]
