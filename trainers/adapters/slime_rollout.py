"""A rollout function for slime: all episodes of a step at the same time, without slime's own scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from turngym.envs.core import TurngymError
from turngym.trainers.adapters.slime import GenerateSample


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

            async def one(sample: Any) -> Any:
                async with limit:
                    # a copy each, since a generate function may change its parameters
                    return await generate(args, sample, dict(params), evaluation=evaluation)

            return await asyncio.gather(*(one(sample) for group in groups for sample in group))

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
