"""Routes about sessions and turns that are there: the end of a session, and what users think of a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError, invalid
from turngym.agents.proxy.http.identity import Headers, read_session
from turngym.agents.proxy.http.read_messages import read_messages, shown
from turngym.agents.proxy.http.request import read_json
from turngym.agents.proxy.http.respond import json_response
from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.envs.suggest import did_you_mean

if TYPE_CHECKING:
    from flask import Flask, Response

MAX_TEXT = 4000
"""Characters of a user's words about a turn."""
NAMING = ("session_id", "metadata", "conversation", "conversation_id")
FIELDS = ("score", "text", "turn", "answer", *NAMING)


def add_session_routes(app: Flask, service: ProxyService) -> None:
    """Add them to the application."""
    from flask import request

    @app.post("/v1/sessions/done")
    def done() -> Response:
        fields = read_json(request.get_data(cache=False))
        session = read_session(fields, request.headers)
        if session is None:
            raise invalid("which session is done? Set the header X-Session-Id or session_id", "session_id")
        given = fields.get("messages")
        final = () if not given else read_messages(given, service.settings)
        return json_response({"object": "session", "turns": service.end(session, final)}, 200)

    @app.post("/v1/feedback")
    def feedback() -> Response:
        if service.stopping:
            raise ApiError(503, "the server is stopping", code="unavailable", retry_after=5)
        said, place = read_feedback(read_json(request.get_data(cache=False)), request.headers)
        outcome = service.feedback(said, **place)
        return json_response({"object": "feedback", "score": said.score, "status": outcome}, 200)


def read_feedback(fields: Mapping[str, Any], headers: Headers) -> tuple[Feedback, dict[str, Any]]:
    """(what is thought of a turn, which turn: the arguments of `ProxyService.feedback`).

    Raises ApiError (400) with the field at fault.
    """
    for name in fields:
        if name not in FIELDS:
            # a name may be as long as a body
            hint = did_you_mean(name[:40], FIELDS)
            raise invalid(f"the field {shown(name)} is unknown; valid: {', '.join(FIELDS[:5])}.{hint}", name[:40])
    score, text = fields.get("score"), fields.get("text")
    # True equals 1
    if isinstance(score, bool) or score not in (1, -1):
        raise invalid(f"score is {shown(score)}; it must be 1 (good) or -1 (bad)", "score")
    if text is not None and (not isinstance(text, str) or len(text) > MAX_TEXT):
        raise invalid(f"text is {shown(text)}; it must be text of at most {MAX_TEXT} letters", "text")
    return Feedback(score=int(score), text=text or ""), _place(fields, headers)


def _place(fields: Mapping[str, Any], headers: Headers) -> dict[str, Any]:
    """Which turn is meant: `session_id` and `turn`, or `answer`."""
    session, turn, answer = read_session(fields, headers), fields.get("turn"), fields.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise invalid(f"answer is {shown(answer)}; it must be the id of an answer (chatcmpl-...)", "answer")
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or turn < 0):
        raise invalid(f"turn is {shown(turn)}; it must be a whole number from 0, or left out for the last", "turn")
    if answer is None and session is None:
        raise invalid("which turn? Send answer (its id), or session_id and turn", "session_id")
    if answer is not None and turn is not None:
        raise invalid("answer names the turn already: leave turn out", "turn")
    return {"session_id": session, "turn": turn, "answer": answer}
