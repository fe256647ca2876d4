"""How episodes are scored: Avg@n, pass@k, rows by category, rates of invalid actions and truncated episodes.

`Outcomes` keeps how episodes ended in columns (about 60 bytes each), `score` turns them into `Scores`, and
`success_table` and `behavior_table` show these.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, paired_difference, pass_at_k
from turngym.envs.core.episode import LENIENT, SHORT, Episode, Status
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table
from turngym.envs.core.task import Task, Verdict


class EvaluationError(TurngymError):
    """An evaluation that cannot start or be resumed: another evaluation's trace, or tasks that are not the panel's."""


V = TypeVar("V")
EACH = ("error", "goal_rate", "usage", SHORT, LENIENT)
"""Names in an episode's `meta` whose values differ from episode to episode."""
_STATUSES = tuple(Status)
_UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one episode ended."""

    task: Task
    seed: int
    sample: int
    group: int
    status: Status
    success: bool
    score: float
    episode_return: float
    verdicts: tuple[tuple[Verdict, int], ...]
    """Number of turns for each verdict that occurs."""
    goal_rate: float | None
    prompt_tokens: int | None
    """Number of ids that were not sampled; None for text-only agents."""
    response_tokens: int | None
    cut: int
    """Number of answers that ended at the limit on new tokens."""
    meta: Mapping[str, Any]
    """The episode's `meta` without the names in `EACH`."""

    @property
    def depth(self) -> int:
        """Number of turns."""
        return sum(count for _, count in self.verdicts)

    @property
    def invalid(self) -> int:
        """Number of turns whose action did not reach the environment."""
        return sum(count for verdict, count in self.verdicts if not verdict.valid)


class Codes(Generic[V]):
    """Numbers values that many episodes share, so that each is stored once."""

    def __init__(self) -> None:
        self.values: list[V] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, make: Callable[[], V]) -> int:
        """The number of the value with this `key`; `make` builds it the first time."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(make())
        return found


_COLUMNS = {
    **dict.fromkeys(("task", "verdicts", "played", "sample", "prompt", "response", "cut"), "i"),
    "group": "q",
    **dict.fromkeys(("status", "success"), "b"),
    **dict.fromkeys(("score", "ret", "goal"), "d"),
}


class Outcomes(Sequence[Outcome]):
    """Outcomes in the order in which they were added."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        self._tasks, self._verdicts = Codes[Task](), Codes[tuple[tuple[Verdict, int], ...]]()
        self._played = Codes[tuple[int, Mapping[str, Any]]]()
        self.noted_usage = False
        """Whether any episode added so far recorded its usage."""

    @classmethod
    def of(cls, episodes: Iterable[Episode] | Outcomes) -> Outcomes:
        """The outcomes of `episodes`."""
        if isinstance(episodes, Outcomes):
            return episodes
        found = cls()
        for episode in episodes:
            found.add(episode)
        return found

    def add(self, episode: Episode, task: Task | None = None) -> int:
        """Add `episode` and return its place. `task` may be an equal object to store instead of the episode's own."""
        counts = Counter(turn.verdict for turn in episode.turns)
        verdicts = tuple((verdict, counts[verdict]) for verdict in Verdict if verdict in counts)
        meta = {name: value for name, value in episode.meta.items() if name not in EACH}
        response = sum(turn.response_length for turn in episode.turns)
        ids = sum(len(segment) for segment in episode.segments)
        task, goal = task or episode.task, episode.meta.get("goal_rate")
        row: dict[str, Any] = {
            "task": self._tasks.number(task, lambda: task),
            "verdicts": self._verdicts.number(verdicts, lambda: verdicts),
            "played": self._played.number((episode.seed, repr(meta)), lambda: (episode.seed, meta)),
            "sample": episode.sample,
            "group": episode.group,
            "prompt": ids - response if episode.segments else _UNKNOWN,
            "response": response if episode.segments else _UNKNOWN,
            "cut": sum(turn.finish == "length" for turn in episode.turns),
            "status": _STATUSES.index(episode.status),
            "success": episode.success,
            "score": episode.score,
            "ret": episode.episode_return,
            "goal": np.nan if goal is None else float(goal),
        }
        for name, value in row.items():
            self._columns[name].append(value)
        self.noted_usage |= "usage" in episode.meta
        return len(self) - 1

    def __len__(self) -> int:
        return len(self._columns["task"])

    @overload
    def __getitem__(self, place: int) -> Outcome: ...
    @overload
    def __getitem__(self, place: slice) -> Outcomes: ...
    def __getitem__(self, place: int | slice) -> Outcome | Outcomes:
        if isinstance(place, slice):
            return self.take(range(*place.indices(len(self))))
        row = {name: column[place] for name, column in self._columns.items()}
        seed, meta = self._played.values[row["played"]]
        known = row["response"] != _UNKNOWN
        return Outcome(
            task=self._tasks.values[row["task"]],
            seed=seed,
            sample=row["sample"],
            group=row["group"],
            status=_STATUSES[row["status"]],
            success=bool(row["success"]),
            score=row["score"],
            episode_return=row["ret"],
            verdicts=self._verdicts.values[row["verdicts"]],
            goal_rate=None if np.isnan(row["goal"]) else row["goal"],
            prompt_tokens=row["prompt"] if known else None,
            response_tokens=row["response"] if known else None,
            cut=row["cut"],
            meta=meta,
        )

    def __iter__(self) -> Iterator[Outcome]:
        return (self[place] for place in range(len(self)))

    def take(self, places: Iterable[int] | NDArray[np.int64]) -> Outcomes:
        """The outcomes at `places`, in that order."""
        found = Outcomes()
        rows = places if isinstance(places, np.ndarray) else np.fromiter(places, np.int64)
        found._tasks, found._verdicts, found._played = self._tasks, self._verdicts, self._played
        found.noted_usage = self.noted_usage
        found._columns = {
            name: array(column.typecode, np.array(column)[rows].tobytes()) for name, column in self._columns.items()
        }
        return found

    def column(self, name: str) -> NDArray[Any]:
        """A copy of `score`, `goal`, `success`, `sample`, ... [n]."""
        return np.array(self._columns[name])

    @property
    def errors(self) -> NDArray[np.bool_]:
        """[n]: whether each episode ended in an error."""
        return np.array([status.is_error for status in _STATUSES])[self.column("status")]

    def latest(self) -> NDArray[np.int64]:
        """Sorted places of one episode of each (task, sample): the last without an error, if there is one."""
        task, sample, places = self.task_ranks(), self.column("sample"), np.arange(len(self))
        order = np.lexsort((places, ~self.errors, sample, task))
        task, sample = task[order], sample[order]
        last = np.ones(len(self), np.bool_)
        last[:-1] = (task[1:] != task[:-1]) | (sample[1:] != sample[:-1])
        return np.sort(order[last])

    def task_ranks(self) -> NDArray[np.int64]:
        """The number of each episode's task [n], tasks sorted by id."""
        names = {name: rank for rank, name in enumerate(sorted({task.task_id for task in self._tasks.values}))}
        return np.array([names[task.task_id] for task in self._tasks.values], np.int64)[self.column("task")]

    def tasks(self) -> list[Task]:
        """The tasks of these episodes, each once, in order of first occurrence."""
        numbers, first = np.unique(self.column("task"), return_index=True)
        return [self._tasks.values[number] for number in numbers[np.argsort(first)].tolist()]

    def categories(self) -> dict[str, NDArray[np.int64]]:
        """Places of the episodes by category."""
        names = list(dict.fromkeys(task.category for task in self._tasks.values))
        known = {name: number for number, name in enumerate(names)}
        each = np.array([known[task.category] for task in self._tasks.values], np.int64)[self.column("task")]
        order = np.argsort(each, kind="stable")
        ends = np.cumsum(np.bincount(each, minlength=len(names)))
        parts = zip(names, np.split(order, ends[:-1]), strict=True)
        return {name: places for name, places in parts if len(places)}

    def played(self) -> list[tuple[int, int, Mapping[str, Any]]]:
        """Each distinct (seed, meta without `EACH`) with the place of its first episode, in order of that place."""
        numbers, first = np.unique(self.column("played"), return_index=True)
        return [
            (place, *self._played.values[number])
            for place, number in sorted(zip(first.tolist(), numbers.tolist(), strict=True))
        ]

    def depths(self) -> NDArray[np.int64]:
        """Number of turns of each episode [n]."""
        each = [sum(count for _, count in verdicts) for verdicts in self._verdicts.values]
        return np.array(each, np.int64)[self.column("verdicts")]

    def verdict_counts(self) -> Counter[Verdict]:
        """Number of turns of all episodes by verdict."""
        total: Counter[Verdict] = Counter()
        for number, times in zip(*np.unique(self.column("verdicts"), return_counts=True), strict=True):
            for verdict, count in self._verdicts.values[number]:
                total[verdict] += count * int(times)
        return total

    def statuses(self) -> Counter[Status]:
        """Number of episodes by status."""
        numbers, counts = np.unique(self.column("status"), return_counts=True)
        return Counter({_STATUSES[n]: c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True)})


PAPER_ORDER = ("place", "look", "clean", "heat", "cool", "two")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One row of a result table."""

    name: str
    samples: int
    """Smallest number of samples of a task in this row, the n of Avg@n."""
    episodes: int
    avg: Interval
    """Avg@n: mean success over tasks and samples."""
    pass_at: Mapping[int, float]
    """k to pass@k, for k = 1, 2, 4, ... up to n."""
    pass_intervals: Mapping[int, Interval]
    """k to pass@k with its interval over tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """All that tables and figures need about one evaluation. Episodes that ended in an error do not count."""

    overall: ScoreRow
    categories: tuple[ScoreRow, ...]
    errors: int
    """Number of episodes that ended in an error; they are left out of all other numbers."""
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
    cut_rate: float
    """Share of turns whose answer ended at the limit on new tokens."""
    truncated: Mapping[str, float]
    """Share of episodes by truncation status."""
    goal_rate: float | None
    """Mean share of goal conditions met at the end; None if the environment has none."""

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
        cut_rate=int(counted.column("cut").sum()) / turns,
        truncated={s.value: statuses[s] / len(counted) for s in Status if s.value.startswith("truncated_")},
        goal_rate=fmean(goals) if len(goals) else None,
    )


def compare(first: Iterable[Episode] | Outcomes, second: Iterable[Episode] | Outcomes) -> Interval:
    """Avg@n of `second` minus `first` on the same tasks, paired by task, with its 95 % interval.

    Raises ScoreError if the runs played different tasks (by id, or by sha256).
    """
    one, other = _counted(Outcomes.of(first)), _counted(Outcomes.of(second))
    check_hashes(*({task.task_id: task.sha256 for task in run.tasks()} for run in (one, other)))
    return paired_difference(task_means(one), task_means(other))


def check_hashes(first: Mapping[str, str], second: Mapping[str, str]) -> None:
    """Raises ScoreError where two runs mean different tasks by one id. Takes the hashes of tasks by id."""
    for task_id, sha256 in second.items():
        if first.get(task_id, sha256) != sha256:
            raise ScoreError(
                f"{task_id} has sha256 {first[task_id][:12]} in the first run and {sha256[:12]} in the "
                "second: same name, another task"
            )


def _counted(every: Outcomes) -> Outcomes:
    """The outcomes without those that ended in an error."""
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
    """(tasks, successes, samples), each [T], from the task and success of every episode [N]."""
    tasks_T, place_N, samples_T = np.unique(rank_N, return_inverse=True, return_counts=True)
    wins_T = np.bincount(place_N, weights=won_N, minlength=len(tasks_T)).astype(np.int64)
    return tasks_T, wins_T, samples_T


def category_rank(category: str) -> tuple[int, str]:
    """Sort key of a category in tables: ALFWorld's in the order of papers, then others by name."""
    known = PAPER_ORDER.index(category) if category in PAPER_ORDER else len(PAPER_ORDER)
    return known, category


def success_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: Avg@n by category and overall and pass@n with 95 % intervals; percent.

    Runs with different numbers of samples per task get columns of their own, since Avg@1 and Avg@4 differ in meaning.
    """
    names = list(dict.fromkeys(row.name for scores in runs.values() for row in scores.categories))
    samples = sorted({scores.overall.samples for scores in runs.values()}, reverse=True)
    header = ["run", *names, *(f"Avg@{n} [95 %]" for n in samples), *(f"pass@{n} [95 %]" for n in samples), "tasks"]
    return header, [_success_row(name, scores, names, samples) for name, scores in runs.items()]


def behavior_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: turns, invalid actions, truncations, goal conditions, errors."""
    header = ["run", "turns", "turns (won)", "invalid %", "malformed %", "answers cut %", "cut by turns %"]
    header += ["cut by context %", "goal conditions %", "score", "errors"]
    rows = []
    for name, scores in runs.items():
        cells = [f"{scores.turns:.1f}", "-" if scores.success_turns is None else f"{scores.success_turns:.1f}"]
        cells += [_percent(scores.invalid_rate), _percent(scores.verdicts["malformed"]), _percent(scores.cut_rate)]
        cells += [_percent(scores.truncated[key]) for key in ("truncated_turns", "truncated_tokens")]
        cells += ["-" if scores.goal_rate is None else _percent(scores.goal_rate), f"{scores.score:.3f}"]
        rows.append([name, *cells, str(scores.errors)])
    return header, rows


def _success_row(name: str, scores: Scores, names: Sequence[str], samples: Sequence[int]) -> list[str]:
    rows: dict[str, ScoreRow] = {row.name: row for row in scores.categories}
    cells = [_percent(rows[category].avg.mean) if category in rows else "-" for category in names]
    overall, best = scores.overall, scores.overall.pass_intervals[max(scores.overall.pass_at)]
    for own in (str(overall.avg), str(best)):
        cells += [own if n == overall.samples else "-" for n in samples]
    return [name, *cells, str(overall.avg.tasks)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
