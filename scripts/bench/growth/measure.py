"""What a measure of growth is, and its cell: one size in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from turngym.envs.core.errors import TurngymError

Work = Callable[[], object]
"""What is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Something that is asked to be linear in its size."""

    name: str
    per: str
    """What its size counts, in the plural."""
    sizes: tuple[int, ...]
    full: tuple[int, ...]
    """Instead of `sizes` with --full."""
    open: Callable[[Path, int], Work]
    """Gets ready (unmeasured, in the cell's process) and returns the work."""
    make: Callable[[Path, int], object] = lambda folder, size: None
    """Writes what the work reads, in another process; called once for each size."""
    shared: str = ""
    """Measures that read the same files name the same folder for them."""
    power: float = 1.0
    """The exponent of time that is asked for: 1 for work on all of it, 0 where size should not matter."""
    holds: str = ""
    """What must lie in memory and grows with the size; empty: nothing, memory is asked to be flat."""
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


def run_cell(module: str, measure: Measure, folder: Path, size: int) -> Cell:
    """Measure one size. Raises TurngymError with what the process said where it failed."""
    place = folder / (measure.shared or measure.name.replace(" ", "-")) / str(size)
    ready = place / "ready"
    if not ready.exists():
        place.mkdir(parents=True, exist_ok=True)
        _process("make", module, measure.name, place, size)
        ready.touch()
    return Cell(**json.loads(_process("work", module, measure.name, place, size)))


def _process(task: str, module: str, name: str, place: Path, size: int) -> str:
    # one thread: what is asked is how work grows, and threads that wait for each other take CPU time too
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turngym.scripts.bench.growth.measure", task, module, name, str(place), str(size)]
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


def work(measure: Measure, place: Path, size: int) -> Cell:
    """Measure in this process."""
    run = measure.open(place, size)
    before, begin = _peak_mb(), time.process_time()
    run()
    spent, peak = time.process_time() - begin, _peak_mb()
    return Cell(size=size, cpu_s=spent, peak_mb=peak, added_mb=peak - before)


def main() -> None:
    """`work` or `make`, a module with MEASURES, the name of one of them, its folder, a size."""
    task, module, name, place, size = sys.argv[1:]
    measures: tuple[Measure, ...] = importlib.import_module(module).MEASURES
    (measure,) = [item for item in measures if item.name == name]
    if task == "make":
        measure.make(Path(place), int(size))
    else:
        print(json.dumps(asdict(work(measure, Path(place), int(size)))))


if __name__ == "__main__":
    main()
