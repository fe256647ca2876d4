"""ALFWorld as a Gymnasium environment: the contract, splits, options, errors."""

from __future__ import annotations

from turngym.envs.testing import EnvContract


class TestGenerated(EnvContract):
    env_id = "turngym/ALFWorld-v0"


class TestShuffledNumbers(EnvContract):
    env_id = "turngym/ALFWorld-v0"
    make_kwargs = {"domain_randomization": True, "config": "full"}
