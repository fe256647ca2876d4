"""Algorithms by name: what an algorithm's file offers, and how it is found in this package or in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turngym.envs.common.plugins import find
from turngym.trainers.algorithm import Algorithm, Term
from turngym.trainers.config import ConfigError, DistillConfig, RunConfig
from turngym.trainers.losses.lm_loss import LmLoss, LmLossConfig

GROUP = "turngym.algorithms"
"""Entry points under which packages offer their `AlgorithmSpec`."""
Uses = Literal["teacher", "distill", "judge", "text", "expert", "noise"]
"""Groups of settings that only some algorithms use: `distill` and `text` (`lm_loss`) exist for those alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm may be built from beside its own configuration."""

    run: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lm_loss: LmLossConfig = field(default_factory=LmLossConfig)
    has_teacher: bool = False
    """Whether another model than the student can teach."""
    tokenizer: Any = None
    """The student's."""

    def text_term(self) -> Term:
        """The loss on pre-training text that `lm_loss` describes."""

        def encode(document: str) -> list[int]:
            return list(self.tokenizer.encode(document, add_special_tokens=False))

        run = self.run
        return LmLoss(self.lm_loss, encode, micro_tokens=run.micro_tokens, autocast=run.autocast != "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm as its file offers it: `ALGORITHM = AlgorithmSpec(name="mine", config=MyConfig, build=build)`."""

    name: str
    config: type[Any]
    """A frozen dataclass whose fields have defaults and a docstring each: they become `--mine.field`, and `[mine]` in
    configuration files."""
    build: Callable[[Any, BuildContext], Algorithm]
    """From such a configuration to the algorithm."""
    section: str = ""
    """Name of the settings, if not `name` (two algorithms may share them)."""
    uses: frozenset[Uses] = frozenset()
    """Which of the settings that not all algorithms use it reads."""

    @property
    def table(self) -> str:
        """Name of the settings' table, an identifier."""
        return (self.section or self.name).replace("-", "_")

    @property
    def help(self) -> str:
        """What the algorithm is, in a line."""
        return (self.config.__doc__ or "").strip().split("\n")[0]


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
