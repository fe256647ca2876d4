"""The embedded shop of the quickstart and its expert."""

from __future__ import annotations

import gymnasium as gym

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents.worlds import load_world
from turngym.envs.webshop.env import WebShopEnv

WORLD = load_world("webshop")


def test_the_expert_needs_half_of_the_turns_and_nothing_but_the_instruction():
    env = gym.make(WORLD.env_id, split=WORLD.split, max_turns=WORLD.max_turns, **WORLD.make)
    base = env.unwrapped
    assert isinstance(base, WebShopEnv)
    for task in base.task_ids()[:20]:
        env.reset(options={"task": task})
        words = set(base.goal.instruction_text.replace(",", "").split())
        turns, over = 0, False
        while not over:
            action = base.expert_action()
            assert action is not None
            if action.startswith("search["):
                assert set(action[len("search[") : -1].split()) <= words
            over = env.step(action)[2]
            turns += 1
        assert base.success
        assert turns <= WORLD.max_turns // 2
