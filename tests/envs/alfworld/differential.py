"""The differential test: the native engine and TextWorld play the same games and must agree in every byte.

Scripts say what is played: walkthroughs, random and broken commands, and short scripts for the rare rules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np

from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import Game
from turngym.envs.alfworld.textworld import Reference

# --- Scripts

_NAME = re.compile(r"[a-z]+ \d+")
T = TypeVar("T")
Script = Callable[[NativeEngine, np.random.Generator], Iterator[str]]


def renamed(commands: tuple[str, ...], old: Game, new: Game) -> tuple[str, ...]:
    """Commands in the numbers of `old` as commands in the numbers of `new` (another shuffle of the same game)."""
    pairs = zip(old.object_names + old.receptacle_names, new.object_names + new.receptacle_names, strict=True)
    names = dict(pairs)
    return tuple(_NAME.sub(lambda match: names.get(match[0], match[0]), command) for command in commands)


def walkthrough(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """The game's own solution."""
    game = engine.game
    yield from renamed(game.walkthrough, Game.renumbered(game, None), game)


def noisy(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """The solution with random steps and broken commands in between."""
    for command in walkthrough(engine, rng):
        while rng.random() < 0.35:
            yield anything(engine, rng)
        yield command


def wander(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Random commands, possible or not, for ever."""
    while True:
        yield anything(engine, rng)


def slicing(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Take a knife to something that can be sliced, slice it twice, take and examine it."""
    problem, game = engine.problem, engine.game
    knives = [o for o, kind in enumerate(problem.object_types) if kind in ("knifetype", "butterknifetype")]
    for target in _shuffled(rng, sorted(problem.unary["sliceable"])):
        knife = next((k for k in _shuffled(rng, knives) if _where(engine, k) >= 0), -1)
        place = _where(engine, target)
        if knife < 0 or place < 0:
            continue
        yield from _fetch(engine, knife)
        yield f"go to {game.receptacle_names[place]}"
        command = f"slice {game.object_names[target]} with {game.object_names[knife]}"
        yield from (command, command, "look")
        yield from _put_here(engine, rng)
        yield from _fetch(engine, target)
        yield f"examine {game.object_names[target]}"
        yield "look"
        return


def nested(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Examine objects that hold other objects, first where they stand, then in hand."""
    problem = engine.problem
    full = [o for o, inner in enumerate(problem.inside) if inner and _where(engine, o) >= 0]
    for target in _shuffled(rng, full)[:2] or _shuffled(rng, sorted(problem.unary["isreceptacleobject"]))[:1]:
        name = engine.game.object_names[target]
        if _where(engine, target) >= 0:
            yield f"examine {name}"
            yield from _fetch(engine, target)
            yield f"examine {name}"
            yield from _put_here(engine, rng)


def neighbors(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Move things between receptacles that share a location, looking around after each move."""
    problem = engine.problem
    spots = [rs for rs in problem.receptacles_at if len(rs) > 1 and any(engine.state.contents[r] for r in rs)]
    if not spots:
        return
    spot = spots[int(rng.integers(len(spots)))]
    yield f"go to {engine.game.receptacle_names[spot[int(rng.integers(len(spot)))]]}"
    yield f"go to {engine.game.receptacle_names[spot[0]]}"
    for r in spot:
        if r in problem.openable:
            yield f"open {engine.game.receptacle_names[r]}"
    for _ in range(5):
        yield _pick(engine, rng, ("take",)) or "look"
        puts = [c for c in engine.admissible() if (engine.find(c) or ("",))[0] == "put"]
        moves = [c for c in puts if not _was_in(engine, c)] or puts
        yield moves[int(rng.integers(len(moves)))] if moves else "look"
        yield "look"


def treatments(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Clean, heat and cool one object in a random order, examining it after each."""
    problem, names = engine.problem, engine.game.receptacle_names
    stations = {"sinkbasintype": "clean", "microwavetype": "heat", "fridgetype": "cool"}
    able = [o for o in sorted(problem.unary["cleanable"] | problem.unary["coolable"]) if _where(engine, o) >= 0]
    for target in _shuffled(rng, able)[:1]:
        yield from _fetch(engine, target)
        for kind in _shuffled(rng, [*stations, *stations])[:4]:
            for r in problem.receptacles_of(kind)[:1]:
                yield f"go to {names[r]}"
                yield f"{stations[kind]} {engine.game.object_names[target]} with {names[r]}"
                yield f"examine {engine.game.object_names[target]}"


def lamps(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    """Use a lamp twice, with something in hand."""
    for lamp in _shuffled(rng, sorted(engine.problem.unary["toggleable"]))[:1]:
        yield _pick(engine, rng, ("go",)) or "look"
        yield _pick(engine, rng, ("take",)) or "inventory"
        yield f"go to {engine.game.receptacle_names[max(_where(engine, lamp), 0)]}"
        command = f"use {engine.game.object_names[lamp]}"
        yield from (command, command, f"examine {engine.game.object_names[lamp]}", "look", "inventory")


SCRIPTS: dict[str, Script] = {
    "walkthrough": walkthrough,
    "slicing": slicing,
    "noisy": noisy,
    "nested": nested,
    "neighbors": neighbors,
    "treatments": treatments,
    "wander": wander,
    "lamps": lamps,
}


def suits(script: str, game: Game) -> bool:
    """Whether a game has what a script is about."""
    problem = game.problem
    if script == "slicing":
        return bool(problem.unary["sliceable"]) and bool({"knifetype", "butterknifetype"} & set(problem.object_types))
    if script == "nested":
        return any(problem.inside)
    if script == "neighbors":
        return any(
            len(receptacles) > 1 and any(problem.contents[r] for r in receptacles)
            for receptacles in problem.receptacles_at
        )
    return script != "lamps" or bool(problem.unary["toggleable"])


def anything(engine: NativeEngine, rng: np.random.Generator) -> str:
    """A random command: mostly possible and not going somewhere, sometimes impossible, sometimes broken text."""
    draw = rng.random()
    if draw < 0.25:
        return _pick(engine, rng, ("go",)) or "look"
    possible = engine.admissible()
    if draw < 0.65:
        return _pick(engine, rng, ("take", "put", "open", "close", "use", "clean", "heat", "cool", "slice")) or "look"
    if draw < 0.75:
        return possible[int(rng.integers(len(possible)))]
    return impossible(engine, rng) if draw < 0.88 else broken(possible[int(rng.integers(len(possible)))], rng)


def impossible(engine: NativeEngine, rng: np.random.Generator) -> str:
    """A well-formed command about random things of this house; mostly not possible here and now."""
    things, places = engine.game.object_names, engine.game.receptacle_names
    o, r = things[int(rng.integers(len(things)))], places[int(rng.integers(len(places)))]
    here = engine.problem.receptacles_at[engine.state.location]
    r = places[here[0]] if here and rng.random() < 0.5 else r
    forms = (
        *(f"go to {r}", f"open {r}", f"close {r}", f"take {o} from {r}", f"move {o} to {r}", f"examine {o}"),
        *(f"examine {r}", f"use {o}", f"heat {o} with {r}", f"clean {o} with {r}", f"cool {o} with {r}"),
        *(f"slice {o} with knife 1", f"put {o} in/on {r}", f"slice {o} with {o}"),
    )
    return forms[int(rng.integers(len(forms)))]


def broken(command: str, rng: np.random.Generator) -> str:
    """A possible command, damaged; some damages are forgiven (white space around it)."""
    forms = (
        *(f"  {command}\t\n", command.upper(), command.capitalize(), command.replace(" ", "  ", 1), command + "."),
        *(command[:-1], command + " 1", f"please {command}", f"{command}\n{command}", "", " ", "\n", "help me"),
        *(
            command.replace(" ", "\u00a0"),
            f"\u3000{command}\u00a0",
            "\x00",
            "go to",
            "take from",
            "\U0001f600",
            command * 40,
        ),
    )
    return forms[int(rng.integers(len(forms)))]


def _was_in(engine: NativeEngine, command: str) -> bool:
    """Whether a put command would undo a take."""
    found = engine.find(command)
    return found is not None and found[1] in engine.state.taken[found[2]]


def _where(engine: NativeEngine, thing: int) -> int:
    """A receptacle that holds an object and stands somewhere; -1 if there is none."""
    places = engine.problem.receptacle_location
    return next((r for r, things in enumerate(engine.state.contents) if thing in things and places[r] >= 0), -1)


def _fetch(engine: NativeEngine, thing: int) -> Iterator[str]:
    place = _where(engine, thing)
    name = engine.game.receptacle_names[place]
    yield f"go to {name}"
    if place in engine.problem.openable:
        yield f"open {name}"
    yield f"take {engine.game.object_names[thing]} from {name}"


def _put_here(engine: NativeEngine, rng: np.random.Generator) -> Iterator[str]:
    if engine.state.held >= 0:
        yield _pick(engine, rng, ("put",)) or "inventory"


def _pick(engine: NativeEngine, rng: np.random.Generator, verbs: tuple[str, ...]) -> str | None:
    """A random possible command with one of the verbs; each verb that is possible is equally likely."""
    groups: dict[str, list[str]] = {}
    for command in engine.admissible():
        found = engine.find(command)
        if found is not None and found[0] in verbs:
            groups.setdefault(found[0], []).append(command)
    if not groups:
        return None
    group = groups[sorted(groups)[int(rng.integers(len(groups)))]]
    return group[int(rng.integers(len(group)))]


def _shuffled(rng: np.random.Generator, items: list[T]) -> list[T]:
    return [items[int(index)] for index in rng.permutation(len(items))]


# --- Comparing

FIELDS = ("observation", "admissible", "score", "won", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One game to compare: which script plays it, for how many steps, with which numbering."""

    task_id: str
    script: str
    seed: int
    shuffle: int | None
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of one play."""

    play: Play
    category: str
    won: bool
    verbs: Mapping[str, int]
    """Steps by what the command meant; `nothing` where it was not possible."""
    mismatches: tuple[str, ...]


def compare(reference: Reference, data: Mapping[str, Any], play: Play) -> Comparison:
    """Play one game in both engines; every difference becomes a line in `mismatches`."""

    def differences(where: str, native: tuple[Any, ...], text: str) -> list[str]:
        state = reference._state  # which has no score before the first step
        score, done = int(state.get("score") or 0), bool(state.get("done"))
        seen = (text, reference.admissible(), score, reference.won, done)
        pairs = zip(FIELDS, native, seen, strict=True)
        return [f"{where}: {name} is {a!r}, TextWorld has {b!r}" for name, a, b in pairs if a != b]

    engine = NativeEngine(Game(data, source=play.task_id, shuffle=play.shuffle))
    first = engine.reset()
    reference.load(data, shuffle=play.shuffle)
    found = differences("reset", (first, engine.admissible(), 0, engine.won, False), reference.reset())
    rng = np.random.default_rng(play.seed)
    script = SCRIPTS[play.script](engine, rng)
    commands = script if play.script == "walkthrough" else islice(chain(script, wander(engine, rng)), play.steps)
    verbs: Counter[str] = Counter()
    for number, command in enumerate(commands):
        meaning = engine.find(command.strip())
        verbs["nothing" if meaning is None else meaning[0]] += 1
        observation, won = engine.step(command)
        seen = (observation, engine.admissible(), int(won), won, won)
        found += differences(f"step {number} {command!r}", seen, reference.step(command)[0])
        if won:
            break
    return Comparison(play=play, category=engine.game.category, won=engine.won, verbs=verbs, mismatches=tuple(found))


def plan(
    ids: Mapping[str, Sequence[str]], games: int, steps: int, load: Callable[[str], Mapping[str, Any]], seed: int = 0
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
