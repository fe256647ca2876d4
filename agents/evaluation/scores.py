"""Scores of evaluation episodes: Avg@n, pass@k, rows by category, rates of invalid actions and cut episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.outcomes import Outcomes
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, paired_difference, pass_at_k
from turngym.envs.core import Verdict
from turngym.envs.episode import Episode, Status

PAPER_ORDER = ("place", "look", "clean", "heat", "cool", "two")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One row of a result table."""

    name: str
    samples: int
    """Fewest samples of a task in this row: the n of Avg@n."""
    episodes: int
    avg: Interval
    """Avg@n: mean success over tasks and samples."""
    pass_at: Mapping[int, float]
    """k to pass@k, for k = 1, 2, 4, ... up to n."""
    pass_intervals: Mapping[int, Interval]
    """k to pass@k with its interval over tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Everything that a table or a figure needs about one evaluation. Episodes that ended in an error do not count."""

    overall: ScoreRow
    categories: tuple[ScoreRow, ...]
    errors: int
    """Episodes that ended in an error: left out everywhere else, to be played again."""
    score: float
    """Mean graded score at the end."""
    turns: float
    """Mean number of turns."""
    success_turns: float | None
    """Mean number of turns of the successful episodes."""
    invalid_rate: float
    """Share of turns whose action did not reach the environment."""
    verdicts: Mapping[str, float]
    """Share of turns by verdict."""
    truncated: Mapping[str, float]
    """Share of episodes by truncation status."""
    goal_rate: float | None
    """Mean share of goal conditions met at the end; None where the environment has none."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def avg_at_n(episodes: Sequence[Episode] | Outcomes) -> float:
    """Mean over tasks of the mean success of their samples; episodes that ended in an error do not count."""
    return clustered(list(task_means(episodes).values())).mean


def task_means(episodes: Iterable[Episode] | Outcomes) -> dict[str, float]:
    """Task id to the mean success of its samples."""
    counted = _counted(Outcomes.of(episodes))
    names = sorted({task.task_id for task in counted.tasks()})
    _, wins_T, samples_T = _by_task(counted.task_ranks(), counted.column("success"))
    return dict(zip(names, (wins_T / samples_T).tolist(), strict=True))


def score(episodes: Iterable[Episode] | Outcomes) -> Scores:
    """Score one evaluation. Raises ScoreError if no episode ended without an error."""
    every = Outcomes.of(episodes)
    counted = _counted(every)
    if not len(counted):
        raise ScoreError(f"none of {len(every)} episodes ended without an error, so there is nothing to score")
    verdicts, statuses = counted.verdict_counts(), counted.statuses()
    depths, won, goals = counted.depths(), counted.column("success").astype(np.bool_), counted.column("goal")
    rows, ranks, turns = counted.categories(), counted.task_ranks(), max(int(depths.sum()), 1)
    goals = goals[~np.isnan(goals)]
    return Scores(
        overall=_row("all", ranks, won),
        categories=tuple(_row(name, ranks[rows[name]], won[rows[name]]) for name in sorted(rows, key=category_rank)),
        errors=len(every) - len(counted),
        score=fmean(counted.column("score")),
        turns=fmean(depths),
        success_turns=fmean(depths[won]) if won.any() else None,
        invalid_rate=sum(n for verdict, n in verdicts.items() if not verdict.valid) / turns,
        verdicts={verdict.value: verdicts[verdict] / turns for verdict in Verdict},
        truncated={s.value: statuses[s] / len(counted) for s in Status if s.value.startswith("truncated_")},
        goal_rate=fmean(goals) if len(goals) else None,
    )


def compare(first: Iterable[Episode] | Outcomes, second: Iterable[Episode] | Outcomes) -> Interval:
    """Avg@n of `second` minus `first` on the same tasks, paired by task, with its 95 % interval.

    Raises:
        ScoreError: if the runs played different tasks (by id, or by sha256).
    """
    one, other = _counted(Outcomes.of(first)), _counted(Outcomes.of(second))
    hashes = {task.task_id: task.sha256 for task in one.tasks()}
    for task in other.tasks():
        if hashes.get(task.task_id, task.sha256) != task.sha256:
            raise ScoreError(
                f"{task.task_id} has sha256 {hashes[task.task_id][:12]} in the first run and {task.sha256[:12]} in the "
                "second: same name, another task"
            )
    return paired_difference(task_means(one), task_means(other))


def _counted(every: Outcomes) -> Outcomes:
    """Without those that ended in an error."""
    failed = every.errors
    return every.take(np.flatnonzero(~failed)) if failed.any() else every


def _row(name: str, rank_N: NDArray[np.int64], won_N: NDArray[np.bool_]) -> ScoreRow:
    _, wins_T, samples_T = _by_task(rank_N, won_N)
    samples = int(samples_T.min())
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= samples]
    pairs = list(zip(samples_T.tolist(), wins_T.tolist(), strict=True))
    best = {k: clustered([pass_at_k(played, won, k) for played, won in pairs]) for k in ks}
    return ScoreRow(
        name=name,
        samples=samples,
        episodes=len(rank_N),
        avg=clustered((wins_T / samples_T).tolist()),
        pass_at={k: interval.mean for k, interval in best.items()},
        pass_intervals=best,
    )


def _by_task(
    rank_N: NDArray[np.int64], won_N: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(tasks, successes, samples), each [T], from the task and the success of every episode [N]."""
    tasks_T, place_N, samples_T = np.unique(rank_N, return_inverse=True, return_counts=True)
    wins_T = np.bincount(place_N, weights=won_N, minlength=len(tasks_T)).astype(np.int64)
    return tasks_T, wins_T, samples_T


def category_rank(category: str) -> tuple[int, str]:
    """Where a category stands in tables: ALFWorld's as papers have them, others by name."""
    known = PAPER_ORDER.index(category) if category in PAPER_ORDER else len(PAPER_ORDER)
    return known, category
