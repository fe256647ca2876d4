"""A training run put together: what `train.build_trainer` builds, and how its folder is opened before the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turngym.agents.sglang.weights import SyncedPolicy
from turngym.envs.core.protocols import EvalPoint, RolloutSource, Scorer
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.checkpoint import MODEL
from turngym.trainers.config import OptimizerConfig, RunConfig, fingerprint
from turngym.trainers.critic import ValueCritic
from turngym.trainers.distributed import NullMetricsLog
from turngym.trainers.metrics import MetricsLog, check_trackers
from turngym.trainers.microbatch import resolved
from turngym.trainers.optimizer_step import make_optimizer
from turngym.trainers.progress import NoProgress, Progress
from turngym.trainers.run_folder import RunFolder, lock_run, with_saved_settings
from turngym.trainers.schedule import RolloutSchedule, Synchronous
from turngym.trainers.scorer import in_turn, reference_refresh
from turngym.trainers.train_loop import Interrupts, RunResult, TrainError, TrainLoop
from turngym.trainers.world import SINGLE, World


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Runs one algorithm on one student. It knows no environment: episodes, scores and evaluations come from callables.

    The same configuration and seed give the same numbers, however often the run was killed and resumed, as long as
    `collect` and `evaluate` depend on their arguments and on the student's weights alone.
    """

    model: Any
    algorithm: Algorithm
    collect: RolloutSource
    out: Path
    run: RunConfig = field(default_factory=RunConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    teacher: Scorer | None = None
    """Scores at the algorithm's distillation temperature."""
    reference: Scorer | None = None
    """The frozen initial policy, for algorithms that stay near it."""
    evaluate: Callable[[int], EvalPoint] | None = None
    """Called with the step; 0 is before training."""
    on_update: Callable[[int], None] | None = None
    """Called after the student's weights have changed, with the step (tell an engine its policy version)."""
    on_start: Callable[[], None] | None = None
    """Called once the run's folder is open, before step 1; of several processes, in the first."""
    save_extra: Callable[[Path], None] | None = None
    """Adds files to each saved model folder (a tokenizer)."""
    vocab_size: int | None = None
    """Ids that teacher and student share, when their padding differs."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that a resumed run must share (environment, split, teacher)."""
    progress: Progress = field(default_factory=NoProgress)
    order: RolloutSchedule = field(default_factory=Synchronous)
    """Whether batches are played in their step or ahead of it."""
    servers: SyncedPolicy | None = None
    """Engine servers that play with the student's weights; of several processes one sends them."""
    players: str = ""
    """Who plays the episodes, in words, for the run's settings."""
    world: World = SINGLE
    """The processes of the run; more than one are set up by `distributed.distribute_trainer`."""
    locked: bool = False
    """The caller has locked `out` for this run already."""

    def train(self, *, resume: bool = False) -> RunResult:
        """Run until `run.steps`; Ctrl-C saves, then raises KeyboardInterrupt. Never overwrites another run.

        Raises FolderInUseError where another process trains into `out`, and what `RunFolder.open` raises.
        """
        # a run that was begun with padded rows must not go on with packed ones: sums would round otherwise
        made = replace(self, run=with_saved_settings(self.run, self.out)) if resume else self
        made._check()
        with ExitStack() as held:
            if not made.locked:
                lock_run(made.out, made.world, held)
            return made._train(resume)

    def _train(self, resume: bool) -> RunResult:
        run = replace(self.run, packing=resolved(self.run.packing, self.model))
        refresh = reference_refresh(self.run.reference_every, self.reference, self.model, self.world)
        critic = self._critic()  # it may copy the policy: before that is divided
        self.world.shard(self.model)
        # after sharding, which replaces the model's parameters
        optimizer = make_optimizer(self.model, self.optimizer)
        folder = RunFolder(
            path=self.out,
            model=self.model,
            optimizer=optimizer,
            fingerprint=self._fingerprint(),
            config=self.run,
            save_extra=self.save_extra,
            critic=critic,
            world=self.world,
            order=self.order,
            refresh=refresh,
            fixed_end=self._fixed_end(),
        )
        state = folder.open(resume=resume, depth=self.algorithm.depth.start())
        if self.on_start is not None and not self.world.rank:
            self.on_start()
        log = NullMetricsLog() if self.world.rank else self._log()
        # before anything is written: sinks and rows go on from the checkpoint, not from where the killed run was
        log.truncate(state.step, state.evaluated)
        log.open(state.step)
        # once the student's new weights are announced
        on_update = self.on_update if refresh is None else in_turn(self.on_update, refresh.after)
        loop = TrainLoop(replace(self, on_update=on_update, run=run), optimizer, folder, log, state, critic)
        try:
            with Interrupts(self.world) as interrupts, self.progress:
                loop.run(interrupts)
        finally:
            self.order.close()
            log.close()
        model = folder.latest() / MODEL
        return RunResult(step=loop.state.step, model=model, train_seconds=loop.state.train_seconds)

    def _log(self) -> MetricsLog:
        run = self.run
        return MetricsLog(self.out, tensorboard=run.tensorboard, others=run.trackers, project=run.log_project)

    def _check(self) -> None:
        check_trackers(self.run.trackers)
        if self.algorithm.needs_teacher and self.teacher is None:
            raise TrainError(f"algorithm {self.algorithm.name} needs a teacher; none was given")
        if self.algorithm.needs_reference and self.reference is None:
            raise TrainError(f"algorithm {self.algorithm.name} needs the initial policy as reference; none was given")
        if self.run.episodes % self.algorithm.group:
            raise TrainError(
                f"{self.run.episodes} episodes per step are not whole groups of {self.algorithm.group}; "
                "take a multiple of the group size"
            )
        resolved(self.run.packing, self.model)

    def _critic(self) -> ValueCritic | None:
        config = self.algorithm.critic
        if config is None:
            return None
        return ValueCritic(
            self.model,
            config,
            micro_tokens=self.run.micro_tokens,
            autocast=self.run.autocast != "off",
            gradient_checkpointing=self.run.gradient_checkpointing,
            seed=self.run.seed,
            world=self.world,
        )

    def _fixed_end(self) -> str:
        """Why the steps done depend on how many there will be; "" where they do not, so that a run can be extended."""
        if self.optimizer.schedule != "constant":
            schedule = self.optimizer.schedule
            return f"its learning rate reaches zero at its last step (--optimizer.schedule {schedule})"
        if self.algorithm.to_the_end:
            return f"{self.algorithm.name} changes with the share of the run that is done"
        # what does not say may read the number of steps
        if getattr(self.algorithm.weight, "to_the_end", True):
            return f"the weights of {self.algorithm.name} change with the share of the run that is done"
        if not isinstance(self.order, Synchronous):
            return "batches are played ahead, and those behind its end were not"
        return ""

    def _fingerprint(self) -> dict[str, Any]:
        run = replace(self.run, max_turns=self.run.full_depth)
        return {
            "algorithm": self.algorithm.name,
            **{f"algorithm.{name}": value for name, value in self.algorithm.settings.items()},
            **{f"run.{name}": value for name, value in fingerprint(run).items()},
            **{f"optimizer.{name}": value for name, value in fingerprint(self.optimizer).items()},
            **self.identity,
        }
