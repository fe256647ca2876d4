"""Prints the size and shape of the rooms, as a table: `python tests/support/house.py`; of named modules their tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median, quantiles

import import_graph
from import_graph import ROOMS, ROOT

STARTS = {
    "evaluate": "turngym.agents.evaluation.evaluate",
    "a training run": "turngym.trainers.run",
    "the training loop": "turngym.trainers.train_loop",
    "the live proxy": "turngym.trainers.live.run",
    "TurnOPD": "turngym.trainers.algorithms.turnopd",
}
"""What a reader may start from, and its module. Its files are what it imports, directly or not, and itself."""


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def figures() -> dict[str, int | str]:
    """Names and values of the table's rows."""
    sizes = {path: lines(path) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    modules = sorted(size for path, size in sizes.items() if path.name != "__init__.py")
    edges = import_graph.graph()
    folders = import_graph.folders(edges)
    both = sum(other in folders and here in folders[other] for here, others in folders.items() for other in others) // 2
    tests = {path: lines(path) for path in (ROOT / "tests").rglob("*.py")}
    of_room = {room: sum(size for path, size in sizes.items() if path.is_relative_to(ROOT / room)) for room in ROOMS}
    of_start = {name: {start} | import_graph.reached(edges, start) for name, start in STARTS.items()}
    return {
        "source lines": sum(sizes.values()),
        **{f"  {room}": size for room, size in of_room.items()},
        "files": len(modules),
        "folders": len({path.parent for path in sizes if path.name != "__init__.py"}),
        "lines a file, median / p90": f"{median(modules):.0f} / {quantiles(modules, n=10)[-1]:.0f}",
        "longest import chain": len(import_graph.longest_chain(edges)),
        "circles of files": len(import_graph.circles(edges)),
        "rings of folders": len(import_graph.circles(folders)),
        "pairs of folders both ways": both,
        "test lines": sum(tests.values()),
        "test files": len(tests),
        **{f"files reached from {name}": len(files) for name, files in of_start.items()},
    }


def tests_of(module: str) -> list[str]:
    """The files of tests that import a module of ours (`trainers/losses.py`), and those of mutants that change it."""
    dotted = f"turngym.{module.removesuffix('.py').replace('/', '.')}"
    names = re.compile(rf"(?:from|import) {re.escape(dotted)}\b|{re.escape(module)}")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in files if names.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("\n".join(f"{module}: {' '.join(tests_of(module))}" for module in sys.argv[1:]))
    for name, value in figures().items() if len(sys.argv) == 1 else ():
        print(f"| {name:<36} | {value:>9} |" if isinstance(value, str) else f"| {name:<36} | {value:>9,} |")
