"""Prints the numbers that packed results and studies are compared by, as this process computes them, to the last bit.

    python tests/support/recorded_numbers.py FILE...    # *.result.xz, study-*.json.gz

The first line is the kernel of NumPy's BLAS and a product whose last digits depend on it; then a line for each file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import kernels

from turngym.agents.evaluation.packed import inconsistencies
from turngym.agents.evaluation.packed_file import SUFFIX, read_result
from turngym.agents.evaluation.scores import score, task_means
from turngym.agents.evaluation.seeds import over_seeds, rise, seed_spread
from turngym.trainers.study.records import read_records
from turngym.trainers.study.results import least_time, same_step


def main(paths: list[Path]) -> None:
    draws = np.random.default_rng(0).random((64, 64))
    print(json.dumps([kernels()[:1], float((draws @ draws).sum())]))
    packed = {path.name: read_result(path) for path in paths if path.name.endswith(SUFFIX)}
    for name, result in packed.items():
        print(json.dumps([name, inconsistencies(result), score(result.episodes).to_json()]))
    # the last four are training seeds of two methods in one world, as a table compares them
    last = list(packed.values())[-4:]
    runs = [task_means(result.episodes) for result in last]
    clusters = {episode.task.task_id: episode.task.cluster for episode in last[0].episodes}
    compared = [over_seeds(runs, clusters=clusters), rise(runs[:2], runs[2:], clusters=clusters), seed_spread(runs)]
    print(json.dumps(list(map(plain, compared))))
    for path in paths:
        if path.name not in packed:
            study = read_records(path)
            for world, rows in study.worlds.items():
                base = study.baseline or ""
                tables = [same_step(rows, base), least_time(rows, base, "cpu"), least_time(rows, base, window=0.3)]
                print(json.dumps([path.name, world, *map(plain, tables)]))


def plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
