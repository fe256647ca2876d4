"""The results file of an evaluation, with one schema (docs/results.schema.json) whoever played the episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from turngym.agents.evaluation.scores import EpisodeOutcome, EvaluationError
from turngym.agents.play_spec import EvalSpec
from turngym.core.episode import LENIENT, SHORT, Status
from turngym.core.task import Task, Verdict, plain_id
from turngym.core.user_files import json_object
from turngym.core.whole_files import atomic_write

FORMAT, VERSION = "turngym-results", 3
AVERAGE = "average"
"""Folder of a training run that holds its averaged weights and their evaluation (`turngym model average`)."""
EACH = ("error", "goal_rate", "answer_f1", "usage", SHORT, LENIENT)
"""Names in `Episode.meta` whose values differ from episode to episode."""


ALIKE = ("sample", "seed", "success", "score", "episode_return")
"""What a row has of an outcome, by the same names."""


def episode_row(outcome: EpisodeOutcome) -> dict[str, Any]:
    """One episode in a results file: enough to score and compare it, without its text."""
    task = outcome.task
    return {
        "task_id": task.task_id,
        "sha256": task.sha256,
        "category": task.category,
        **({"cluster": task.cluster} if task.cluster else {}),
        "status": outcome.status.value,
        "prompt_tokens": outcome.prompt_tokens,
        "response_tokens": outcome.response_tokens,
        **{name: getattr(outcome, name) for name in (*ALIKE, "turns", "invalid")},
    }


class _Row(msgspec.Struct):
    task_id: str
    sha256: str
    category: str
    status: Status
    sample: int
    seed: int
    success: bool
    score: float
    episode_return: float
    turns: int
    invalid: int
    cluster: str = ""
    prompt_tokens: int | None = None
    response_tokens: int | None = None


class _Results(msgspec.Struct):
    format: Literal["turngym-results"]
    version: Literal[3]
    spec: EvalSpec
    episodes: list[_Row]


def read_results(path: Path) -> tuple[EvalSpec, list[EpisodeOutcome]]:
    """Reads the settings and the outcomes in a results file. Raises EvaluationError for another file.

    The file does not tell invalid verdicts apart, so that all of them are read as inadmissible.
    """
    try:
        # not msgspec's reader: a path in the settings may hold bytes that are no UTF-8
        results = msgspec.convert(json_object(path, EvaluationError), _Results)
    # half a surrogate pair is a ValueError, too
    except ValueError as error:
        raise EvaluationError(f"{path} is no results file of this turngym: {error}") from error
    env_id = plain_id(results.spec.play.env.id)
    outcomes = []
    for row in results.episodes:
        task = {name: getattr(row, name) for name in ("task_id", "sha256", "category", "cluster")}
        # the file does not say which kind of invalid they were
        counts = {Verdict.OK: row.turns - row.invalid, Verdict.INADMISSIBLE: row.invalid}
        outcomes.append(
            EpisodeOutcome(
                task=Task(env_id=env_id, split="", **task),
                group=0,
                verdicts=tuple(counts.get(verdict, 0) for verdict in Verdict),
                goal_rate=None,
                cut=0,
                **{name: getattr(row, name) for name in (*ALIKE, "status", "prompt_tokens", "response_tokens")},
            )
        )
    return results.spec, outcomes


def token_counts(outcomes: Sequence[EpisodeOutcome]) -> dict[str, int] | None:
    """Number of `prompt` and `response` ids of all episodes; None if no episode has ids."""
    counts = [
        (outcome.prompt_tokens, outcome.response_tokens or 0)
        for outcome in outcomes
        if outcome.prompt_tokens is not None
    ]
    return {"prompt": sum(p for p, _ in counts), "response": sum(r for _, r in counts)} if counts else None


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
