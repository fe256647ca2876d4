"""Senseless actions: whatever text an agent writes, an environment answers and judges it; it never raises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from turngym.envs.core.task import Verdict
from turngym.scripts.bench.faults.tally import Tally

ENVIRONMENTS = {
    "turngym/ALFWorld-v0": {"config": "small"},
    "turngym/WebShop-v0": {},
    "turngym/Search-v0": {},
}
"""Arguments by id: all in generated worlds."""
BAD = ("raised", "wrong answer")
PIECES = (
    *("", " ", "\n", "\t", "\x00", "\ud800", "\u202e", "\ufb00", "\u0130", "go to", "search[", "click[", "take"),
    *("1e999", "-1", "[", "]", "{}", "<", ">", "%s", "${x}", "../", "None", "<action>", "</action>", "<tool_call>"),
)
"""Of what might be mistaken for syntax, or surprise who handles text."""


def fuzzed(actions: int, seed: int) -> Iterator[Tally]:
    """`actions` senseless actions in each environment, some of them damaged forms of possible ones."""
    for number, (name, kwargs) in enumerate(ENVIRONMENTS.items()):
        yield fuzz(name, kwargs, actions, np.random.default_rng([seed, number]))


def fuzz(name: str, kwargs: dict[str, Any], actions: int, rng: np.random.Generator) -> Tally:
    """One environment."""
    import turngym.envs  # noqa: F401 - registers the ids

    tally = Tally(what=f"senseless actions: {name}", bad=BAD)
    env = gym.make(name, disable_env_checker=True, **kwargs)
    done, info = True, dict[str, Any]()
    try:
        for _ in range(actions):
            if done:
                _, info = env.reset(seed=int(rng.integers(2**31)))
            action = senseless(rng, info.get("admissible_actions") or ("look",))
            try:
                observation, reward, terminated, truncated, info = env.step(action)
            except Exception as error:  # that is what is looked for
                tally.count("raised", f"{action!r:.80}: {type(error).__name__}: {error}")
                done = True
                continue
            done = terminated or truncated
            whole = isinstance(observation, str) and math.isfinite(reward) and info["verdict"] in list(Verdict)
            outcome = Verdict(info["verdict"]).value if whole else "wrong answer"
            tally.count(outcome, f"{action!r:.80}: {observation!r:.80}")
    finally:
        env.close()
    return tally


def senseless(rng: np.random.Generator, possible: Any) -> str:
    """Text of one of four sorts: pieces of syntax, random characters, a possible action damaged, very long."""
    sort = int(rng.integers(4))
    if sort == 0:
        return "".join(PIECES[place] for place in rng.integers(len(PIECES), size=int(rng.integers(1, 8))))
    if sort == 1:
        return "".join(chr(code) for code in rng.integers(0x110000, size=int(rng.integers(1, 40))))
    action = str(possible[int(rng.integers(len(possible)))])
    if sort == 2 and action:
        place = int(rng.integers(len(action)))
        return action[:place] + PIECES[int(rng.integers(len(PIECES)))] + action[place + int(rng.integers(2)) :]
    return action * int(rng.integers(1, 2000))
