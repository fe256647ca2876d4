"""What a batch does to a number: players of known strength, evaluated as the published harness does.

    python tests/bench/batch_numbers.py --alfworld ~/.cache/alfworld --webshop ~/.cache/turngym/webshop

Each player plays every task many times, which gives its true rate in each task. Validations are then drawn from these
episodes by the harness's own rule, a thousand of them. Prints the tables of docs/batch.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.play_episodes import play_episodes
from turngym.agents.evaluation.published_tasks import FIRST_SEED, published_tasks
from turngym.envs.guard import guard_of
from turngym.envs.panels import Panel, load_panel
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop import Shop

Wins = NDArray[np.float64]
HOUSES, SHOP = "alfworld-valid-seen", "webshop-papers-test"
PLAYERS = {"weak": 0.85, "middle": 0.75, "strong": 0.65}
"""Share of random actions of ALFWorld's searching player, by name in the tables."""


def main() -> None:
    """Play, draw, print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--alfworld", help="folder of the games; by default where the environment looks")
    asked.add_argument("--webshop", help="folder of the shop's files; by default where the environment looks")
    asked.add_argument("--samples", type=int, default=24, help="episodes of each task and player")
    asked.add_argument("--validations", type=int, default=1000, help="validations that are drawn")
    given = asked.parse_args()
    panel = load_panel(HOUSES)
    made = {**panel.make_kwargs, "on_invalid": "noop", **({"data": given.alfworld} if given.alfworld else {})}
    players = {
        name: play(panel.env_id, "searching", noise, panel.task_ids, given.samples, made)[0]
        for name, noise in PLAYERS.items()
    }
    draws_VN = house_draws(panel, 140, given.validations)
    print(house_table(players, draws_VN, np.random.default_rng(0)))
    print(shop_tables(given.webshop))


def play(
    env: str, agent: str, noise: float, tasks: tuple[str, ...], samples: int, made: dict[str, object]
) -> tuple[Wins, Wins]:
    """Success and score, float64 [tasks, samples] each."""
    played = play_episodes(env, agent, noise=noise, tasks=tasks, samples=samples, env_kwargs=made)
    number = {task_id: place for place, task_id in enumerate(tasks)}
    won_TS, score_TS = np.full((len(tasks), samples), np.nan), np.full((len(tasks), samples), np.nan)
    for one in played.episodes:
        # a player that knows no action any more, after mistakes that it cannot mend, has lost
        place = number[one.task.task_id], one.sample
        won_TS[place], score_TS[place] = one.success, one.score
    assert not np.isnan(won_TS).any(), "episodes are missing"
    return won_TS, score_TS


def house_draws(panel: Panel, workers: int, seeds: int) -> NDArray[np.int64]:
    """int64 [seeds, workers]: which game each worker plays in the first validation of runs with seeds of their own."""
    number = {task_id: place for place, task_id in enumerate(panel.task_ids)}
    return np.array(
        [
            # seeds of two runs that differ by less than the number of workers would share workers
            [number[t.task_id] for t in published_tasks(panel, None, workers=workers, validations=1, seed=1000 * seed)]
            for seed in range(seeds)
        ]
    )


def house_table(players: dict[str, Wins], draws_VN: NDArray[np.int64], rng: np.random.Generator) -> str:
    """What 128 workers, 140 workers, the panel and the best of thirty validations make of each player."""
    rows: dict[str, list[str]] = {}
    games = len(next(iter(players.values())))

    def add(what: str, say: Callable[[Wins], str]) -> None:
        rows[what] = [say(won) for won in players.values()]

    def outcomes(won_GS: Wins, places: NDArray[np.int64]) -> Wins:
        return won_GS[places, rng.integers(won_GS.shape[1], size=places.shape)]

    def many(won_GS: Wins, workers: int) -> Wins:
        return 100 * outcomes(won_GS, draws_VN[:, :workers]).mean(axis=1)

    def best(won_GS: Wins) -> Wins:
        # the policy stays as it is; each validation has other games
        found = many(won_GS, 128)
        return np.array([rng.choice(found, 30, replace=False).max() for _ in range(len(found))])

    def grown(won_GS: Wins) -> Wins:
        won_VN = outcomes(won_GS, draws_VN)
        return 100 * (won_VN.mean(axis=1) - won_VN[:, :128].mean(axis=1))

    def panel_of(won_GS: Wins, samples: int) -> Wins:
        whole = np.tile(np.arange(games), (len(draws_VN), samples))
        return 100 * outcomes(won_GS, whole).mean(axis=1)

    add("true rate on the 140 games", lambda won: f"{100 * won.mean():.1f}")
    add("128 draws", lambda won: spread(many(won, 128)))
    add("140 draws", lambda won: spread(many(won, 140)))
    add("128 draws, a policy without chance", lambda won: spread(100 * won[:, 0][draws_VN[:, :128]].mean(axis=1)))
    add("140 minus 128 draws, the 128 the same", lambda won: spread(grown(won), signed=True))
    add("best of thirty validations", lambda won: spread(best(won)))
    add("each of the 140 games once", lambda won: spread(panel_of(won, 1)))
    add("each four times", lambda won: spread(panel_of(won, 4)))
    distinct = np.array([len(set(row[:128].tolist())) for row in draws_VN])
    head = f"\n128 draws reach {distinct.mean():.0f} of {games} games ({distinct.min()} to {distinct.max()}).\n"
    return table(["ALFWorld", *players], [[what, *cells] for what, cells in rows.items()]) + head


def shop_tables(data: str | None) -> str:
    """What the worker's price caps and order of goals do in WebShop."""
    panel = load_panel(SHOP)
    made = {**panel.make_kwargs, "strict_admissible": False, **({"data": data} if data else {})}
    seeds, rows = range(FIRST_SEED, FIRST_SEED + 8), []
    for name, agent, noise in (
        ("expert", "oracle-title", 0.0),
        ("expert, 30 % mistakes", "oracle-title", 0.3),
        ("buys the first hit", "first-hit", 0.0),
    ):
        # the same goals and actions; prices and caps of another worker
        by_seed = [play(panel.env_id, agent, noise, panel.task_ids, 1, {**made, "price_seed": seed}) for seed in seeds]
        won_GS, score_GS = (np.concatenate([one[part] for one in by_seed], axis=1) for part in (0, 1))
        changed = [100 * (values.min(axis=1) != values.max(axis=1)).mean() for values in (won_GS, score_GS)]
        rows.append(
            [
                name,
                *(low_high(100 * values.mean(axis=0)) for values in (won_GS, score_GS)),
                *(f"{share:.1f} %" for share in changed),
            ]
        )
    header = ["WebShop, 500 goals, price caps of 8 workers", "success, lowest to highest", "score, lowest to highest"]
    header += ["goals whose success changes", "goals whose score changes"]
    env = panel.make_env(**({"data": data} if data else {}))
    base = guard_of(env).base
    assert isinstance(base, WebShopEnv)
    count, order = len(base.shop.goals), base.shop.goals.order
    drawn = {task.task_id.partition("@")[0] for task in published_tasks(panel, env, workers=128, validations=1, seed=0)}
    held_out = len(drawn & set(panel.task_ids))
    # what a worker of training may draw: everything but the first 500 of its own order
    trained: set[int] = set()
    for worker in range(16):
        places = list(range(count))
        random.Random(worker).shuffle(places)
        trained |= set(places[500:])
    sides = [sides_of_caps(base.shop, int(task_id.rpartition("/")[2]), seeds) for task_id in panel.task_ids]
    leaked = sum(int(order[int(task_id.rpartition("/")[2])]) in trained for task_id in drawn)
    env.close()
    return table(header, rows) + (
        f"\nOf the products that the words of an instruction find, {100 * np.mean(sides):.1f} % are within the cap of "
        "some of these workers and above that of others.\n"
        f"\nOf {len(drawn)} goals that a validation with seed 0 draws among all {count:,} of the shop, {held_out} are "
        f"among the panel's 500, and {leaked} are training goals of at least one of the run's 16 training seeds.\n"
    )


def sides_of_caps(shop: Shop, goal: int, seeds: range) -> float:
    """Share of the products found by a goal's words that are within the cap of some workers, not of others."""
    draws = [shop.drawn_with(seed) for seed in seeds]
    found = shop.search(shop.goals[goal].request)
    within = [[one.price(asin) <= one.goals[goal].price_upper for one in draws] for asin in found]
    return float(np.mean([len(set(row)) > 1 for row in within])) if within else 0.0


def spread(values: Wins, *, signed: bool = False) -> str:
    """Mean and the range that holds 95 % of the values."""
    low, high = np.quantile(values, [0.025, 0.975])
    sign = "+z" if signed else ""
    return f"{values.mean():{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def low_high(values: Wins) -> str:
    """Lowest and highest."""
    return f"{values.min():.1f} to {values.max():.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)) + "\n"


if __name__ == "__main__":
    main()
