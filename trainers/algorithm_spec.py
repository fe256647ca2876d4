"""What an algorithm's file offers: its name, its settings, and how it is built from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from turngym.trainers.algorithm import Algorithm
from turngym.trainers.config import DistillConfig, LmLossConfig, RunConfig

Uses = Literal["teacher", "distill", "judge", "text", "expert", "noise", "reward", "shown"]
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
    env_id: str = ""
    """Gymnasium id of the environment that is played; empty where that is unknown."""


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
    about: str = ""
    """What the algorithm is, in a line, if not the first line of its configuration's docstring."""

    @property
    def table(self) -> str:
        """Name of the settings' table, an identifier."""
        return (self.section or self.name).replace("-", "_")

    @property
    def help(self) -> str:
        """What the algorithm is, in a line."""
        return self.about or (self.config.__doc__ or "").strip().split("\n")[0]
