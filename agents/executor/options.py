"""How many processes play where nobody says: as many as the cores allow, if their start pays."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turngym.envs.core.errors import TurngymError

# How many processor cores this process may count on: affinity, the container's quota, and who else runs beside it.

SHARE = "TURNGYM_CORES"
"""Environment variable: cores for this process, set by whoever starts several side by side."""
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Where Linux says what a container may use: version 2, then version 1 of control groups."""


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """At least 1. Of several processes that torchrun started on a machine, each has its part."""
    limits = [_allowed(), *_quota(), *_number(environment, SHARE)]
    beside = _number(environment, "LOCAL_WORLD_SIZE")
    return max(1, min(limits) // max(1, *beside, 1))


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def _quota() -> list[int]:
    """The container's limit in whole cores, rounded up; empty without one."""
    modern, old = QUOTAS
    try:
        if modern.exists():
            quota, period = modern.read_text(encoding="ascii").split()[:2]
        else:
            quota = old.read_text(encoding="ascii").strip()
            period = old.with_name("cpu.cfs_period_us").read_text(encoding="ascii")
        return [] if int(quota) <= 0 else [-(-int(quota) // int(period))]
    except (OSError, ValueError):  # none there, or `max`
        return []


def _number(environment: Mapping[str, str], name: str) -> list[int]:
    """What the variable says, if it is a number."""
    said = environment.get(name, "")
    return [int(said)] if said.isdecimal() else []


EPISODES = 2000
"""Fewer are not worth the start of workers: some seconds of processor time each, for a third of the time that such
episodes of a tiny model take."""
PARAMETERS = 64_000_000
"""Larger models keep several cores busy with their matrix products, and every worker holds a copy."""
WORKERS = 4
"""Most that are started unasked: a batch cut finer decodes too few episodes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be played, as far as it is known before the first episode."""

    episodes: int
    """Of the whole run or evaluation."""
    model: Any = None
    """The model that plays in this process; None: nothing plays here that a worker could play faster."""
    ahead: bool = False
    """A copy of the model plays while the model learns: the cores are busy with both already."""

    @classmethod
    def of(cls, policy: Any, episodes: int, *, ahead: bool = False) -> Workload:
        """`policy` continues token ids; only a local engine's model is this process's own."""
        # not imported: then no engine exists, and torch need not be loaded
        local = sys.modules.get("turngym.agents.local_engine.engine")
        here = local is not None and isinstance(policy, local.LocalEngine)
        return cls(episodes=episodes, model=policy.model if here else None, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many workers, and why."""

    workers: int
    """0: this process plays."""
    reason: str

    def __str__(self) -> str:
        return f"{self.workers} workers ({self.reason})" if self.workers else f"this process ({self.reason})"


def choose_workers(playing: Workload, cores: int | None = None) -> Choice:
    """Follows from what is played and the cores alone, so that a run that goes on plays as it began."""
    cores = available_cores() if cores is None else cores
    if playing.model is None:
        return Choice(workers=0, reason="no model of its own plays")
    first = next(playing.model.parameters())
    size = sum(part.numel() for part in playing.model.parameters())
    for refuses, reason in (
        (cores < 2, "one core"),
        (first.device.type != "cpu", f"the model is on {first.device.type}"),
        (playing.ahead, "it plays ahead"),
        (size > PARAMETERS, f"the model has {size / 1e6:.0f} million parameters"),
        (playing.episodes < EPISODES, f"{playing.episodes} episodes"),
    ):
        if refuses:
            return Choice(workers=0, reason=reason)
    return Choice(workers=min(cores, WORKERS), reason=f"{cores} cores, {playing.episodes} episodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Who plays. The episodes are the same for any number of workers."""

    workers: int | Literal["auto"] = "auto"
    """Processes that play episodes, each with its own environments and copy of the model; 0: this process; auto: as
    many as cores are free, where a tiny model in this process plays so many episodes that their start pays."""
    executor: Literal["local", "ray"] = "local"
    """Where workers run: processes on this machine, or actors of a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster (`auto`, `HOST:PORT`, `ray://...`); by default Ray is started on this machine."""
    worker_cpus: float = 1.0
    """ray: processors that each worker claims."""
    worker_gpus: float = 0.0
    """ray: accelerators that each worker claims; a part of one may be claimed."""
    retries: int = 2
    """How often an episode whose worker died is begun again before it counts as failed."""

    @classmethod
    def of(cls, workers: int | Literal["auto"] | WorkerOptions) -> WorkerOptions:
        """The options themselves, or those of so many processes on this machine."""
        return workers if isinstance(workers, WorkerOptions) else cls(workers=workers)

    def __post_init__(self) -> None:
        if self.workers != "auto" and self.workers < 0:
            raise TurngymError(f"--workers is {self.workers}; valid: 0 (this process) or more, or auto")
        if self.executor == "ray" and self.workers in (0, "auto"):
            raise TurngymError("--executor ray needs --workers, the number of actors")

    def choice(self, playing: Workload) -> Choice:
        """How many workers play, as asked for or, for `auto`, as pays."""
        return choose_workers(playing) if self.workers == "auto" else Choice(workers=self.workers, reason="--workers")
