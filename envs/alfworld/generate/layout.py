"""Draw the task and the receptacles of a house."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import lru_cache

from turngym.envs.alfworld.generate.config import GeneratorConfig
from turngym.envs.alfworld.generate.house import APPLIANCE, LOOK, TWO, Draw, Receptacle
from turngym.envs.alfworld.generate.priors import Priors, TaskRow

CORE = ("Bed", "CounterTop", "Fridge", "Microwave", "SinkBasin")
"""What a small house has whenever every real room of its kind has it."""


def draw_task(config: GeneratorConfig, priors: Priors, draw: Draw) -> TaskRow:
    """A task type by the mix, then target, destination and room as often as the train games have them."""
    rows = possible_tasks(config, priors)
    mix = dict(config.mix) if config.mix is not None else None
    task = draw.weighted((t, sum(n for _, n in rows[t]) if mix is None else mix.get(t, 0.0)) for t in rows)
    return draw.weighted(rows[task])


@lru_cache(maxsize=16)
def possible_tasks(config: GeneratorConfig, priors: Priors) -> dict[str, list[tuple[TaskRow, int]]]:
    """By task type, the tasks that the configuration's rooms, receptacles and objects allow, with their counts."""
    rows: dict[str, list[tuple[TaskRow, int]]] = {}
    for row in priors.tasks:
        if _allowed(config, row):
            rows.setdefault(row.task, []).append((row, row.count))
    return rows


def _allowed(config: GeneratorConfig, row: TaskRow) -> bool:
    kinds = {name for name, _ in config.receptacle_caps} if config.receptacle_caps is not None else None
    objects = config.object_types
    if row.room not in config.rooms or (objects is not None and row.target not in objects):
        return False
    if row.task == LOOK:
        return objects is None or row.destination in objects
    appliance = APPLIANCE.get(row.task)
    if kinds is not None and (row.destination not in kinds or (appliance is not None and appliance not in kinds)):
        return False
    return config.instances >= 2 or row.task != TWO


def draw_receptacles(config: GeneratorConfig, priors: Priors, row: TaskRow, draw: Draw) -> list[str]:
    """The receptacle types of the house, sorted; what the task needs is among them."""
    needed = {APPLIANCE[row.task]} if row.task in APPLIANCE else set()
    if row.task != LOOK:
        needed.add(row.destination)
    if config.receptacle_caps is None:
        return _real_layout(config, priors, row.room, needed, draw)
    caps = dict(config.receptacle_caps)
    scenes = priors.scenes[row.room]
    always = {t for t in CORE if t in caps and all(t in scene for scene, _ in scenes)}
    chosen = Counter(dict.fromkeys(sorted(needed | always), 1))
    if row.task == LOOK:
        stands = priors.placed[row.room][row.destination]
        chosen[draw.weighted((t, n) for t, n in stands.items() if t in caps)] += 1
    mean = {t: sum(scene.get(t, 0) * n for scene, n in scenes) for t in caps}
    size = draw.between(*config.receptacles)
    while chosen.total() < size:
        # a type's weight falls with each copy, so that small houses still have many kinds
        chosen[draw.weighted((t, mean[t] / (1 + 4 * chosen[t])) for t in caps if chosen[t] < caps[t])] += 1
    return sorted(chosen.elements())


def _real_layout(config: GeneratorConfig, priors: Priors, room: str, needed: Collection[str], draw: Draw) -> list[str]:
    scenes = priors.scenes[room]
    scene = draw.weighted((s, n) for s, n in scenes if all(t in s for t in needed))
    counts = dict(scene)
    for name in sorted(counts):
        most = max(s.get(name, 0) for s, _ in scenes)
        if most > 1 and draw.chance(config.jitter):
            counts[name] = min(max(counts[name] + (1 if draw.chance(0.5) else -1), 1), most)
    return sorted(Counter(counts).elements())


def place_receptacles(
    config: GeneratorConfig, priors: Priors, room: str, types: list[str], draw: Draw
) -> tuple[Receptacle, ...]:
    """Give each receptacle a location; some share one, as the measured groups do."""
    location = list(range(len(types)))
    free = set(location)
    for group, rate in priors.shared[room]:
        expected = rate * config.shared
        # the fraction is drawn, so that the mean number of groups is the measured one
        for _ in range(int(expected) + draw.chance(expected % 1.0)):
            members = _pick_group(group, types, free, draw)
            free -= set(members)
            for member in members:
                location[member] = location[members[0]]
    # without gaps: the problem's text has a location for every number up to the highest
    number = {spot: i for i, spot in enumerate(sorted(set(location)))}
    share = priors.openable
    opens = [draw.chance(share[t]) if config.mixed_openable else share[t] > 0.5 for t in types]
    rows = zip(types, opens, location, strict=True)
    return tuple(Receptacle(type=t, openable=o, location=number[spot]) for t, o, spot in rows)


def _pick_group(group: tuple[str, ...], types: list[str], free: set[int], draw: Draw) -> list[int]:
    members: list[int] = []
    for name in group:
        # sorted: the draw must not depend on the order of a set
        options = [i for i in sorted(free) if types[i] == name and i not in members]
        if not options:
            return []
        members.append(options[draw.index(len(options))])
    return members
