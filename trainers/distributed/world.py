"""One run in several processes: who does which share of the work, and how the shares come together again.

Everything that is decided (tasks, weights of tokens, depth, when to stop) is decided by every process alike, from the
whole batch; only playing, scoring and gradients are divided. `SINGLE` is the world of an ordinary run: it divides
nothing, so that no caller asks how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turngym.envs.core import TurngymError
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.models.microbatch import MicroBatch, split_rows

T = TypeVar("T")
Split = Callable[[RolloutBatch, int, NDArray[np.int64]], list[MicroBatch]]
"""`split_rows` or `packing.split_packed`."""


class DistributedError(TurngymError):
    """Processes that disagree, or one that failed while others waited for it."""


class World(Protocol):
    """The processes of a run. Every method is called by all of them, in the same order, or the run hangs."""

    @property
    def rank(self) -> int:
        """This process, 0-based; 0 writes files and talks to people."""

    @property
    def size(self) -> int: ...

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes in the order of their ranks, the same list everywhere."""

    def shard(self, model: Any) -> None:
        """Divide a model's parameters among the processes, in place; its hidden states and its head go on working."""

    def full_params(self, model: Any) -> AbstractContextManager[None]:
        """Inside, each process holds all parameters of a sharded model and may run it on its own, without gradient."""

    def state(self, model: Any) -> Mapping[str, Tensor]:
        """All of a model's weights on the CPU, in process 0; the others get nothing."""


@dataclass(frozen=True, slots=True)
class Single:
    """A world of one process."""

    rank: int = 0
    size: int = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def shard(self, model: Any) -> None:
        return

    def full_params(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self, model: Any) -> Mapping[str, Tensor]:
        weights: Mapping[str, Tensor] = model.state_dict()
        return weights


SINGLE = Single()


def broadcast(world: World, value: T) -> T:
    """Process 0's value, everywhere."""
    return world.all_gather(cast(T, value if world.rank == 0 else None))[0]


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Do `work`, which may fail in one process only; then no process goes on.

    The process that failed raises its own error, the others DistributedError that names it, so that none waits for it.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # whatever it was, the others must hear of it
        failure = error
    notes = world.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, note in enumerate(notes):
        if note is not None:
            raise DistributedError(f"process {rank} of {world.size} failed, so all stop: {note}")
    return cast(T, result)


def on_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Process 0 does `work` while the others wait; all get its result, or its failure."""
    return broadcast(world, on_all_ranks(world, lambda: cast(T, work() if world.rank == 0 else None)))


def divide(costs: Sequence[float] | NDArray[Any], parts: int) -> list[NDArray[np.int64]]:
    """Numbers of the items of each part, ascending: the costliest item left goes to the part that has least.

    Together the parts hold every item once; with fewer items than parts some are empty.
    """
    load = np.zeros(parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in np.argsort(-np.asarray(costs, np.float64), kind="stable"):
        part = int(load.argmin())
        members[part].append(int(item))
        load[part] += costs[item]
    return [np.array(sorted(chosen), np.int64) for chosen in members]


def micro_batches(batch: RolloutBatch, max_tokens: int, world: World, split: Split = split_rows) -> list[MicroBatch]:
    """This process's share of `split(batch, max_tokens)`: whole episodes, about as many tokens as the others'.

    All processes get equally many micro-batches, for a sharded model computes in step; those without work of their own
    get empty ones at the end.
    """
    lengths = np.diff(batch.row_offsets)
    episode_R = batch.episode_N[np.searchsorted(batch.row_N, np.arange(batch.rows))]
    tokens_E = np.bincount(episode_R, weights=lengths, minlength=batch.episodes)
    shares = [np.flatnonzero(np.isin(episode_R, members)) for members in divide(tokens_E, world.size)]
    all_of_them = [split(batch, max_tokens, rows) for rows in shares]
    empty = MicroBatch(rows=np.empty(0, np.int64), tokens=np.empty(0, np.int64))
    own, most = all_of_them[world.rank], max(map(len, all_of_them))
    return own + [empty] * (most - len(own))


def to_local(tensor: Tensor) -> Tensor:
    """A value that may be spread over processes (a DTensor), as an ordinary tensor."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
