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
            record_in_file, row = (file, record), (record.world, record.method)
            _compare(worlds.setdefault((record.world, record.trained), record_in_file), record_in_file, shared_settings)
            _compare(games.setdefault(record.world, record_in_file), record_in_file, game_settings)
            # agents that follow a script have none
            if record.game.get("temperature") is not None:
                _compare(
                    heats.setdefault(record.world, record_in_file),
                    record_in_file,
                    lambda of: {"temperature": of.game["temperature"]},
                )
            _compare(rows.setdefault(row, record_in_file), record_in_file, row_settings)
            earlier_file, earlier = cells.setdefault((*row, record.seed), record_in_file)
            if earlier != record and not alike(asdict(earlier), asdict(record)):
                raise TurngymError(
                    f"{earlier_file} and {file} both have {name_of(record)}, with other numbers: leave one out"
                )
    runs = {
        json.dumps(record_in_file, sort_keys=True): record_in_file
        for study in files.values()
        for record_in_file in study.made_by
    }
    order = {name: earlier_file for earlier_file, name in enumerate(_names(files.values()))}
    return Records(
        title=first.title,
        about=first.about,
        baseline=first.baseline,
        against={name: whom for study in files.values() for name, whom in study.against.items()},
        tables=tuple(dict.fromkeys(name for study in files.values() for name in study.tables)),
        records=sorted(
            (record_in_file for _, record_in_file in cells.values()),
            key=lambda record_in_file: (record_in_file.world, order[record_in_file.method], record_in_file.seed),
        ),
        made_by=[runs[text] for text in sorted(runs, key=lambda text: (str(runs[text].get("started")), text))],
    )


def _names(studies: Iterable[Records]) -> list[str]:
    """Methods of all studies in one order, whatever that of the files: by group, then by name."""
    names = {(record.group, record.method) for study in studies for record in study.records}
    return [method for _, method in sorted(names)]


def shared_settings(record: Record) -> dict[str, Any]:
    """The settings that all trainings, and all agents, of a world share: what they learn from, and when they are
    evaluated."""
    kinds = ("game", "amount") if record.trained else ("game",)
    every = flat(record.settings).items()
    # at which temperature agents play is compared by itself
    shared = {path: value for path, value in every if meaning(path) in kinds and path != "agent.temperature"}
    shared["evaluations after steps"] = [point.step for point in record.evaluations]
    return shared | {
        f"content of {path}": record.contents.get(path) for path in content_hashes.CODE if path != "algorithm"
    }


def game_settings(record: Record) -> dict[str, Any]:
    """The settings that all cells of a world share, agents included: the game, its tasks, and how often they are
    played."""
    game = {name: value for name, value in record.game.items() if name != "temperature"}
    return {**game, "samples": record.samples, "tasks played": sorted(record.categories)}


def row_settings(record: Record) -> dict[str, Any]:
    """The settings that all seeds of a method share: all that change a number."""
    values = flat(with_paths(record.settings, last_names))
    counted = {path: value for path, value in values.items() if counts(path) and meaning(path) != "seed"}
    return counted | {f"content of {name}": content for name, content in record.contents.items()}


def _compare(
    first: tuple[str, Record], other: tuple[str, Record], settings: Callable[[Record], dict[str, Any]]
) -> None:
    """Raises TurngymError for the first setting in which two cells differ."""
    for name, values in differing(settings(first[1]), settings(other[1])).items():
        shown = [
            f"{name_of(record)} of {file} has {name} {brief(value, 60)}"
            for (file, record), value in zip((first, other), values, strict=True)
        ]
        raise TurngymError(f"not cells of one study: {shown[0]}, {shown[1]}")
