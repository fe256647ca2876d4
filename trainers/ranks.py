"""The processes of a training run: all_gather, broadcast, work on rank 0, and how work is divided among them.

Everything that is decided (tasks, weights of tokens, depth, when to stop) is decided by every process alike, from the
whole batch; only playing, scoring and gradients are divided. `SINGLE` is the one process of an ordinary run: it divides
nothing, so that no caller asks how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turngym.core.errors import TurngymError

T = TypeVar("T")


class DistributedError(TurngymError):
    """Processes that disagree, or a process that failed while others waited for it."""


class Ranks:
    """The processes of a run; here a single one, in which nothing is divided.

    Methods are collectives: every rank calls them in the same order, or the run hangs.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        """Number of this process, 0-based; rank 0 writes files, logs and shows progress."""
        self.size = size

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes in rank order, the same list on every rank (torch's all_gather_object)."""
        return [value]

    def shard(self, model: Any) -> None:
        """Shard a model's parameters over the ranks (FSDP2), in place; forward passes and the head go on working."""

    def full_params(self, model: Any) -> AbstractContextManager[None]:
        """Context in which every process holds the full parameters of a sharded model and runs it without gradient."""
        return nullcontext()

    def state(self, model: Any) -> Mapping[str, Tensor]:
        """The full state dict on the CPU on rank 0; an empty one on the others."""
        weights: Mapping[str, Tensor] = model.state_dict()
        return weights


SINGLE = Ranks()


def broadcast(ranks: Ranks, value: T) -> T:
    """The value of rank 0 on every rank."""
    return ranks.all_gather(cast(T, value if ranks.rank == 0 else None))[0]


def on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on every rank, then a barrier that propagates errors: if one rank fails, all raise.

    The rank that failed raises its own error, the others a DistributedError that names it; none waits for it forever.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # any error must reach the other ranks, which would wait in the next collective
        failure = error
    errors = ranks.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, error_text in enumerate(errors):
        if error_text is not None:
            raise DistributedError(f"process {rank} of {ranks.size} failed, so all stop: {error_text}")
    return cast(T, result)


def on_rank_zero(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait; its result, or its error, is broadcast."""
    # first the barrier that carries errors: a rank 0 that failed would never reach the broadcast
    return broadcast(ranks, on_all_ranks(ranks, lambda: cast(T, work() if ranks.rank == 0 else None)))


def balanced_shares(costs: Sequence[float] | NDArray[Any], parts: int) -> list[NDArray[np.int64]]:
    """Item numbers of each part, ascending: the costliest remaining item goes to the part of the least total cost.

    Together the parts hold every item once; with fewer items than parts some are empty.
    """
    load = np.zeros(parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    # stable: ties must fall alike in every process, whichever machine sorts them
    for item in np.argsort(-np.asarray(costs, np.float64), kind="stable"):
        part = int(load.argmin())
        members[part].append(int(item))
        load[part] += costs[item]
    return [np.array(sorted(chosen), np.int64) for chosen in members]
