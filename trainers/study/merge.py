"""Cells of several files as those of one study: which may stand in one table, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
    first_of: dict[tuple[object, ...], tuple[str, Record]] = {}
    cells: dict[tuple[str, str, int], tuple[str, Record]] = {}
    for file, study in files.items():
        if study.baseline != first.baseline:
            raise TurngymError(f"{file} compares with {study.baseline}, {next(iter(files))} with {first.baseline}")
        for record in study.records:
            here, world = (file, record), record.world
            # what must be equal, and in which cells
            same: dict[Callable[[Record], dict[str, Any]], tuple[object, ...]] = {
                shared_settings: (world, record.trained),
                game_settings: (world,),
                # agents that follow a script have none
                _temperature: (world, record.game.get("temperature") is None),
                row_settings: (world, record.method),
            }
            for settings, group in same.items():
                _compare(first_of.setdefault((settings, *group), here), here, settings)
            earlier_file, earlier = cells.setdefault((world, record.method, record.seed), here)
            if earlier != record and not alike(asdict(earlier), asdict(record)):
                raise TurngymError(
                    f"{earlier_file} and {file} both have {name_of(record)}, with other numbers: leave one out"
                )
    commands = {json.dumps(made, sort_keys=True): made for study in files.values() for made in study.made_by}
    records = [record for _, record in cells.values()]
    # in one order, whatever that of the files: by group, then by name
    methods = sorted({(record.group, record.method) for record in records})
    order = {method: number for number, (_, method) in enumerate(methods)}
    return Records(
        title=first.title,
        about=first.about,
        baseline=first.baseline,
        against={name: whom for study in files.values() for name, whom in study.against.items()},
        tables=tuple(dict.fromkeys(name for study in files.values() for name in study.tables)),
        records=sorted(records, key=lambda record: (record.world, order[record.method], record.seed)),
        made_by=[
            commands[text] for text in sorted(commands, key=lambda text: (str(commands[text].get("started")), text))
        ],
    )


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


def _temperature(record: Record) -> dict[str, Any]:
    return {"temperature": record.game.get("temperature")}


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
