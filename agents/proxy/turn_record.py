"""The record of a finished turn, from its request and what the engine drew."""

from __future__ import annotations

from turngym.agents.proxy.conversation.answer import reply_of
from turngym.agents.proxy.inflight import InflightRequest
from turngym.agents.proxy.sessions.records import TurnRecord
from turngym.agents.proxy.sessions.session import session_name
from turngym.envs.protocols import Generation


def turn_record(inflight: InflightRequest, generation: Generation) -> TurnRecord:
    """What is written down of the turn that `generation` finishes."""
    request, prompt, session = inflight.request, inflight.prompt, inflight.session
    text, _ = inflight.service.renderer.decode(generation.ids)
    reader = inflight.reader()
    main = request.main and session is not None
    return TurnRecord(
        session="" if session is None else session.key,
        main=main,
        kept=prompt.kept,
        messages=prompt.new_messages,
        tools=prompt.tools if session is None or prompt.tools != session.history.tools else None,
        opens=prompt.opens,
        prompt_ids=prompt.added,
        ids=generation.ids,
        logprobs=generation.logprobs,
        reply=reply_of([*reader.feed(text), *reader.end()]),
        text=text,
        finish=generation.finish,
        version=generation.policy_version,
        version_spans=generation.version_spans,
        temperature=inflight.pending.request.sampling.temperature,
        retry=prompt.retry,
        owner=owner_of(request.user) if main and request.session_id is None else None,
    )


def owner_of(user: str) -> str:
    """A hash of whom the conversations belong to; "" for nobody."""
    return session_name(f"user/{user}") if user else ""
