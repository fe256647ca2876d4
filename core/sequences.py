"""LazySequence: a sequence whose items are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T", covariant=True)


class LazySequence(Sequence[T]):
    """A subclass writes `__len__` and `item`. Slices are lists."""

    @abstractmethod
    def item(self, index: int) -> T:
        """Makes item `index`, from 0 to `len(self) - 1`."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        positions = range(len(self))[index]
        return self.item(positions) if isinstance(positions, int) else [self.item(position) for position in positions]

    def __iter__(self) -> Iterator[T]:
        return map(self.item, range(len(self)))
