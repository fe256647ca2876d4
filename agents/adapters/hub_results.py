"""A result as the Hugging Face Hub reads it: `.eval_results/PANEL.yaml` of a model, and `eval.yaml` of the benchmark.

What the format cannot hold: any episode; intervals, the panel's hash and the rules of the game stand in `notes`.
"""

from __future__ import annotations

import json
from pathlib import Path

from turngym.agents.adapters.exported_numbers import (
    hub_id,
    numbers_of,
    panel_of_result,
    rules_of,
    times_of,
    write_texts,
)
from turngym.agents.evaluation.packed_file import PackedResult

LACKS = "no episodes, and intervals, hashes and rules only as a note"
SHOWN_METRICS = ("avg-", "pass-at-", "pass-all-", "score")


def write(result: PackedResult, out: Path, *, dataset: str) -> list[Path]:
    """Writes both files below `out` and returns their paths.

    Raises EvaluationError for another id, and for a result without episodes that ended well.
    """
    hub_id("--dataset", dataset)
    panel, play, times = panel_of_result(result), result.spec.play, times_of(result)
    # a point stands before a category
    numbers = [n for n in numbers_of(result) if n.name.startswith(SHOWN_METRICS) and "." not in n.name]
    short = panel.panel.rpartition(":")[2]
    entries, tasks = "", ""
    for number in numbers:
        notes = f"{number.about} Panel {panel.panel}, sha256 {panel.sha256}; {rules_of(result)}."
        if number.interval is not None:
            notes += f" 95 % interval over tasks {100 * number.interval.low:.1f} to {100 * number.interval.high:.1f}."
        entries += (
            f"- dataset:\n    id: {_text(dataset)}\n    task_id: {_text(f'{short}-{number.name}')}\n"
            f"  value: {100 * number.value:.4g}\n"
        )
        entries += (f"  date: {_text(times[1].isoformat())}\n" if times else "") + f"  notes: {_text(notes)}\n"
        tasks += f"  - id: {_text(f'{short}-{number.name}')}\n    config: {_text(short)}\n    split: test\n"
    about = f"{panel.size} tasks of {play.env.id}, played by turns in text; a task is known by its hash. Percent."
    benchmark = f"name: {_text(short)}\ndescription: {_text(about)}\nevaluation_framework: turngym\n\ntasks:\n{tasks}"
    return write_texts({out / ".eval_results" / f"{short}.yaml": entries, out / "eval.yaml": benchmark})


def _text(value: str) -> str:
    """A text as YAML: what JSON writes of it is YAML, too."""
    return json.dumps(value)
