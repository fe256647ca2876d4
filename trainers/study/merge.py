"""Cells of several files as those of one study: which may stand in one table, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from turngym.agents.evaluation.statistics import alike
from turngym.agents.meaning import meaning
from turngym.core.errors import TurngymError
from turngym.core.nested import differing, flat
from turngym.core.redaction import brief
from turngym.trainers import content_hashes
from turngym.trainers.study.portable import counts, last_names, with_paths
from turngym.trainers.study.records import Record, Records, name_of


def merge_records(files: Mapping[str, Records]) -> Records:
    """All cells of `files` (name -> content), whose cells were run on different machines or days.

    A cell that two files have alike is taken once. Raises TurngymError where a cell has other numbers in two files, and
    where cells that would stand in one table were run with different settings. One file is left as it is.
    """
    first = next(iter(files.values()))
    if len(files) == 1:
        return first
    worlds: dict[tuple[str, bool], tuple[str, Record]] = {}
    games: dict[str, tuple[str, Record]] = {}
    heats: dict[str, tuple[str, Record]] = {}
    rows: dict[tuple[str, str], tuple[str, Record]] = {}
    cells: dict[tuple[str, str, int], tuple[str, Record]] = {}
    for file, study in files.items():
        if study.baseline != first.baseline:
            raise TurngymError(f"{file} compares with {study.baseline}, {next(iter(files))} with {first.baseline}")
        for record in study.records:
            one, row = (file, record), (record.world, record.method)
            _compare(worlds.setdefault((record.world, record.trained), one), one, shared_settings)
            _compare(games.setdefault(record.world, one), one, game_settings)
            # agents that follow a script have none
            if record.game.get("temperature") is not None:
                _compare(heats.setdefault(record.world, one), one, lambda of: {"temperature": of.game["temperature"]})
            _compare(rows.setdefault(row, one), one, row_settings)
            place, other = cells.setdefault((*row, record.seed), one)
            if other != record and not alike(asdict(other), asdict(record)):
                raise TurngymError(f"{place} and {file} both have {name_of(record)}, with other numbers: leave one out")
    made = {json.dumps(one, sort_keys=True): one for study in files.values() for one in study.made_by}
    order = {name: place for place, name in enumerate(_names(files.values()))}
    return Records(
        title=first.title,
        about=first.about,
        baseline=first.baseline,
        against={name: whom for study in files.values() for name, whom in study.against.items()},
        tables=tuple(dict.fromkeys(name for study in files.values() for name in study.tables)),
        records=sorted((one for _, one in cells.values()), key=lambda one: (one.world, order[one.method], one.seed)),
        made_by=[made[text] for text in sorted(made, key=lambda text: (str(made[text].get("started")), text))],
    )


def _names(studies: Iterable[Records]) -> list[str]:
    """Methods of all studies in one order, whatever that of the files: by group, then by name."""
    found = {(record.group, record.method) for study in studies for record in study.records}
    return [method for _, method in sorted(found)]


def shared_settings(record: Record) -> dict[str, Any]:
    """What all trainings of a world share, and all agents of it: what they learn from, and when they are evaluated."""
    kinds = ("game", "amount") if record.trained else ("game",)
    every = flat(record.settings).items()
    # at which temperature agents play is compared by itself
    found = {path: value for path, value in every if meaning(path) in kinds and path != "agent.temperature"}
    found["evaluations after steps"] = [point.step for point in record.evaluations]
    return found | {
        f"content of {path}": record.contents.get(path) for path in content_hashes.CODE if path != "algorithm"
    }


def game_settings(record: Record) -> dict[str, Any]:
    """What all cells of a world share, agents included: what was played, how often, on which tasks."""
    game = {name: value for name, value in record.game.items() if name != "temperature"}
    return {**game, "samples": record.samples, "tasks played": sorted(record.categories)}


def row_settings(record: Record) -> dict[str, Any]:
    """What all seeds of a method share: every setting that changes a number."""
    found = flat(with_paths(record.settings, last_names))
    kept = {path: value for path, value in found.items() if counts(path) and meaning(path) != "seed"}
    return kept | {f"content of {name}": content for name, content in record.contents.items()}


def _compare(
    first: tuple[str, Record], other: tuple[str, Record], settings: Callable[[Record], dict[str, Any]]
) -> None:
    """Raises TurngymError for the first setting in which two cells differ."""
    for name, values in differing(settings(first[1]), settings(other[1])).items():
        said = [
            f"{name_of(one)} of {file} has {name} {brief(value, 60)}"
            for (file, one), value in zip((first, other), values, strict=True)
        ]
        raise TurngymError(f"not cells of one study: {said[0]}, {said[1]}")
