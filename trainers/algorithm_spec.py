"""How an algorithm is found by its name: what its file offers, and where those of this package are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from turngym.core.errors import SettingsError
from turngym.core.plugins import find
from turngym.core.spec import Spec
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.run_config import DistillConfig, LmLossConfig, RunConfig

Uses = Literal[
    "teacher",
    "distill",
    "judge",
    "scores",
    "text",
    "expert",
    "reward",
    "shown",
    "reference",
    "surrogate",
    "imitates",
    "form",
    "distills",
]
"""What only some algorithms have, and whose settings therefore exist for those alone:

    teacher     another model that teaches           distill    a loss between student and teacher (`DistillConfig`)
    judge       verdicts on turns                    text       pre-training text (`LmLossConfig`)
    scores      no hints are asked of the judge
    expert      the environment's expert             reward     what an episode is worth
    shown       demonstrations                       reference  the initial policy, to stay near it or to read hints
    surrogate   a probability ratio that is clipped  imitates   it plays no episodes of the student's, but an expert's
    form        a choice of the KL (`distill.form`)  distills   `targets.distillation`: all forms, either's support
"""
PLAYS = "plays"
"""The use of all algorithms that do not imitate: the student plays the episodes that it learns from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm may be built from beside its own configuration."""

    run: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lm_loss: LmLossConfig = field(default_factory=LmLossConfig)
    has_teacher: bool = False
    """Whether another model than the student can teach."""
    tokenizer: Any = None
    """The student's tokenizer."""
    env_id: str = ""
    """Gymnasium id of the environment that is played; empty where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm as its file offers it: `ALGORITHM = AlgorithmSpec(name="mine", config=MyConfig, build=build)`."""

    name: str
    config: type[Any]
    """A `Spec` whose fields have defaults and a docstring each: they become `--mine.field`, and `[mine]` in
    configuration files."""
    build: Callable[[Any, BuildContext], Algorithm]
    """Builds the algorithm from such a configuration."""
    section: str = ""
    """Name of the settings, if not `name` (two algorithms may share them)."""
    uses: frozenset[Uses] = frozenset()
    """What it has that not all algorithms have; settings of everything else do not exist for it."""
    about: str = ""
    """What the algorithm is, in a line, if not the first line of its configuration's docstring."""

    @property
    def reads(self) -> frozenset[str]:
        """Whose settings it reads: its `uses`, and `PLAYS` unless it imitates."""
        return self.uses if "imitates" in self.uses else self.uses | {PLAYS}

    @property
    def table(self) -> str:
        """Name of the settings' table, an identifier."""
        return (self.section or self.name).replace("-", "_")

    @property
    def help(self) -> str:
        """What the algorithm is, in a line."""
        return self.about or (self.config.__doc__ or "").strip().split("\n")[0]


# Algorithms by name: those of this package, and how those of another are found.

GROUP = "turngym.algorithms"
"""Entry points under which packages offer their `AlgorithmSpec`."""
_HERE, _CONTRIB = "turngym.trainers.algorithms", "turngym.trainers.contrib"
BUILT_IN: Mapping[str, str] = {
    "sft": f"{_HERE}.sft:ALGORITHM",
    "opd": f"{_HERE}.opd:ALGORITHM",
    "turnopd": f"{_HERE}.turnopd:ALGORITHM",
    "tcod": f"{_HERE}.tcod:ALGORITHM",
    "grpo": f"{_HERE}.grpo:ALGORITHM",
    "gigpo": f"{_HERE}.gigpo:ALGORITHM",
    "rloo": f"{_HERE}.rloo:ALGORITHM",
    "reinforce++": f"{_HERE}.reinforce_pp:ALGORITHM",
    "ppo": f"{_HERE}.ppo:ALGORITHM",
    "luffy": f"{_HERE}.luffy:ALGORITHM",
    "prm-rl": f"{_HERE}.prm_rl:ALGORITHM",
    "opd-hints": f"{_HERE}.opd_hints:ALGORITHM",
    "prm-opd": f"{_HERE}.prm_opd:ALGORITHM",
    "grpo-kd": f"{_HERE}.grpo_kd:ALGORITHM",
    "grpo-minillm": f"{_HERE}.grpo_kd:WITH_TEXT",
    "ppo-kd": f"{_HERE}.ppo_kd:ALGORITHM",
    "ppo-minillm": f"{_HERE}.ppo_kd:WITH_TEXT",
    "loopstop": f"{_CONTRIB}.loopstop:ALGORITHM",
    "guided-opd": f"{_CONTRIB}.guided_opd:ALGORITHM",
    "atod": f"{_CONTRIB}.atod:ALGORITHM",
    "sage-opd": f"{_CONTRIB}.sage_opd:ALGORITHM",
    "sod": f"{_CONTRIB}.sod:ALGORITHM",
    "grpo-opd": f"{_CONTRIB}.grpo_opd:ALGORITHM",
    "sdar": f"{_CONTRIB}.sdar:ALGORITHM",
    "rlsd": f"{_CONTRIB}.rlsd:ALGORITHM",
    "skill-sd": f"{_CONTRIB}.skill_sd:ALGORITHM",
    "opid": f"{_CONTRIB}.opid:ALGORITHM",
    "agent-opsd": f"{_CONTRIB}.agent_opsd:ALGORITHM",
}
"""The algorithms of this package, and where they are."""


def find_algorithm(name: str) -> AlgorithmSpec:
    """The algorithm that a built-in name, `package.module:name` or an entry point stands for.

    Raises PluginError for an unknown name, SettingsError for an object that is no AlgorithmSpec.
    """
    spec = find(GROUP, BUILT_IN.get(name, name), {}, known=BUILT_IN)
    if not isinstance(spec, AlgorithmSpec):
        raise SettingsError(f"algorithm {name!r} is {type(spec).__name__}; valid: an AlgorithmSpec (turngym.trainers)")
    valid_uses, uses = get_args(Uses), spec.uses
    if not isinstance(uses, frozenset) or not uses <= {*valid_uses}:
        raise SettingsError(f"algorithm {name!r}: its uses are {uses!r}; valid: a frozenset of {', '.join(valid_uses)}")
    for field_name, value, holds, valid in (
        ("name", spec.name, isinstance(spec.name, str), "a text"),
        (
            "config",
            spec.config,
            isinstance(spec.config, type) and issubclass(spec.config, Spec),
            "a Spec (turngym.core)",
        ),
        ("build", spec.build, callable(spec.build), "a function of its settings and a BuildContext"),
    ):
        if not holds:
            raise SettingsError(f"algorithm {name!r}: its {field_name} is {value!r}; valid: {valid}")
    return spec
