"""Records of cells that no study has run: two tasks, evaluated after every so many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turngym.trainers.study.records import Cost, Evaluation, Record


def record(
    method: str, seed: int, costs: Sequence[Cost], curve: Sequence[Mapping[str, float]], every: int, **changes: Any
) -> Record:
    """`curve` is the success of the tasks a and b at each evaluation, `costs` what it had cost by then."""
    points = enumerate(zip(costs, curve, strict=True))
    given: dict[str, Any] = {
        "world": "house",
        "method": method,
        "group": "main" if method in ("opd", "turnopd") else "fixed",
        "about": f"about {method}",
        "seed": seed,
        "settings": {"algorithm": method},
        "samples": 4,
        "evaluations": tuple(Evaluation(step=every * n, cost=cost, tasks=tasks) for n, (cost, tasks) in points),
        "categories": {"a": "place", "b": "heat"},
        "total": costs[-1],
        "phases": dict.fromkeys(("rollout", "teacher", "update"), (2.0, 1.0)),
        "steps": [
            {"step": 1, "depth/cap": 24, "depth/probe": 1, "turns_mean": 9.0},
            {"step": 2, "depth/cap": 8, "depth/probe": 0, "turns_mean": 5.0, "depth/h_eff": 4, "weight/alpha": 0.5},
        ],
        "regime": {},
        "schema": 3,
    }
    return Record(**{**given, **changes})
