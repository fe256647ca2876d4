"""Train a student: supervised fine-tuning, on-policy distillation, TurnOPD, TCOD, GRPO or LUFFY.

Examples:
    turngym train --algorithm turnopd --student models/student --teacher models/teacher --out runs/turnopd
    turngym train --algorithm sft --student models/base --expert searching --noise 0 0.5 --out runs/sft
    turngym train --algorithm turnopd --student S --teacher T --out runs/turnopd --resume
    torchrun --nproc-per-node 8 -m turngym.scripts.main train --algorithm turnopd ... (docs/distributed.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from turngym.agents.executor.open_workers import WorkerOptions, open_workers
from turngym.agents.judges.make_judge import JudgeOptions
from turngym.agents.sglang.options import TrainServers
from turngym.envs.core import TurngymError

try:
    from turngym.trainers.algorithms.grpo import GrpoConfig
    from turngym.trainers.algorithms.grpo_kd import GrpoKdConfig
    from turngym.trainers.algorithms.luffy import LuffyConfig
    from turngym.trainers.algorithms.opd import OpdConfig
    from turngym.trainers.algorithms.opd_hints import OpdHintsConfig
    from turngym.trainers.algorithms.ppo_kd import PpoKdConfig
    from turngym.trainers.algorithms.prm_rl import PrmRlConfig
    from turngym.trainers.algorithms.sft import SftConfig
    from turngym.trainers.algorithms.tcod import TcodConfig
    from turngym.trainers.algorithms.turnopd import TurnOpdConfig
    from turngym.trainers.config import DistillConfig, OptimizerConfig, RunConfig
    from turngym.trainers.distributed.run import divided
    from turngym.trainers.distributed.world import World, on_all_ranks
    from turngym.trainers.losses.lm_loss import LmLossConfig
    from turngym.trainers.models.lora import LoraConfig
    from turngym.trainers.run.async_rollout import AsyncConfig
    from turngym.trainers.trainer import RunResult, Trainer
except ImportError as error:
    raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error


Name = Literal[
    "sft",
    "opd",
    "turnopd",
    "tcod",
    "grpo",
    "luffy",
    "prm-rl",
    "opd-hints",
    "grpo-kd",
    "grpo-minillm",
    "ppo-kd",
    "ppo-minillm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of `turngym train`; the defaults are the reference configuration (TurnOPD, Table 7)."""

    student: Path
    """Folder of the model to train, with its tokenizer (and `turngym.json`, if it has one)."""
    out: Path
    """Folder of the run: checkpoints, metrics.jsonl, tensorboard, evaluation traces."""
    algorithm: Name = "turnopd"
    """What is trained, and how."""
    teacher: Path | None = None
    """Folder of the teacher; needed by every algorithm that distils, but not by opd-hints (there the student before
    training teaches)."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, to the same numbers."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id of the environment."""
    split: str = "generated"
    """Split to train on."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    make: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"config": "small", "on_invalid": "noop"}'."""
    panel: str | None = None
    """Panel to evaluate on; its tasks are never trained on. Without one nothing is evaluated."""
    eval_samples: int = 4
    """Episodes per task of an evaluation (Avg@n)."""
    eval_temperature: float = 0.85
    """Sampling temperature of evaluations."""
    eval_limit: int | None = None
    """Evaluate on the first so many tasks of the panel only."""
    traces: tuple[Path, ...] = ()
    """Train on these recorded episodes instead of playing: sft imitates them; the others take them as rollouts, cut at
    the depth cap, attempts at one task as a group (not tcod b2f, which replays an expert in the environment)."""
    expert: str = "expert"
    """sft, tcod b2f and luffy: who demonstrates; --judge expert: who is asked. `searching` knows only what it has
    seen."""
    noise: tuple[float, float] = (0.0, 0.0)
    """sft: share of random actions in an episode, drawn from this range; they are never imitated."""
    mistakes: float = 0.0
    """sft: share of those random actions that are plausible mistakes, possible or not, instead of admissible ones."""
    hints: float = 0.0
    """sft: share of observations that carry the expert's next action as a hint, in the words of --judge expert. A model
    can only teach by hints (opd-hints) what it has learned to read."""
    slots: int = 64
    """Episodes played, and requests generated, at a time."""
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
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    turnopd: TurnOpdConfig = field(default_factory=TurnOpdConfig)
    tcod: TcodConfig = field(default_factory=TcodConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    luffy: LuffyConfig = field(default_factory=LuffyConfig)
    grpo_kd: GrpoKdConfig = field(default_factory=GrpoKdConfig)
    ppo_kd: PpoKdConfig = field(default_factory=PpoKdConfig)
    prm_rl: PrmRlConfig = field(default_factory=PrmRlConfig)
    opd_hints: OpdHintsConfig = field(default_factory=OpdHintsConfig)
    judging: Annotated[JudgeOptions, tyro.conf.arg(name="")] = field(default_factory=JudgeOptions)
    lm_loss: LmLossConfig = field(default_factory=LmLossConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    servers: Annotated[TrainServers, tyro.conf.arg(name="")] = field(default_factory=TrainServers)
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    stale: Annotated[AsyncConfig, tyro.conf.arg(name="")] = field(default_factory=AsyncConfig)


def main(argv: Sequence[str]) -> int:
    """Run `turngym train` with `argv` (without the verb itself); under `torchrun` as one of several processes."""
    from turngym.trainers.distributed.processes import world_of

    options = parse(argv)
    with world_of(timeout=options.process_timeout) as world:
        result = run(options, world)
        if world.rank == 0:
            print(f"{result.step} steps in {result.train_seconds:.0f} s of training; model in {result.model}")
    return 0


def run(options: Options, world: World) -> RunResult:
    """Build the trainer that `options` describe and train in `world`."""
    from turngym.scripts.train_build import build_trainer
    from turngym.trainers.distributed.processes import local_device

    if world.size > 1 and options.stale.staleness:
        raise TurngymError(
            f"--staleness {options.stale.staleness} with {world.size} training processes: playing ahead needs one "
            "training process; leave staleness at 0"
        )
    if world.size > 1 and options.workers.workers:
        raise TurngymError(
            f"--workers {options.workers.workers} with {world.size} training processes: each of them plays its share "
            "of the episodes itself; leave out --workers"
        )
    if world.size > 1 and options.device == "auto":
        options = replace(options, device=local_device())
    with open_workers(options.workers) as play:
        trainer: Trainer = divided(
            on_all_ranks(world, lambda: build_trainer(options, play)), world, shard_teacher=options.shard_teacher
        )
        return trainer.train(resume=options.resume)


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line; a setting outside its range is explained, and the exit status is 2."""
    return tyro.cli(Options, args=list(argv), prog="turngym train", description=(__doc__ or "").split("\n")[0])
