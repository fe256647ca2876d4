"""Steps per CPU second: through gym.make with the guard, through a bare session, through HTML as the original."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.webshop.env import ShopSession, WebShopEnv
from turngym.scripts.bench.webshop.peer import HtmlSession

if TYPE_CHECKING:
    from turngym.envs.webshop.shop import Shop
Step = tuple[str, float]
"""Observation and reward of one action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One episode to be played: a goal and the actions up to the purchase."""

    goal: int
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one way of stepping took."""

    steps: int
    seconds: float
    """CPU time, resets included."""
    seen: list[Step]

    @property
    def per_second(self) -> float:
        return self.steps / self.seconds


def make_scripts(shop: Shop, steps: int, seed: int) -> list[Script]:
    """Episodes with at least so many steps in all: half random clicks and searches, half the expert's way."""
    env, rng, found, total = WebShopEnv(shop=shop), np.random.default_rng(seed), [], 0
    while total < steps:
        goal = int(rng.integers(len(shop.goals)))
        env.reset(options={"task": f"{shop.profile.name}/{goal}"})
        actions: list[str] = []
        over = False
        while not over and len(actions) < 40:
            at_random = rng.random() < 0.5 and len(actions) < 12
            action = env.sample_action(rng) if at_random else env.expert_action()
            if action is None:
                break
            actions.append(action)
            over = env.step(action)[2]
        found.append(Script(goal=goal, actions=tuple(actions)))
        total += len(actions)
    env.close()
    return found


def mix_of(scripts: Sequence[Script]) -> dict[str, int]:
    """How many steps are searches, clicks and purchases."""
    actions = [action for script in scripts for action in script.actions]
    searches, bought = sum(a.startswith("search[") for a in actions), actions.count("click[buy now]")
    return {"searches": searches, "clicks": len(actions) - searches - bought, "purchases": bought}


def guarded(shop: Shop) -> Callable[[Script], list[Step]]:
    """`gym.make` with all wrappers that it puts on."""
    env = gym.make("turngym/WebShop-v0", shop=shop)
    profile = shop.profile.name

    def run(script: Script) -> list[Step]:
        env.reset(options={"task": f"{profile}/{script.goal}"})
        return [env.step(action)[:2] for action in script.actions]  # type: ignore[misc]

    return run


def bare(shop: Shop) -> Callable[[Script], list[Step]]:
    """A session without environment and guard."""
    session = ShopSession(shop)

    def run(script: Script) -> list[Step]:
        session.reset(script.goal)
        return [session.step(action)[:2] for action in script.actions]

    return run


def through_html(shop: Shop) -> Callable[[Script], list[Step]]:
    """The peer."""
    session = HtmlSession(shop)

    def run(script: Script) -> list[Step]:
        session.reset(script.goal)
        return [session.step(action)[:2] for action in script.actions]

    return run


def measure(run: Callable[[Script], list[Step]], scripts: Sequence[Script], keep: int) -> Rate:
    """CPU time of playing all scripts; the first `keep` steps are kept to be compared."""
    seen: list[Step] = []
    start = time.process_time()
    for script in scripts:
        steps = run(script)
        if len(seen) < keep:
            seen += steps
    return Rate(
        steps=sum(len(script.actions) for script in scripts), seconds=time.process_time() - start, seen=seen[:keep]
    )


def cost_of_more(shop: Shop, count: int, seed: int) -> float:
    """Bytes that the last tenth of `count` environments on one shop cost, each; all of them in mid-episode."""
    scripts = make_scripts(shop, 400, seed)[:24]
    envs: list[gym.Env[Any, Any]] = []

    def enter(number: int) -> None:
        script = scripts[number % len(scripts)]
        env = gym.make("turngym/WebShop-v0", shop=shop)
        env.reset(seed=number, options={"task": f"{shop.profile.name}/{script.goal}"})
        for action in script.actions[: 1 + number % max(len(script.actions) - 1, 1)][:-1]:
            env.step(action)
        envs.append(env)

    tracemalloc.start()
    # what they share (pages, products, best purchases) is there after the first ones
    last = max(count // 10, 1)
    for number in range(count - last):
        enter(number)
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count - last, count):
        enter(number)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for env in envs:
        env.close()
    return grown / last


def sessions_kept(shop: Shop, resets: int = 1500) -> tuple[int, float]:
    """(session ids that one session object remembers, bytes per id) after so many resets with a new id each."""
    session = ShopSession(shop)
    tracemalloc.start()
    for number in range(resets):
        session.reset(f"person {number}")
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return len(session._goals), used / resets
