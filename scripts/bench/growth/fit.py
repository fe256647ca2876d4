"""How time and memory grow over the cells of one measure, and whether that is what was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turngym.scripts.bench.growth.measure import Cell, Measure

NOISE = 0.2
"""By which an exponent may exceed what is asked for: caches that no longer hold what is read, a busy machine."""
FLAT = 1.25
"""Largest peak memory / smallest, of what is called flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What the cells of one measure say."""

    exponent: float
    """Of CPU seconds over size: slope of a straight line through all points in logarithms."""
    last: float
    """The same between the two largest sizes, where what is done once for any size weighs least."""
    peak_ratio: float
    """Peak memory at the largest size / at the smallest."""
    bytes_each: float
    """Peak memory added from the smallest size to the largest, for each unit of size."""
    time_ok: bool
    memory_ok: bool


def growth(measure: Measure, cells: Sequence[Cell]) -> Growth:
    """Raises ValueError for fewer than two sizes."""
    if len(cells) < 2:
        raise ValueError(f"{measure.name}: {len(cells)} sizes; growth needs two")
    cells = sorted(cells, key=lambda cell: cell.size)
    first, end = cells[0], cells[-1]
    exponent, last = slope(cells), slope(cells[-2:])
    ratio = end.peak_mb / first.peak_mb
    each = 1e6 * (end.peak_mb - first.peak_mb) / (end.size - first.size)
    # what memory must grow with may not grow with its square either
    held = not measure.holds or _memory_slope(cells) <= 1 + NOISE
    return Growth(
        exponent=exponent,
        last=last,
        peak_ratio=ratio,
        bytes_each=each,
        # fixed costs hide growth in the fit, noise shows some in the last step: both must be as asked
        time_ok=max(exponent, last) <= measure.power + NOISE,
        memory_ok=held if measure.holds else ratio <= FLAT,
    )


def slope(cells: Sequence[Cell]) -> float:
    """Exponent of CPU seconds over size, least squares in logarithms."""
    points = [(math.log(cell.size), math.log(max(cell.cpu_s, 1e-6))) for cell in cells]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def _memory_slope(cells: Sequence[Cell]) -> float:
    """Exponent of memory between the two largest sizes, above the smallest; 0 for less than a megabyte."""
    small, middle, large = cells[0], cells[-2], cells[-1]
    a, b = middle.peak_mb - small.peak_mb, large.peak_mb - small.peak_mb
    if len(cells) < 3 or a < 1 or b < 1:
        return 0.0
    return math.log(b / a) / math.log((large.size - small.size) / (middle.size - small.size))


def verdicts(measure: Measure, found: Growth) -> tuple[str, str]:
    """(of time, of memory) in words."""
    asked = "linear" if measure.power == 1 else "flat" if measure.power == 0 else f"power {measure.power:g}"
    time = asked if found.time_ok else f"NOT {asked}"
    if found.memory_ok:
        return time, f"linear: {measure.holds}" if measure.holds else "flat"
    return time, "NOT linear" if measure.holds else f"NOT flat: {found.bytes_each / 1000:.2g} kB each"
