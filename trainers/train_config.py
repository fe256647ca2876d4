"""All settings of a training run as one object: what the command line, TOML files and `train()` describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from turngym.envs.common.plugins import find
from turngym.envs.common.rollout_side import RolloutProvider
from turngym.envs.common.settings import FLAT, from_table
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.config import ConfigError, DistillConfig, LmLossConfig, OptimizerConfig, RunConfig
from turngym.trainers.models.lora import LoraConfig
from turngym.trainers.registry import BUILT_IN, find_algorithm, owners_of
from turngym.trainers.run.async_rollout import AsyncConfig

PROVIDER = "turngym.agents.training.provider:ROLLOUTS"
"""Who plays for trainers: found by name, since this room imports nothing of agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which models take part, where the run is kept, and what it computes on."""

    student: Path
    """Folder of the model to train, with its tokenizer (and `turngym.json`, if it has one)."""
    teacher: Path | None = None
    """Folder of the teacher; needed by every algorithm that distills, but not by opd-hints (there the student before
    training teaches)."""
    out: Path
    """Folder of the run: checkpoints, metrics.jsonl, tensorboard, evaluation traces."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, to the same numbers."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights; bfloat16 loses updates as small as the reference learning rate's."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the teacher's weights."""
    threads: int = 0
    """Threads of torch on the CPU; 0 leaves its default. Tiny models are fastest with 1."""
    shard_teacher: bool = False
    """Under torchrun: divide the weights of teacher and initial policy too; a process holds all of them only while it
    scores."""
    process_timeout: float = 120.0
    """Under torchrun: minutes that a process waits for another one (which plays, evaluates or saves)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run. `config_class` adds the settings of its algorithm and of whoever plays for it."""

    section: ClassVar[str] = ""
    """Name of the field with the algorithm's own settings."""
    algorithm: str
    models: ModelConfig = field(metadata=FLAT)
    run: RunConfig = field(default_factory=RunConfig, metadata=FLAT)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    stale: AsyncConfig = field(default_factory=AsyncConfig, metadata=FLAT)
    rollouts: Any = None
    """Settings of the provider of rollouts."""

    @property
    def own(self) -> Any:
        """The algorithm's own settings."""
        return getattr(self, self.section)


def optional_parts(config: Any) -> tuple[DistillConfig, LmLossConfig]:
    """The settings that only some algorithms have, or their defaults."""
    return getattr(config, "distill", None) or DistillConfig(), getattr(config, "lm_loss", None) or LmLossConfig()


def rollout_provider() -> RolloutProvider:
    """Who plays for `turngym train` and `train()`; who plays otherwise builds a `Trainer` with its own `collect`."""
    found: RolloutProvider = find("rollouts", PROVIDER, {})
    return found


# settings made from two classes of the same algorithm would never be equal
@cache
def config_class(algorithm: str) -> type[TrainConfig]:
    """The class of all settings of a run with `algorithm`; an error for an unknown one."""
    spec, provider = find_algorithm(algorithm), rollout_provider()
    parts: list[tuple[str, type[Any], Any]] = [(spec.table, spec.config, field(default_factory=spec.config))]
    if "distill" in spec.uses:
        parts.append(("distill", DistillConfig, field(default_factory=DistillConfig)))
    if "text" in spec.uses:
        parts.append(("lm_loss", LmLossConfig, field(default_factory=LmLossConfig)))
    parts.append(("rollouts", provider.config, field(default_factory=provider.config, metadata=FLAT)))
    _check_table(spec)
    made = make_dataclass(
        "TrainConfig",
        parts,
        bases=(TrainConfig,),
        namespace={"section": spec.table, "__module__": __name__},
        frozen=True,
        slots=True,
        kw_only=True,
    )
    made.__doc__ = f"A training run with {spec.name}."
    return made


def _check_table(spec: AlgorithmSpec) -> None:
    taken = {*TrainConfig.__dataclass_fields__, "distill", "lm_loss", "rollouts"}
    if spec.table in taken or not spec.table.isidentifier():
        raise ConfigError(
            f"algorithm {spec.name!r}: its settings cannot be called {spec.table!r}; valid: a name other than "
            f"{', '.join(sorted(taken))} (AlgorithmSpec.section)"
        )


def train_config(algorithm: str, table: Mapping[str, Any], where: str, **more: Any) -> TrainConfig:
    """Settings from a nested table (keywords, or a TOML file); `more` is that of `from_table`. Raises SettingsError."""
    cls = config_class(algorithm)
    return from_table(cls, {"algorithm": algorithm, **table}, where, hint=foreign_tables(cls), **more)


def foreign_tables(cls: type[TrainConfig]) -> dict[str, str]:
    """Settings of other algorithms than that of `cls`: table -> whose it is, in words."""
    found: dict[str, str] = {}
    for name in BUILT_IN:
        table = find_algorithm(name).table
        if table not in cls.__dataclass_fields__ and table not in found:
            found[table] = f"It belongs to {', '.join(owners_of(table))}."
    for table, use in (("distill", "distill"), ("lm_loss", "text")):
        if table not in cls.__dataclass_fields__:
            users = [name for name in BUILT_IN if use in find_algorithm(name).uses]
            found[table] = f"It belongs to {', '.join(users)}."
    return found
