"""WebShop under the environment contract, on the generated shop and on a shop made for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from turngym.envs.guard import ActionGuard
from turngym.envs.testing import EnvContract


class WebShopContract(EnvContract):
    env_id = "turngym/WebShop-v0"

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        """Real searches instead of the template, and the expert's way now and then, so that episodes end."""
        if rng.random() < 0.4:
            return guard.expert_action() or "search[nothing]"
        return guard.base.sample_action(rng) or "search[nothing]"


class TestGenerated(WebShopContract):
    pass


class TestGeneratedSmallRich(WebShopContract):
    make_kwargs: ClassVar[Mapping[str, Any]] = {
        "profile": "embedded-small",
        "split": "eval",
        "observation_mode": "text_rich",
        "num_prev_obs": 1,
        "num_prev_actions": 2,
        "show_attributes": True,
        "oracle_query": "instruction",
    }
