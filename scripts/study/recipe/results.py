"""What an embedded recipe ends with: each method's evaluation, and the CPU seconds of its commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from turngym.agents.evaluation.statistics import Interval
from turngym.envs.core.tables import Table
from turngym.scripts.study.recipe.runs import PaperRun


def result_table(run: PaperRun, out: Path, spent: Mapping[str, float]) -> Table:
    """A row per method, that of the teacher's training first; `spent`: --out of a command -> its CPU seconds."""
    found = [("grpo", "teacher (GRPO)")] if run.has_teacher else []
    rows = []
    for name, shown in [*found, *((method.name, method.name) for method in run.methods)]:
        folder = out / name
        seconds = [f"{spent[str(at)]:.0f}" if str(at) in spent else "-" for at in (folder, folder / "final")]
        rows.append([shown, accuracy(folder / "final" / "results.json"), *seconds])
    rows.append(["all of it", "", f"{sum(spent.values()):.0f}", ""])
    return ["", "Avg@4 [95 %]", "training, CPU s", "evaluation, CPU s"], rows


def accuracy(path: Path) -> str:
    """The mean success in a results.json with its interval; `-` without one."""
    if not path.exists():
        return "-"
    average = json.loads(path.read_text(encoding="utf-8"))["scores"]["overall"]["avg"]
    return str(Interval(**average))
