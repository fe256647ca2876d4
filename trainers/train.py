"""From the settings of a run to its trainer, and the run itself: what `turngym train` and `train()` do."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import weights_hash
from turngym.envs.core.plugins import find_reward
from turngym.envs.core.protocols import Collect, Scorer
from turngym.envs.core.settings import FILE, read_toml, write_config
from turngym.trainers.algorithm import Algorithm, BuildContext, find_algorithm
from turngym.trainers.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.collecting import DatasetCollect
from turngym.trainers.config import ConfigError, RunConfig
from turngym.trainers.distributed import distribute_trainer, local_device, world_of
from turngym.trainers.judged import HINTING, JudgedCollect, UnreadVotes
from turngym.trainers.lora import add_adapters
from turngym.trainers.losses import bounded
from turngym.trainers.models import vocabulary_size
from turngym.trainers.progress import LiveProgress, NoProgress
from turngym.trainers.run_folder import as_begun, lock_run
from turngym.trainers.schedule import AsyncRollout, RolloutSchedule, Synchronous, WeightSnapshot, frozen_copy
from turngym.trainers.scorer import LocalScorer, ModelWeights, load_scorer, load_student
from turngym.trainers.targets import RewardedCollect
from turngym.trainers.train_config import (
    PlayedModel,
    Rollouts,
    StudentRun,
    TrainConfig,
    optional_parts,
    rollout_provider,
    train_config,
)
from turngym.trainers.train_loop import RunResult
from turngym.trainers.trainer import Trainer
from turngym.trainers.world import World, on_all_ranks


def run_training(
    config: TrainConfig, world: World, *, progress: bool = True, command: str | Sequence[str] = ()
) -> RunResult:
    """Build the trainer that `config` describes and train in `world`; the run's folder keeps `config` and `command`."""
    if world.size > 1:
        config = _checked_for_processes(config, world)
    with ExitStack() as opened:
        # before anything is loaded or started: servers write into the folder, too
        lock_run(config.models.out, world, opened)
        trainer = on_all_ranks(world, lambda: build_trainer(config, opened))
        # not yet: until the folder is open it may belong to another run
        trainer.locked = True
        trainer.on_start = lambda: _keep_config(config, command, trainer.players)
        if not progress:
            trainer.progress = NoProgress()
        shared: Trainer = distribute_trainer(trainer, world, shard_teacher=config.models.shard_teacher)
        return shared.train(resume=config.models.resume)


def _checked_for_processes(config: TrainConfig, world: World) -> TrainConfig:
    workers: Any = getattr(config.rollouts, "workers", None)
    if getattr(workers, "executor", "local") == "ray" and getattr(workers, "ray_address", None) is None:
        raise TurngymError(
            f"--executor ray with {world.size} training processes: each would start a Ray of its own; name the cluster "
            "with --ray-address (auto, HOST:PORT)"
        )
    if config.models.device == "auto":
        return replace(config, models=replace(config.models, device=local_device()))
    return config


def _keep_config(config: TrainConfig, command: str | Sequence[str], players: str) -> None:
    """A resumed run leaves the file of the run that it continues, unless it is to be longer."""
    models = config.models
    if models.resume:
        path = models.out / FILE
        if not path.exists() or read_toml(path).get("steps", config.run.steps) == config.run.steps:
            return
        config = replace(config, models=replace(models, resume=False))
    about = {"seed": config.run.seed, **({"players": players} if players else {})}
    write_config(models.out / FILE, config, command or None, **about)


def build_algorithm(config: TrainConfig, tokenizer: Any = None) -> Algorithm:
    """The algorithm that `config` names; algorithms that read text need the student's tokenizer."""
    distill, lm_loss = optional_parts(config)
    context = BuildContext(
        run=run_of(config),
        distill=distill,
        lm_loss=lm_loss,
        has_teacher=has_teacher(config),
        tokenizer=tokenizer,
        env_id=rollout_provider().env_id(config.rollouts),
    )
    algorithm = find_algorithm(config.algorithm).build(config.own, context)
    stale = bool(config.stale.staleness) or rollout_provider().has_traces(config.rollouts)
    return config.stale.corrected(bounded(algorithm, config.run.dual_clip, stale=stale))


def run_of(config: TrainConfig) -> RunConfig:
    """The settings of the run with its limit of turns filled in (as given, else the preset's, else 50); of a resumed
    one, with what it began with where that is not given."""
    run = as_begun(config.run, config.models.out) if config.models.resume else config.run
    turns = rollout_provider().max_turns(config.rollouts) if run.max_turns is None else run.max_turns
    return replace(run, max_turns=run.full_depth if turns is None else turns)


def has_teacher(config: TrainConfig) -> bool:
    """Whether another model than the student teaches."""
    return config.models.teacher is not None or rollout_provider().has_teacher(config.rollouts)


def build_trainer(config: TrainConfig, opened: ExitStack | None = None) -> Trainer:
    """Load models and environment and put the run together; nothing is written yet.

    What must be closed after the run (workers, connections) is put on `opened`.
    """
    return _Assembly.of(config, opened or ExitStack()).trainer()


@dataclass(slots=True, kw_only=True)
class _Assembly:
    """The parts of a run while they are put together."""

    config: TrainConfig
    algorithm: Algorithm
    model: Any
    tokenizer: Any
    actor: Any
    """The copy of the model that plays ahead; None where the student plays."""
    rollouts: Rollouts

    @classmethod
    def of(cls, config: TrainConfig, opened: ExitStack) -> _Assembly:
        models, run = config.models, run_of(config)
        if models.threads:
            torch.set_num_threads(models.threads)
        model, tokenizer = load_student(models.student, models.dtype, models.device)
        if config.lora.rank:
            add_adapters(model, config.lora, base=str(models.student), seed=run.seed)
        algorithm = build_algorithm(config, tokenizer)
        if algorithm.needs_teacher and not has_teacher(config):
            raise TurngymError(
                f"--algorithm {config.algorithm} distills from a teacher: name its folder with --teacher"
            )
        actor = frozen_copy(model) if config.stale.staleness else None
        words = None if actor is None else copy.deepcopy(tokenizer)  # another thread uses them
        about = StudentRun(
            folder=models.student,
            out=models.out,
            learner=PlayedModel(model=model, tokenizer=tokenizer, weights=ModelWeights(model)),
            actor=None if actor is None else PlayedModel(model=actor, tokenizer=words, weights=ModelWeights(actor)),
            teacher=models.teacher,
            seed=run.seed,
            episodes=run.steps * run.episodes,
            max_turns=run.full_depth,
            explicit_turns=config.run.max_turns is not None,
            device=models.device,
            reward=run.reward,
            collects=algorithm.collects,
            judge=algorithm.judge,
            hint_position=algorithm.hint_position,
        )
        rollouts = rollout_provider().open(config.rollouts, about)
        # at once: what fails from here on must not leave workers or servers running
        opened.callback(rollouts.close)
        if models.resume and list_checkpoints(models.out):
            # versions count the steps of the run, not of this process
            rollouts.learner_changed(read_state(latest_checkpoint(models.out))["step"])
        parts = {"model": model, "tokenizer": tokenizer, "actor": actor, "rollouts": rollouts}
        return cls(config=config, algorithm=algorithm, **parts)

    def trainer(self) -> Trainer:
        config, algorithm, rollouts = self.config, self.algorithm, self.rollouts
        evaluate = rollouts.evaluate
        teacher, vocab_size = self._teacher()
        reference = self._scorer(config.models.student, vocab_size) if algorithm.needs_reference else None

        def save_extra(folder: Path) -> None:
            self.tokenizer.save_pretrained(str(folder))
            rollouts.save_settings(folder)

        return Trainer(
            model=self.model,
            algorithm=algorithm,
            collect=self._rewarded(self._judged(self._collect(teacher))),
            out=config.models.out,
            run=run_of(config),
            optimizer=config.optimizer,
            teacher=teacher,
            reference=reference,
            evaluate=evaluate,
            on_update=rollouts.learner_changed,
            save_extra=save_extra,
            vocab_size=vocab_size,
            identity=self._identity(),
            progress=LiveProgress(config.algorithm, config.run.steps),
            order=self._order(),
            servers=rollouts.servers,
            players=rollouts.players,
        )

    def _teacher(self) -> tuple[Scorer | None, int | None]:
        """The teacher as a scorer, here or on servers, and the number of ids that it shares with the student."""
        if not self.algorithm.needs_teacher:
            return None, None
        served = self.rollouts.teacher(vocabulary_size(self.model), self.algorithm.distill_temperature)
        if served is not None:
            return served
        folder = self.config.models.teacher
        if folder is None:
            return None, None
        scorer = self._scorer(folder, None, student=(self.model, self.tokenizer))
        return scorer, scorer.vocab_size

    def _scorer(self, folder: Path, vocab_size: int | None, student: tuple[Any, Any] | None = None) -> LocalScorer:
        return load_scorer(
            folder,
            dtype=self.config.models.teacher_dtype,
            device=self.config.models.device,
            temperature=self.algorithm.distill_temperature,
            max_tokens=self.config.run.micro_tokens,
            vocab_size=vocab_size,
            student=student,
            shared_prefixes=self.algorithm.shared_prefixes,
            packing=run_of(self.config).packing,
        )

    def _collect(self, teacher: Scorer | None) -> Collect:
        algorithm, recorded = self.algorithm, self.rollouts.recorded()
        if recorded is None:
            partner = teacher.model if isinstance(teacher, LocalScorer) else None
            return self.rollouts.collect(partner, algorithm.teacher_mix, guided=algorithm.guide is not None)
        if algorithm.teacher_mix:
            raise ConfigError("teacher_mix is a way of playing: it cannot be used with --traces")
        return DatasetCollect(episodes=recorded, seed=self.config.run.seed, cut=algorithm.cut_recorded)

    def _judged(self, collect: Collect) -> Collect:
        """`collect` itself, or for the algorithms that learn from a judge its episodes with votes and hints."""
        kind, rollouts = self.algorithm.judge, self.rollouts
        if kind is None:
            return collect
        return JudgedCollect(
            collect=collect,
            judge=rollouts.judge(),
            kind=kind,
            next_role=rollouts.next_role,
            enhance=rollouts.add_hints if kind in HINTING else None,
            record=rollouts.keep_judged,
            unread=UnreadVotes(limit=rollouts.judge_unread),
        )

    def _rewarded(self, collect: Collect) -> Collect:
        """`collect` itself, or with the run's own reward in the place of the environment's return."""
        name, kind = self.config.run.reward, getattr(self.config.own, "reward", "return")
        if name is None:
            return collect
        if kind in ("success", "score"):
            raise ConfigError(
                f"--reward {name} takes the place of the return, but --{self.config.section.replace('_', '-')}.reward "
                f"is {kind}: leave one of them out"
            )
        return RewardedCollect(collect=collect, reward=find_reward(name))

    def _order(self) -> RolloutSchedule:
        if self.actor is None:
            return Synchronous()
        snapshot = WeightSnapshot(self.model, self.actor, self.rollouts.actor_changed)
        return AsyncRollout(
            staleness=self.config.stale.staleness,
            last=self.config.run.steps,
            snapshot=snapshot,
            cancel=self.rollouts.cancel,
        )

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share beside the algorithm, the run and the optimizer."""
        config, identity = self.config, dict(self.rollouts.identity)
        identity |= {"models.dtype": config.models.dtype, "models.teacher_dtype": config.models.teacher_dtype}
        if self.algorithm.needs_reference:
            identity["models.reference"] = weights_hash(config.models.student)
        if config.models.teacher is not None and self.algorithm.needs_teacher:
            # by content: folders may have moved when a run is resumed, or hold other weights under the same name
            identity["teacher"] = weights_hash(config.models.teacher)
        if config.lora.rank:
            # adapters are only right on the weights that they were trained on, so the student counts too
            adapters = {**asdict(config.lora), "targets": list(config.lora.targets)}
            identity |= {"lora": adapters, "student": weights_hash(config.models.student)}
        return identity


# Training from a script or notebook: `train("turnopd", student=..., teacher=..., out=..., env=..., steps=50)`.

DEFAULT = "turnopd"


def train(
    algorithm: str | None = None,
    *,
    config: Path | str | Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a student as `turngym train` does: same settings, defaults, progress and resumption.

    Args:
        algorithm: a name (`turnopd`), `package.module:NAME`, or an entry point of `turngym.algorithms`; by default the
            one that `config` names, else turnopd.
        config: a TOML file, or its content: settings that `settings` override. A run's own `config.toml` repeats it.
        progress: show a bar.
        settings: what `turngym train ALGORITHM --help` lists, under the same names with underscores: `student` and
            `out` must be given, `resume=True` goes on. A group (`optimizer`, the algorithm's own) is a dict or an
            object of its class. Where several processes train (`torchrun`), each of them calls this.

    Raises:
        SettingsError: a setting that does not exist, or has a value that it cannot have.
        TurngymError: models, environment or folder that do not fit.
    """
    table = dict(read_toml(config) if isinstance(config, str | Path) else config or {})
    named = algorithm or table.get("algorithm") or DEFAULT
    merged = _merged(table, settings) | {"algorithm": named}
    found = train_config(str(named), merged, f"train({named!r})")
    # settings are read before: a mistake in them is said at once, without waiting for other processes
    with world_of(timeout=found.models.process_timeout) as world:
        return run_training(found, world, progress=progress, command=_command(str(named), settings))


def _merged(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with `settings` on top; of two tables of one name the settings in them are merged."""
    merged = dict(table)
    for name, value in settings.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _command(algorithm: str, settings: Mapping[str, Any]) -> str:
    """The call as it stands in the run's provenance."""
    return f"train({', '.join([repr(algorithm), *(f'{name}={value!r}' for name, value in settings.items())])})"
