"""Seeded ALFWorld games that need no download: the same configuration, part and number give the same bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from turngym.envs.alfworld.data import game_texts
from turngym.envs.alfworld.generate.config import PRESETS, SMALL, GeneratorConfig, Part, preset
from turngym.envs.alfworld.generate.furnish import Furnishing
from turngym.envs.alfworld.generate.house import Draw, House, Rejected
from turngym.envs.alfworld.generate.layout import draw_receptacles, draw_task, place_receptacles
from turngym.envs.alfworld.generate.priors import Priors, load_priors
from turngym.envs.alfworld.generate.problem_text import problem_text, task_sentence
from turngym.envs.alfworld.native.engine import NativeEngine
from turngym.envs.alfworld.native.game import Game
from turngym.envs.alfworld.players.expert import next_action
from turngym.envs.core import TaskError

__all__ = ["PRESETS", "SMALL", "GeneratorConfig", "Part", "draw_house", "generate", "preset", "task_ids"]

# many: of the draws for an evaluation game, three in four belong to the other part
ATTEMPTS = 400
EVAL_SHARE = 4
"""One content in four belongs to the evaluation part, by its hash, so no train game can equal an evaluation game."""


def draw_house(config: GeneratorConfig, priors: Priors, rng: np.random.Generator) -> House:
    """One house with its task. Raises Rejected when the draw contradicts itself (no place for the target)."""
    draw = Draw(rng)
    row = draw_task(config, priors, draw)
    types = draw_receptacles(config, priors, row, draw)
    receptacles = place_receptacles(config, priors, row.room, types, draw)
    furnishing = Furnishing(config=config, priors=priors, row=row, types=types, draw=draw)
    furnishing.furnish()
    sentence = draw.weighted(priors.sentences[row.task].items())
    return House(row=row, receptacles=receptacles, things=tuple(furnishing.things), sentence=sentence)


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
        game = _game(house, priors, f"{config.name}_{part}_{number}")
        walkthrough = _solve(game, config.expert_steps)
        if walkthrough is not None:
            game["walkthrough"] = walkthrough
            return game
    raise TaskError(
        f"generated game {config.name}/{part}/{number}: no playable house in {ATTEMPTS} attempts; allow more "
        "receptacle or object types, larger ranges, or more expert_steps"
    )


def _game(house: House, priors: Priors, name: str) -> dict[str, Any]:
    domain, grammar = game_texts(task_sentence(house))
    return {
        "pddl_domain": domain,
        "grammar": grammar,
        "pddl_problem": problem_text(house, priors, name),
        "solvable": True,
        "walkthrough": [],
        "task_type": house.row.task,
    }


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


def task_ids(config: GeneratorConfig, part: Part) -> Sequence[str]:
    """The listed ids `generated/<config>/<part>/<number>`; nothing is generated."""
    return [f"generated/{config.name}/{part}/{number}" for number in range(config.size(part))]


def parse_task_id(task_id: str) -> tuple[str, Part, int]:
    """Configuration name, part and number of a generated game's id. Raises TaskError."""
    match = re.fullmatch(r"generated/([\w-]+)/(train|eval)/(\d+)", task_id)
    if match is None:
        raise TaskError(f"task id {task_id!r}: a generated game is called generated/<config>/<train|eval>/<number>")
    part: Part = "train" if match[2] == "train" else "eval"
    return match[1], part, int(match[3])
