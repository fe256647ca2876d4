"""Our environments behind OpenEnv's HTTP and WebSocket interface (tried with openenv 0.10.0).

    uvicorn.run(app(SessionPool.of("turngym/ALFWorld-v0", tokenizer)), port=8000)

A client answers with text, or, where the sessions have a tokenizer, with the ids that it sampled: each observation then
brings the ids to append before the next response, and the last one brings the whole trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import Generation
from turngym.trainers.adapters.extras import need
from turngym.trainers.adapters.session import Stepped, TokenSession, TokenSessions
from turngym.trainers.adapters.trajectory import Trajectory


def first(session: TokenSession) -> dict[str, Any]:
    """The fields of the first observation."""
    if session.done:
        raise TurngymError(f"the environment failed: {session.episode().meta.get('error')}")
    request = session.request
    ids = [] if request is None else request.prompt_ids.tolist()
    return _fields(session, session.messages[-1]["content"], ids) | {"messages": session.messages}


def act(session: TokenSession, action: Mapping[str, Any]) -> dict[str, Any]:
    """Answer with one of `response` (text), `response_ids` with `logprobs`, or `action`; the next observation."""
    # None is a field that was left out: the action's model fills it in
    given = [name for name in ("response", "response_ids", "action") if action.get(name) is not None]
    if len(given) != 1:
        raise TurngymError(
            f"an action has exactly one of response, response_ids, action; this one has {given or 'none'}"
        )
    if given == ["response_ids"]:
        stepped = session.step(_generation(action))
    else:
        stepped = (session.step_text if given == ["response"] else session.step_action)(action[given[0]])
    return _fields(session, stepped.observation, stepped.observation_ids.tolist()) | _outcome(session, stepped)


def app(sessions: TokenSessions, *, max_concurrent: int = 64) -> Any:
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
        admissible: list[str] | None = None
        verdict: str | None = None
        success: bool = False
        status: str | None = None
        trajectory: dict[str, Any] | None = None

    class TurngymEnvironment(server.Environment):  # type: ignore[misc, name-defined]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._session: TokenSession | None = None
            self._state = types.State(step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **wanted: Any) -> Any:
            self.close()
            names = {name: wanted[name] for name in ("task_id", "sample") if wanted.get(name) is not None}
            self._session = sessions.open(seed=seed or 0, **names)
            self._state = types.State(episode_id=episode_id, step_count=0)
            return TurngymObservation(**first(self._session))

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
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

    return server.create_app(
        TurngymEnvironment, TurngymAction, TurngymObservation, env_name="turngym", max_concurrent_envs=max_concurrent
    )


def _generation(action: Mapping[str, Any]) -> Generation:
    ids, logprobs = action["response_ids"], action.get("logprobs")
    if logprobs is not None and len(logprobs) != len(ids):
        raise TurngymError(f"{len(logprobs)} log-probabilities came with {len(ids)} response ids")
    values = np.full(len(ids), np.nan) if logprobs is None else logprobs
    return Generation(
        ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
        finish="stop",
        policy_version=int(action.get("policy_version") or 0),
    )


def _fields(session: TokenSession, text: str, ids: list[int]) -> dict[str, Any]:
    admissible = session.admissible
    return {"text": text, "observation_ids": ids, "admissible": None if admissible is None else list(admissible)}


def _outcome(session: TokenSession, stepped: Stepped) -> dict[str, Any]:
    verdict = None if stepped.verdict is None else stepped.verdict.value
    outcome = {"reward": stepped.reward, "done": stepped.done, "verdict": verdict, "success": session.success}
    if not stepped.done:
        return outcome
    episode = session.episode()
    return outcome | {"status": episode.status.value, "trajectory": _trajectory(episode)}


def _trajectory(episode: Episode) -> dict[str, Any] | None:
    if not episode.segments:
        return None
    row = Trajectory.of(episode)
    return {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "response_mask": row.response_mask.astype(int).tolist(),
        "logprobs": None if row.logprobs is None else row.logprobs.tolist(),
        "policy_versions": row.policy_versions.tolist(),
        "reward": row.reward,
    }
