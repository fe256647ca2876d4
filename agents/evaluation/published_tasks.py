"""Which tasks does the published harness play? `published_tasks` draws them as verl-agent and its forks do.

Its validation has N workers (128), each with a seed of its own and one task at a time. Which tasks are played, and how
often, therefore depends on N, and in WebShop the order of goals and the price caps depend on the worker, too. A panel
has none of that. Draw tasks like this to reproduce a published number, and to find out what such a number is worth.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.presets import ALFWORLD, SEARCH, WEBSHOP
from turngym.core.task import Task, plain_id
from turngym.envs.guard import guard_of
from turngym.envs.panels import Panel, collect_tasks
from turngym.envs.webshop.goals import PAPERS

FIRST_SEED = 1000
"""Worker i of a validation is seeded with the run's seed + 1000 + i."""


def published_tasks(panel: Panel, env: Any, *, workers: int, validations: int, seed: int) -> list[Task]:
    """The tasks of the first `validations` validations, one after another, `workers` each; a task may be there twice.

    ALFWorld: each worker shuffles the games by its seed and plays the next one at every validation. The harness begins
    with the order of its file system, which differs between machines; this begins with the panel's.
    WebShop: each validation draws `workers` of the numbers 0 to 499 without repetition. A worker shuffles all goals of
    the shop by its seed, and draws prices and price caps with it: number k is another goal, with other caps, for each
    worker. Ids are `PROFILE/GOAL@SEED`.

    Args:
        panel: its environment decides how tasks are drawn; ALFWorld's games are drawn among its tasks.
        env: an environment of the panel; it is played to learn the hashes of WebShop's tasks.
        workers: number of workers of the harness; each plays one task at every validation.
        seed: the run's seed; worker i has `seed` + 1000 + i.

    Raises EvaluationError for an environment for which the harness draws nothing, and for too small a shop.
    """
    env_id = plain_id(panel.env_id)
    if env_id == ALFWORLD:
        numbers = [_games(len(panel.tasks), seed + FIRST_SEED + worker, validations) for worker in range(workers)]
        return [panel.tasks[games[turn]] for turn in range(validations) for games in numbers]
    if env_id == WEBSHOP:
        base: Any = guard_of(env).base
        shop = base.shop
        ids = list(_goals(shop.profile.name, shop.goals.order, workers, validations, seed))
        tasks = {task.task_id: task for task in collect_tasks(env, dict.fromkeys(ids))}
        return [tasks[task_id] for task_id in ids]
    why = (
        "the harness plays all rows of its test sets in order" if env_id == SEARCH else "no published harness is known"
    )
    raise EvaluationError(f"--sampling published: nothing is drawn for {env_id}: {why}; leave it out")


def _games(count: int, seed: int, validations: int) -> list[int]:
    """Indices of the games that one worker plays: all of them shuffled, and shuffled again once all were played."""
    rng = np.random.RandomState(seed)
    order, played = list(range(count)), list[int]()
    while len(played) < validations:
        rng.shuffle(order)
        played += order
    return played[:validations]


def _goals(profile: str, order: np.ndarray, workers: int, validations: int, seed: int) -> Iterator[str]:
    """Ids of WebShop's tasks; `order` int64 [goals] is the place in file order of each of our goals."""
    count = len(order)
    first, end = PAPERS["test"]
    assert end is not None
    if count < end:
        raise EvaluationError(
            f"--sampling published draws among goals {first} to {end - 1} of each worker; {profile} has {count} goals: "
            "take a panel of a larger shop"
        )
    if workers > end:
        raise EvaluationError(
            f"--sampling published:{workers}: a validation draws at most {end} goals without repetition"
        )
    # our number of each place in file order
    number_of = np.argsort(order)
    rng = np.random.RandomState(seed + FIRST_SEED)
    for _ in range(validations):
        for worker, position in enumerate(rng.choice(range(first, end), size=workers, replace=False).tolist()):
            worker_seed = seed + FIRST_SEED + worker
            yield f"{profile}/{number_of[_shuffled(count, worker_seed)[position]]}@{worker_seed}"


@lru_cache(maxsize=512)
def _shuffled(count: int, seed: int) -> np.ndarray:
    """Place in file order of the first goals of a worker's own order, int64 [500]."""
    places = list(range(count))
    random.Random(seed).shuffle(places)
    return np.array(places[: PAPERS["test"][1]], dtype=np.int64)
