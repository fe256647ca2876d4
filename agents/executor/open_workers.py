"""Where episodes are played: in this process, in several on this machine, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from turngym.agents.executor.automatic import Choice, Playing, choose_workers
from turngym.agents.executor.core import Workers
from turngym.agents.executor.local import LocalWorkers
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.ray_cluster import RayWorkers
from turngym.agents.rollout import PlayJobs, rollout
from turngym.envs.core import TurngymError


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

    def choice(self, playing: Playing) -> Choice:
        """How many workers play, as asked for or, for `auto`, as pays."""
        return choose_workers(playing) if self.workers == "auto" else Choice(workers=self.workers, reason="--workers")


@contextmanager
def open_workers(options: WorkerOptions, playing: Playing | None = None) -> Iterator[PlayJobs]:
    """What plays jobs as `rollout` does; its workers end with the context. `auto` goes by `playing`."""
    choice = options.choice(playing or Playing(episodes=0))
    if not choice.workers:
        yield rollout
        return
    unasked = options.workers == "auto"
    if unasked:
        print(f"episodes are played by {choice}; --workers 0: by this process", file=sys.stderr)
    workers: Workers
    if options.executor == "ray":
        workers = RayWorkers(
            choice.workers, address=options.ray_address, cpus=options.worker_cpus, gpus=options.worker_gpus
        )
    else:
        workers = LocalWorkers(choice.workers)
    play = ParallelRollout(workers, retries=options.retries, fixed_shares=unasked)
    try:
        yield play
    finally:
        play.close()
