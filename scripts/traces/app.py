"""The local server behind `turngym trace view`: pages of a list, and one episode at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Turn
from turngym.scripts.traces.html import Decode, episode_view
from turngym.scripts.traces.index import SORTS, VERDICTS, Query, TraceIndex

VIEW = Path(__file__).with_name("view.html")
MOST_ROWS = 500
MOST_ATTEMPTS = 24
"""At one task, that the page offers beside the one that is shown."""


def create_app(runs: Mapping[str, TraceIndex], decode: Decode | None = None) -> Any:
    """A Flask application over indexed traces, in order. Raises TurngymError without Flask."""
    try:
        from flask import Flask, abort, jsonify, request
    except ImportError as error:
        raise TurngymError("trace view needs Flask: pip install 'turngym[serve]'") from error
    app, indexes = Flask(__name__, static_folder=None), list(runs.values())

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
        return VIEW.read_text(encoding="utf-8")

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
        _, index = chosen()
        place = request.args.get("at", -1, int)
        if request.args.get("task") is not None:
            place = _or_minus(index.find(request.args["task"], request.args.get("sample", 0, int)))
        if not 0 <= place < len(index):
            abort(404)
        return jsonify(shown(index, place, decode))

    return app


def shown(index: TraceIndex, place: int, decode: Decode | None = None) -> dict[str, Any]:
    """One episode as the page wants it; each token is [id, log p, text, log p - log q, advantage], null for unknown."""
    item = index.read(place)
    view, group = episode_view(item, decode), index.advantage(place)
    for turn, made in zip(item.turns, view["turns"], strict=True):
        advantage = group if turn.judge_scores is None else _majority(turn.judge_scores)
        if made["tokens"]:
            pairs = zip(made["tokens"], _gaps(item, turn), strict=True)
            made["tokens"] = [[*token, gap, advantage] for token, gap in pairs]
        made["advantage"] = advantage
    return {
        **view,
        "at": place,
        "attempts": [index.row(other) for other in index.attempts(item.task.task_id)[:MOST_ATTEMPTS]],
    }


def _gaps(episode: Episode, turn: Turn) -> list[float | None]:
    """log p - log q of each sampled id, nats; None where the teacher's recorded top-K does not hold it."""
    ids, teacher, logprobs = episode.response_ids(turn), turn.teacher, turn.logprobs
    if teacher is None or logprobs is None:
        return [None] * turn.response_length
    found: list[float | None] = []
    for place, token in enumerate(ids):
        hit = (teacher.ids[place] == token).nonzero()[0]
        found.append(round(float(logprobs[place] - teacher.logp[place][hit[0]]), 3) if len(hit) else None)
    return found


def _majority(scores: tuple[float, ...]) -> float:
    """The score of most votes, 0 for a tie at the top: what a judge's verdict trains with."""
    counts = {score: scores.count(score) for score in scores}
    top = [score for score, count in counts.items() if count == max(counts.values())]
    return top[0] if len(top) == 1 else 0.0


def _query(args: Mapping[str, str]) -> Query:
    words = {name: args.get(name, "") for name in ("text", "outcome", "status", "category", "verdict")}
    sort = args.get("sort", "order")
    return Query(**words, sort=sort if sort in SORTS else "order", descending=args.get("descending") == "1")


def _about(name: str, index: TraceIndex) -> dict[str, Any]:
    values = {"status": sorted(set(index.status)), "category": sorted(set(index.category)), "verdict": list(VERDICTS)}
    return {"name": name, "episodes": len(index), "skipped": index.skipped, **values, "sort": list(SORTS)}


def _or_minus(place: int | None) -> int:
    return -1 if place is None else place
