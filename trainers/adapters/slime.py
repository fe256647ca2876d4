"""Our environments for slime: a custom generate function and a rollout function.

Written against slime's documented `Sample` and its calls; slime is not on the package registry (what is called `slime`
there is another project), so the tests hold the contract field by field. Put into a module of your own:

    sessions = SessionPool.of("turngym/ALFWorld-v0", tokenizer)
    generate = slime.generate_function(sessions)            # --custom-generate-function-path my_module.generate
    generate_rollout = rollout_function(generate)           # --rollout-function-path my_module.generate_rollout
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngym.agents.playing.episode_session import EpisodeSession, SessionPool
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.plugins import need
from turngym.core.protocols import GenerateRequest, Generation
from turngym.trainers.adapters.token_session import Trajectory, play_async, stops

# SGLang behind slime's router, as the slime adapter asks it.

Post = Callable[..., Awaitable[dict[str, Any]]]
"""slime's `post(url, payload, headers=...)`."""


@dataclass(slots=True, kw_only=True)
class Server:
    """SGLang behind slime's router, for one sample."""

    args: Any
    sample: Any
    params: dict[str, Any]
    post: Post
    start: int
    """Where the response of the episode begins."""
    versions: list[str]
    """The weights of each turn, as the server names them."""
    aborted: bool = False

    async def __call__(self, request: GenerateRequest) -> Generation | Status:
        room = int(self.params["max_new_tokens"]) - (len(request.prompt_ids) - self.start)
        if room < 1:
            return Status.TRUNCATED_TOKENS
        # with this policy the key leads every turn to the same worker, which still has the episode's keys and values
        routed = getattr(self.args, "router_policy", None) == "consistent_hashing" and self.sample.session_id
        answer = await self.post(
            f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}/generate",
            payload(request, self.params, room),
            headers={"X-SMG-Routing-Key": self.sample.session_id} if routed else None,
        )
        meta = answer["meta_info"]
        self.aborted = meta["finish_reason"]["type"] == "abort"
        if self.aborted:
            return Status.ERROR_ENGINE
        self.versions.append(str(meta.get("weight_version", "")))
        rows = meta["output_token_logprobs"]
        return Generation(
            # SGLang's rows are (log-probability, id, text); decoding and encoding the text again could give other ids
            ids=np.array([row[1] for row in rows], np.int32),
            logprobs=np.array([row[0] for row in rows], np.float32),
            finish=meta["finish_reason"]["type"],
            policy_version=version_number(self.versions[-1]),
        )


def payload(request: GenerateRequest, params: dict[str, Any], room: int) -> dict[str, Any]:
    """The body of SGLang's /generate for one turn of at most `room` tokens."""
    texts, ids = stops(params, request)
    sampling = {
        "max_new_tokens": min(room, request.sampling.max_new_tokens),
        "stop": texts,
        "stop_token_ids": ids,
        "no_stop_trim": True,  # SGLang would cut off what matched a stop, the action's closing tag
    }
    return {"input_ids": request.prompt_ids.tolist(), "sampling_params": {**params, **sampling}, "return_logprob": True}


def version_number(version: str) -> int:
    """The policy version in the name that SGLang gives its weights; 0 if the name is not a number."""
    # SGLang names the weights that it started with "default"
    return int(version) if version.isdecimal() else 0


GenerateSample = Callable[..., Awaitable[Any]]
SPANS = "turngym_spans"
"""Where an aborted sample keeps its turns, so that the episode can go on."""


def generate_function(sessions: SessionPool, *, post: Post | None = None) -> GenerateSample:
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
    """Write an episode into a sample: tokens, length R of the response, mask [R], log-probabilities [R], reward.

    Args:
        sample: slime's, changed in place and returned.
        weight_versions: of the server, one for each response.
        aborted: whether slime broke the generation off; the sample then has no reward yet.
    """
    trajectory, statuses = Trajectory.of(episode), type(sample.status)
    lists = trajectory.lists()
    sample.tokens = lists["prompt_ids"] + lists["response_ids"]
    sample.response_length = len(lists["response_ids"])
    sample.response = "\n".join(turn.response for turn in episode.turns)
    sample.loss_mask, sample.rollout_log_probs = lists["response_mask"], lists["logprobs"]
    # a response that broke the environment has a version, but is no turn
    sample.weight_versions = weight_versions[: len(episode.turns)]
    sample.metadata = {**(sample.metadata or {}), SPANS: [list(span) for span in trajectory.turn_spans]}
    sample.metadata |= {"success": trajectory.success, "turn_rewards": list(trajectory.turn_rewards)}
    if aborted:
        # no reward yet: slime gives the sample back later
        sample.status = statuses.ABORTED
        return sample
    sample.reward = 0.0 if trajectory.failed else trajectory.reward
    # slime then masks the whole sample: a failed one, or one without a response, has nothing to learn from
    sample.remove_sample = trajectory.failed or not len(trajectory.response_ids)
    ended = statuses.TRUNCATED if trajectory.truncated else statuses.COMPLETED
    sample.status = statuses.FAILED if trajectory.failed else ended
    return sample


def _replay(sample: Any, session: EpisodeSession) -> list[str]:
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


# A rollout function for slime: all episodes of a step at the same time, without slime's own scheduling.


def rollout_function(generate: GenerateSample) -> Callable[..., list[list[Any]] | dict[str, dict[str, Any]]]:
    """`generate_rollout(args, rollout_id, data_source, evaluation=False)`: all samples of a step at the same time.

    Training gives the groups of `data_source.get_samples(args.rollout_batch_size)`; evaluation gives rewards,
    truncation and samples of every group that `data_source.get_eval_samples()` has. Without that method
    use slime's own rollout function for evaluation (`--eval-function-path`).
    """

    def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        if evaluation and not hasattr(data_source, "get_eval_samples"):
            raise TurngymError("this data source has no get_eval_samples(): set --eval-function-path to slime's own")
        groups = data_source.get_eval_samples() if evaluation else data_source.get_samples(args.rollout_batch_size)
        params = _sampling_params(args)

        async def play_all() -> list[Any]:
            # slime's own default; without a limit the open requests of a step overwhelm SGLang's HTTP server
            limit = asyncio.Semaphore(int(getattr(args, "sglang_server_concurrency", 512)))

            async def play_one(sample: Any) -> Any:
                async with limit:
                    # a copy each, since a generate function may change its parameters
                    return await generate(args, sample, dict(params), evaluation=evaluation)

            return await asyncio.gather(*(play_one(sample) for group in groups for sample in group))

        samples = asyncio.run(play_all())
        if evaluation:
            truncated = [sample.status.value == "truncated" for sample in samples]
            return {"turngym": {"rewards": [s.reward for s in samples], "truncated": truncated, "samples": samples}}
        played = iter(samples)
        return [[next(played) for _ in group] for group in groups]

    return generate_rollout


def _sampling_params(args: Any) -> dict[str, Any]:
    """slime's sampling parameters from its command line."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "spaces_between_special_tokens": False,
    }
