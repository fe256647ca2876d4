"""Converts a finished chat session to an `Episode` for training."""

from __future__ import annotations

from typing import Any

from turngym.agents.proxy.conversation.messages import ChatMessage, as_observation
from turngym.agents.proxy.sessions.session import ProxySession, SessionTurn
from turngym.envs.core import Task, Verdict, content_hash
from turngym.envs.episode import Episode, Status, Turn

ENV_ID = "proxy"


def episode_of(
    session: ProxySession, why: str, final: tuple[ChatMessage, ...] = (), *, temperature: float | None = None
) -> Episode:
    """The session's main turns in order; `final` is what came after the last answer, if anything did.

    The observation of turn t + 1 is the next state of turn t. `meta["chat"]` holds what a prompt can be rebuilt from:
    per turn how many messages were kept and which were added, and tools where they
    changed, after what `meta["before"]` holds; `meta["ended"]` says `done` (the client
    said so), `idle`, `room` (others needed its place) or `part` (it goes on under another key). Turns that were sampled
    at another `temperature` than the trainer's are excluded: their log-probabilities are of another policy.
    """
    following = [*(turn.has_new_messages for turn in session.turns[1:]), True]
    turns = tuple(
        _turn(index, turn, _why_excluded(turn, new, temperature))
        for index, (turn, new) in enumerate(zip(session.turns, following, strict=True))
    )
    name, _, number = session.key.rpartition("-")
    return Episode(
        task=Task(
            env_id=ENV_ID,
            task_id=session.key,
            sha256=content_hash({"proxy": name, "number": number}),
            split="live",
            category="session",
        ),
        seed=0,
        sample=0,
        group=int(number),
        segments=tuple(buffer.array() for buffer in session.history.segments),
        turns=turns,
        status=Status.TRUNCATED_TURNS if why == "part" else Status.COMPLETED,
        success=False,
        episode_return=0.0,
        system=session.system,
        final_observation=as_observation(final) if final else "",
        meta=_meta(session, why, final),
    )


def _why_excluded(turn: SessionTurn, new: bool, temperature: float | None) -> str | None:
    if temperature is not None and turn.temperature != temperature:
        return f"sampled at temperature {turn.temperature:g}"
    return None if new else "no next state"


def _turn(index: int, turn: SessionTurn, excluded: str | None) -> Turn:
    return Turn(
        index=index,
        observation=turn.observation,
        admissible=None,
        response=turn.text,
        action=turn.text,
        verdict=Verdict.OK,
        reward=0.0,
        segment=turn.segment,
        prompt_span=turn.prompt_span,
        response_span=turn.response_span,
        logprobs=turn.logprobs,
        finish=turn.finish,
        policy_version=turn.version,
        version_spans=turn.version_spans,
        excluded=excluded,
    )


def _meta(session: ProxySession, why: str, final: tuple[ChatMessage, ...]) -> dict[str, Any]:
    roles = [turn.role for turn in session.turns[1:]] + ([final[-1].role] if final else [])
    return {
        "agent": "proxy",
        "ended": why,
        "next_roles": roles,
        "superseded": session.superseded,
        "temperatures": [turn.temperature for turn in session.turns],
        "before": list(session.before),
        "first": session.first,
        "at": [turn.at for turn in session.turns],
        "chat": [_said(turn) for turn in session.turns],
    }


def _said(turn: SessionTurn) -> dict[str, Any]:
    said: dict[str, Any] = {"kept": turn.kept, "messages": [message.as_json() for message in turn.messages]}
    return said if turn.tools is None else {**said, "tools": list(turn.tools)}
