"""How many processes play episodes: as asked, or (`auto`) as many as the cores allow if starting them pays off."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from turngym.agents.playing.timed_calls import STEP_TIMEOUT
from turngym.core.cpu_cores import available_cores
from turngym.core.errors import TurngymError
from turngym.core.nested import KIND
from turngym.core.numbers import NotNegative, Number, Patience, Threads
from turngym.core.spec import Spec

EPISODES = 2000
"""Fewest episodes for which starting workers pays off: it takes each some seconds of processor time, about a third of
the time in which a tiny model plays so many."""
PARAMETERS = 64_000_000
"""Larger models keep several cores busy with their matrix products, and every worker holds a copy."""
WORKERS = 4
"""Most workers that `auto` starts: with more of them each decodes too few episodes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayWorkload:
    """What is known about a run's episodes before the first one is played."""

    episodes: int
    """Number of episodes in the whole run or evaluation."""
    model: Any = None
    """The model that generates in this process; None if nothing runs here that workers could do faster."""
    ahead: bool = False
    """Whether a copy of the model plays while the model learns, so that the cores are busy already."""

    @classmethod
    def of(cls, policy: Any, episodes: int, *, ahead: bool = False) -> PlayWorkload:
        """The workload of `policy`, which continues token ids; only a local engine has its model in this process."""
        # if the module was never imported no engine exists, and torch need not be loaded
        local = sys.modules.get("turngym.agents.local_engine.engine")
        is_local = local is not None and isinstance(policy, local.LocalEngine)
        return cls(episodes=episodes, model=policy.model if is_local else None, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCount:
    """How many workers play, and why."""

    workers: int
    """0 if this process plays."""
    reason: str

    def __str__(self) -> str:
        return f"{self.workers} workers ({self.reason})" if self.workers else f"this process ({self.reason})"


def choose_workers(workload: PlayWorkload, cores: int | None = None) -> WorkerCount:
    """The number of workers for `auto`. It depends on workload and cores alone, so a resumed run plays as before."""
    cores = available_cores() if cores is None else cores
    if workload.model is None:
        return WorkerCount(workers=0, reason="no model of its own plays")
    first = next(workload.model.parameters())
    size = sum(part.numel() for part in workload.model.parameters())
    for refuses, reason in (
        (cores < 2, "one core"),
        (first.device.type != "cpu", f"the model is on {first.device.type}"),
        (workload.ahead, "it plays ahead"),
        (size > PARAMETERS, f"the model has {size / 1e6:.0f} million parameters"),
        (workload.episodes < EPISODES, f"{workload.episodes} episodes"),
    ):
        if refuses:
            return WorkerCount(workers=0, reason=reason)
    return WorkerCount(workers=min(cores, WORKERS), reason=f"{cores} cores, {workload.episodes} episodes")


class WorkerOptions(Spec, tag_field=KIND):
    """Which processes play. The episodes are the same for any number of workers."""

    step_timeout: Patience = STEP_TIMEOUT
    """Seconds for one step of an environment. Or for one reset, or one call of a --reward function, in any process. A
    longer one is given up, and its episode ends as error_timeout; inf waits for ever. One that holds the interpreter
    lock (a pattern, a C extension) ends its process after twice this time and 20 s. A worker is replaced; with
    --workers 0 the command ends and keeps the episodes that have finished."""

    def count(self, workload: PlayWorkload) -> WorkerCount:
        """How many workers play."""
        raise NotImplementedError

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """Reads `N`: 0 is this process, a larger number so many processes."""
        if not (text.isascii() and text.isdigit()):
            return super().table_of(text)
        return {KIND: "local", "processes": int(text)} if int(text) else {KIND: "none"}


class InProcess(WorkerOptions, tag="none"):
    """No workers: this process plays."""

    def count(self, workload: PlayWorkload) -> WorkerCount:
        return WorkerCount(workers=0, reason="--workers")


class StartedWorkers(WorkerOptions):
    """Workers that may die."""

    retries: Number = 2
    """How often an episode is restarted after its worker died, before it counts as failed."""
    worker_timeout: Patience = 600.0
    """Seconds after which a worker that gives no sign is ended, and its episodes are restarted (`retries`)."""

    def __post_init__(self) -> None:
        # all steps of a round may hang, which takes a worker two limits
        if not math.isinf(self.step_timeout) and self.worker_timeout <= 2 * self.step_timeout:
            raise TurngymError(
                f"worker_timeout is {self.worker_timeout:g}; a worker needs more than twice --step-timeout "
                f"({self.step_timeout:g}) before it is taken for dead"
            )


class AutoWorkers(StartedWorkers, tag="auto"):
    """Several processes if a tiny model plays so many episodes that starting them pays off, else this process."""

    def count(self, workload: PlayWorkload) -> WorkerCount:
        return choose_workers(workload)


class LocalProcesses(StartedWorkers, tag="local", kw_only=True):
    """Processes on this machine."""

    processes: Threads
    """How many. Each has its own environments and copy of the model."""

    def count(self, workload: PlayWorkload) -> WorkerCount:
        return WorkerCount(workers=self.processes, reason="--workers")


class RayActors(StartedWorkers, tag="ray", kw_only=True):
    """Actors of a Ray cluster."""

    actors: Threads
    """How many. Each has its own environments and copy of the model."""
    ray_address: str | None = None
    """Address of the Ray cluster. `auto`, `HOST:PORT` or `ray://...`; by default Ray is started on this machine."""
    worker_cpus: NotNegative = 1.0
    """Processors that each worker claims."""
    worker_gpus: NotNegative = 0.0
    """Accelerators that each worker claims; a part of one may be claimed."""

    def count(self, workload: PlayWorkload) -> WorkerCount:
        return WorkerCount(workers=self.actors, reason="--workers")


AnyWorkers = AutoWorkers | InProcess | LocalProcesses | RayActors
