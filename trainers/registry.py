"""Algorithms by name: those of this package, and how those of another are found."""

from __future__ import annotations

from collections.abc import Mapping

from turngym.envs.common.plugins import find
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.config import ConfigError

GROUP = "turngym.algorithms"
"""Entry points under which packages offer their `AlgorithmSpec`."""
_HERE = "turngym.trainers.algorithms"
BUILT_IN: Mapping[str, str] = {
    "sft": f"{_HERE}.sft:ALGORITHM",
    "opd": f"{_HERE}.opd:ALGORITHM",
    "turnopd": f"{_HERE}.turnopd:ALGORITHM",
    "tcod": f"{_HERE}.tcod:ALGORITHM",
    "grpo": f"{_HERE}.grpo:ALGORITHM",
    "luffy": f"{_HERE}.luffy:ALGORITHM",
    "prm-rl": f"{_HERE}.prm_rl:ALGORITHM",
    "opd-hints": f"{_HERE}.opd_hints:ALGORITHM",
    "prm-opd": f"{_HERE}.prm_opd:ALGORITHM",
    "guided-opd": f"{_HERE}.guided_opd:ALGORITHM",
    "atod": f"{_HERE}.atod:ALGORITHM",
    "sage-opd": f"{_HERE}.sage_opd:ALGORITHM",
    "grpo-opd": f"{_HERE}.grpo_opd:ALGORITHM",
    "grpo-kd": f"{_HERE}.grpo_kd:ALGORITHM",
    "grpo-minillm": f"{_HERE}.grpo_kd:WITH_TEXT",
    "ppo-kd": f"{_HERE}.ppo_kd:ALGORITHM",
    "ppo-minillm": f"{_HERE}.ppo_kd:WITH_TEXT",
}
"""The algorithms of this package, and where they are."""


def find_algorithm(name: str) -> AlgorithmSpec:
    """The algorithm that a built-in name, `package.module:name` or an entry point stands for.

    Raises PluginError for an unknown name, ConfigError for an object that is no AlgorithmSpec.
    """
    found = find(GROUP, BUILT_IN.get(name, name), {}, known=BUILT_IN)
    if not isinstance(found, AlgorithmSpec):
        raise ConfigError(f"algorithm {name!r} is {type(found).__name__}; valid: an AlgorithmSpec (turngym.trainers)")
    return found


def owners_of(table: str) -> list[str]:
    """Names of the built-in algorithms whose settings are called `table` (`grpo_kd`)."""
    return [name for name in BUILT_IN if find_algorithm(name).table == table]
