"""Our environments behind OpenEnv's HTTP and WebSocket interface (tried with openenv 0.10.0).

    uvicorn.run(app(SessionPool.of("turngym/ALFWorld-v0", tokenizer)), port=8000)

A client answers with text, or, where the sessions have a tokenizer, with the ids that it sampled: each observation then
brings the ids to append before the next response, and the last one brings the whole trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from turngym.agents.playing.episode_session import EpisodeSession, SessionPool, Stepped
from turngym.agents.serving_asgi import JsonBodies
from turngym.core.errors import TurngymError
from turngym.core.plugins import need
from turngym.core.protocols import Generation
from turngym.core.redaction import brief
from turngym.trainers.adapters.token_session import Trajectory

# What OpenEnv's clients send, read: which episode a reset asks for, and ids that a client sampled.


def reset_arguments(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `SessionPool.open` in the fields of a reset. Raises TurngymError for other types or ranges."""
    task_id = wanted.get("task_id")
    if task_id is not None and not isinstance(task_id, str):
        raise TurngymError(f"task_id is {brief(task_id, 60)}; it must be text")
    arguments: dict[str, Any] = {} if task_id is None else {"task_id": task_id}
    for name in ("seed", "sample"):
        value = wanted.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise TurngymError(f"{name} is {brief(value, 60)}; it must be a whole number from 0 to 2**63 - 1")
        arguments[name] = value
    return arguments


def generation(action: Mapping[str, Any]) -> Generation:
    """The response that `response_ids` and `logprobs` are. Raises TurngymError for ids or lengths that cannot be."""
    ids, logprobs = action["response_ids"], action.get("logprobs")
    if logprobs is not None and len(logprobs) != len(ids):
        raise TurngymError(f"{len(logprobs)} log-probabilities came with {len(ids)} response ids")
    if not all(0 <= token < 2**31 for token in ids):
        raise TurngymError("response_ids must be from 0 to 2**31 - 1")
    values = np.full(len(ids), np.nan) if logprobs is None else logprobs
    return Generation(
        ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
        finish="stop",
        policy_version=int(action.get("policy_version") or 0),
    )


def first_fields(session: EpisodeSession) -> dict[str, Any]:
    if session.done:
        raise TurngymError(f"the environment failed: {session.episode().meta.get('error')}")
    request = session.request
    ids = [] if request is None else request.prompt_ids.tolist()
    return _fields(session, session.messages[-1]["content"], ids) | {"messages": session.messages}


def act(session: EpisodeSession, action: Mapping[str, Any]) -> dict[str, Any]:
    """Answer with one of `response` (text), `response_ids` with `logprobs`, or `action`; the next observation."""
    # None is a field that was left out: the action's model fills it in
    forms = [name for name in ("response", "response_ids", "action") if action.get(name) is not None]
    if len(forms) != 1:
        raise TurngymError(
            f"an action has exactly one of response, response_ids, action; this one has {forms or 'none'}"
        )
    if forms == ["response_ids"]:
        stepped = session.step(generation(action))
    else:
        stepped = (session.step_text if forms == ["response"] else session.step_action)(action[forms[0]])
    return _fields(session, stepped.observation, stepped.observation_ids.tolist()) | _outcome(session, stepped)


IDLE, SILENT = 900.0, 30.0
"""Seconds of silence after which a WebSocket ends, and after which it makes room for a new one."""


def app(sessions: SessionPool, *, max_concurrent: int = 64) -> Any:
    """The FastAPI application; every client session plays its own episode. Raises MissingExtra without openenv.

    `reset(task_id=..., seed=..., sample=...)` chooses the episode; without a task it is drawn from seed and sample.
    """
    types = need("openenv.core.env_server.types", "the OpenEnv server", "openenv")
    server = need("openenv.core.env_server", "the OpenEnv server", "openenv")

    class TurngymAction(types.Action):  # type: ignore[misc, name-defined]
        response: str | None = None
        response_ids: list[int] | None = None
        logprobs: list[float] | None = None
        policy_version: int = 0
        action: str | None = None

    class TurngymObservation(types.Observation):  # type: ignore[misc, name-defined]
        text: str
        observation_ids: list[int] | None = None
        messages: list[dict[str, str]] | None = None
        tools: list[dict[str, Any]] | None = None
        admissible: list[str] | None = None
        verdict: str | None = None
        success: bool = False
        status: str | None = None
        trajectory: dict[str, Any] | None = None

    class TurngymEnvironment(server.Environment):  # type: ignore[misc, name-defined]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._session: EpisodeSession | None = None
            self._state = types.State(step_count=0)

        # fields by name: of others the server would make arguments of its own functions
        def reset(
            self, seed: Any = None, episode_id: str | None = None, task_id: Any = None, sample: Any = None
        ) -> Any:
            self.close()
            self._session = sessions.open(**reset_arguments({"seed": seed, "sample": sample, "task_id": task_id}))
            self._state = types.State(episode_id=episode_id, step_count=0)
            return TurngymObservation(**first_fields(self._session), tools=sessions.tool.schemas())

        def step(self, action: Any, timeout_s: float | None = None) -> Any:
            if self._session is None:
                raise TurngymError("step() was called before reset()")
            self._state.step_count += 1
            return TurngymObservation(**act(self._session, action.model_dump()))

        @property
        def state(self) -> Any:
            return self._state

        def close(self) -> None:
            if self._session is not None:
                self._session.close()
                self._session = None

    application = server.create_app(
        TurngymEnvironment, TurngymAction, TurngymObservation, env_name="turngym", max_concurrent_envs=max_concurrent
    )
    application.add_exception_handler(TurngymError, _bad_request)
    application.add_middleware(JsonBodies, complaint=_complaint)
    application.add_middleware(MakesRoom, most=max_concurrent)
    return application


class MakesRoom:
    """ASGI middleware that ends silent WebSockets.

    A WebSocket ends after `idle` seconds without a message. If a new one comes while `most` are open, the one that has
    been silent longest ends, provided that it has been silent for `silent` seconds.
    """

    def __init__(self, app: Any, *, most: int, idle: float = IDLE, silent: float = SILENT) -> None:
        self._app, self._most, self._idle, self._silent = app, most, idle, silent
        self._open: list[_Socket] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await self._make_room()
        socket = _Socket()
        self._open.append(socket)

        async def receive_or_close() -> Any:
            # ends: below, after `idle` seconds at the latest
            message, gone = asyncio.ensure_future(receive()), asyncio.ensure_future(socket.gone.wait())
            try:
                await asyncio.wait((message, gone), timeout=self._idle, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    socket.used = time.monotonic()
                    return message.result()  # ends: it is done
            finally:
                gone.cancel()
                message.cancel()
            await send({"type": "websocket.close", "code": 1001, "reason": "silent for too long"})
            return {"type": "websocket.disconnect", "code": 1001}

        try:
            await self._app(scope, receive_or_close, send)
        finally:
            self._open.remove(socket)
            socket.over.set()

    async def _make_room(self) -> None:
        silent = [each for each in self._open if each.used < time.monotonic() - self._silent and not each.gone.is_set()]
        if len(self._open) >= self._most and silent:
            oldest = min(silent, key=lambda socket: socket.used)
            oldest.gone.set()
            # its place is free when its environment is closed
            with contextlib.suppress(TimeoutError):
                # ends: 10 s later
                await asyncio.wait_for(oldest.over.wait(), 10.0)


class _Socket:
    def __init__(self) -> None:
        self.used, self.gone, self.over = time.monotonic(), asyncio.Event(), asyncio.Event()


async def _bad_request(request: Any, error: Exception) -> Any:
    """Describes a client's mistake, for the client."""
    responses: Any = need("starlette.responses", "the OpenEnv server", "openenv")
    return responses.JSONResponse({"error": str(error)}, status_code=400)


def _complaint(text: str) -> str:
    return json.dumps({"type": "error", "data": {"message": text, "code": "INVALID_JSON"}})


def _fields(session: EpisodeSession, text: str, ids: list[int]) -> dict[str, Any]:
    admissible = session.admissible
    return {"text": text, "observation_ids": ids, "admissible": None if admissible is None else list(admissible)}


def _outcome(session: EpisodeSession, stepped: Stepped) -> dict[str, Any]:
    verdict = None if stepped.verdict is None else stepped.verdict.value
    outcome = {"reward": stepped.reward, "done": stepped.done, "verdict": verdict, "success": session.success}
    if not stepped.done:
        return outcome
    episode = session.episode()
    row = Trajectory.of(episode) if episode.segments else None
    trajectory = row and row.lists() | {"reward": row.reward}
    return outcome | {"status": episode.status.value, "trajectory": trajectory}
