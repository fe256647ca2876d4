"""What generated ALFWorld games are like: their settings, and the counts of the real train games that they follow.

The counts (`data/priors.json`) were measured once from the real games, in the form in which generator and expert ask.
`vocabulary` lists every phrase that the games of a configuration can say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import msgspec

from turngym.core.errors import TaskError, checked_choice

Part = Literal["train", "eval"]
CATEGORIES = {
    "pick_and_place_simple": "place",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
"""Row of the result tables by task type."""
TASK_TYPES = tuple(CATEGORIES)
ROOMS = ("kitchen", "living", "bedroom", "bathroom")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """What kind of games are generated. The same name, version, part and number give the same bytes."""

    name: str
    """Part of the task id; a configuration of your own needs a name of its own."""
    version: int = 1
    """Counts changes of the generator; part of the seed."""
    mix: tuple[tuple[str, float], ...] | None = None
    """(task type, weight) pairs; None takes the frequencies of the real train games."""
    rooms: tuple[str, ...] = ROOMS
    """Room kinds that may be drawn (the task decides among them)."""
    receptacle_caps: tuple[tuple[str, int], ...] | None = None
    """(receptacle type, at most how many) pairs that small houses are built from; None takes real layouts."""
    receptacles: tuple[int, int] = (6, 9)
    """Fewest and most receptacles of a small house (with `receptacle_caps`)."""
    object_types: tuple[str, ...] | None = None
    """Object types that may occur; None allows all measured ones."""
    objects: tuple[int, int] | None = None
    """Fewest and most objects; None draws each type's number as in real games."""
    instances: int = 7
    """Most objects of one type."""
    crowd: int = 26
    """Most objects in one receptacle (and never more than real games have in one of its type)."""
    shared: float = 1.0
    """How often receptacles share a location, as a multiple of real games."""
    jitter: float = 0.25
    """Chance that a receptacle type of a real layout gets one more or one fewer."""
    mixed_openable: bool = True
    """Whether some cabinets, drawers and safes cannot be opened, as in real games; else the type decides."""
    oddities: bool = True
    """Objects in other objects, and objects that are cool from the start, as often as in real games."""
    expert_steps: int = 40
    """A game is kept only if the expert wins it within so many steps."""
    train_size: int = 5000
    """Training instances that are listed (5,000 in TurnOPD); any larger number can be asked for by id."""
    eval_size: int = 300
    """Evaluation instances that are listed (300 in TurnOPD)."""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_" for c in self.name):
            raise TaskError(f"generator name {self.name!r}: use letters, digits, - and _")
        for room in self.rooms:
            checked_choice(f"generator {self.name!r}: a room", room, ROOMS, TaskError)
        for task, weight in self.mix or ():
            checked_choice(f"generator {self.name!r}: a task type", task, TASK_TYPES, TaskError)
            if weight < 0:
                raise TaskError(f"generator {self.name!r}: weight of {task} is {weight}; it must be 0 or more")
        for low, high in (self.receptacles, self.objects or (1, 1)):
            if not 1 <= low <= high:
                raise TaskError(f"generator {self.name!r}: range ({low}, {high}) must have 1 <= fewest <= most")

    def size(self, part: Part) -> int:
        """How many instances of `part` are listed."""
        return self.train_size if part == "train" else self.eval_size


SMALL = GeneratorConfig(
    name="small",
    mix=tuple((task, 1.0) for task in TASK_TYPES),
    rooms=("kitchen", "bedroom"),
    receptacle_caps=(
        *(("Bed", 1), ("Cabinet", 3), ("CounterTop", 1), ("Desk", 1), ("DiningTable", 1), ("Drawer", 3)),
        *(("Fridge", 1), ("GarbageCan", 1), ("Microwave", 1), ("Safe", 1), ("Shelf", 2), ("SideTable", 1)),
        ("SinkBasin", 1),
    ),
    object_types=(
        *("Apple", "Bowl", "Bread", "Cup", "Egg", "Lettuce", "Mug", "Plate", "Potato", "Spoon", "Tomato"),
        *("AlarmClock", "Book", "CD", "CellPhone", "CreditCard", "DeskLamp", "KeyChain", "Pen", "Pencil", "Pillow"),
    ),
    objects=(5, 8),
    instances=2,
    crowd=3,
    shared=0.3,
    mixed_openable=False,
    oddities=False,
    expert_steps=20,
)
"""Kitchens and bedrooms with 6 to 9 receptacles and 5 to 8 objects: the quickstart's houses."""
FULL = GeneratorConfig(name="full")
"""Houses like the real ones: receptacles, objects, tasks and oddities at the measured frequencies."""
PRESETS = {config.name: config for config in (SMALL, FULL)}


def preset(name: str) -> GeneratorConfig:
    """The preset called `name`. Raises TaskError with the nearest names."""
    return PRESETS[checked_choice("the generator preset", name, PRESETS, TaskError)]


# --- what the real train games have

Weights = Mapping[str, int]


class TaskRow(msgspec.Struct, frozen=True, array_like=True):
    """One kind of task: what to bring where, in which room, and how often the train games ask for it."""

    task: str
    room: str
    target: str
    destination: str
    """A receptacle type, or the lamp of a look task."""
    count: int


class Priors(msgspec.Struct, frozen=True, eq=False, dict=True):
    """All counts; type names as in PDDL without the `Type` suffix. In order everywhere: sorted, never by hash.

    Equal only to itself, so that what is derived from a table can be cached under it.
    """

    games: int
    rooms: Weights
    tasks: tuple[TaskRow, ...]
    scenes: Mapping[str, tuple[tuple[Mapping[str, int], int], ...]]
    """Room to (receptacle multiset, games) pairs."""
    number: Mapping[str, Mapping[str, Mapping[int, int]]]
    """Room, object type: how many games have how many of it standing in receptacles."""
    placed: Mapping[str, Mapping[str, Weights]]
    """Room, object type: receptacle types it stood in at the start."""
    shared: Mapping[str, tuple[tuple[tuple[str, ...], int], ...]]
    """Room to (receptacle types at one location, groups) pairs."""
    opened: Mapping[str, tuple[int, int]]
    """How many receptacles of a type can be opened, and how many there are."""
    can_contain: Mapping[str, tuple[str, ...]]
    most_objects: Mapping[str, int]
    flags: Mapping[str, frozenset[str]]
    """`pickupable`, `cleanable`, ...: object types that have it."""
    nested: tuple[tuple[tuple[str, str], int], ...]
    """((inner, outer), count) pairs."""
    cool_in_fridge: tuple[int, int]
    """How many of the coolable objects in fridges are cool from the start, and how many there are."""
    sentences: Mapping[str, Weights]

    @cached_property
    def anywhere(self) -> Mapping[str, Weights]:
        """Object type: as `placed`, over all rooms."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for rows in self.placed.values():
            for name, counts in rows.items():
                totals[name].update(counts)
        return totals

    @cached_property
    def openable(self) -> Mapping[str, float]:
        """Share of the receptacles of a type that can be opened."""
        return {name: yes / total for name, (yes, total) in self.opened.items()}


@cache
def load_priors() -> Priors:
    """The shipped table, read once."""
    return msgspec.json.decode((Path(__file__).parent / "data" / "priors.json").read_bytes(), type=Priors)


# --- every name and phrase that can occur in the games of a configuration, for phrase tokenizers of tiny models

ROOM = (
    "-= Welcome to TextWorld, ALFRED! =-\n\n",
    "You are in the middle of a room. Looking quickly around you, you see ",
    "\n\nYour task is to: ",
    *(".", "a ", ", a ", ", and a ", "nothing", "nothing.", "Nothing happens."),
)
ACTIONS = (
    *("look", "inventory", "help", "go to ", "open ", "close ", "examine ", "use "),
    *("take ", " from ", "move ", " to ", "heat ", "cool ", "clean ", "slice ", " with "),
)
FEEDBACK = (
    *("You arrive at ", ". On the ", ", you see ", ". The ", "On the ", "The ", " is closed.", " is open. In it"),
    *("You open the ", "You close the ", "You pick up the ", " from the ", "You move the ", " to the "),
    *("You heat the ", "You cool the ", "You clean the ", " using the ", "You sliced the ", " with the "),
    *("You turn on the ", "You are carrying: a ", "You are not carrying anything."),
    *("You are facing the ", ", and ", ", ", ". Next to it", "There's nothing special about "),
    *("This is a ", "normal ", ". In it", "hot ", "cool ", "cold ", "clean ", "sliced ", "hot and clean "),
    *("cool and clean ", "hot and clean sliced ", "cool and clean sliced ", "clean sliced ", "hot sliced "),
    *("cool sliced ", "This ", " is on.", " is off."),
)


def vocabulary(config: GeneratorConfig) -> list[str]:
    """Sorted phrases into which every task, observation and command of `config`'s games can be cut.

    Each entity name (`cabinet 3`) and each type word (`cabinet`) is one phrase; the answer to `help` is left out.
    """
    priors = load_priors()
    # the highest number that a receptacle of each type can have
    receptacles: dict[str, int] = {}
    for room in config.rooms:
        for scene, _ in priors.scenes[room]:
            for kind, count in scene.items():
                receptacles[kind] = max(receptacles.get(kind, 0), count)
    if config.receptacle_caps is not None:
        receptacles = {kind: cap for kind, cap in config.receptacle_caps if kind in receptacles}
    # the same for objects; a two-object task puts two, however few real games have
    allowed = priors.flags["pickupable"] | priors.flags["toggleable"]
    if config.object_types is not None:
        allowed = allowed & set(config.object_types)
    objects: dict[str, int] = {}
    for room in config.rooms:
        for kind, counts in priors.number[room].items():
            if kind in allowed:
                objects[kind] = max(objects.get(kind, 2), min(max(counts), config.instances))
    numbers = receptacles | {kind: min(count, config.instances) for kind, count in objects.items()}
    names = {f"{kind.lower()} {n}" for kind, most in numbers.items() for n in range(1, most + 1)}
    types = {kind.lower() for kind in numbers}
    # what stands around the type words in the task sentences: `put a `, ` in `, ...
    tasks = [task for task, weight in config.mix if weight > 0] if config.mix is not None else list(priors.sentences)
    sentences = [sentence + "." for task in tasks for sentence in priors.sentences[task]]
    around = {part for sentence in sentences for half in sentence.split("{o}") for part in half.split("{r}")} - {""}
    return sorted({*ROOM, *ACTIONS, *FEEDBACK, *around, *types, *names})
