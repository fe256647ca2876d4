"""What docs/algorithms.md says to type is what `turngym train` takes; names are checked in project/test_sources.py."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

from turngym.scripts import train

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
OPTIONS = sorted(set(re.findall(r"`(--[^`]+)`", " ".join(PAGE.split()))))
GIVEN = """
--lm-loss.files a.txt; --judge rules; --grpo.n 4; --luffy.n 4; --opd.weight trajectory; --turnopd.depth.warmup 2;
--turnopd.depth.probe-interval 4; --tcod.schedule.k-max 20; --judge-votes 5; --luffy.prefix.count 2;
--luffy.prefix.high 1.0; --prm-rl.weight trajectory; --optimizer.ppo-epochs 2
"""
VALUES = dict(words.split(maxsplit=1) for words in GIVEN.split(";"))
"""What an option is given where the page names no value and it takes no single fraction."""
PAIRS = ("clip",)
FLAGS = ("no-", "share", "mask-neutral", "student-entropy")


def command(option: str) -> list[str]:
    name, *given = option.split()
    last = name.removeprefix("--").split(".")[-1]
    if not given and not last.startswith(FLAGS):
        pair = last in PAIRS and "critic" not in name
        given = VALUES.get(name, "0.1 0.3" if pair else "0.5").split()
    return [name, *given]


def test_the_command_takes_every_option() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for option in OPTIONS:
        by_name[option.split()[0]].append(option)
    parsed = []
    for together in zip_longest(*by_name.values()):  # an option that stands twice on the page is given in two commands
        words = [word for option in together if option for word in command(option)]
        parsed.append(train.parse(["--student", "s", "--out", "o", *words]))  # an unknown option ends the process
    assert len(OPTIONS) > 80
    assert {options.algorithm for options in parsed} == {
        option.split()[1] for option in OPTIONS if option.startswith("--algorithm ")
    }
    assert parsed[0].prm_rl.exclude == "openclaw"
    assert parsed[0].luffy.prefix.share
