"""Task ids of a shop: `<profile>/<goal>`; a split lists its own, every goal of the shop can be played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from turngym.envs.core import TaskError
from turngym.envs.webshop.shop.splits import TRAIN, Splits


class GoalIds(Sequence[str]):
    """The ids of some goals of a shop, made when they are asked for; `in` is true for every goal of the shop."""

    def __init__(self, profile: str, listed: Sequence[int], goals: int) -> None:
        """`listed`: goal numbers; `goals`: how many the shop has."""
        self._prefix = f"{profile}/"
        self._listed = listed
        self._goals = goals

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [f"{self._prefix}{goal}" for goal in self._listed[index]]
        return f"{self._prefix}{self._listed[index]}"

    def __iter__(self) -> Iterator[str]:
        return (f"{self._prefix}{goal}" for goal in self._listed)

    def __contains__(self, task_id: object) -> bool:
        return isinstance(task_id, str) and self._number(task_id) is not None

    def goal_of(self, task_id: str) -> int:
        """The goal's number. Raises TaskError for an id of another shop and for a number that does not exist."""
        number = self._number(task_id)
        if number is None:
            raise TaskError(f"task {task_id!r} is not one of {self._prefix}0 to {self._prefix}{self._goals - 1}")
        return number

    def _number(self, task_id: str) -> int | None:
        digits = task_id.removeprefix(self._prefix)
        # one spelling per goal: no sign, no leading zeros, no other alphabet's digits
        # twelve digits at most: int() raises ValueError for thousands of them
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 12 or task_id != f"{self._prefix}{int(digits)}":
            return None
        return int(digits) if int(digits) < self._goals else None


def listed_goals(splits: Splits, split: str | None) -> tuple[int, ...]:
    """The goals of a split; None is training, or where that is empty the first split with goals."""
    if split is None:
        split = next((name for name in (TRAIN, *splits.parts) if splits.parts.get(name)), TRAIN)
    return splits[split]
