"""Data files of one study as one: cells that were run on different machines, or days, side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.worlds import WORLDS
from turngym.envs.core.errors import TurngymError
from turngym.scripts.study.methods import GROUPS, methods
from turngym.scripts.study.records import Record

OWN = ("--seed", "--out")
"""Options in which the cells of one row differ."""
MODELS = ("--student", "--teacher")
"""Options with folders, which lie elsewhere on another machine: the last two names of a path count."""
Found = tuple[str, Record]
"""A record, and the file that it is from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What a data file holds."""

    records: Sequence[Record]
    made_by: Sequence[Mapping[str, Any]]
    """Of every command that wrote some of the records: command line, versions, platform, when."""


def merge_studies(files: Mapping[str, Study]) -> Study:
    """All cells of `files` (name -> content), in the order in which a study runs them, whatever that of the files.

    A cell that two files have alike is taken once. Raises TurngymError where a cell has different numbers in two files,
    and where cells that would stand in one table were run with different settings. One file is left as it is.
    """
    if len(files) == 1:
        return next(iter(files.values()))
    worlds: dict[str, Found] = {}
    rows: dict[tuple[str, str], Found] = {}
    cells: dict[tuple[str, str, int], Found] = {}
    for file, study in files.items():
        for record in study.records:
            one, row = (file, record), (record.world, record.method)
            _compare(worlds.setdefault(record.world, one), one, shared_settings)
            _compare(rows.setdefault(row, one), one, own_settings)
            first, other = cells.setdefault((*row, record.seed), one)
            if other != record:
                raise TurngymError(f"{first} and {file} both have {_name(record)}, with other numbers: leave one out")
    made = {json.dumps(one, sort_keys=True): one for study in files.values() for one in study.made_by}
    return Study(
        records=sorted((record for _, record in cells.values()), key=_place),
        made_by=[made[text] for text in sorted(made, key=lambda text: (str(made[text].get("started")), text))],
    )


def shared_settings(record: Record) -> dict[str, str]:
    """What all cells of a world have in common: options, when they were evaluated and on what."""
    settings = {name: value for name, value in _options(record)[1].items() if name not in OWN}
    settings |= {name: "/".join(settings[name].split("/")[-2:]) for name in MODELS if name in settings}
    settings["evaluations after steps"] = " ".join(str(point.step) for point in record.evaluations)
    settings["samples"] = str(record.samples)
    settings["tasks"] = " ".join(sorted(record.categories))
    return settings


def own_settings(record: Record) -> dict[str, str]:
    """What makes a row of the table what it is."""
    return {"method's options": " ".join(_options(record)[0]), "group": record.group}


def _options(record: Record) -> tuple[list[str], dict[str, str]]:
    """The words of `turngym train` that are the method's, and the options of all, which begin with the models."""
    words = shlex.split(record.command)[2:]
    start = words.index("--student") if "--student" in words else len(words)
    found, name = dict[str, str](), ""
    for word in words[start:]:
        if word.startswith("--"):
            name, found[word] = word, ""
        else:
            found[name] = f"{found[name]} {word}".strip()
    return words[:start], found


def _compare(first: Found, other: Found, settings: Callable[[Record], dict[str, str]]) -> None:
    """Raise TurngymError for the first setting in which two cells differ."""
    left, right = settings(first[1]), settings(other[1])
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            said = [_said(file, record, name, of.get(name)) for (file, record), of in ((first, left), (other, right))]
            raise TurngymError(f"not cells of one study: {said[0]}, {said[1]}")


def _said(file: str, record: Record, name: str, value: str | None) -> str:
    shown = "nothing" if value is None else value if len(value) <= 60 else f"{value[:60]}..."
    return f"{_name(record)} of {file} has {name} {shown}"


def _name(record: Record) -> str:
    return f"{record.world}/{record.method}/seed{record.seed}"


def _place(record: Record) -> tuple[int | str, ...]:
    """Seed by seed, group by group; the rows of a group as they are listed, fixed depths by depth."""
    turns = record.method.removeprefix("fixed-")
    row = (_index(GROUPS, record.group), _index([*methods(1)], record.method), int(turns) if turns.isdigit() else 0)
    return (record.seed, *row, _index([*WORLDS], record.world), record.world, record.method)


def _index(names: Sequence[str], name: str) -> int:
    """Where it stands; behind all where it does not."""
    return names.index(name) if name in names else len(names)
