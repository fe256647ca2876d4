"""How seeded ALFWorld games are made that need no download: same configuration, part and number, same bytes.

`generate` draws a house with its task (`draw_house`), writes it as a PDDL problem (`problem_text`) and keeps it if the
expert wins it in time. What is drawn follows the counts of the real train games (`priors`).
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, get_args

import numpy as np

from turngym.core.errors import TaskError
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import Game, game_texts
from turngym.envs.alfworld.players import next_action
from turngym.envs.alfworld.priors import SMALL, GeneratorConfig, Part, Priors, TaskRow, load_priors

K = TypeVar("K")
LOOK, TWO, SIMPLE = "look_at_obj_in_light", "pick_two_obj_and_place", "pick_and_place_simple"
TREATMENT = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("Microwave", "heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("Fridge", "coolable", "isCool"),
}
"""Task type to the receptacle that treats the target, and the predicates before and after."""
CORE = ("Bed", "CounterTop", "Fridge", "Microwave", "SinkBasin")
"""What a small house has whenever every real room of its kind has it."""
# many: of the draws for an evaluation game, three in four belong to the other part
ATTEMPTS = 400
EVAL_SHARE = 4
"""One content in four belongs to the evaluation part, by its hash, so no train game can equal an evaluation game."""


class Rejected(Exception):
    """This draw makes no game; the generator draws again with the next attempt's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receptacle:
    type: str
    openable: bool
    location: int
    """Receptacles with the same number share a location."""


@dataclass(slots=True, kw_only=True)
class Thing:
    type: str
    where: int
    """Index of its receptacle."""
    inside: int | None = None
    """Index of the object that holds it."""
    cool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One drawn game before it is text. Index order is the order of ids."""

    row: TaskRow
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    sentence: str


@dataclass(slots=True)
class DrawStream:
    """A stream of draws. Only `Generator.random` is used: the method whose stream is the simplest to keep stable."""

    rng: np.random.Generator

    def chance(self, probability: float) -> bool:
        return float(self.rng.random()) < probability

    def index(self, count: int) -> int:
        """Uniform in 0..count-1."""
        return min(int(self.rng.random() * count), count - 1)

    def between(self, low: int, high: int) -> int:
        """Uniform in low..high, both included."""
        return low + self.index(high - low + 1)

    def weighted(self, items: Iterable[tuple[K, float]]) -> K:
        """One of the keys, in proportion to its weight. Raises Rejected when nothing has weight."""
        pairs = list(items)
        totals = list(accumulate(weight for _, weight in pairs))
        if not totals or totals[-1] <= 0:
            raise Rejected("nothing to draw from")
        # bisect_right: a draw of exactly 0.0 must not choose a first key without weight
        return pairs[min(bisect_right(totals, float(self.rng.random()) * totals[-1]), len(pairs) - 1)][0]


def generate(config: GeneratorConfig, part: Part, number: int) -> dict[str, Any]:
    """Game `number` of `part` with the keys of a real `game.tw-pddl`, plus `task_type`.

    Not won at the start, and the expert wins it within `config.expert_steps`; draws that fail are drawn again from
    the next attempt's seed, so the result depends on the arguments alone.

    Raises:
        TaskError: for an unknown part, a negative number, or a configuration that cannot make a game.
    """
    if part not in get_args(Part) or number < 0:
        raise TaskError(
            f"generated game {config.name}/{part}/{number}: the part is train or eval, the number 0 or more"
        )
    priors = load_priors()
    for attempt in range(ATTEMPTS):
        try:
            house = draw_house(config, priors, attempt_rng(config, part, number, attempt))
        except Rejected:
            continue
        if content_part(house) != part:
            continue
        domain, grammar = game_texts(task_sentence(house))
        game = {
            "pddl_domain": domain,
            "grammar": grammar,
            "pddl_problem": problem_text(house, priors, f"{config.name}_{part}_{number}"),
            "solvable": True,
            "walkthrough": [],
            "task_type": house.row.task,
        }
        walkthrough = _solve(game, config.expert_steps)
        if walkthrough is not None:
            game["walkthrough"] = walkthrough
            return game
    raise TaskError(
        f"generated game {config.name}/{part}/{number}: no playable house in {ATTEMPTS} attempts; allow more "
        "receptacle or object types, larger ranges, or more expert_steps"
    )


def _solve(game: dict[str, Any], limit: int) -> list[str] | None:
    """The expert's actions from the start to the win; None when it starts won or does not win within `limit`."""
    engine = NativeEngine(Game(game))
    engine.reset()
    actions: list[str] = []
    while not engine.won and len(actions) < limit:
        action = next_action(engine)
        if action is None:
            return None
        engine.step(action)
        actions.append(action)
    return actions if engine.won and actions else None


def parse_task_id(task_id: str) -> tuple[str, Part, int]:
    """Configuration name, part and number of a generated game's id. Raises TaskError."""
    # a bounded number: int() refuses thousands of digits with an error of its own
    match = re.fullmatch(r"generated/([\w-]+)/(train|eval)/([0-9]{1,18})", task_id)
    if match is None:
        raise TaskError(f"task id {task_id!r}: a generated game is called generated/<config>/<train|eval>/<number>")
    part: Part = "train" if match[2] == "train" else "eval"
    return match[1], part, int(match[3])


def attempt_rng(config: GeneratorConfig, part: str, number: int, attempt: int) -> np.random.Generator:
    """The random stream of one attempt; parts cannot share one."""
    text = f"turngym alfworld {config.name} {config.version} {part} {number} {attempt}"
    # hash() of a str differs between processes
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    # not default_rng, whose generator may change with a release of NumPy
    return np.random.Generator(np.random.PCG64(seed))


def content_part(house: House) -> Part:
    """The part that a house with this content may appear in; the wording of the task does not count."""
    row = house.row
    # by content: two numbers can draw the same house
    facts = (row.task, row.target, row.destination, house.receptacles, house.things)
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def draw_house(config: GeneratorConfig, priors: Priors, rng: np.random.Generator) -> House:
    """One house with its task. Raises Rejected where the draw contradicts itself (no place for the target)."""
    draw = DrawStream(rng)
    # a task type by the mix, then target, destination and room as often as the train games have them
    rows = possible_tasks(config, priors)
    mix = dict(config.mix) if config.mix is not None else None
    task = draw.weighted((t, sum(n for _, n in rows[t]) if mix is None else mix.get(t, 0.0)) for t in rows)
    row = draw.weighted(rows[task])
    types = draw_receptacles(config, priors, row, draw)
    receptacles = place_receptacles(config, priors, row.room, types, draw)
    furnishing = Furnishing(config=config, priors=priors, row=row, types=types, draw=draw)
    furnishing.furnish()
    sentence = draw.weighted(priors.sentences[row.task].items())
    return House(row=row, receptacles=receptacles, things=tuple(furnishing.things), sentence=sentence)


@lru_cache(maxsize=16)
def possible_tasks(config: GeneratorConfig, priors: Priors) -> dict[str, list[tuple[TaskRow, int]]]:
    """The tasks by type that the configuration's rooms, receptacles and objects allow, with their counts."""
    kinds = {name for name, _ in config.receptacle_caps} if config.receptacle_caps is not None else None
    objects = config.object_types
    rows: dict[str, list[tuple[TaskRow, int]]] = {}
    for row in priors.tasks:
        if row.room not in config.rooms or (objects is not None and row.target not in objects):
            continue
        needed = {row.destination, *TREATMENT.get(row.task, ())[:1]}
        # a look task needs its lamp, which is an object; all others need receptacles
        if row.task == LOOK:
            possible = objects is None or row.destination in objects
        else:
            possible = (kinds is None or needed <= kinds) and (config.instances >= 2 or row.task != TWO)
        if possible:
            rows.setdefault(row.task, []).append((row, row.count))
    return rows


def draw_receptacles(config: GeneratorConfig, priors: Priors, row: TaskRow, draw: DrawStream) -> list[str]:
    """The receptacle types of the house, sorted, one entry per receptacle, those that the task needs included.

    Args:
        config: `receptacle_caps` None draws the layout of a real room; else `receptacles` bounds their number.
    """
    needed = {row.destination} if row.task != LOOK else set()
    needed.update(TREATMENT.get(row.task, ())[:1])
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


def _real_layout(
    config: GeneratorConfig, priors: Priors, room: str, needed: Collection[str], draw: DrawStream
) -> list[str]:
    """The receptacles of a real room that has all `needed`, some types with one more or one fewer."""
    scenes = priors.scenes[room]
    scene = draw.weighted((s, n) for s, n in scenes if all(t in s for t in needed))
    counts = dict(scene)
    for name in sorted(counts):
        most = max(s.get(name, 0) for s, _ in scenes)
        if most > 1 and draw.chance(config.jitter):
            counts[name] = min(max(counts[name] + (1 if draw.chance(0.5) else -1), 1), most)
    return sorted(Counter(counts).elements())


def place_receptacles(
    config: GeneratorConfig, priors: Priors, room: str, types: list[str], draw: DrawStream
) -> tuple[Receptacle, ...]:
    """Gives each receptacle a location, some a shared one as in the real games, and decides which can be opened.

    Args:
        config: `shared` scales how many groups share a location; `mixed_openable` draws for each receptacle whether it
            opens, instead of taking what is more frequent for its type.
    """
    location = list(range(len(types)))
    free = set(location)
    for group, count in priors.shared[room]:
        expected = count / priors.rooms[room] * config.shared
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


def _pick_group(group: tuple[str, ...], types: list[str], free: set[int], draw: DrawStream) -> list[int]:
    """Free receptacles of the group's types, one each; none where a type has none left."""
    members: list[int] = []
    for name in group:
        # sorted: the draw must not depend on the order of a set
        options = [i for i in sorted(free) if types[i] == name and i not in members]
        if not options:
            return []
        members.append(options[draw.index(len(options))])
    return members


@dataclass(slots=True, kw_only=True)
class Furnishing:
    """Puts objects into the receptacles `types` until the house is as full as the configuration says."""

    config: GeneratorConfig
    priors: Priors
    row: TaskRow
    types: list[str]
    draw: DrawStream
    things: list[Thing] = field(default_factory=list)
    load: Counter[int] = field(default_factory=Counter)

    def furnish(self) -> None:
        """The target first, then the lamp of a look task, then distractors."""
        row, draw = self.row, self.draw
        least = 2 if row.task == TWO else 1
        for _ in range(self.draw_number(row.target, least)):
            self.put(row.target)
        if len(self.things) < least:
            raise Rejected("no place for the target")
        if row.task == LOOK:
            self.put(row.destination)
            # put() does nothing where there is no room
            if self.things[-1].type != row.destination:
                raise Rejected("no place for the lamp")
        if self.config.objects is None:
            self._as_measured()
        else:
            self._up_to(draw.between(*self.config.objects))
        # fact order would otherwise tell which object is asked for
        self.things.sort(key=lambda thing: thing.type)
        if self.config.oddities:
            self._odd()

    def kinds(self) -> list[str]:
        """Object types that can be distractors, sorted."""
        flags = self.priors.flags
        allowed = self.config.object_types
        skip = {self.row.target} | ({self.row.destination} if self.row.task == LOOK else set())
        usable = flags["pickupable"] | flags["toggleable"]
        names = self.priors.number[self.row.room]
        return [t for t in sorted(names) if t in usable and t not in skip and (allowed is None or t in allowed)]

    def draw_number(self, name: str, least: int) -> int:
        """How many of `name`, as measured in the room, at least `least`, at most the configured number."""
        counts = self.priors.number[self.row.room].get(name, {})
        most = self.config.instances
        options: Mapping[int, int] = {n: c for n, c in counts.items() if least <= n <= most}
        return self.draw.weighted(options.items()) if options else least

    def put(self, name: str) -> None:
        """Stands one more `name` at a random place that has room for it; does nothing if there is none."""
        counts = self.priors.placed[self.row.room].get(name, {})
        solved = name == self.row.target and self.row.task in (SIMPLE, TWO)
        # real games have objects that no receptacle takes back; picking one up would leave no way on
        fixed = name not in self.priors.flags["pickupable"]
        spots: dict[str, list[int]] = {}
        for i, kind in enumerate(self.types):
            most = min(self.config.crowd, self.priors.most_objects.get(kind, 0))
            fits = kind in counts and (fixed or name in self.priors.can_contain.get(kind, ()))
            if fits and self.load[i] < most and not (solved and kind == self.row.destination):
                spots.setdefault(kind, []).append(i)
        if not spots:
            return
        options = spots[self.draw.weighted((kind, counts[kind]) for kind in spots)]
        where = options[self.draw.index(len(options))]
        self.load[where] += 1
        self.things.append(Thing(type=name, where=where))

    def _as_measured(self) -> None:
        """Each type as often, and in as many copies, as real rooms have it."""
        room = self.row.room
        for name in self.kinds():
            counts = self.priors.number[room][name]
            if self.draw.chance(sum(counts.values()) / self.priors.rooms[room]):
                for _ in range(self.draw_number(name, 1)):
                    self.put(name)

    def _up_to(self, size: int) -> None:
        """`size` objects in all, common types more often."""
        left = {name: sum(self.priors.number[self.row.room][name].values()) for name in self.kinds()}
        while left and len(self.things) < size:
            name = self.draw.weighted(left.items())
            del left[name]
            for _ in range(min(self.draw_number(name, 1), size - len(self.things))):
                self.put(name)

    def _odd(self) -> None:
        """Cool some objects in the fridge; stand some objects in others."""
        cool, coolable = self.priors.cool_in_fridge
        for thing in self.things:
            if self.types[thing.where] == "Fridge" and thing.type in self.priors.flags["coolable"]:
                thing.cool = self.draw.chance(cool / coolable)
        if not self.draw.chance(sum(n for _, n in self.priors.nested) / self.priors.games):
            return
        present = {thing.type for thing in self.things}
        pairs = [(p, n) for p, n in self.priors.nested if set(p) <= present and p[0] != self.row.target]
        if not pairs:
            return
        inner_type, outer_type = self.draw.weighted(pairs)
        inner = next(i for i, t in enumerate(self.things) if t.type == inner_type)
        outers = [i for i, t in enumerate(self.things) if t.type == outer_type and i != inner]
        for outer in outers:
            kind = self.types[self.things[outer].where]
            if inner_type in self.priors.can_contain.get(kind, ()):
                self.things[inner].where, self.things[inner].inside = self.things[outer].where, outer
                return


# --- a drawn house as the PDDL problem and the task sentence of a `game.tw-pddl`

DOMAIN_RTYPES = ("Fridge", "Microwave", "SinkBasin")
DOMAIN_OTYPES = ("ButterKnife", "Knife", "Sink")
"""Types that the domain's actions name: every problem must declare them, present or not."""
OBJECT_FLAGS = ("pickupable", "isReceptacleObject", "cleanable", "heatable", "coolable", "sliceable", "toggleable")


def task_sentence(house: House) -> str:
    """The sentence after `Your task is to: `, with its full stop."""
    row = house.row
    return house.sentence.format(o=row.target.lower(), r=row.destination.lower()) + "."


def problem_text(house: House, priors: Priors, name: str) -> str:
    """The PDDL problem called `name`; facts in a fixed order, so equal houses give equal text."""
    receptacles = _ids(r.type for r in house.receptacles)
    things = _ids(t.type for t in house.things)
    spots = [f"loc_bar_{number:02d}" for number in range(1 + max(r.location for r in house.receptacles) + 1)]
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", "agent1 - agent"]
    rtypes = sorted({r.type for r in house.receptacles} | set(DOMAIN_RTYPES))
    otypes = sorted({t.type for t in house.things} | set(DOMAIN_OTYPES))
    lines += [f"{t}Type - otype" for t in otypes] + [f"{t}Type - rtype" for t in rtypes]
    lines += [f"{t} - object" for t in things] + [f"{r} - receptacle" for r in receptacles]
    lines += [f"{spot} - location" for spot in spots] + [")", "(:init"]
    lines += _receptacle_facts(house, priors, receptacles, spots)
    lines += _thing_facts(house, priors, things, receptacles, spots)
    lines += [f"(atLocation agent1 {spots[0]})", ")", f"(:goal {goal(house)})", ")"]
    return "\n".join(lines) + "\n"


def _ids(types: Iterable[str]) -> list[str]:
    """Cabinet_bar_01, Cabinet_bar_02, ...: numbered per type in the order given.

    Basins are called Sink_bar_01_bar_SinkBasin: display names are the part before `_bar_`, plus "basin".
    """
    seen: dict[str, int] = {}
    ids = []
    for name in types:
        seen[name] = seen.get(name, 0) + 1
        stem = name.removesuffix("Basin")
        ids.append(f"{stem}_bar_{seen[name]:02d}" + ("" if stem == name else f"_bar_{name}"))
    return ids


def _receptacle_facts(house: House, priors: Priors, ids: list[str], spots: list[str]) -> list[str]:
    present = sorted({t.type for t in house.things})
    rows = list(zip(ids, house.receptacles, strict=True))
    lines = [f"(receptacleType {i} {r.type}Type)" for i, r in rows]
    for kind in sorted({r.type for r in house.receptacles}):
        contains = priors.can_contain.get(kind, ())
        lines += [f"(canContain {kind}Type {t}Type)" for t in present if t in contains]
    lines += [f"(openable {i})" for i, r in rows if r.openable]
    # spot 0 is where the agent starts: away from everything, as in every real game
    return lines + [f"(receptacleAtLocation {i} {spots[r.location + 1]})" for i, r in rows]


def _thing_facts(house: House, priors: Priors, ids: list[str], receptacles: list[str], spots: list[str]) -> list[str]:
    rows = list(zip(ids, house.things, strict=True))
    lines = [f"(objectType {i} {t.type}Type)" for i, t in rows]
    for flag in OBJECT_FLAGS:
        lines += [f"({flag} {i})" for i, t in rows if t.type in priors.flags[flag]]
    lines += [f"(isCool {i})" for i, t in rows if t.cool]
    lines += [f"(inReceptacle {i} {receptacles[t.where]})" for i, t in rows]
    lines += [f"(inReceptacleObject {i} {ids[t.inside]})" for i, t in rows if t.inside is not None]
    return lines + [f"(objectAtLocation {i} {spots[house.receptacles[t.where].location + 1]})" for i, t in rows]


def goal(house: House) -> str:
    """The goal in the shape that the real games of this task type have."""
    row = house.row
    target, receptacle = f"{row.target}Type", f"{row.destination}Type"
    if row.task == LOOK:
        lamp = (
            f"(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {receptacle}) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
        )
        return f"(and {lamp} (exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o))))"
    if row.task != TWO:
        _, able, done_flag = TREATMENT.get(row.task, ("", "", ""))
        state = f"({able} ?o) ({done_flag} ?o) " if able else ""
        facts = f"{state}(inReceptacle ?o ?r) (objectType ?o {target}) (receptacleType ?r {receptacle})"
        return f"(and (exists (?r - receptacle) (exists (?o - object) (and {facts}))))"
    first = f"(objectType ?o1 {target}) (receptacleType ?r {receptacle}) (inReceptacle ?o1 ?r)"
    second = f"(not (= ?o1 ?o2)) (objectType ?o2 {target}) (receptacleType ?r {receptacle}) (inReceptacle ?o2 ?r)"
    inner = f"(exists (?o2 - object) (and {second}))"
    return f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {first} {inner}))))"


# --- houses that training never shows
#
# `generated_unseen` is to the generated games what `valid_unseen` is to the real ones. By construction, no reset text
# of it can occur in training with the configuration that it is held out from:
#
# - its rooms (living rooms, bathrooms) are none of the trained ones;
# - of a house's 6 to 9 receptacles at most 5 are of types that training has, and the first text lists all of them;
# - what is to be brought is of a type that training never has, not even as a distractor.

UNSEEN = "generated_unseen"
SMALL_UNSEEN = GeneratorConfig(
    name="small-unseen",
    # living rooms and bathrooms have neither fridge nor microwave
    mix=tuple((task, 1.0) for task in (SIMPLE, LOOK, "pick_clean_then_place_in_recep", TWO)),
    rooms=("living", "bathroom"),
    receptacle_caps=(
        *(("ArmChair", 3), ("BathtubBasin", 1), ("Cart", 1), ("CoffeeTable", 2), ("Dresser", 2)),
        *(("HandTowelHolder", 3), ("Ottoman", 1), ("Sofa", 2), ("TVStand", 2), ("Toilet", 1)),
        *(("ToiletPaperHanger", 1), ("TowelHolder", 2)),
        # trained ones: fewer than the smallest house has, so that every house has others too
        *(("Desk", 1), ("GarbageCan", 1), ("Shelf", 1), ("SideTable", 1), ("SinkBasin", 1)),
    ),
    object_types=(
        *("Box", "Laptop", "Newspaper", "RemoteControl", "Statue", "TissueBox", "Vase", "Watch", "WateringCan"),
        *("Candle", "Cloth", "DishSponge", "HandTowel", "SoapBar", "SoapBottle", "SprayBottle", "ToiletPaper", "Towel"),
        # the lamp of the look tasks, as in training
        "DeskLamp",
    ),
    objects=(5, 8),
    instances=2,
    crowd=3,
    shared=0.3,
    mixed_openable=False,
    oddities=False,
    expert_steps=20,
)
"""Held out from `small`."""
_HELD_OUT = {SMALL: SMALL_UNSEEN}


def unseen(config: GeneratorConfig) -> GeneratorConfig:
    """The houses that are held out from `config`. Raises TaskError for a configuration without any."""
    if config not in _HELD_OUT:
        held = ", ".join(repr(trained.name) for trained in _HELD_OUT)
        raise TaskError(
            f"split {UNSEEN!r} with config {config.name!r}: no houses are held out from it, only from: {held}"
        )
    return _HELD_OUT[config]
