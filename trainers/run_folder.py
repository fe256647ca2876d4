"""The folder of a run: opened for a new run or a resumed one, never overwritten by another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch.optim import Optimizer

from turngym.agents.meaning import meaning
from turngym.core.disk_space import at_once
from turngym.core.files import locked_folder
from turngym.core.nested import at, differing
from turngym.core.spec import changed
from turngym.trainers.algorithm import DepthState
from turngym.trainers.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from turngym.trainers.content_hashes import CODE
from turngym.trainers.critic import ValueCritic
from turngym.trainers.metrics import METRICS_FILE
from turngym.trainers.ranks import SINGLE, Ranks, on_all_ranks, on_rank_zero
from turngym.trainers.rollout_order import RolloutSchedule
from turngym.trainers.run_config import RunConfig
from turngym.trainers.scorer import ReferenceRefresh

STEPS = "run.steps"
CONTENT = "content of "
MOST_SHOWN = 8
"""Most settings that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands, apart from weights and optimizer. Data position and random streams follow from `step`."""

    step: int
    """Steps done."""
    depth: DepthState
    train_seconds: float = 0.0
    evaluated: int = -1
    """Last step that was evaluated."""


def lock_run(path: Path, ranks: Ranks, stack: ExitStack) -> None:
    """Lock the run's folder until `stack` is closed; of several processes rank 0 does, for all.

    Raises FolderInUseError where another run has it (on the other ranks DistributedError).
    """
    on_all_ranks(ranks, lambda: stack.enter_context(locked_folder(None if ranks.rank else path)))


@dataclass(slots=True)
class RunFolder:
    """Checkpoints of one run."""

    path: Path
    model: Any
    optimizer: Optimizer
    spec: Mapping[str, Any]
    """The settings of the run, which one that goes on must share."""
    contents: Mapping[str, str]
    """Path in `spec` -> hash of what it names."""
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
        self.saved = msgspec.convert(saved, RunState)
        return self.saved

    def _newest(self) -> tuple[Path, dict[str, Any]]:
        checkpoint = latest_checkpoint(self.path)
        saved = read_state(checkpoint)
        check_end(saved, self.spec, self.fixed_end, checkpoint)
        check_same(saved, self.spec, self.contents, checkpoint)
        return checkpoint, saved

    def save(self, state: RunState) -> None:
        """Write a checkpoint of `state`, unless the newest one is just that."""
        if self.saved == state:
            return
        values = {**asdict(state), "spec": dict(self.spec), "contents": dict(self.contents)}
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


def with_saved_settings(run: RunConfig, path: Path) -> RunConfig:
    """Returns `run` as it goes on in `path`: `packing="auto"` becomes what the run that began there had.

    Packed and padded rows round differently, so that a run goes on as it began.
    """
    if run.packing != "auto" or not list_checkpoints(path):
        return run
    return changed(run, packing=read_state(latest_checkpoint(path))["spec"]["run"]["packing"])


def check_end(saved: Mapping[str, Any], spec: Mapping[str, Any], fixed: str, where: Path) -> None:
    """Refuse another number of steps than the run began with where it is `fixed` (why), or done already.

    `saved` is the state of the run that is gone on with, `spec` has the settings of this one, `where` is the
    checkpoint.
    """
    old, new, done = at(saved["spec"], STEPS), at(spec, STEPS), saved["step"]
    if old == new:
        return
    reason = fixed or (f"{done} steps are done already" if new < done else "")
    if reason:
        raise CheckpointError(
            f"{where} is of a run of {old} steps, which cannot be made one of {new}: {reason}. Use --steps {old}, or "
            "begin another run with its model as --student"
        )


def check_same(saved: Mapping[str, Any], spec: Mapping[str, Any], contents: Mapping[str, str], where: Path) -> None:
    """Refuse a checkpoint of another configuration, naming each setting that differs.

    What a setting names counts by its content where that is known. What changes nothing but how sums round, and code of
    one's own, may differ and is said.
    `contents` are hashes of what the settings name; the others are as in `check_end`.
    """
    before: Mapping[str, str] = saved["contents"]
    hashed = (before.keys() | contents.keys()) - {*CODE}
    differ = {path: values for path, values in differing(saved["spec"], spec).items() if path not in hashed}
    differ |= {f"{CONTENT}{path}": values for path, values in differing(before, contents).items()}
    refused = list[str]()
    for path, (was, current) in sorted(differ.items()):
        kind = meaning(path.removeprefix(CONTENT))
        # `check_end` compares the end; a run that was not evaluated until now may be from here on
        if kind in ("cost", "amount") or _new_evaluation(path, saved["spec"]):
            continue
        if kind == "rounding":
            print(f"{path} is {current}, was {was}: sums round otherwise from here on", file=sys.stderr)
        elif path in (f"{CONTENT}{name}" for name in CODE):
            print(f"turngym: not as when the run began: the {path}", file=sys.stderr)
        else:
            refused.append(f"{path}: checkpoint {was!r}, now {current!r}")
    if refused:
        rest = f"; and {len(refused) - MOST_SHOWN} more" if len(refused) > MOST_SHOWN else ""
        raise CheckpointError(
            f"{where} was made with another configuration; nothing was overwritten. Differing fields: "
            f"{'; '.join(refused[:MOST_SHOWN])}{rest}. Use the same options, or another output folder"
        )


def _new_evaluation(path: str, saved: Mapping[str, Any]) -> bool:
    """Whether a setting says how a run is evaluated that was not evaluated when it was `saved`."""
    parts = path.split(".")
    return "evaluation" in parts and at(saved, ".".join(parts[: parts.index("evaluation") + 1])) is None
