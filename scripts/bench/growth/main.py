"""Growth: CPU seconds and peak memory over sizes, and whether anything grows with the square.

Each cell (a measure at a size) is a process of its own, so that its peak memory is its own; what it reads is made up by
another one before. Exponents are of CPU time over size: a line through all sizes in logarithms, and between the two
largest. Asked for are 1 (work on all of it) or 0 (each answer costs the same), within 0.2; memory is flat where the
largest size takes at most a quarter more than the smallest, or linear where something must be held. Status 1 if
anything is not as asked.

Examples:
    turngym bench growth
    turngym bench growth --only report "trace html"
    turngym bench growth --full --folder growth --json growth.json
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.envs.core.tables import table_text
from turngym.scripts.bench.growth.fit import Growth, growth, verdicts
from turngym.scripts.bench.growth.measure import Cell, Measure, run_cell

MODULES = tuple(f"turngym.scripts.bench.growth.{name}" for name in ("traces", "runs", "play", "engine", "corpora"))
SHORT = 0.5
"""CPU seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthBench:
    """What to measure."""

    only: tuple[str, ...] = ()
    """Measures, by name (default: all)."""
    full: bool = False
    """To the largest sizes: an hour, and ten gigabytes of disk."""
    sizes: tuple[int, ...] = ()
    """Other sizes, of every measure."""
    folder: Path | None = None
    """Where what is read is made up, and kept; by default a temporary one."""
    json: Path | None = None
    """Also write all figures here."""


HEADER = ["", "sizes", "CPU s", "exponent", "at the end", "time", "peak MB", "memory"]


def main(argv: Sequence[str]) -> int:
    """Measure; status 1 if something grows otherwise than asked."""
    config = tyro.cli(GrowthBench, args=list(argv), prog="turngym bench growth", description=__doc__)
    chosen = list(_chosen(config.only))
    rows, figures, met = [], {}, True
    with _folder(config.folder) as folder:
        for module, measure in chosen:
            if measure.needs and importlib.util.find_spec(measure.needs) is None:
                print(f"{measure.name}: left out, {measure.needs} is not installed", flush=True)
                continue
            cells = []
            for size in config.sizes or (measure.full if config.full else measure.sizes):
                cells.append(_quickest(module, measure, folder, size))
                said = f"{cells[-1].cpu_s:.3f} CPU s, {cells[-1].peak_mb:.0f} MB"
                print(f"  {measure.name}, {size:,} {measure.per}: {said}", flush=True)
            found = growth(measure, cells)
            met &= found.time_ok and found.memory_ok
            rows.append(table_row(measure, cells, found))
            figures[measure.name] = {"cells": [asdict(cell) for cell in cells], "growth": asdict(found)}
    print(table_text((HEADER, rows), "Growth"), end="")
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


def _quickest(module: str, measure: Measure, folder: Path, size: int) -> Cell:
    """Short cells are measured three times: what else the machine does only adds to CPU time."""
    first = run_cell(module, measure, folder, size)
    more = [run_cell(module, measure, folder, size) for _ in range(2 if first.cpu_s < SHORT else 0)]
    return min((first, *more), key=lambda cell: cell.cpu_s)


def table_row(measure: Measure, cells: Sequence[Cell], found: Growth) -> list[str]:
    """One line of the table: figures from the smallest size to the largest."""
    time, memory = verdicts(measure, found)
    return [
        measure.name,
        " ".join(short(cell.size) for cell in cells) + f" {measure.per}",
        " ".join(f"{cell.cpu_s:.2g}" if cell.cpu_s < 100 else f"{cell.cpu_s:.0f}" for cell in cells),
        f"{found.exponent:.2f}",
        f"{found.last:.2f}",
        time,
        " ".join(f"{cell.peak_mb:.0f}" for cell in cells),
        memory,
    ]


def short(size: int) -> str:
    """1k, 1.18M."""
    for unit, sign in ((1_000_000, "M"), (1_000, "k")):
        if size >= unit:
            return f"{size / unit:.3g}{sign}"
    return str(size)


def _chosen(only: Sequence[str]) -> Iterator[tuple[str, Measure]]:
    known = [(module, measure) for module in MODULES for measure in importlib.import_module(module).MEASURES]
    names = [measure.name for _, measure in known]
    for name in only:
        if name not in names:
            raise TurngymError(f"there is no measure {name!r}.{did_you_mean(name, names)} Measures: {', '.join(names)}")
    return ((module, measure) for module, measure in known if not only or measure.name in only)


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
