"""How episodes ended, in columns: what scores and results files need, in about 60 bytes an episode."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core import Task, Verdict
from turngym.envs.episode import SHORT, Episode, Status

V = TypeVar("V")
EACH = ("error", "goal_rate", "usage", SHORT)
"""Of an episode's `meta`, what is another for each."""
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
    """Turns by verdict, of those that occur."""
    goal_rate: float | None
    prompt_tokens: int | None
    """Ids that were not sampled; None for text-only agents."""
    response_tokens: int | None
    meta: Mapping[str, Any]
    """Without what is another for each episode."""

    @property
    def depth(self) -> int:
        """Number of turns."""
        return sum(count for _, count in self.verdicts)

    @property
    def invalid(self) -> int:
        """Turns whose action did not reach the environment."""
        return sum(count for verdict, count in self.verdicts if not verdict.valid)


class Codes(Generic[V]):
    """Values that many episodes share, by number."""

    def __init__(self) -> None:
        self.values: list[V] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, make: Callable[[], V]) -> int:
        """The number of the value under `key`, which `make` makes the first time."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(make())
        return found


_COLUMNS = {
    **dict.fromkeys(("task", "verdicts", "played", "sample", "prompt", "response"), "i"),
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
        """Whether any episode ever added says what it used."""

    @classmethod
    def of(cls, episodes: Iterable[Episode] | Outcomes) -> Outcomes:
        """Those of `episodes`."""
        if isinstance(episodes, Outcomes):
            return episodes
        found = cls()
        for episode in episodes:
            found.add(episode)
        return found

    def add(self, episode: Episode, task: Task | None = None) -> int:
        """Its place. `task`: an equal object that is kept anyway."""
        counts = Counter(turn.verdict for turn in episode.turns)
        verdicts = tuple((verdict, counts[verdict]) for verdict in Verdict if verdict in counts)
        meta = {name: value for name, value in episode.meta.items() if name not in EACH}
        response, ids = (
            sum(turn.response_length for turn in episode.turns),
            sum(len(segment) for segment in episode.segments),
        )
        task, goal = task or episode.task, episode.meta.get("goal_rate")
        row: dict[str, Any] = {
            "task": self._tasks.number(task, lambda: task),
            "verdicts": self._verdicts.number(verdicts, lambda: verdicts),
            "played": self._played.number((episode.seed, repr(meta)), lambda: (episode.seed, meta)),
            "sample": episode.sample,
            "group": episode.group,
            "prompt": ids - response if episode.segments else _UNKNOWN,
            "response": response if episode.segments else _UNKNOWN,
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
            meta=meta,
        )

    def __iter__(self) -> Iterator[Outcome]:
        return (self[place] for place in range(len(self)))

    def take(self, places: Iterable[int] | NDArray[np.int64]) -> Outcomes:
        """Those at `places`, in that order."""
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
        """[n]: episodes that ended in an error."""
        return np.array([status.is_error for status in _STATUSES])[self.column("status")]

    def latest(self) -> NDArray[np.int64]:
        """Places of one of each (task, sample), sorted: the last that ended without an error, if one did."""
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
        """The tasks of these episodes, each once, by first occurrence."""
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
        """(place of the first, seed, meta without what is another for each) by first occurrence, each pair once."""
        numbers, first = np.unique(self.column("played"), return_index=True)
        return [
            (place, *self._played.values[number])
            for place, number in sorted(zip(first.tolist(), numbers.tolist(), strict=True))
        ]

    def depths(self) -> NDArray[np.int64]:
        """Turns [n]."""
        each = [sum(count for _, count in verdicts) for verdicts in self._verdicts.values]
        return np.array(each, np.int64)[self.column("verdicts")]

    def verdict_counts(self) -> Counter[Verdict]:
        """Turns of all by verdict."""
        total: Counter[Verdict] = Counter()
        for number, times in zip(*np.unique(self.column("verdicts"), return_counts=True), strict=True):
            for verdict, count in self._verdicts.values[number]:
                total[verdict] += count * int(times)
        return total

    def statuses(self) -> Counter[Status]:
        """Episodes by status."""
        numbers, counts = np.unique(self.column("status"), return_counts=True)
        return Counter({_STATUSES[n]: c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True)})
