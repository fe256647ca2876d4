"""Request bodies of /generate, and checks before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.sglang.errors import ServerError
from turngym.envs.protocols import GenerateRequest, Sampling

SCORE_TEMPERATURE = "input_logprob_temperature"
"""The field that asks for scores at a temperature, and says in `meta_info` that they have it (sglang, pull request
36213)."""


def seed_of(stream: Sequence[int]) -> int:
    """A number in 0..2**63 - 1 for the random stream with entropy `stream`; the server's seeds are signed.

    Raises ServerError for a negative part, as the local engine does.
    """
    if any(part < 0 for part in stream):
        raise ServerError(f"the random stream {tuple(stream)} has a negative part; use non-negative integers")
    state = np.random.SeedSequence([int(part) for part in stream]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generate_body(rid: str, prompt: NDArray[np.int32], sampling: Sampling, seed: int, count: int) -> dict[str, Any]:
    """A request for at most `count` ids after `prompt`. The server draws id number n of a sequence by (seed, n)."""
    params: dict[str, Any] = {
        "max_new_tokens": count,
        "temperature": sampling.temperature,
        "sampling_seed": seed,
        # the defaults of a model's generation_config.json must not change the distribution
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_text),
        "skip_special_tokens": False,
    }
    return {"rid": rid, "input_ids": prompt.tolist(), "sampling_params": params, "return_logprob": True}


def score_body(
    rid: str,
    ids: NDArray[np.int32],
    start: int,
    *,
    top: int = 0,
    chosen: Sequence[int] = (),
    temperature: float = 1.0,
) -> dict[str, Any]:
    """A request for the log-probabilities of `ids[start + 1:]`; nothing is drawn.

    `top`: also the so many most likely ids at each of these positions. `chosen`: also these ids at each of them.
    `temperature`: of the scores; servers that cannot do it do not say so (`check_temperature`).
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids.tolist(),
        # whatever this one says, the server scores what was given at temperature 1
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    if temperature != 1.0:
        body[SCORE_TEMPERATURE] = temperature
    if top:
        body["top_logprobs_num"] = top
    if chosen:
        body["token_ids_logprob"] = [int(one) for one in chosen]
    return body


def check_ids(ids: NDArray[np.int32], vocabulary: int, where: str) -> None:
    """Raises ServerError for what is no row of ids: the server does not look, and an id too large ends it."""
    if ids.ndim != 1 or not len(ids):
        raise ServerError(f"{where}: ids have shape {ids.shape}; they must be a row of at least one id")
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ServerError(f"{where}: ids span {ids.min()}..{ids.max()}; the model knows ids 0..{vocabulary - 1}")


def check_request(request: GenerateRequest, vocabulary: int, where: str) -> None:
    """Raises ServerError for a request that makes no sense."""
    sampling = request.sampling
    check_ids(np.asarray(request.prompt_ids, np.int32), vocabulary, where)
    if not (sampling.temperature >= 0 and np.isfinite(sampling.temperature)):
        raise ServerError(f"{where}: temperature {sampling.temperature} must be a finite number >= 0 (0 is greedy)")
    if sampling.max_new_tokens < 1:
        raise ServerError(f"{where}: max_new_tokens {sampling.max_new_tokens} must be at least 1")
    if any(not stop for stop in sampling.stop_text):
        raise ServerError(f"{where}: stop_text {sampling.stop_text!r} contains an empty string")
