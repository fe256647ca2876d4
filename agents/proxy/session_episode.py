"""How the session of a client becomes an episode to train on."""

from __future__ import annotations

from typing import Any

from turngym.agents.proxy.sessions import ProxySession
from turngym.agents.proxy.turn_records import ChatMessage, as_observation
from turngym.core.episode import Episode, Status, Turn
from turngym.core.task import Task, Verdict, content_hash

ENV_ID = "proxy"


def episode_of(
    session: ProxySession, why: str, final: tuple[ChatMessage, ...] = (), *, temperature: float | None
) -> Episode:
    """The session's main turns in order.

    The observation of turn t + 1 is the next state of turn t. Turns that were sampled at another `temperature` than the
    trainer's are excluded: their log-probabilities are those of another policy. In `meta`,

    - `chat` holds what prompts can be rebuilt from, after the messages of `before`: per turn the number of messages
      that were kept, the messages that were added, and the tools where they changed;
    - `ended` is `done` (the client said so), `idle`, `room` (another session needed its place), `part` (the session
      goes on under another key) or `open` (it has not ended).

    Args:
        final: messages after the last answer, which are its next state.
        temperature: the trainer's; None: no turn is excluded for its own.
    """
    following = [*(turn.answers_last for turn in session.turns[1:]), True]
    turns, chat = [], []
    for index, (turn, has_next_state) in enumerate(zip(session.turns, following, strict=True)):
        record = turn.record
        excluded = None if has_next_state else "no next state"
        if temperature is not None and record.temperature != temperature:
            excluded = f"sampled at temperature {record.temperature:g}"
        turns.append(
            Turn(
                index=index,
                observation=turn.observation,
                admissible=None,
                response=record.text,
                action=record.text,
                verdict=Verdict.OK,
                reward=0.0,
                segment=turn.segment,
                prompt_span=turn.prompt_span,
                response_span=turn.response_span,
                logprobs=record.logprobs,
                finish=record.finish,
                policy_version=record.version,
                version_spans=record.version_spans,
                excluded=excluded,
            )
        )
        entry: dict[str, Any] = {"kept": record.kept, "messages": [message.as_json() for message in record.messages]}
        entry |= {} if record.tools is None else {"tools": list(record.tools)}
        entry |= {"calls": [call.as_json() for call in record.reply.tool_calls]} if record.reply.tool_calls else {}
        chat.append(entry)
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
        turns=tuple(turns),
        status=Status.TRUNCATED_TURNS if why == "part" else Status.COMPLETED,
        success=False,
        episode_return=0.0,
        system=session.system,
        final_observation=as_observation(final) if final else "",
        meta={
            "agent": "proxy",
            "ended": why,
            "next_roles": [turn.role for turn in session.turns[1:]] + ([final[-1].role] if final else []),
            "superseded": session.superseded,
            "temperatures": [turn.record.temperature for turn in session.turns],
            "before": list(session.before),
            "first": session.first,
            "at": [turn.record.at for turn in session.turns],
            "chat": chat,
        },
    )
