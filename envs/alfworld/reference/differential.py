"""The differential test: the native engine and TextWorld play the same games and must agree in every byte."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import Game
from turngym.envs.alfworld.reference.probes import SCRIPTS, suits, wander
from turngym.envs.alfworld.textworld import Reference

FIELDS = ("observation", "admissible", "score", "won", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One game to compare: which script plays it, for how many steps, with which numbering."""

    task_id: str
    script: str
    seed: int
    shuffle: int | None
    steps: int

    @property
    def key(self) -> str:
        return f"{self.task_id} {self.script} {self.seed} {self.shuffle} {self.steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of one play. `native_s` and `reference_s` are CPU seconds: load and reset, then all steps."""

    play: Play
    category: str
    steps: int
    won: bool
    verbs: Mapping[str, int]
    """Steps by what the command meant; `nothing` where it was not possible."""
    mismatches: tuple[str, ...]
    native_s: tuple[float, float]
    reference_s: tuple[float, float]
    extras: Mapping[str, int] = field(default_factory=dict)
    """Situations met: objects listed beside a receptacle, objects inside objects."""


def compare(reference: Reference, data: Mapping[str, Any], play: Play, category: str = "") -> Comparison:
    """Play one game in both engines; every difference becomes a line in `mismatches`."""
    clock = time.process_time
    start = clock()
    engine = NativeEngine(Game(data, source=play.task_id, shuffle=play.shuffle))
    first = engine.reset()
    native = clock() - start
    start = clock()
    reference.load(data, shuffle=play.shuffle)
    expected = reference.reset()
    loads = native, clock() - start
    found = _differences("reset", (first, engine.admissible(), 0, engine.won, False), _seen(reference, expected))
    rng = np.random.default_rng(play.seed)
    verbs: Counter[str] = Counter()
    extras: Counter[str] = Counter()
    times = [0.0, 0.0]
    for number, command in enumerate(_commands(engine, rng, play)):
        meaning = engine.find(command.strip())
        verbs["nothing" if meaning is None else meaning[0]] += 1
        start = clock()
        observation, won = engine.step(command)
        possible = engine.admissible()
        middle = clock()
        expected, _ = reference.step(command)
        times[0] += middle - start
        times[1] += clock() - middle
        seen = (observation, possible, int(won), won, won)
        found += _differences(f"step {number} {command!r}", seen, _seen(reference, expected))
        extras["beside"] += observation.startswith("You are facing") and not observation.endswith("see nothing.")
        extras["inside"] += observation.startswith("This is a normal") and not observation.endswith("see nothing.")
        if won:
            break
    return Comparison(
        play=play,
        category=category or engine.game.category,
        steps=sum(verbs.values()),
        won=engine.won,
        verbs=dict(verbs),
        mismatches=tuple(found),
        native_s=(loads[0], times[0]),
        reference_s=(loads[1], times[1]),
        extras=dict(extras),
    )


def plan(
    ids: Mapping[str, Sequence[str]],
    games: int,
    steps: int,
    load: Callable[[str], Mapping[str, Any]],
    seed: int = 0,
) -> list[Play]:
    """`games` plays of different tasks that cycle through categories and scripts; every third has shuffled numbers.

    `ids`: task ids by category. A category whose tasks are used up is passed over; only when all are is a task drawn
    again. A script gets the next task that has what it is about, if one of the next 40 has.
    """
    rng = np.random.default_rng(seed)
    rows, scripts = [row for row in sorted(ids) if ids[row]], list(SCRIPTS)
    left: dict[str, list[str]] = {}
    plays = []
    for number in range(games):
        if not any(left.values()):
            left = {row: [ids[row][int(i)] for i in rng.permutation(len(ids[row]))] for row in rows}
        row = next(row for row in (rows[(number + i) % len(rows)] for i in range(len(rows))) if left[row])
        # one further every round: 6 categories and 8 scripts would otherwise meet in half of the pairs only
        script = scripts[(number + number // len(rows)) % len(scripts)]
        queue = left[row]
        fits = (i for i, task_id in enumerate(queue[:40]) if suits(script, Game(load(task_id), source=task_id)))
        task_id = queue.pop(next(fits, 0))
        shuffle = number if number % 3 == 2 else None
        plays.append(Play(task_id=task_id, script=script, seed=number, shuffle=shuffle, steps=steps))
    return plays


def run(
    plays: Sequence[Play],
    load: Callable[[str], Mapping[str, Any]],
    log: Path | None = None,
    progress: Callable[[Comparison, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Compare all plays; with `log`, one JSON line each, and plays that are there already are not repeated."""
    done = _read(log)
    reference: Reference | None = None
    rows = []
    for number, play in enumerate(plays):
        row = done.get(play.key)
        if row is None:
            reference = reference or Reference()
            result = compare(reference, load(play.task_id), play)
            row = {"key": play.key, **asdict(result)}
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if progress is not None:
                progress(result, number)
        rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and CPU-time ratios over `run`'s rows."""
    total: Counter[str] = Counter()
    verbs: Counter[str] = Counter()
    for row in rows:
        verbs.update(row["verbs"])
        total["steps"] += row["steps"]
        total["mismatches"] += len(row["mismatches"])
        total["won"] += row["won"]
        total["shuffled"] += row["play"]["shuffle"] is not None
        total.update(row["extras"])
    native, reference = (np.array([row[key] for row in rows]).sum(axis=0) for key in ("native_s", "reference_s"))
    return {
        "games": len(rows),
        "by category": dict(sorted(Counter(row["category"] for row in rows).items())),
        "by script": dict(sorted(Counter(row["play"]["script"] for row in rows).items())),
        **total,
        "by verb": dict(sorted(verbs.items())),
        "reference / native, reset": float(reference[0] / native[0]),
        "reference / native, step": float(reference[1] / native[1]),
        "first mismatches": [line for row in rows for line in row["mismatches"]][:5],
    }


def _commands(engine: NativeEngine, rng: np.random.Generator, play: Play) -> Iterator[str]:
    script = SCRIPTS[play.script](engine, rng)
    if play.script == "walkthrough":
        return script
    return islice(chain(script, wander(engine, rng)), play.steps)


def _seen(reference: Reference, observation: str) -> tuple[Any, ...]:
    return observation, reference.admissible(), reference.score, reference.won, reference.done


def _differences(where: str, native: tuple[Any, ...], reference: tuple[Any, ...]) -> list[str]:
    pairs = zip(FIELDS, native, reference, strict=True)
    return [f"{where}: {name} is {a!r}, TextWorld has {b!r}" for name, a, b in pairs if a != b]


def _read(log: Path | None) -> dict[str, dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    rows: dict[str, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line that was being written when the run was stopped is played again
        rows[row["key"]] = row
    return rows
