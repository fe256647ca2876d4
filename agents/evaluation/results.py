"""The results file of an evaluation, with one schema (docs/results.schema.json) whoever played the episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from turngym.agents.evaluation.scores import EpisodeOutcome, Scores
from turngym.core.episode import LENIENT, SHORT
from turngym.core.provenance import loaded_versions
from turngym.core.redaction import brief
from turngym.core.tables import atomic_write

FORMAT, VERSION = "turngym-results", 2
DEPARTS = "departs"
"""Setting that lists what an evaluation does otherwise than the original (`original.departures`)."""
BESIDE = "beside"
"""Setting that lists the part of it that was given beside a preset."""
AVERAGE = "average"
"""Folder of a training run that holds its averaged weights and their evaluation (`turngym model average`)."""
IDENTITY = ("panel", "panel_sha256", "env_id", "tasks", "limit", "agent", "samples", "seed")
"""Settings at the top level of every results file; the others are under `settings`."""
ABOUT = ("chat", "endpoint", "preset_values", "panel_max_turns", DEPARTS, BESIDE)
"""Names in `Episode.meta` that are recorded, but may differ between calls that play into one trace."""
EACH = ("error", "goal_rate", "usage", SHORT, LENIENT)
"""Names in `Episode.meta` whose values differ from episode to episode."""
PER_EPISODE = (*EACH, "panel", *ABOUT)
"""Names in `Episode.meta` that are not settings of the evaluation."""


def check_settings(settings: Any) -> None:
    """Raises ValueError for settings, of a file from anyone, that no evaluation has recorded."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"its settings are {brief(settings, 80)}")
    kinds: dict[str, Any] = {"tasks": int, "samples": int, "seed": int, "panel": str | None, "limit": int | None}
    kinds |= {"make": dict | None, "channel": str | None, "max_turns": int | None, "temperature": float | int | None}
    kinds |= dict.fromkeys(("agent", "model", "player", "preset", "chat", "env_id", "panel_sha256"), str | None)
    kinds |= {
        "endpoint": dict | None,
        "scored_with": str | None,
        "approximate": str | None,
        "sampling": str | None,
        "draws": int | None,
    }
    for name, kind in kinds.items():
        check_kind(f"setting {name}", settings.get(name), kind)
    for name in (DEPARTS, BESIDE):
        said = settings.get(name, [])
        if not isinstance(said, list) or len(said) > 100 or not all(isinstance(text, str) for text in said):
            raise ValueError(f"its setting {name} is {brief(said, 80)}")
    # panel.tasks[:-5] would leave out the last ones
    for name in ("tasks", "samples", "limit", "max_turns"):
        if (value := settings.get(name)) is not None and value < 1:
            raise ValueError(f"its setting {name} is {brief(value, 80)}; it must be at least 1")


LARGE = 1e18


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raises ValueError where `value`, which a file from anyone calls `name`, is of another `kind`, a type or a union
    of types; numbers must be finite, and no larger than anything that is measured."""
    infinite = isinstance(value, int | float) and not abs(value) < LARGE
    if not isinstance(value, kind) or isinstance(value, bool) or infinite:
        kinds = get_args(kind) or (kind,)
        valid = " or ".join(_KINDS.get(one, "nothing") for one in kinds if one is not int or float not in kinds)
        raise ValueError(f"its {name} is {brief(value, 80)}; valid: {valid}")


_KINDS = {int: "a whole number", float: "a finite number", str: "a text", dict: "a table"}


def episode_row(outcome: EpisodeOutcome) -> dict[str, Any]:
    """One episode in a results file: enough to score and compare it, without its text."""
    task = outcome.task
    alike = ("sample", "seed", "success", "score", "episode_return", "turns", "invalid")
    return {
        "task_id": task.task_id,
        "sha256": task.sha256,
        "category": task.category,
        **({"cluster": task.cluster} if task.cluster else {}),
        "status": outcome.status.value,
        "prompt_tokens": outcome.prompt_tokens,
        "response_tokens": outcome.response_tokens,
        **{name: getattr(outcome, name) for name in alike},
    }


def token_counts(outcomes: Sequence[EpisodeOutcome]) -> dict[str, int] | None:
    """Number of `prompt` and `response` ids of all episodes; None if no episode has ids."""
    known = [(one.prompt_tokens, one.response_tokens or 0) for one in outcomes if one.prompt_tokens is not None]
    return {"prompt": sum(p for p, _ in known), "response": sum(r for _, r in known)} if known else None


def results_json(
    settings: Mapping[str, Any], scores: Scores, seconds: float, outcomes: Sequence[EpisodeOutcome]
) -> dict[str, Any]:
    """The content of a results file without the rows of its episodes.

    Args:
        settings: of the evaluation.
        scores: of all episodes.
        seconds: wall clock of the evaluation.
        outcomes: of the episodes, whose tokens are counted.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: settings.get(name) for name in IDENTITY},
        "settings": {name: value for name, value in settings.items() if name not in IDENTITY},
        "versions": loaded_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "tokens": token_counts(outcomes),
        "scores": scores.to_json(),
    }


def write_results(path: str | Path, head: Mapping[str, Any], outcomes: Sequence[EpisodeOutcome]) -> None:
    """Write `head` and the rows of the episodes one by one; the file is the same as if it were written at once."""
    before, after = _indented({**head, "episodes": []}, 0).split('\n "episodes": []', 1)
    with atomic_write(path) as file:
        file.write(f'{before}\n "episodes": [')
        comma = ""
        for outcome in outcomes:
            file.write(f"{comma}\n{_indented(episode_row(outcome), 2)}")
            comma = ","
        file.write(("\n ]" if comma else "]") + after + "\n")


def _indented(value: Any, by: int) -> str:
    text = json.dumps(value, indent=1, sort_keys=True)
    return text if not by else " " * by + text.replace("\n", "\n" + " " * by)
