"""Game: one problem with its names and words, ready to play; shared, never changed by playing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from turngym.envs.alfworld.errors import GameError, GameUnsupported, UnsupportedFacts
from turngym.envs.alfworld.native.goal import category
from turngym.envs.alfworld.native.grammar import split_task
from turngym.envs.alfworld.native.names import entity_names, listing, shuffled
from turngym.envs.alfworld.native.problem import Problem, parse_problem
from turngym.envs.alfworld.native.rules import Wording, canonical_rules, read_wording
from turngym.envs.core import content_hash
from turngym.envs.suggest import did_you_mean

KEYS = ("pddl_domain", "grammar", "pddl_problem")
"""What a game file must have; `walkthrough` and `solvable` are optional."""


class Game:
    """Everything about a game that playing does not change. Attributes are read-only by convention.

    `object_names[i]` and `receptacle_names[i]` belong to index i of `problem.objects` and `problem.receptacles`.
    `shuffle` (a seed) numbers the entities as alfworld's domain randomization does after `random.seed(shuffle)`.
    """

    def __init__(self, data: Mapping[str, Any], *, source: str = "game", shuffle: int | None = None) -> None:
        self.data = data
        self.source = source
        self.shuffle = shuffle
        self.problem, self.wording = _parse(data, source)
        self._name()

    @classmethod
    def renumbered(cls, game: Game, shuffle: int | None) -> Game:
        """The same game with other numbers; parses nothing."""
        other = cls.__new__(cls)
        other.data, other.source, other.shuffle = game.data, game.source, shuffle
        other.problem, other.wording = game.problem, game.wording
        other._name()
        return other

    def _name(self) -> None:
        problem = self.problem
        ids = problem.entities
        names = entity_names(ids if self.shuffle is None else shuffled(ids, self.shuffle))
        self.object_names = tuple(names[word] for word in problem.objects)
        self.receptacle_names = tuple(names[word] for word in problem.receptacles)
        self.location_names = tuple(names[word] for word in problem.locations)
        self.object_index = {name: index for index, name in enumerate(self.object_names)}
        self.receptacle_index = {name: index for index, name in enumerate(self.receptacle_names)}
        # filled by go_commands as locations are seen, for all plays of the game
        self.go: dict[int, dict[str, tuple[str, int, int]]] = {}
        places = enumerate(problem.receptacle_location)
        self.ways = sorted((f"go to {self.receptacle_names[r]}", ("go", r, at)) for r, at in places if at >= 0)

    @property
    def task_text(self) -> str:
        """For example `put a hot mug in cabinet.`"""
        return self.wording.task

    @property
    def category(self) -> str:
        """Row of the result tables: `place`, `look`, `clean`, `heat`, `cool` or `two`."""
        return category(self.problem.goal)

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """The commands that the file gives as a solution (in unshuffled numbers); empty if none."""
        return tuple(self.data.get("walkthrough") or ())

    @cached_property
    def sha256(self) -> str:
        """Hash of what fixes the game: problem, rules, task sentence. White space and comments do not count."""
        return game_hash(self.data)

    @cached_property
    def intro(self) -> str:
        """The first observation, unless the agent starts at a receptacle."""
        names = [self.receptacle_names[r] for r, at in enumerate(self.problem.receptacle_location) if at >= 0]
        room = f"You are in the middle of a room. Looking quickly around you, you see {listing(names)}."
        return self.welcome(room)

    def welcome(self, room: str) -> str:
        """The first observation around the room line."""
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {self.task_text}"


def load_game(source: str | Path | Mapping[str, Any], *, shuffle: int | None = None) -> Game:
    """Read a game file (`game.tw-pddl`), or take its content as a mapping.

    Parsed games are kept (the 64 files last used, while their size and time stay the same).
    Raises GameError naming the file and the key, GameUnsupported for rules the native engine does not know.
    """
    if isinstance(source, Mapping):
        return Game(source, shuffle=shuffle)
    path = Path(source)
    try:
        stat = path.stat()
    except OSError as error:
        raise GameError(f"{path}: game file cannot be read: {error.strerror}") from error
    game = _cached(str(path), stat.st_mtime_ns, stat.st_size)
    return game if shuffle is None else Game.renumbered(game, shuffle)


def read_game_file(path: str | Path) -> dict[str, Any]:
    """The checked JSON content of a game file. Raises GameError naming the file and what is wrong."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise GameError(f"{path}: game file cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GameError(f"{path}: damaged game file, not JSON: {error}") from error
    check_keys(data, str(path))
    checked: dict[str, Any] = data
    return checked


def check_keys(data: Any, source: str) -> None:
    """Raise GameError unless `data` has every needed key with a value of the right type."""
    if not isinstance(data, Mapping):
        raise GameError(f"{source}: a game file must be a JSON object, not {type(data).__name__}")
    for key in KEYS:
        if key not in data:
            hint = did_you_mean(key, [str(name) for name in data])
            raise GameError(f"{source}: game file has no key {key!r}; it needs {', '.join(KEYS)}.{hint}")
        if not isinstance(data[key], str):
            raise GameError(f"{source}: key {key!r} must be text, not {type(data[key]).__name__}")
    walkthrough = data.get("walkthrough")
    if walkthrough is not None and not (
        isinstance(walkthrough, (list, tuple)) and all(isinstance(line, str) for line in walkthrough)
    ):
        raise GameError(f"{source}: key 'walkthrough' must be a list of commands")


def game_hash(data: Mapping[str, Any]) -> str:
    """SHA-256 of a game's content: equal for files that differ only in white space, comments or the walkthrough."""
    task, template = split_task(data["grammar"])
    rules = canonical_rules(data["pddl_domain"], template)
    # PDDL knows no letter case, and `;` begins a comment
    lines = (line.split(";", 1)[0] for line in data["pddl_problem"].lower().split("\n"))
    problem = " ".join(" ".join(lines).replace("(", " ( ").replace(")", " ) ").split())
    return content_hash({"problem": problem, "rules": rules, "task": task})


@lru_cache(maxsize=64)
def _cached(path: str, _mtime: int, _size: int) -> Game:
    return Game(read_game_file(path), source=path)


def _parse(data: Mapping[str, Any], source: str) -> tuple[Problem, Wording]:
    check_keys(data, source)
    try:
        wording = read_wording(data["pddl_domain"], data["grammar"])
    except UnsupportedFacts as error:
        raise GameUnsupported(source, str(error)) from error
    except ValueError as error:
        raise GameError(f"{source}: damaged game file: {error}") from error
    try:
        return parse_problem(data["pddl_problem"]), wording
    except UnsupportedFacts as error:
        raise GameUnsupported(source, f"key 'pddl_problem': {error}") from error
    except ValueError as error:
        raise GameError(f"{source}: key 'pddl_problem': {error}") from error
