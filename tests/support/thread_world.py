"""A world of processes that are threads: what is divided among processes, tried without any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Thread:
    """A `World` whose processes are threads: `boards` holds what each has said in each round."""

    rank: int
    size: int
    barrier: threading.Barrier
    boards: list[list[Any]]
    round: int = 0

    def all_gather(self, value: T) -> list[T]:
        self.boards[self.rank].append(value)
        self.barrier.wait(60)
        said = [board[self.round] for board in self.boards]
        self.round += 1
        return said

    def full_params(self, model: Any) -> Any:
        return nullcontext()


def in_world(size: int, work: Callable[[Any], T]) -> list[T]:
    """`work(world)` in every process of a world of threads; an exception counts as what it returned."""
    barrier, boards = threading.Barrier(size), [[] for _ in range(size)]
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, size, barrier, boards))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results
