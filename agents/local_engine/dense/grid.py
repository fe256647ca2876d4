"""A batch as attention sees it, rows and columns, and as products see it: the real ids alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """B rows of Q ids for attention, and the T of them that are real, for everything else: padding costs no product."""

    rows: int
    queries: int
    cells: Tensor | None
    """As in `Step`."""

    def real(self, values: Tensor) -> Tensor:
        """[B, Q, ...] to [T, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.cells is None else flat.index_select(0, self.cells)

    def spread(self, values: Tensor) -> Tensor:
        """[T, ...] to [B, Q, ...], zeros where nothing is real."""
        if self.cells is not None:
            grid = values.new_zeros(self.rows * self.queries, *values.shape[1:])
            values = grid.index_copy_(0, self.cells, values)
        return values.unflatten(0, (self.rows, self.queries))

    def last(self, values: Tensor) -> Tensor:
        """Those of [T, ...] that stand in the last column."""
        if self.cells is None:
            return values[self.queries - 1 :: self.queries]
        return values if self.queries == 1 else values[self._ends(self.cells)]

    def last_rows(self) -> slice | Tensor:
        """The rows whose last id is real."""
        return slice(None) if self.cells is None else self.cells[self._ends(self.cells)] // self.queries

    def _ends(self, cells: Tensor) -> Tensor:
        return cells % self.queries == self.queries - 1
