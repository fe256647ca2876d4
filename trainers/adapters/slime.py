"""Our environments for slime: a custom generate function and a rollout function.

Written against slime's documented `Sample` and its calls; slime is not on the package registry (what is called `slime`
there is another project), so the tests hold the contract field by field. Put into a module of your own:

    sessions = SessionPool.of("turngym/ALFWorld-v0", tokenizer)
    generate = slime.generate_function(sessions)            # --custom-generate-function-path my_module.generate
    generate_rollout = rollout_function(generate)           # --rollout-function-path my_module.generate_rollout
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import Generation
from turngym.trainers.adapters.extras import need
from turngym.trainers.adapters.session import TokenSession, TokenSessions, play_async
from turngym.trainers.adapters.slime_server import Post, Server, version_number
from turngym.trainers.adapters.trajectory import Trajectory

GenerateSample = Callable[..., Awaitable[Any]]

SPANS = "turngym_spans"
"""Where an aborted sample keeps its turns, so that the episode can go on."""


def generate_function(sessions: TokenSessions, *, post: Post | None = None) -> GenerateSample:
    """`async generate(args, sample, sampling_params, evaluation=False)`: plays one episode and fills the sample.

    The task is `sample.metadata["task_id"]`, else the sample's prompt where that is text; the random stream is that of
    (`args.rollout_seed`, `sample.index`). `sampling_params["max_new_tokens"]` limits the whole response, as in slime; a
    turn is limited by the sessions. An episode whose server aborts is `ABORTED` with the turns so far; given back, it
    goes on after them. One whose environment fails is `FAILED` and not trained on. `post` is slime's own by default.
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        send = post or need("slime.utils.http_utils", "the generate function", "").post
        # by the sample's index: attempts at one task differ, and an aborted one that is given back meets the same world
        session = sessions.open(_task_id(sample), seed=int(args.rollout_seed), sample=int(sample.index or 0))
        first = session.request
        server = Server(
            args=args,
            sample=sample,
            params=sampling_params,
            post=send,
            start=0 if first is None else len(first.prompt_ids),
            versions=_replay(sample, session),
        )
        # before playing: what the replay has brought was sampled by older weights
        stale = 0 if session.request is None else len(session.request.prompt_ids) - server.start
        fill(sample, await play_async(session, server), server.versions, aborted=server.aborted)
        if stale and getattr(args, "mask_offpolicy_in_partial_rollout", False):
            stale = min(stale, len(sample.loss_mask))  # the last observation is no part of it if nothing was said since
            sample.loss_mask[:stale] = [0] * stale
        return sample

    return generate


def fill(sample: Any, episode: Episode, weight_versions: list[str], *, aborted: bool = False) -> Any:
    """Write an episode into a sample: tokens, length R of the response, mask [R], log-probabilities [R], reward."""
    trajectory, kinds = Trajectory.of(episode), type(sample.status)
    sample.tokens = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    sample.response_length = len(trajectory.response_ids)
    sample.response = "\n".join(turn.response for turn in episode.turns)
    sample.loss_mask = trajectory.response_mask.astype(int).tolist()
    sample.rollout_log_probs = None if trajectory.logprobs is None else trajectory.logprobs.tolist()
    # a response that broke the environment has a version, but is no turn
    sample.weight_versions = weight_versions[: len(episode.turns)]
    sample.metadata = {**(sample.metadata or {}), SPANS: [list(span) for span in trajectory.turn_spans]}
    sample.metadata |= {"success": trajectory.success, "turn_rewards": list(trajectory.turn_rewards)}
    if aborted:
        # no reward yet: slime gives the sample back later
        sample.status = kinds.ABORTED
        return sample
    sample.reward = 0.0 if trajectory.failed else trajectory.reward
    # slime then masks the whole sample: a failed one, or one without a response, has nothing to learn from
    sample.remove_sample = trajectory.failed or not len(trajectory.response_ids)
    ended = kinds.TRUNCATED if trajectory.truncated else kinds.COMPLETED
    sample.status = kinds.FAILED if trajectory.failed else ended
    return sample


def _replay(sample: Any, session: TokenSession) -> list[str]:
    """Play the turns of an aborted sample again; the weights of each. Raises TurngymError where the world differs."""
    spans = (sample.metadata or {}).get(SPANS, ()) if sample.status.value == "aborted" else ()
    begin = len(sample.tokens) - sample.response_length
    for number, (start, stop) in enumerate(spans):
        request = session.request
        # compared as ids: the old log-probabilities hold for exactly this history
        if request is None or request.prompt_ids.tolist() != sample.tokens[: begin + start]:
            session.close()
            raise TurngymError(
                f"sample {sample.index} cannot go on: its environment says other things at turn {number}"
            )
        session.step(
            Generation(
                ids=np.array(sample.tokens[begin + start : begin + stop], np.int32),
                logprobs=np.array(sample.rollout_log_probs[start:stop], np.float32),
                finish="stop",
                policy_version=version_number(sample.weight_versions[number]),
            )
        )
    return list(sample.weight_versions[: len(spans)])


def _task_id(sample: Any) -> str:
    task_id = (sample.metadata or {}).get("task_id", sample.prompt)
    if isinstance(task_id, str) and task_id:
        return task_id
    raise TurngymError(f"sample {sample.index} names no task: put task_id into its metadata, or make it the prompt")
