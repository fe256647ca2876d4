"""Ranks that are threads: what is divided among processes, tried without any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from turngym.trainers.ranks import Ranks

T = TypeVar("T")


class Thread(Ranks):
    """`Ranks` whose processes are threads: `boards` holds what each has said in each round."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, boards: list[list[Any]]) -> None:
        super().__init__(rank, size)
        self.barrier, self.boards, self.round = barrier, boards, 0

    def all_gather(self, value: T) -> list[T]:
        self.boards[self.rank].append(value)
        self.barrier.wait(60)
        values = [board[self.round] for board in self.boards]
        self.round += 1
        return values


def in_ranks(size: int, work: Callable[[Any], T]) -> list[T]:
    """`work(ranks)` in every thread; an exception counts as what it returned."""
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
