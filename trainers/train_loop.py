"""How a run goes: `Trainer` holds what a run consists of, `TrainLoop` plays, scores, learns and measures step by step.

In a run of several processes each has a loop of its own, and all take the same steps.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch.optim import Optimizer

from turngym.core.disk_space import at_once
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError, full_disk
from turngym.core.protocols import EvalPoint, RolloutSource, Scorer
from turngym.core.redaction import redacted
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.signals import on_signals
from turngym.core.spec import changed
from turngym.trainers import step_metrics
from turngym.trainers.algorithm import Algorithm, DepthPlan, Scorers
from turngym.trainers.batch import EmptyBatchError, RolloutBatch, pack
from turngym.trainers.checked_parts import calling, checked_targets, selected, with_own_numbers
from turngym.trainers.checkpoint import latest_model, resume_hint
from turngym.trainers.critic import ValueCritic
from turngym.trainers.judged_episodes import judge_row
from turngym.trainers.metrics import MetricsLog, check_tracker, iter_metrics
from turngym.trainers.microbatch import packing_for
from turngym.trainers.models import recomputing
from turngym.trainers.optimizer_step import Forward, RunStep, make_optimizer, run_epochs
from turngym.trainers.progress import Progress
from turngym.trainers.ranks import SINGLE, Ranks, on_all_ranks
from turngym.trainers.rollout_order import AsyncRollout, Planned, RolloutSchedule
from turngym.trainers.run_config import OptimizerConfig, RunConfig, tables_of
from turngym.trainers.run_folder import RunFolder, RunState, lock_run, with_saved_settings
from turngym.trainers.scorer import LocalScorer, reference_refresh, shared_scorer

if TYPE_CHECKING:
    from turngym.agents.servers.weights import SyncedPolicy

# Where the time of a step goes: wall clock and CPU seconds of this process, phase by phase.

PHASES = ("rollout", "teacher", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A point in time on both clocks, seconds; only differences mean something."""

    wall: float
    cpu: float
    """CPU seconds of all threads of this process; workers and servers have their own."""

    @classmethod
    def now(cls) -> ClockReading:
        return cls(wall=time.perf_counter(), cpu=time.process_time())


def phase_row(moments: Sequence[ClockReading]) -> dict[str, float]:
    """Seconds of each phase of a step, from its beginning and the ends of its three phases."""
    row: dict[str, float] = {}
    for name, begin, end in zip(PHASES, moments[:-1], moments[1:], strict=True):
        row[f"time/{name}_s"] = end.wall - begin.wall
        row[f"time/{name}_cpu_s"] = end.cpu - begin.cpu
    return row


class TrainError(TurngymError):
    """A run that cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Where a run ended."""

    step: int
    model: Path
    """Folder of the newest saved model."""
    train_seconds: float
    """Seconds of training, evaluations excluded."""


def check_ids(batch: RolloutBatch, vocab_size: int | None) -> None:
    """Raises TrainError for a token that is trained on and that is not scored: only the first `vocab_size` ids are.

    Engines draw no others, and traces with others are not read.
    """
    if vocab_size is not None and np.any(batch.label_N >= vocab_size):
        raise TrainError(
            f"id {batch.label_N.max()} is trained on, and teacher and student share the first {vocab_size} alone: it "
            "lies in the padding of the student's head, which no tokenizer names"
        )


def check_groups(algorithm: Algorithm, episodes: int) -> None:
    """Raises TrainError where a step's episodes are not whole groups of the algorithm's size."""
    if episodes % algorithm.group:
        raise TrainError(
            f"{episodes} episodes per step are not whole groups of {algorithm.group}; take a multiple of the group size"
        )


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Runs one algorithm on one student. It knows no environment: episodes, scores and evaluations come from callables.

    The same configuration and seed give the same numbers, however often the run was killed and resumed, as long as
    `source` and `evaluate` depend on their arguments and on the student's weights alone.
    """

    model: Any
    algorithm: Algorithm
    source: RolloutSource
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
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings as a table, which a resumed run must share; by default algorithm, run and optimizer."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Path in `spec` -> hash of the file, the code or the model that it names; it is compared instead of the name."""
    progress: Progress = field(default_factory=Progress)
    order: RolloutSchedule = field(default_factory=RolloutSchedule)
    """Whether batches are played in their step or ahead of it."""
    servers: SyncedPolicy | None = None
    """Engine servers that play with the student's weights; of several processes one sends them."""
    players: str = ""
    """Who plays the episodes, in words, for the run's settings."""
    ranks: Ranks = SINGLE
    """The processes of the run; more than one are set up by `distributed.distribute_trainer`."""
    locked: bool = False
    """The caller has locked `out` for this run already."""
    writing: Callable[[Callable[[], Any]], Any] = at_once
    """Calls what writes a checkpoint or a row. By default a full disk ends the run; a server waits (`RoomToWrite`)."""

    def train(self, *, resume: bool = False) -> RunResult:
        """Run until `run.steps`; Ctrl-C saves, then raises KeyboardInterrupt. Never overwrites another run.

        Raises FolderInUseError where another process trains into `out`, and what `RunFolder.open` raises.
        """
        # a run that was begun with padded rows must not go on with packed ones: sums would round otherwise
        trainer = replace(self, run=with_saved_settings(self.run, self.out)) if resume else self
        trainer._check()
        with ExitStack() as stack:
            if not trainer.locked:
                lock_run(trainer.out, trainer.ranks, stack)
            return trainer._train(resume)

    def _train(self, resume: bool) -> RunResult:
        # what is left open is filled in, for the loop and for those who go on with the run
        run = changed(self.run, packing=packing_for(self.run.packing, self.model), micro_tokens=self.run.pass_tokens)
        refresh = reference_refresh(run.reference, self.reference, self.model, self.ranks)
        critic = self._critic()  # it may copy the policy: before that is divided
        self.ranks.shard(self.model)
        # after sharding, which replaces the model's parameters
        optimizer = make_optimizer(self.model, self.optimizer)
        folder = RunFolder(
            path=self.out,
            model=self.model,
            optimizer=optimizer,
            spec=self._spec(run),
            contents=self.contents,
            config=self.run,
            save_extra=self.save_extra,
            critic=critic,
            ranks=self.ranks,
            order=self.order,
            refresh=refresh,
            fixed_end=self._fixed_end(),
            writing=self.writing,
        )
        with calling(self.algorithm, "depth"):
            depth = self.algorithm.depth.start()
        state = folder.open(resume=resume, depth=depth)
        if self.on_start is not None and not self.ranks.rank:
            self.on_start()
        log = None
        if not self.ranks.rank:
            log = MetricsLog(self.out, tracker=run.tracker, writing=self.writing)
            # before anything is written: sinks and rows go on from the checkpoint, not from where the killed run was
            log.truncate(state.step, state.evaluated)
            log.open(state.step)
        loop = TrainLoop(replace(self, run=run), optimizer, folder, log, state, critic)
        try:
            with Interrupts(self.ranks) as interrupts, self.progress:
                loop.run(interrupts)
        finally:
            self.order.close()
            if log is not None:
                log.close()
        return RunResult(step=loop.state.step, model=latest_model(self.out), train_seconds=loop.state.train_seconds)

    def _check(self) -> None:
        check_tracker(self.run.tracker)
        if self.algorithm.needs_teacher and self.teacher is None:
            raise TrainError(f"algorithm {self.algorithm.name} needs a teacher; none was given")
        if self.algorithm.needs_reference and self.reference is None:
            raise TrainError(f"algorithm {self.algorithm.name} needs the initial policy as reference; none was given")
        check_groups(self.algorithm, self.run.episodes)
        if self.algorithm.refill and isinstance(self.order, AsyncRollout):
            raise TrainError("refill plays further tasks once a step's groups are known: it cannot be played ahead")
        packing_for(self.run.packing, self.model)
        if self.run.gradient_checkpointing:
            # a family that cannot recompute is told before anything is played
            with recomputing(self.model, True):
                pass

    def _critic(self) -> ValueCritic | None:
        config = self.algorithm.critic
        if config is None:
            return None
        return ValueCritic(
            self.model,
            config,
            micro_tokens=self.run.pass_tokens,
            autocast=self.run.autocast != "off",
            gradient_checkpointing=self.run.gradient_checkpointing,
            seed=self.run.seed,
            ranks=self.ranks,
        )

    def _fixed_end(self) -> str:
        """Says why the steps done depend on the number of steps; "" if they do not, so that the run can be extended."""
        if (schedule := self.optimizer.schedule) != "constant":
            return f"its learning rate reaches zero at its last step (--optimizer.schedule {schedule})"
        if self.algorithm.to_the_end:
            return f"{self.algorithm.name} changes with the share of the run that is done"
        if self.algorithm.weight.to_the_end:
            return f"the weights of {self.algorithm.name} change with the share of the run that is done"
        if isinstance(self.order, AsyncRollout):
            return "batches are played ahead, and those behind its end were not"
        return ""

    def _spec(self, run: RunConfig) -> dict[str, Any]:
        """The settings of the run, with those of the loop as they are in `run`."""
        algorithm = {"name": self.algorithm.name, **self.algorithm.settings}
        loop, optimizer = tables_of(run, self.optimizer).values()
        spec = dict(self.spec or {"algorithm": algorithm, "run": loop, "optimizer": optimizer})
        spec["run"] = {name: loop[name] for name in spec["run"]}
        # as a checkpoint gives it back
        read_back: dict[str, Any] = json.loads(json.dumps(redacted(spec)))
        return read_back


@dataclass(slots=True)
class TrainLoop:
    """The state of a run that is under way."""

    trainer: Trainer
    optimizer: Optimizer
    folder: RunFolder
    log: MetricsLog | None
    """None on all ranks but 0."""
    state: RunState
    critic: ValueCritic | None

    def run(self, interrupts: Interrupts) -> None:
        trainer, total = self.trainer, self.trainer.run.steps
        trainer.progress.begin(self.state.step)
        if self.state.step and self.log is not None:
            rows = (row for row in iter_metrics(trainer.out) if row["kind"] == "eval" and row["step"] == 0)
            if (first := next(rows, None)) is not None:
                trainer.progress.started_at(first)
        try:
            self._maybe_evaluate()
            while self.state.step < total:
                # not protected: playing changes nothing, so Ctrl-C may break it off at once
                collected = self._collect()
                with interrupts.protected():
                    self._step(*collected)
                    trainer.order.learned(self.state.step)
                self._maybe_evaluate()
                every = trainer.run.checkpoint_every
                if self.state.step == total or (every and self.state.step % every == 0):
                    with interrupts.protected():
                        self._save()
        except KeyboardInterrupt:
            with interrupts.protected():
                self._save()
            raise
        # a run that was interrupted in its last evaluation has no step left that would save it
        self._save(ended=True)

    def _save(self, *, ended: bool = False) -> None:
        self.folder.save(self.state)
        step = self.state.step
        on_all_ranks(self.trainer.ranks, lambda: None if self.log is None else self.log.saved(step, ended=ended))

    def _planned(self, step: int) -> Planned:
        """Returns what to play for `step`, as far as that is known now."""
        run, algorithm = self.trainer.run, self.trainer.algorithm
        with calling(algorithm, "depth"):
            plan = algorithm.depth.plan(self.state.depth, step)
        # at least one episode of a probe is measured
        short = min(round(plan.short_share * run.episodes), run.episodes - 1)
        play_plan = PlayPlan(
            short_episodes=short,
            short_turns=plan.adaptive_cap if short else None,
            leave_loops=round(plan.loop_share * run.episodes),
            demonstration_turns=plan.demonstration_turns,
            prefix_ratios=() if algorithm.prefix is None else algorithm.prefix(step, run.episodes // algorithm.group),
            prefix_unit=algorithm.prefix_unit,
            teacher_turns=0.0 if algorithm.guide is None else algorithm.guide(step),
            states=algorithm.states,
        )
        request = RolloutRequest(
            step=step,
            episodes=run.episodes,
            group=algorithm.group,
            max_turns=plan.cap,
            temperature=run.temperature,
            plan=play_plan,
        )
        return Planned(plan=plan, request=request)

    def _collect(self) -> tuple[ClockReading, DepthPlan, list[Episode]]:
        trainer, step = self.trainer, self.state.step + 1
        trainer.progress.phase("rollout")
        start = ClockReading.now()
        planned, episodes = trainer.order(step, self._planned, trainer.source)
        if all(episode.status.is_error for episode in episodes):
            first = episodes[0].meta.get("error", episodes[0].status) if episodes else "the source returned none"
            raise TrainError(f"step {step}: all {len(episodes)} episodes failed; the first: {first}")
        return start, planned.plan, self._refilled(planned.request, episodes)

    def _refilled(self, request: RolloutRequest, episodes: list[Episode]) -> list[Episode]:
        """Returns `episodes`, and those of further tasks as long as `select` leaves less groups than were asked for."""
        algorithm, groups = self.trainer.algorithm, request.episodes // request.group
        for round_number in range(1, algorithm.refill + 1):
            chosen = selected(algorithm, episodes)
            if algorithm.select is None or len({episode.group for episode in chosen}) >= groups:
                break
            next_round = replace(request, plan=replace(request.plan, round=round_number))
            episodes = [*episodes, *self.trainer.source(next_round)]
        return episodes

    def _step(self, start: ClockReading, plan: DepthPlan, episodes: list[Episode]) -> None:
        """Makes all changes of a step. It is not interruptible, so that weights, state and metrics agree."""
        trainer, step = self.trainer, self.state.step + 1
        algorithm, collected = trainer.algorithm, ClockReading.now()
        if trainer.servers is not None and not trainer.ranks.rank:
            trainer.servers.sleep()
        chosen = selected(algorithm, episodes)
        if not chosen:
            self._skip((start, collected), plan, episodes)
            return
        try:
            batch = pack(chosen, origins=algorithm.origins)
        except EmptyBatchError:
            # episodes of text will never have ids; a step in which every response was broken off is one of many
            if not any(episode.segments for episode in episodes):
                raise
            self._skip((start, collected), plan, episodes)
            return
        check_ids(batch, trainer.vocab_size)
        trainer.progress.phase("teacher")
        with calling(algorithm, "target_fn"):
            answered = algorithm.target_fn(batch, chosen, self._scorers())
        targets = checked_targets(answered, batch.tokens, algorithm.name)
        scored = ClockReading.now()
        trainer.progress.phase("update")
        run_step = RunStep(config=trainer.optimizer, step=step, total_steps=trainer.run.steps)
        epochs = run_epochs(
            trainer.model, self.optimizer, batch, chosen, targets, algorithm, run_step, self._forward(), self.critic
        )
        # the raw form is what the depth controller is defined on; algorithms without it have a fixed depth
        kl_N = epochs.columns.get("kl_raw", np.zeros(batch.tokens, np.float32))
        with calling(algorithm, "depth"):
            depth = algorithm.depth.learn(self.state.depth, plan, batch, chosen, kl_N)
        self._updated(step)
        end = ClockReading.now()
        spent = self.state.train_seconds + end.wall - start.wall
        self.state = replace(self.state, step=step, depth=depth, train_seconds=spent)
        row = {
            "step": step,
            "kind": "train",
            **step_metrics.step_row(episodes, batch, targets, epochs, plan, depth),
            # versions count steps done: fresh episodes of this step were played by version step - 1
            **step_metrics.staleness_row(episodes, step - 1),
            **step_metrics.weight_row(algorithm.weight, run_step),
            "tokens_per_s": batch.tokens / (end.wall - start.wall),
            **phase_row((start, collected, scored, end)),
            "time/step_s": end.wall - start.wall,
            "time/train_s": spent,
        }
        self._write(with_own_numbers(row, algorithm, episodes, targets.log))

    def _skip(self, moments: tuple[ClockReading, ClockReading], plan: DepthPlan, episodes: list[Episode]) -> None:
        """A step whose episodes all teach nothing: it counts, what it cost is written, and nothing is updated.

        `moments`: when the step began, and when its episodes had been played.
        """
        end = ClockReading.now()
        step, spent = self.state.step + 1, self.state.train_seconds + end.wall - moments[0].wall
        self.state = replace(self.state, step=step, train_seconds=spent)
        played = [episode for episode in episodes if not episode.status.is_error]
        row: dict[str, Any] = {
            "episodes": 0,
            "episodes_failed": len(episodes) - len(played),
            "episodes_dropped": len(played),
            "tokens": 0,
            "success": float(np.mean([episode.success for episode in played])),
            "depth/cap": plan.cap,
            **step_metrics.spent_row(episodes),
            **phase_row((*moments, end, end)),
            "time/step_s": end.wall - moments[0].wall,
        }
        # the weights are the same, but their version must count this step, or the next episodes would look stale
        self._updated(step)
        row |= step_metrics.played_row(episodes) | judge_row(episodes, None)
        row = with_own_numbers(row, self.trainer.algorithm, episodes, {})
        self._write({"step": step, "kind": "train", **row, "time/train_s": spent})

    def _updated(self, step: int) -> None:
        if self.trainer.on_update is not None:
            self.trainer.on_update(step)
        # once the student's new weights are announced
        if self.folder.refresh is not None:
            self.folder.refresh.after(step)

    def _scorers(self) -> Scorers:
        trainer = self.trainer
        student = LocalScorer(
            model=trainer.model,
            vocab_size=trainer.vocab_size,
            temperature=trainer.algorithm.distill_temperature,
            max_tokens=trainer.run.pass_tokens,
            chunk=trainer.run.head_chunk,
            packing=trainer.run.packing,
        )
        shared = shared_scorer(student, trainer.ranks, trainer.model)
        return Scorers(
            student=shared,
            teacher=trainer.teacher,
            reference=trainer.reference,
            critic=None if self.critic is None else self.critic.values,
            step=self.state.step + 1,
        )

    def _forward(self) -> Forward:
        run = self.trainer.run
        return Forward(
            micro_tokens=run.pass_tokens,
            head_chunk=run.head_chunk,
            vocab_size=self.trainer.vocab_size,
            distill_temperature=self.trainer.algorithm.distill_temperature,
            sampling_temperature=run.temperature,
            entropy_gradient=self.trainer.algorithm.entropy_gradient,
            autocast=run.autocast != "off",
            autocast_head=run.autocast == "bfloat16",
            gradient_checkpointing=run.gradient_checkpointing,
            packing=run.packing,
            ranks=self.trainer.ranks,
        )

    def _maybe_evaluate(self) -> None:
        trainer, step = self.trainer, self.state.step
        every = trainer.run.eval_every
        if trainer.evaluate is None or not every or self.state.evaluated == step:
            return
        if step % every and step != trainer.run.steps:
            return
        trainer.progress.phase("evaluate")
        start = time.perf_counter()
        point = trainer.evaluate(step)
        row = {"eval/avg": point.avg, "eval/low": point.low, "eval/high": point.high}
        row |= {f"eval/{name}": value for name, value in point.extra.items()}
        times = {"time/train_s": self.state.train_seconds, "time/eval_s": time.perf_counter() - start}
        # before the state: an interrupt in between repeats the evaluation, whose row is then dropped on resumption
        self._write({"step": step, "kind": "eval", **row, **times})
        self.state = replace(self.state, evaluated=step)

    def _write(self, row: dict[str, Any]) -> None:
        out, action = self.trainer.out, f"metrics of step {row['step']}"
        with full_disk(out, action, TrainError, then=resume_hint(out)):
            # only rank 0 has a log, but when its disk is full all must stop
            on_all_ranks(self.trainer.ranks, lambda: None if self.log is None else self.log.write(row))
        self.trainer.progress.row(row)


class Interrupts:
    """While entered, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt(number): at once, or at the end of a
    `protected` block.

    In a run of several processes always at the end of a block, in all of them at the same one: else one would save what
    the others are still computing.
    """

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        self._ranks = ranks
        self._protected = 0
        self._pending = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._former = on_signals(self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _handle(self, number: int) -> None:
        if not self._protected and self._ranks.size == 1:
            raise KeyboardInterrupt(number)
        self._pending = number

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Context whose body is finished before a signal interrupts."""
        # a counter, for blocks may be nested: only the end of the outermost one raises
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1
        if not self._protected and (number := max(self._ranks.all_gather(self._pending))):
            self._pending = 0
            raise KeyboardInterrupt(number)
