"""The folder of a run: opened for a new run or a resumed one, never overwritten by another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from turngym.core.disk_space import at_once
from turngym.core.files import locked_folder
from turngym.trainers.algorithm import DepthState
from turngym.trainers.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from turngym.trainers.critic import ValueCritic
from turngym.trainers.metrics import METRICS_FILE
from turngym.trainers.ranks import SINGLE, Ranks, on_all_ranks, on_rank_zero
from turngym.trainers.rollout_schedule import RolloutSchedule
from turngym.trainers.run_config import EVALUATION, RunConfig
from turngym.trainers.scorer import ReferenceRefresh

STEPS = "run.steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands, apart from weights and optimizer. Data position and random streams follow from `step`."""

    step: int
    """Steps done."""
    depth: DepthState
    train_seconds: float = 0.0
    evaluated: int = -1
    """Last step that was evaluated."""


def lock_run(path: Path, ranks: Ranks, held: ExitStack) -> None:
    """Lock the run's folder until `held` is closed; of several processes rank 0 does, for all.

    Raises FolderInUseError where another run has it (on the other ranks DistributedError).
    """
    on_all_ranks(ranks, lambda: held.enter_context(locked_folder(None if ranks.rank else path)))


@dataclass(slots=True)
class RunFolder:
    """Checkpoints of one run."""

    path: Path
    model: Any
    optimizer: Optimizer
    fingerprint: Mapping[str, Any]
    config: RunConfig
    save_extra: Callable[[Path], None] | None = None
    critic: ValueCritic | None = None
    ranks: Ranks = SINGLE
    order: RolloutSchedule = field(default_factory=RolloutSchedule)
    refresh: ReferenceRefresh | None = None
    """The reference policy, where it is replaced now and then."""
    fixed_end: str = ""
    """Why the run cannot get another number of steps than it began with; "" where nothing depends on it."""
    writing: Callable[[Callable[[], Any]], Any] = at_once
    """Calls what writes a checkpoint, as `Trainer.writing`."""
    saved: RunState | None = field(default=None, init=False)

    def open(self, *, resume: bool, depth: DepthState) -> RunState:
        """The state to start from; weights and optimizer are put in place.

        Raises CheckpointError for a folder that holds a run (without `resume`), that holds none (with it), or whose run
        had another configuration.
        """
        # only rank 0 looks: another rank might look after rank 0 has begun to write
        begun, exists = on_rank_zero(
            self.ranks, lambda: (bool(list_checkpoints(self.path)), (self.path / METRICS_FILE).exists())
        )
        if (begun or exists) and not resume:
            first = "continue it with --resume" if begun else "it has no checkpoint to continue from: remove it"
            raise CheckpointError(f"{self.path} already holds a run: {first}, or choose another folder")
        if not resume:
            on_rank_zero(self.ranks, lambda: self.path.mkdir(parents=True, exist_ok=True))
            # without a checkpoint of step 0 a run killed early could neither be resumed nor started again
            state = RunState(step=0, depth=depth)
            self.save(state)
            return state
        checkpoint, saved = on_rank_zero(self.ranks, self._newest)
        load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer, critic=self.critic)
        self.order.load(checkpoint)
        if self.refresh is not None:
            self.refresh.load(checkpoint)
        self.saved = RunState(
            step=saved["step"],
            depth=DepthState(**saved["depth"]),
            train_seconds=saved["train_seconds"],
            evaluated=saved["evaluated"],
        )
        return self.saved

    def _newest(self) -> tuple[Path, dict[str, Any]]:
        checkpoint = latest_checkpoint(self.path)
        saved = read_state(checkpoint)
        before, now = saved["fingerprint"], self.fingerprint
        check_end(saved["step"], before, now, self.fixed_end, checkpoint)
        end = {name: now[name] for name in (STEPS,) if name in before and name in now}
        # a run that was not evaluated until now may be from here on
        begun = {name.rpartition(".")[0] for name in before}
        added = {name: value for name, value in now.items() if _new_evaluation(name, begun)}
        # a run that runs out of memory at step N could not go on otherwise
        memory = {name: now[name] for name in MEMORY if name in now and before.get(name, now[name]) != now[name]}
        check_fingerprint({**before, **end, **added, **memory}, now, checkpoint)
        for name, value in memory.items():
            print(f"{name} is {value}, was {before[name]}: sums round otherwise from here on", file=sys.stderr)
        return checkpoint, saved

    def save(self, state: RunState) -> None:
        """Write a checkpoint of `state`, unless the newest one is just that."""
        if self.saved == state:
            return
        values = {
            "step": state.step,
            "depth": asdict(state.depth),
            "train_seconds": state.train_seconds,
            "evaluated": state.evaluated,
            "fingerprint": dict(self.fingerprint),
        }
        self.writing(
            lambda: save_checkpoint(
                self.path,
                model=self.model,
                optimizer=self.optimizer,
                state=values,
                keep=self.config.keep_checkpoints,
                save_extra=self.save_extra,
                critic=self.critic,
                ranks=self.ranks,
                beside=self._beside,
            )
        )
        self.saved = state

    def _beside(self, folder: Path) -> None:
        self.order.save(folder)
        if self.refresh is not None:
            self.refresh.save(folder)


MEMORY = ("run.micro_tokens", "run.head_chunk")
"""Settings of which memory and rounding depend and nothing else: a resumed run may have others."""


def _new_evaluation(name: str, begun: Collection[str]) -> bool:
    """Whether a setting says how a run is evaluated whose fingerprint, with the groups `begun`, has none of it."""
    group = name.rpartition(".")[0]
    return group not in begun and f"{group}.".startswith(f"{EVALUATION}.")


def with_saved_settings(run: RunConfig, path: Path) -> RunConfig:
    """Returns `run` as it goes on in `path`: `packing="auto"` becomes what the run that began there had.

    Packed and padded rows round differently, so that a run goes on as it began.
    """
    if run.packing != "auto" or not list_checkpoints(path):
        return run
    return replace(run, packing=read_state(latest_checkpoint(path))["fingerprint"]["run.packing"])


def check_end(done: int, saved: Mapping[str, Any], current: Mapping[str, Any], fixed: str, where: Path) -> None:
    """Refuse another number of steps than the run began with where it is `fixed` (why), or `done` already.

    Args:
        done: steps that the checkpoint has.
        saved: fingerprint of the run that is gone on with.
        current: fingerprint of this one.
        fixed: why the number of steps may not change; empty where it may.
        where: the checkpoint, for the error.
    """
    old, new = saved.get(STEPS), current.get(STEPS)
    if old == new or old is None or new is None:
        return
    reason = fixed or (f"{done} steps are done already" if new < done else "")
    if reason:
        raise CheckpointError(
            f"{where} is of a run of {old} steps, which cannot be made one of {new}: {reason}. Use --steps {old}, or "
            "begin another run with its model as --student"
        )


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint of another configuration, naming each field that differs."""
    missing = "(absent)"
    rows = [
        f"{name}: checkpoint {saved.get(name, missing)!r}, now {current.get(name, missing)!r}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name, missing) != current.get(name, missing)
    ]
    if rows:
        raise CheckpointError(
            f"{where} was made with another configuration; nothing was overwritten. Differing fields: "
            + "; ".join(rows)
            + ". Use the same options, or another output folder"
        )
