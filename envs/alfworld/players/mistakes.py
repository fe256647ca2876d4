"""Plausible mistakes: the commands of a player that misremembers where things are and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from turngym.envs.alfworld.native.engine import NativeEngine


def plausible_mistake(engine: NativeEngine, rng: np.random.Generator) -> str:
    """A well-formed command about this house that may be impossible now; the goal's objects are named most often."""
    return _VERBS[int(rng.choice(len(_VERBS), p=_SHARES))](engine, rng)


def _go(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"go to {_pick(rng, engine.game.receptacle_names)}"


def _take(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"take {_thing(engine, rng)} from {_place(engine, rng)}"


def _move(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"move {_thing(engine, rng)} to {_place(engine, rng)}"


def _treat(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"{_pick(rng, ('clean', 'heat', 'cool'))} {_thing(engine, rng)} with {_place(engine, rng)}"


def _open(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"{_pick(rng, ('open', 'close'))} {_place(engine, rng)}"


def _use(engine: NativeEngine, rng: np.random.Generator) -> str:
    return f"use {_thing(engine, rng)}"


_SHARES = (0.35, 0.3, 0.1, 0.1, 0.1, 0.05)
_VERBS: tuple[Callable[[NativeEngine, np.random.Generator], str], ...] = (_go, _take, _move, _treat, _open, _use)


def _thing(engine: NativeEngine, rng: np.random.Generator) -> str:
    names, goal = engine.game.object_names, sorted(engine.problem.goal_objects)
    if goal and rng.random() < 0.5:
        return names[goal[int(rng.integers(len(goal)))]]
    return _pick(rng, names)


def _place(engine: NativeEngine, rng: np.random.Generator) -> str:
    names, here = engine.game.receptacle_names, engine.problem.receptacles_at[engine.state.location]
    if here and rng.random() < 0.6:
        return names[here[int(rng.integers(len(here)))]]
    return _pick(rng, names)


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]
