"""docs/papers.md says which function holds which equation: what it names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from turngym.scripts import train
from turngym.trainers.registry import BUILT_IN, find_algorithm, owners_of

TABLE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith("| ---")
][1:]
FUNCTIONS = sorted({name for row in ROWS for name in re.findall(r"`([a-z_.A-Za-z0-9]+)`", row[2])})
OPTIONS = sorted({words for row in ROWS for cell in row[3:] for words in re.findall(r"`(--[^`]+)`", cell)})
GIVEN = """
--sft.weight turn_mean; --distill.tail raw; --distill.importance 0.5 2; --lm-loss.files a.txt;
--turnopd.weight turn; --luffy.off-clamp None 0.5; --prm-rl.weight trajectory; --grpo.scale none;
--luffy.advantage grpo; --luffy.shape pow; --luffy.on-shape pow; --luffy.prefix.strategy linear;
--luffy.prefix.low 0.5; --judge rules; --grpo.kl k1; --opd-hints.hint-position last_message;
--grpo-kd.reward sum; --grpo-kd.kl k1; --ppo-kd.critic.kind head; --grpo.n 4; --optimizer.passes 2;
--optimizer.ppo-epochs 2; --optimizer.minibatches 2;
--distill.top-k 5; --judge-votes 5; --luffy.prefix.count 2; --tcod.schedule.eta 4;
--judge-repeats 2
"""
VALUES = dict(words.split(maxsplit=1) for words in GIVEN.split(";"))
"""What an option is given where the table names none and it takes no single fraction."""
USES = {name: find_algorithm(name).uses for name in BUILT_IN}
PAIRS = ("clip",)
FLAGS = ("no-", "share", "mask-neutral", "student-entropy")


def command(option: str) -> list[str]:
    name, *given = option.split()
    last = name.removeprefix("--").split(".")[-1]
    if not given and not last.startswith(FLAGS):
        pair = last in PAIRS and "critic" not in name
        given = VALUES.get(name, "0.1 0.3" if pair else "0.5").split()
    return [name, *given]


def test_the_table_is_whole() -> None:
    assert len(ROWS) > 25
    assert all(len(row) == 5 for row in ROWS)
    assert len(FUNCTIONS) > 40
    named = {words.removeprefix("--algorithm ") for words in OPTIONS if words.startswith("--algorithm ")}
    assert named == set(BUILT_IN)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_exist(name: str) -> None:
    module, _, function = name.rpartition(".")
    found: Any = importlib.import_module(f"turngym.{module}")
    assert callable(getattr(found, function))


def test_options_exist() -> None:
    by_name = {option.split()[0]: command(option) for option in OPTIONS if not option.startswith("--algorithm ")}
    shared: list[str] = []
    own: dict[str, list[str]] = {}
    for name, words in by_name.items():
        table = name.removeprefix("--").partition(".")[0].replace("-", "_") if "." in name else ""
        users = owners_of(table)
        users = users or [
            other for other in BUILT_IN if {"distill": "distill", "lm_loss": "text"}.get(table) in USES[other]
        ]
        if users:
            own.setdefault(users[-1], []).extend(words)
        else:
            shared += words
    assert len(own) > 5
    for algorithm, words in own.items():  # an option that does not exist is an error
        train.parse([algorithm, "--student", "s", "--out", "o", *words, *shared])
