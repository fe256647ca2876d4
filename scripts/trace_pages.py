"""The page for reading episodes: one self-contained HTML file (`trace html`), or behind a local server (`trace view`).

The file holds every episode as escaped JSON in the page. The server keeps an index of the trace files, made in one
pass, and reads an episode again when it is opened; so the files may be larger than memory.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from statistics import multimode
from typing import Any

import numpy as np

from turngym.agents.evaluation.scores import EpisodeOutcome
from turngym.agents.rendering.memory import without
from turngym.core.episode import Episode, Turn, outcome_of
from turngym.core.errors import TurngymError
from turngym.core.task import Task, Verdict
from turngym.core.trace import TraceEpisodes, TraceProblem, iter_places
from turngym.core.whole_files import written_whole
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
    observation, was_listed = _without_list(turn)
    # a scripted agent reads no prompt
    prompt = None if turn.finish == "scripted" else prompts.added(episode, turn)
    return {
        "observation": observation,
        "admissible": None if turn.admissible is None else list(turn.admissible),
        "listed": was_listed,
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
    by_endpoint = turn.origin == "demonstration" and turn.finish != "scripted" and not turn.response_length
    return str(episode.meta.get("agent", turn.origin)) if by_endpoint else turn.origin


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
    for index, token in enumerate(episode.response_ids(turn).tolist()):
        logp = None if turn.logprobs is None else float(turn.logprobs[index])
        gap = None
        if logp is not None and turn.teacher is not None:
            # the teacher's recorded top K may lack the id
            hit = (turn.teacher.ids[index] == token).nonzero()[0]
            gap = round(logp - float(turn.teacher.logp[index][hit[0]]), 3) if len(hit) else None
        text = None if decode is None else decode([token])
        rows.append([token, None if logp is None else _finite(round(logp, 3)), text, gap])
    return rows


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# The index: where each episode begins and how it ended.

VERDICTS = tuple(verdict.value for verdict in Verdict)
KEYS: Mapping[str, Callable[[EpisodeOutcome], Any]] = {
    "task": attrgetter("task.task_id"),
    "turns": attrgetter("turns"),
    "ret": attrgetter("episode_return"),
    "score": attrgetter("score"),
    "invalid": attrgetter("invalid"),
}
SORTS = ("order", *KEYS)


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

    def takes(self, episode: EpisodeOutcome) -> bool:
        return (
            self.outcome in ("", _outcome(episode))
            and self.status in ("", episode.status.value)
            and self.category in ("", episode.task.category)
            and (self.verdict not in VERDICTS or episode.verdicts[VERDICTS.index(self.verdict)] > 0)
            and self.text.lower() in episode.task.task_id.lower()
        )


def _outcome(episode: EpisodeOutcome) -> str:
    return outcome_of(episode.status.value, episode.success)


@dataclass(slots=True)
class TraceIndex:
    """How the readable episodes of one file ended: some hundred bytes each, whatever was said in them."""

    episodes: TraceEpisodes
    outcomes: list[EpisodeOutcome]
    skipped: int
    """Lines that are no episode."""
    _attempts: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.outcomes)

    def attempts(self, task: str) -> list[int]:
        """Places of all episodes of a task, in file order."""
        if not self._attempts:
            for index, outcome in enumerate(self.outcomes):
                self._attempts.setdefault(outcome.task.task_id, []).append(index)
        return self._attempts.get(task, [])

    def find(self, task: str, sample: int) -> int | None:
        """The episode of this task and sample, else the task's first; None where the task was not played."""
        attempts = self.attempts(task)
        return next((n for n in attempts if self.outcomes[n].sample == sample), attempts[0] if attempts else None)

    def select(self, query: Query) -> list[int]:
        """Places of the episodes that match, sorted; ties stay in file order."""
        places = [index for index, outcome in enumerate(self.outcomes) if query.takes(outcome)]
        if query.sort in KEYS:
            places.sort(key=lambda index: KEYS[query.sort](self.outcomes[index]))
        return places[::-1] if query.descending else places

    def row(self, place: int) -> list[Any]:
        """A row of the list: place, task, sample, category, status, outcome, turns, return, invalid turns."""
        episode = self.outcomes[place]
        head = [place, episode.task.task_id, episode.sample, episode.task.category, episode.status.value]
        return [*head, _outcome(episode), episode.turns, _finite(episode.episode_return), episode.invalid]

    def advantage(self, place: int) -> float | None:
        """(return - mean) / (std + 1e-6) over the attempts at the task in this file; None for a single attempt."""
        outcome = self.outcomes[place]
        ret = np.array([self.outcomes[n].episode_return for n in self.attempts(outcome.task.task_id)])
        return None if len(ret) < 2 else float((outcome.episode_return - ret.mean()) / (ret.std(ddof=1) + 1e-6))


def index_trace(path: Path, progress: Callable[[int], None] | None = None) -> TraceIndex:
    """Index a trace file; `progress` is told the number of episodes now and then. Raises TraceError without a file."""
    places, outcomes, skipped = array("q"), list[EpisodeOutcome](), 0
    tasks: dict[Task, Task] = {}
    for offset, item in iter_places(path):
        if isinstance(item, TraceProblem):
            skipped += 1
            continue
        places.append(offset)
        outcomes.append(EpisodeOutcome.of(item, tasks.setdefault(item.task, item.task)))
        if progress is not None and len(outcomes) % 10_000 == 0:
            progress(len(outcomes))
    return TraceIndex(episodes=TraceEpisodes(path, places), outcomes=outcomes, skipped=skipped)


MOST_ROWS = 500
MOST_ATTEMPTS = 24
"""Most attempts at one task that the page offers beside the one shown."""


def create_app(runs: Mapping[str, TraceIndex], tokenizer: Path | None = None) -> Any:
    """A Flask application over indexed traces, in order. Raises TurngymError without Flask.

    `tokenizer` is for all of them; by default each trace names its own (`Prompts.of`).
    """
    try:
        from flask import Flask, abort, jsonify, request
    except ImportError as error:
        raise TurngymError("trace view needs Flask: pip install 'turngym[serve]'") from error
    app, indexes = Flask(__name__, static_folder=None), list(runs.values())
    prompts = [Prompts.of(index.episodes.path, tokenizer) for index in indexes]

    @app.errorhandler(TurngymError)
    def said(error: TurngymError) -> Any:
        return str(error), 500

    @lru_cache(maxsize=16)
    def places(run: int, query: Query) -> list[int]:
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
        matches = places(number, _query(request.args))
        start = max(request.args.get("start", 0, int), 0)
        count = min(max(request.args.get("count", 100, int), 0), MOST_ROWS)
        part = [index.row(place) for place in matches[start : start + count]]
        at = request.args.get("at", -1, int)
        won = sum(index.outcomes[place].success for place in matches)
        where = matches.index(at) if at in matches else None
        return jsonify({"total": len(matches), "won": won, "rows": part, "where": where})

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
    episode = index.episodes[place]
    view, advantage = episode_view(episode, prompts), index.advantage(place)
    for turn in view["turns"]:
        turn["advantage"] = advantage if turn["advantage"] is None else turn["advantage"]
    attempts = [index.row(attempt) for attempt in index.attempts(episode.task.task_id)[:MOST_ATTEMPTS]]
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
    values = {"status": sorted({outcome.status.value for outcome in index.outcomes}), "verdict": list(VERDICTS)}
    values["category"] = sorted({outcome.task.category for outcome in index.outcomes})
    return {"name": name, "episodes": len(index), "skipped": index.skipped, **values, "sort": list(SORTS)}
