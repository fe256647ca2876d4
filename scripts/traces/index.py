"""Where each episode of a trace begins, and what a list shows of it: one pass over the bytes, no episode is built."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.envs.common.sealed_line import check_seal
from turngym.envs.core import Verdict
from turngym.envs.episode import Episode
from turngym.envs.trace import TraceError, episode_from_json

HEAD = re.compile(
    rb'\{"schema":1,"task":(\{[^{}]*\}),"seed":(-?\d+),"sample":(-?\d+),"group":(-?\d+),"status":"(\w+)",'
    rb'"success":(true|false),"ret":("?[-\w.+]+"?),"score":("?[-\w.+]+"?),'
)
"""How our writer begins a line; others are parsed whole."""
VERDICTS = tuple(verdict.value for verdict in Verdict)
_TURN = b'{"index":'
SORTS = ("order", "task", "turns", "ret", "score", "invalid")
_INVALID = [VERDICTS.index(verdict.value) for verdict in Verdict if not verdict.valid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which episodes, in which order. Empty strings ask for nothing."""

    text: str = ""
    """Part of the task's id."""
    outcome: str = ""
    """`won` or `lost`."""
    status: str = ""
    category: str = ""
    verdict: str = ""
    """Episodes with at least one turn judged like this."""
    sort: str = "order"
    descending: bool = False


@dataclass(slots=True)
class TraceIndex:
    """Columns over the n readable episodes of one file: about 150 bytes each, whatever was said in them."""

    path: Path
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    tasks: list[str]
    sample: NDArray[np.int64]
    turns: NDArray[np.int64]
    ret: NDArray[np.float64]
    score: NDArray[np.float64]
    won: NDArray[np.bool_]
    status: list[str]
    category: list[str]
    verdicts: NDArray[np.int32]
    """[n, number of verdicts]: turns by verdict."""
    skipped: int
    """Lines that are no episode."""
    _attempts: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offset)

    def read(self, place: int) -> Episode:
        """One episode, read from the file. Raises TraceError if the file has changed meanwhile."""
        with self.path.open("rb") as file:
            file.seek(int(self.offset[place]))
            line = file.read(int(self.length[place]))
        try:
            return episode_from_json(line.decode("utf-8"))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{self.path} has changed since it was opened: {error}") from error

    def attempts(self, task: str) -> list[int]:
        """Places of all episodes of a task, in file order."""
        if not self._attempts:
            for place, name in enumerate(self.tasks):
                self._attempts.setdefault(name, []).append(place)
        return self._attempts.get(task, [])

    def find(self, task: str, sample: int) -> int | None:
        """The episode of this task and sample, else the task's first; None where the task was not played."""
        found = self.attempts(task)
        return next((place for place in found if self.sample[place] == sample), found[0] if found else None)

    def select(self, query: Query) -> NDArray[np.int64]:
        """Places of the episodes that match, sorted; ties stay in file order."""
        keep = np.ones(len(self), np.bool_)
        if query.outcome:
            keep &= self.won == (query.outcome == "won")
        for wanted, values in ((query.status, self.status), (query.category, self.category)):
            if wanted:
                keep &= np.fromiter((value == wanted for value in values), np.bool_, len(self))
        if query.verdict in VERDICTS:
            keep &= self.verdicts[:, VERDICTS.index(query.verdict)] > 0
        if query.text:
            text = query.text.lower()
            keep &= np.fromiter((text in task.lower() for task in self.tasks), np.bool_, len(self))
        places = np.flatnonzero(keep)
        if query.sort in SORTS and query.sort != "order":
            places = places[np.argsort(self._key(query.sort)[places], kind="stable")]
        return places[::-1] if query.descending else places

    def row(self, place: int) -> list[Any]:
        """What the list shows: place, task, sample, category, status, won, turns, return, invalid turns."""
        head = [int(place), self.tasks[place], int(self.sample[place]), self.category[place], self.status[place]]
        ret = float(self.ret[place])
        plain = ret if np.isfinite(ret) else str(ret)
        return [*head, bool(self.won[place]), int(self.turns[place]), plain, int(self.verdicts[place, _INVALID].sum())]

    def advantage(self, place: int) -> float | None:
        """(return - mean) / (std + 1e-6) over the attempts at the task in this file; None for a single attempt."""
        ret = self.ret[self.attempts(self.tasks[place])]
        if len(ret) < 2:
            return None
        return float((self.ret[place] - ret.mean()) / (ret.std(ddof=1) + 1e-6))

    def _key(self, sort: str) -> NDArray[Any]:
        keys: dict[str, Any] = {"turns": self.turns, "ret": self.ret, "score": self.score}
        if sort == "task":
            return np.array(self.tasks)
        return self._invalid() if sort == "invalid" else keys[sort]

    def _invalid(self) -> NDArray[np.int64]:
        return self.verdicts[:, _INVALID].sum(axis=1)


def index_trace(path: Path, progress: Callable[[int], None] | None = None) -> TraceIndex:
    """Index a trace file; `progress` is told the number of episodes now and then. Raises TraceError without a file."""
    if not path.is_file():
        raise TraceError(f"there is no trace file {path}")
    rows: list[tuple[Any, ...]] = []
    shared: dict[str, str] = {}
    counts, offset, skipped = [], 0, 0
    with path.open("rb") as file:
        for line in file:
            try:
                found = _facts(line) if line.strip() else ()
            except TraceError as error:
                raise TraceError(f"{path}, byte {offset}: {error}") from error
            if found:
                task, *rest, status, category = found
                names = (shared.setdefault(name, name) for name in (task, status, category))
                rows.append((offset, len(line), *names, *rest))
                counts.append([line.count(b'"verdict":"%s"' % name.encode()) for name in VERDICTS])
                if progress is not None and len(rows) % 10_000 == 0:
                    progress(len(rows))
            skipped += found is None
            offset += len(line)
    columns = list(zip(*rows, strict=True)) or [()] * 10
    return TraceIndex(
        path=path,
        offset=np.array(columns[0], np.int64),
        length=np.array(columns[1], np.int64),
        tasks=list(columns[2]),
        status=list(columns[3]),
        category=list(columns[4]),
        sample=np.array(columns[5], np.int64),
        turns=np.array(columns[6], np.int64),
        ret=np.array(columns[7], np.float64),
        score=np.array(columns[8], np.float64),
        won=np.array(columns[9], np.bool_),
        verdicts=np.array(counts, np.int32).reshape(-1, len(VERDICTS)),
        skipped=skipped,
    )


def _facts(line: bytes) -> tuple[Any, ...] | None:
    """Task id, sample, turns, return, score, success, status, category; None for a line that is no episode."""
    head = HEAD.match(line)
    if head is None or not line.endswith(b"\n"):
        return _parsed(line)
    try:
        check_seal(line)
        task = json.loads(head[1])
    except ValueError:
        return None
    # inside strings quotes are escaped, so these bytes are always a turn
    turns, ret, score = line.count(_TURN), *(float(head[at].strip(b'"')) for at in (7, 8))
    return task["task_id"], int(head[3]), turns, ret, score, head[6] == b"true", head[5].decode(), task["category"]


def _parsed(line: bytes) -> tuple[Any, ...] | None:
    try:
        item = episode_from_json(line.decode("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    head = (item.task.task_id, item.sample, item.depth, item.episode_return, item.score, item.success)
    return *head, item.status.value, item.task.category
