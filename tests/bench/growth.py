"""Growth: CPU seconds and peak memory over sizes, and whether anything grows with the square.

Each cell (a measure at a size) is a process of its own, so that its peak memory is its own; what it reads is made up by
another one before. Exponents are of CPU time over size: a line through all sizes in logarithms, and between the two
largest. Asked for are 1 (work on all of it) or 0 (each answer costs the same), within 0.2; memory is flat where the
largest size takes at most a quarter more than the smallest, or linear where something must be held. Status 1 if
anything is not as asked.

Examples:
    python tests/bench/growth.py
    python tests/bench/growth.py --only report "trace html"
    python tests/bench/growth.py --full --folder growth --json growth.json
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.envs.core.tables import table_text

# --- A measure, and a cell of it in its own process

Work = Callable[[], object]
"""What is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Something whose CPU time and memory are measured by size."""

    name: str
    per: str
    """What its size counts, in the plural."""
    sizes: tuple[int, ...]
    full: tuple[int, ...]
    """Instead of `sizes` with --full."""
    open: Callable[[Path, int], Work]
    """Prepares the work in the cell's process, which is not measured, and returns it."""
    make: Callable[[Path, int], object] = lambda folder, size: None
    """Writes what the work reads, once for each size, in another process."""
    shared: str = ""
    """Folder name for measures that read the same files."""
    power: float = 1.0
    """Largest exponent of CPU time: 1 for work on everything, 0 where size should not matter."""
    holds: str = ""
    """What is held in memory and grows with the size. Empty: memory must stay flat."""
    needs: str = ""
    """A package without which the measure is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One size, measured."""

    size: int
    cpu_s: float
    """Of the work alone."""
    peak_mb: float
    """Most that the process ever held, in 10^6 bytes."""
    added_mb: float
    """Of that, above what it held before the work."""


def run_cell(measure: Measure, folder: Path, size: int) -> Cell:
    """Measure one size. Raises TurngymError with what the process said where it failed."""
    place = folder / (measure.shared or measure.name.replace(" ", "-")) / str(size)
    ready = place / "ready"
    if not ready.exists():
        place.mkdir(parents=True, exist_ok=True)
        _process("make", measure.name, place, size)
        ready.touch()
    return Cell(**json.loads(_process("work", measure.name, place, size)))


def _process(task: str, name: str, place: Path, size: int) -> str:
    # one thread: threads that wait for each other take CPU time too, which would blur how work grows
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), f"--{task}", name, str(place), str(size)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise TurngymError(f"measuring {name!r} at {size:,} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip().splitlines()[-1] if task == "work" else ""


def _peak_mb() -> float:
    """Most memory that this process ever held, in 10^6 bytes."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1.024e-3
    # KiB, and on Linux at least what the process held that started this one
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3


def run_work(measure: Measure, place: Path, size: int) -> Cell:
    """Measure in this process."""
    run = measure.open(place, size)
    before, begin = _peak_mb(), time.process_time()
    run()
    spent, peak = time.process_time() - begin, _peak_mb()
    return Cell(size=size, cpu_s=spent, peak_mb=peak, added_mb=peak - before)


def run_task(task: str, name: str, place: Path, size: int) -> None:
    """Makes what a measure reads, or measures it in this process and prints the cell as JSON."""
    (measure,) = _choose([name])
    if task == "--make":
        measure.make(place, size)
    else:
        print(json.dumps(asdict(run_work(measure, place, size))))


# --- How time and memory grow over the cells

NOISE = 0.2
"""An exponent may exceed its limit by this much: caches overflow as sizes grow, and the machine is busy."""
FLAT = 1.25
"""Largest peak memory / smallest, of what is called flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How one measure grows over its cells."""

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


# --- The command

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
    config = tyro.cli(GrowthBench, args=list(argv), prog="python tests/bench/growth.py", description=__doc__)
    chosen = _choose(config.only)
    rows, figures, met = [], {}, True
    with _working_folder(config.folder) as folder:
        for measure in chosen:
            if measure.needs and importlib.util.find_spec(measure.needs) is None:
                print(f"{measure.name}: left out, {measure.needs} is not installed", flush=True)
                continue
            cells = []
            for size in config.sizes or (measure.full if config.full else measure.sizes):
                cells.append(_quickest(measure, folder, size))
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


def _quickest(measure: Measure, folder: Path, size: int) -> Cell:
    """Short cells are measured three times: what else the machine does only adds to CPU time."""
    first = run_cell(measure, folder, size)
    more = [run_cell(measure, folder, size) for _ in range(2 if first.cpu_s < SHORT else 0)]
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


def _choose(only: Sequence[str]) -> list[Measure]:
    """Returns the measures called `only`, or all. Raises TurngymError for an unknown name."""
    from growth_measures import MEASURES

    names = [measure.name for measure in MEASURES]
    for name in only:
        if name not in names:
            raise TurngymError(f"there is no measure {name!r}.{did_you_mean(name, names)} Measures: {', '.join(names)}")
    return [measure for measure in MEASURES if not only or measure.name in only]


@contextmanager
def _working_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--make"], ["--work"]):
        run_task(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
