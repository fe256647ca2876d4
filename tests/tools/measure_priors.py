"""Measure the priors of generated ALFWorld games from real train games, as one small table of counts.

`python tests/tools/measure_priors.py --data $ALFWORLD_DATA --out envs/alfworld/data/priors.json`
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.core.spec import Spec
from turngym.scripts.options import read_options

FACT = re.compile(r"\(([^\s()]+) ([^()]+)\)")
TASK = re.compile(r"Your task is to: ([^\"]*)\"")
ROOMS = {0: "kitchen", 2: "living", 3: "bedroom", 4: "bathroom"}
"""Room kind by hundreds of the scene number (FloorPlan1-30, 201-230, 301-330, 401-430)."""
FLAGS = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable", "isReceptacleObject")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealGame:
    """What one game file says, types without their `Type` suffix."""

    task: str
    target: str
    destination: str
    scene: int
    sentence: str
    facts: Mapping[str, list[tuple[str, ...]]]
    receptacles: Mapping[str, str]
    """Receptacle id to type."""
    objects: Mapping[str, str]
    """Object id to type."""

    @property
    def room(self) -> str:
        return ROOMS[self.scene // 100]


@dataclass(slots=True, kw_only=True)
class Counts:
    """Running counts; `table()` is what is written."""

    games: int = 0
    rooms: Counter[str] = field(default_factory=Counter)
    scenes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    number: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    placed: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    shared: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    tasks: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sentences: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    flags: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    contain: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    openable: Counter[str] = field(default_factory=Counter)
    receptacles: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    nested: Counter[str] = field(default_factory=Counter)
    fridge: Counter[str] = field(default_factory=Counter)

    def table(self) -> dict[str, Any]:
        """The JSON table; keys sorted, so the same games give the same bytes."""
        return {
            "can_contain": {name: sorted(types) for name, types in sorted(self.contain.items())},
            "cool_in_fridge": [self.fridge["cool"], self.fridge["all"]],
            "flags": {name: sorted(types) for name, types in sorted(self.flags.items())},
            "games": self.games,
            "most_objects": dict(sorted(self.most.items())),
            "nested": listed(self.nested),
            "number": {room: by_first_word(c) for room, c in sorted(self.number.items())},
            "opened": {name: [self.openable[name], total] for name, total in sorted(self.receptacles.items())},
            "placed": {room: by_first_word(c) for room, c in sorted(self.placed.items())},
            "rooms": dict(sorted(self.rooms.items())),
            "scenes": {room: listed(c, scene) for room, c in sorted(self.scenes.items())},
            "sentences": {task: dict(sorted(c.items())) for task, c in sorted(self.sentences.items())},
            "shared": {room: listed(c) for room, c in sorted(self.shared.items())},
            "tasks": [[task, *words, n] for task, c in sorted(self.tasks.items()) for words, n in listed(c)],
        }


def listed(counts: Mapping[str, int], read: Callable[[str], Any] = str.split) -> list[list[Any]]:
    """(words of the key, count) pairs by key."""
    return [[read(key), count] for key, count in sorted(counts.items())]


def scene(key: str) -> dict[str, int]:
    """`Cabinet:2 Fridge:1` as counts by receptacle."""
    return {name: int(count) for name, _, count in (pair.partition(":") for pair in key.split())}


def by_first_word(pairs: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """`{"a b": 1}` as `{"a": {"b": 1}}`, sorted."""
    table: dict[str, dict[str, int]] = {}
    for key, count in sorted(pairs.items()):
        first, second = key.split()
        table.setdefault(first, {})[second] = count
    return table


def strip_type(name: str) -> str:
    return name.removesuffix("Type")


def read_game(path: Path) -> RealGame:
    """Parse one `game.tw-pddl`; the task comes from the folder name. Raises ValueError naming the file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    problem = data["pddl_problem"]
    parts = path.parent.parent.name.split("-")
    sentence = TASK.search(data["grammar"])
    if len(parts) != 5 or sentence is None:
        raise ValueError(f"{path}: not an ALFWorld game; expected <task>-<Object>-<MRecep>-<Recep>-<scene>/<trial>/")
    facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, arguments in FACT.findall(problem[problem.index("(:init") : problem.index("(:goal")]):
        facts[name].append(tuple(arguments.split()))
    return RealGame(
        task=parts[0],
        target=parts[1],
        destination=parts[3],
        scene=int(parts[4]),
        sentence=sentence.group(1),
        facts=facts,
        receptacles={a: strip_type(b) for a, b in facts["receptacleType"]},
        objects={a: strip_type(b) for a, b in facts["objectType"]},
    )


def count_layout(counts: Counts, game: RealGame) -> None:
    """Receptacle multiset of the scene, which of them open, and which share a location."""
    multiset = Counter(game.receptacles.values())
    counts.scenes[game.room][" ".join(f"{name}:{n}" for name, n in sorted(multiset.items()))] += 1
    counts.receptacles.update(multiset)
    counts.openable.update(game.receptacles[r] for (r,) in game.facts["openable"])
    groups: dict[str, list[str]] = defaultdict(list)
    for receptacle, location in game.facts["receptacleAtLocation"]:
        groups[location].append(game.receptacles[receptacle])
    counts.shared[game.room].update(" ".join(sorted(g)) for g in groups.values() if len(g) > 1)
    for container, content in game.facts["canContain"]:
        counts.contain[strip_type(container)].add(strip_type(content))


def count_objects(counts: Counts, game: RealGame) -> None:
    """Objects that stand in receptacles: how many of a type, where, in what state."""
    inside: dict[str, list[str]] = defaultdict(list)
    for thing, receptacle in game.facts["inReceptacle"]:
        counts.placed[game.room][f"{game.objects[thing]} {game.receptacles[receptacle]}"] += 1
        inside[receptacle].append(thing)
    for receptacle, things in inside.items():
        name = game.receptacles[receptacle]
        counts.most[name] = max(counts.most[name], len(things))
    stands = {thing for thing, _ in game.facts["inReceptacle"]}
    number = Counter(game.objects[thing] for thing in stands)
    counts.number[game.room].update(f"{name} {n}" for name, n in number.items())
    for flag in FLAGS:
        counts.flags[flag].update(game.objects[thing] for (thing,) in game.facts[flag] if thing in game.objects)
    for inner, outer in game.facts["inReceptacleObject"]:
        if inner in stands and outer in stands:
            counts.nested[f"{game.objects[inner]} {game.objects[outer]}"] += 1
    cool, coolable = ({thing for (thing,) in game.facts[name]} for name in ("isCool", "coolable"))
    fridge = {t for t, r in game.facts["inReceptacle"] if game.receptacles[r] == "Fridge"} & coolable
    counts.fridge.update(cool=len(fridge & cool), all=len(fridge))


def count_task(counts: Counts, game: RealGame) -> None:
    words = {game.target.lower(): "{o}", game.destination.lower(): "{r}"}
    sentence = " ".join(words.get(word.strip("."), word) for word in game.sentence.lower().rstrip(".").split())
    counts.sentences[game.task][sentence] += 1
    counts.tasks[game.task][f"{game.room} {game.target} {game.destination}"] += 1


def real_games(folder: Path) -> Iterator[RealGame]:
    paths = sorted(folder.glob("*/*/game.tw-pddl"))
    if not paths:
        raise FileNotFoundError(f"no */*/game.tw-pddl under {folder}; give the folder that holds train/")
    for path in paths:
        yield read_game(path)


def measure(folder: Path) -> dict[str, Any]:
    """Counts over every game under `folder` (a split: <task folder>/<trial>/game.tw-pddl)."""
    counts = Counts()
    for game in real_games(folder):
        counts.games += 1
        counts.rooms[game.room] += 1
        count_layout(counts, game)
        count_objects(counts, game)
        count_task(counts, game)
    return counts.table()


def dump(table: Mapping[str, Any]) -> str:
    """JSON with one line per entry of the second level: small, and a change is readable in a diff."""
    lines = []
    for name, value in sorted(table.items()):
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f' "{name}": {{\n{rows}\n }}')
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Arguments(Spec):
    """Where to read and write."""

    data: Path
    """Folder that holds `train/` (or `json_2.1.1/train/`)."""
    out: Path = Path("envs/alfworld/data/priors.json")
    """The table to write."""


def main(argv: Sequence[str]) -> int:
    """Read the train games and write the table."""
    arguments = read_options(Arguments, argv, prog="measure_priors.py", about=__doc__)
    root = arguments.data if (arguments.data / "train").is_dir() else arguments.data / "json_2.1.1"
    table = measure(root / "train")
    text = dump(table)
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{table['games']} games measured; {len(text):,} bytes written to {arguments.out}")
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
