"""The page for reading episodes: one self-contained HTML file (`trace html`), or behind a local server (`trace view`).

The file holds every episode as escaped JSON in the page. The server reads an index of the trace files, made in one
pass over their bytes, and parses an episode only when it is opened; so the files may be larger than memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import multimode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.conversation import without
from turngym.core.episode import Episode, Turn, outcome_of
from turngym.core.errors import TurngymError
from turngym.core.tables import written_whole
from turngym.core.task import Verdict
from turngym.core.trace import TraceError, check_checksum, episode_from_json, has_checksum, is_header
from turngym.core.user_files import json_of
from turngym.envs.guard import listed
from turngym.envs.spaces import printable
from turngym.scripts.trace_prompt import Decode, Prompts

# What the page shows of an episode, and the page with the episodes in it.

PAGE = Path(__file__).with_name("trace_page.html")


def write_page(path: Path, episodes: Iterable[tuple[Episode, Prompts]], *, title: str) -> tuple[int, int]:
    """Writes the page, one episode after the other, replacing what is there. Returns (episodes, bytes).

    The data can contain anything: the page's script puts every string in as text, never as markup.
    """
    count = 0
    before, after = PAGE.read_text(encoding="utf-8").split("__DATA__")
    with written_whole(path) as scratch, scratch.open("wb") as file:
        size = file.write(f'{before}{{"title":{_json(printable(title))},"episodes":['.encode())
        for count, (episode, prompts) in enumerate(episodes, 1):
            size += file.write((("," if count > 1 else "") + _json(episode_view(episode, prompts))).encode())
        size += file.write(f"]}}{after}".encode())
    return count, size


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # inside <script> only "<" could end the block or open a comment; \u003c is the same JSON string
    return text.replace("<", "\\u003c")


def episode_view(episode: Episode, prompts: Prompts) -> dict[str, Any]:
    """Returns what the page shows of an episode as JSON values; NaN and infinities become strings."""
    return {
        "task": episode.task.task_id,
        "category": episode.task.category,
        "env": episode.task.env_id,
        "sample": episode.sample,
        "seed": episode.seed,
        "status": episode.status.value,
        "outcome": episode.outcome,
        "ret": _finite(episode.episode_return),
        "score": _finite(episode.score),
        "invalid": sum(not turn.verdict.valid for turn in episode.turns),
        "system": episode.system,
        "final": episode.final_observation,
        "meta": json.dumps(dict(episode.meta), ensure_ascii=False, indent=1, default=str) if episode.meta else "",
        "turns": [_turn_view(episode, turn, prompts) for turn in episode.turns],
    }


def _turn_view(episode: Episode, turn: Turn, prompts: Prompts) -> dict[str, Any]:
    observation, shown = _without_list(turn)
    # a scripted agent reads no prompt
    prompt = None if turn.finish == "scripted" else prompts.added(episode, turn)
    return {
        "observation": observation,
        "admissible": None if turn.admissible is None else list(turn.admissible),
        "listed": shown,
        "prompt": None if prompt is None else prompt[0],
        "begins": prompt is None or prompt[1],
        "read": turn.response_span[0],
        "response": turn.response,
        "action": turn.action,
        "verdict": turn.verdict.value,
        "reward": _finite(turn.reward),
        "finish": turn.finish,
        "origin": speaker(episode, turn),
        "tokens": _tokens(episode, turn, prompts.decode),
        "scores": None if turn.judge_scores is None else [_finite(score) for score in turn.judge_scores],
        "advantage": None if turn.judge_scores is None else _majority(turn.judge_scores),
        "hint": turn.hint,
    }


def speaker(episode: Episode, turn: Turn) -> str:
    """Who gave the response: `policy`, `noise`, `demonstration`, or the name of the endpoint that played the episode.

    Nothing can be trained on an endpoint's answers but as demonstrations, which is what their origin says. What another
    gave is scripted, or has token ids (a teacher's turn, a demonstration in the student's ids).
    """
    own = turn.origin == "demonstration" and turn.finish != "scripted" and not turn.response_length
    return str(episode.meta.get("agent", turn.origin)) if own else turn.origin


def _without_list(turn: Turn) -> tuple[str, bool]:
    """The observation without the list of admissible actions in it, and whether there was one: the page folds it."""
    actions = turn.admissible or ()
    for text in (listed(actions), f"\nPossible actions: {', '.join(actions)}."):
        if actions and text in turn.observation:
            return without(turn.observation, text), True
    return turn.observation, False


def _tokens(episode: Episode, turn: Turn, decode: Decode | None) -> list[list[Any]] | None:
    """[id, log p, text, log p - log q] of each sampled id; None for what is not known. q is the teacher."""
    if not turn.response_length:
        return None
    rows: list[list[Any]] = []
    for place, token in enumerate(episode.response_ids(turn).tolist()):
        logp = None if turn.logprobs is None else float(turn.logprobs[place])
        gap = None
        if logp is not None and turn.teacher is not None:
            # the teacher's recorded top K may lack the id
            hit = (turn.teacher.ids[place] == token).nonzero()[0]
            gap = round(logp - float(turn.teacher.logp[place][hit[0]]), 3) if len(hit) else None
        text = None if decode is None else decode([token])
        rows.append([token, None if logp is None else _finite(round(logp, 3)), text, gap])
    return rows


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# The index: where each episode begins and what the list shows of it, from one pass over the bytes.

HEAD = re.compile(
    rb'\{"schema":1,"task":(\{[^{}]*\}),"seed":(-?\d+),"sample":(-?\d+),"group":(-?\d+),"status":"(\w+)",'
    rb'"success":(true|false),"ret":("?[-\w.+]+"?),"score":("?[-\w.+]+"?),'
)
"""The first bytes of a line as TraceWriter writes it. Lines that begin otherwise, or have no checksum, are parsed as a
whole: anyone may have written them."""
VERDICTS = tuple(verdict.value for verdict in Verdict)
_TURN = b'{"index":'
SORTS = ("order", "task", "turns", "ret", "score", "invalid")
_INVALID = [VERDICTS.index(verdict.value) for verdict in Verdict if not verdict.valid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query of the list: filters and order. An empty string means no filter."""

    text: str = ""
    """Part of the task's id."""
    outcome: str = ""
    """`won`, `lost` or `error`."""
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
        except ValueError as error:
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
            keep &= np.fromiter(
                (self.outcome(place) == query.outcome for place in range(len(self))), np.bool_, len(self)
            )
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

    def outcome(self, place: int) -> str:
        """`won`, `lost` or `error`."""
        return outcome_of(self.status[place], bool(self.won[place]))

    def row(self, place: int) -> list[Any]:
        """What the list shows: place, task, sample, category, status, outcome, turns, return, invalid turns."""
        head = [int(place), self.tasks[place], int(self.sample[place]), self.category[place], self.status[place]]
        head += [self.outcome(place), int(self.turns[place]), _finite(float(self.ret[place]))]
        return [*head, int(self.verdicts[place, _INVALID].sum())]

    def advantage(self, place: int) -> float | None:
        """(return - mean) / (std + 1e-6) over the attempts at the task in this file; None for a single attempt."""
        ret = self.ret[self.attempts(self.tasks[place])]
        if len(ret) < 2:
            return None
        return float((self.ret[place] - ret.mean()) / (ret.std(ddof=1) + 1e-6))

    def _key(self, sort: str) -> NDArray[Any]:
        if sort == "task":
            return np.array(self.tasks)
        if sort == "invalid":
            return self.verdicts[:, _INVALID].sum(axis=1)
        return {"turns": self.turns, "ret": self.ret, "score": self.score}[sort]


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
                found = _facts(line) if line.strip() and not is_header(line) else ()
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
    if head is None or not line.endswith(b"\n") or not has_checksum(line):
        return _parsed(line)
    try:
        check_checksum(line)
        task = json_of(head[1])
    except ValueError:
        return None
    # inside strings quotes are escaped, so these bytes are always a turn
    turns, ret, score = line.count(_TURN), *(float(head[at].strip(b'"')) for at in (7, 8))
    return task["task_id"], int(head[3]), turns, ret, score, head[6] == b"true", head[5].decode(), task["category"]


def _parsed(line: bytes) -> tuple[Any, ...] | None:
    try:
        item = episode_from_json(line.decode("utf-8"))
    except ValueError:
        return None
    head = (item.task.task_id, item.sample, item.depth, item.episode_return, item.score, item.success)
    return *head, item.status.value, item.task.category


MOST_ROWS = 500
MOST_ATTEMPTS = 24
"""Most attempts at one task that the page offers beside the one shown."""


def create_app(runs: Mapping[str, TraceIndex], tokenizer: str | None = None) -> Any:
    """A Flask application over indexed traces, in order. Raises TurngymError without Flask.

    `tokenizer` is for all of them; by default each trace names its own (`Prompts.of`).
    """
    try:
        from flask import Flask, abort, jsonify, request
    except ImportError as error:
        raise TurngymError("trace view needs Flask: pip install 'turngym[serve]'") from error
    app, indexes = Flask(__name__, static_folder=None), list(runs.values())
    prompts = [Prompts.of(index.path, tokenizer) for index in indexes]

    @app.errorhandler(TurngymError)
    def said(error: TurngymError) -> Any:
        return str(error), 500

    @lru_cache(maxsize=16)
    def places(run: int, query: Query) -> Any:
        return indexes[run].select(query)

    def chosen() -> tuple[int, TraceIndex]:
        number = request.args.get("run", 0, int)
        if not 0 <= number < len(indexes):
            abort(404)
        return number, indexes[number]

    @app.get("/")
    def view() -> Any:
        return PAGE.read_text(encoding="utf-8").replace("__DATA__", "null")

    @app.get("/api/runs")
    def about() -> Any:
        return jsonify([_about(name, index) for name, index in runs.items()])

    @app.get("/api/rows")
    def rows() -> Any:
        number, index = chosen()
        found = places(number, _query(request.args))
        start = max(request.args.get("start", 0, int), 0)
        count = min(max(request.args.get("count", 100, int), 0), MOST_ROWS)
        part = [index.row(place) for place in found[start : start + count]]
        at = request.args.get("at", -1, int)
        where = next(iter((found == at).nonzero()[0].tolist()), None)
        return jsonify({"total": len(found), "won": int(index.won[found].sum()), "rows": part, "where": where})

    @app.get("/api/episode")
    def episode() -> Any:
        number, index = chosen()
        place: int | None = request.args.get("at", -1, int)
        if (task := request.args.get("task")) is not None:
            place = index.find(task, request.args.get("sample", 0, int))
        if place is None or not 0 <= place < len(index):
            abort(404)
        return jsonify(shown(index, place, prompts[number]))

    return app


def shown(index: TraceIndex, place: int, prompts: Prompts) -> dict[str, Any]:
    """One episode as the page wants it."""
    item = index.read(place)
    view, group = episode_view(item, prompts), index.advantage(place)
    for turn in view["turns"]:
        turn["advantage"] = group if turn["advantage"] is None else turn["advantage"]
    attempts = [index.row(other) for other in index.attempts(item.task.task_id)[:MOST_ATTEMPTS]]
    return {**view, "at": place, "attempts": attempts}


def _majority(scores: tuple[float, ...]) -> float:
    """Returns the score with most votes, or 0 for a tie; training uses the same rule for a judge's verdict."""
    top = multimode(scores)
    return top[0] if len(top) == 1 else 0.0


def _query(args: Mapping[str, str]) -> Query:
    words = {name: args.get(name, "") for name in ("text", "outcome", "status", "category", "verdict")}
    sort = args.get("sort", "order")
    return Query(**words, sort=sort if sort in SORTS else "order", descending=args.get("descending") == "1")


def _about(name: str, index: TraceIndex) -> dict[str, Any]:
    values = {"status": sorted(set(index.status)), "category": sorted(set(index.category)), "verdict": list(VERDICTS)}
    return {"name": name, "episodes": len(index), "skipped": index.skipped, **values, "sort": list(SORTS)}
