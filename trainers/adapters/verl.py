"""Our environments for verl: an agent loop, named in the agent loop configuration (tried with verl 0.9.1).

- name: turngym
  _target_: turngym.trainers.adapters.verl.TurngymAgentLoop
  sessions:
    _target_: turngym.agents.playing.episode_session.SessionPool.of
    _partial_: true
    env_id: turngym/ALFWorld-v0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np

from turngym.agents.playing.episode_session import SessionPool
from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.plugins import need
from turngym.core.protocols import GenerateRequest, Generation
from turngym.trainers.adapters.token_session import Generate, Trajectory, play_async, stops

_shared: dict[tuple[str, int], tuple[SessionPool, Any]] = {}
"""verl makes a loop for every episode; the sessions of one configuration and tokenizer are made once per worker.

With what they were made from, so that the key stays the key of these objects."""


class TurngymAgentLoop:
    """Plays the task of one row of verl's data set; `run` is what `AgentLoopBase.run` is.

    Args:
        sessions: makes the sessions from verl's tokenizer.
        trainer_config, server_manager, tokenizer: what verl hands to every loop; the rest of it is not needed.

    Rows need `task_id`, may have `seed` and `sample`, and name this loop in `agent_name`. An episode that uses up
    `rollout.response_length` ends as `truncated_tokens`. A first prompt longer than `rollout.prompt_length` is an
    error, because verl would cut it on the left.
    """

    def __init__(
        self,
        *,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        sessions: Callable[..., SessionPool],
        **_: Any,
    ) -> None:
        self.rollout = trainer_config.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        key = (repr(sessions), id(tokenizer))
        if key not in _shared:
            _shared[key] = (sessions(tokenizer=tokenizer), (sessions, tokenizer))
        self.sessions = _shared[key][0]

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play one episode; an `AgentLoopOutput`. Raises MissingExtra without verl."""
        loops = need("verl.experimental.agent_loop.agent_loop", "the agent loop", "verl")
        wanted: dict[str, Any] = {name: int(row[name]) for name in ("seed", "sample") if row.get(name) is not None}
        task_id = row.get("task_id")
        session = self.sessions.open(None if task_id is None else str(task_id), **wanted)
        try:
            generate = self._generate(sampling_params, session.request)
        except TurngymError:
            session.close()
            raise
        episode = await play_async(session, generate)
        trajectory = Trajectory.of(episode).filled(int(self.tokenizer.eos_token_id))
        return loops.AgentLoopOutput(**output(trajectory), metrics=loops.AgentLoopMetrics())

    def _generate(self, sampling_params: dict[str, Any], first: GenerateRequest | None) -> Generate:
        """Asks verl's server; `first` says where the response of the episode begins."""
        start, request_id = 0 if first is None else len(first.prompt_ids), uuid4().hex
        if start > int(self.rollout.prompt_length):
            raise TurngymError(
                f"the first prompt has {start} tokens, but rollout.prompt_length is {self.rollout.prompt_length}; verl "
                "would cut it: raise data.max_prompt_length"
            )

        async def generate(request: GenerateRequest) -> Generation | Status:
            room = int(self.rollout.response_length) - (len(request.prompt_ids) - start)
            if room < 1:
                return Status.TRUNCATED_TOKENS
            answer = await self.server_manager.generate(
                request_id=request_id,  # the same for all turns: verl keeps an episode on one server by it
                prompt_ids=request.prompt_ids.tolist(),
                sampling_params=server_params(sampling_params, request, room, str(self.rollout.name)),
            )
            return generation(answer)

        return generate


def server_params(base: dict[str, Any], request: GenerateRequest, room: int, engine: str) -> dict[str, Any]:
    """verl's sampling parameters for one turn: at most `room` tokens, and where a response ends.

    Args:
        room: tokens left in the response, over all turns.
        engine: sglang, vllm, or another server, which gets no stop texts.
    """
    texts, ids = stops(base, request)
    # both servers cut off what matched a stop string unless told otherwise, each by another name
    keep = {"sglang": {"no_stop_trim": True}, "vllm": {"include_stop_str_in_output": True}}.get(engine, {})
    return {
        **base,
        "max_tokens": min(room, request.sampling.max_new_tokens),
        "stop_token_ids": ids,
        **({"stop": texts, **keep} if keep and texts else {}),
    }


def generation(answer: Any) -> Generation | Status:
    """verl's `TokenOutput` as ours. An aborted one without a token ends the episode."""
    if answer.stop_reason == "aborted" and not answer.token_ids:
        return Status.ERROR_ENGINE
    ids = np.asarray(answer.token_ids, np.int32)
    scored = answer.log_probs is not None and len(answer.log_probs) == len(ids)
    version = answer.extra_fields.get("global_steps")
    return Generation(
        ids=ids,
        logprobs=np.asarray(answer.log_probs if scored else np.full(len(ids), np.nan), np.float32),
        finish="aborted" if answer.stop_reason == "aborted" else "stop",
        policy_version=0 if version is None else int(version),
    )


def output(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of an `AgentLoopOutput`. An episode that failed has reward 0 and nothing to train on."""
    lists, versions = trajectory.lists(), trajectory.policy_versions[trajectory.response_mask]
    return {
        "prompt_ids": lists["prompt_ids"],
        "response_ids": lists["response_ids"],
        # every row must be answered, so a failed one is, with nothing unmasked
        "response_mask": [0] * len(lists["response_mask"]) if trajectory.failed else lists["response_mask"],
        "response_logprobs": lists["logprobs"],
        "reward_score": 0.0 if trajectory.failed else trajectory.reward,
        "num_turns": 2 * len(trajectory.turn_spans),
        "extra_fields": {
            "turn_scores": list(trajectory.turn_rewards),
            "tool_rewards": [],
            "min_global_steps": int(versions.min()) if len(versions) else None,
            "max_global_steps": int(versions.max()) if len(versions) else None,
            "turngym_status": trajectory.status.value,
            "turngym_success": trajectory.success,
        },
    }
