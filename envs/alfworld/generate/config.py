"""Settings of generated ALFWorld games, and the named presets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Literal

from turngym.envs.core import TaskError

Part = Literal["train", "eval"]

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
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
    """At most how many objects of one type."""
    crowd: int = 26
    """At most how many objects in one receptacle (and never more than real games have in one of its type)."""
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
            if room not in ROOMS:
                raise TaskError(f"generator {self.name!r}: unknown room {room!r}; known: {', '.join(ROOMS)}")
        for task, weight in self.mix or ():
            if task not in TASK_TYPES:
                raise TaskError(f"generator {self.name!r}: unknown task type {task!r}; known: {', '.join(TASK_TYPES)}")
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
        ("Bed", 1),
        ("Cabinet", 3),
        ("CounterTop", 1),
        ("Desk", 1),
        ("DiningTable", 1),
        ("Drawer", 3),
        ("Fridge", 1),
        ("GarbageCan", 1),
        ("Microwave", 1),
        ("Safe", 1),
        ("Shelf", 2),
        ("SideTable", 1),
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
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"no generator preset {name!r}{hint} Presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def describe(config: GeneratorConfig) -> dict[str, object]:
    """All settings as JSON-able values, for hashes and reports."""
    return {field.name: getattr(config, field.name) for field in fields(config)}
