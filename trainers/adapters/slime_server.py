"""SGLang behind slime's router, as the slime adapter asks it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngym.envs.episode import Status
from turngym.envs.protocols import GenerateRequest, Generation

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
        about = answer["meta_info"]
        self.aborted = about["finish_reason"]["type"] == "abort"
        if self.aborted:
            return Status.ERROR_ENGINE
        self.versions.append(str(about.get("weight_version", "")))
        drawn = about["output_token_logprobs"]
        return Generation(
            # SGLang's rows are (log-probability, id, text); decoding and encoding the text again could give other ids
            ids=np.array([row[1] for row in drawn], np.int32),
            logprobs=np.array([row[0] for row in drawn], np.float32),
            finish=about["finish_reason"]["type"],
            policy_version=version_number(self.versions[-1]),
        )


def payload(request: GenerateRequest, params: dict[str, Any], room: int) -> dict[str, Any]:
    """The body of SGLang's /generate for one turn of at most `room` tokens."""
    sampling = request.sampling
    stops = params.get("stop") or ()
    # slime allows a single string as well as a list
    texts = (*((stops,) if isinstance(stops, str) else stops), *sampling.stop_text)
    more = {
        "max_new_tokens": min(room, sampling.max_new_tokens),
        "stop": [*dict.fromkeys(texts)],
        "stop_token_ids": [*dict.fromkeys((*(params.get("stop_token_ids") or ()), *sampling.stop_ids))],
        "no_stop_trim": True,  # SGLang would cut off what matched a stop, the action's closing tag
    }
    return {"input_ids": request.prompt_ids.tolist(), "sampling_params": {**params, **more}, "return_logprob": True}


def version_number(version: str) -> int:
    """The policy version that SGLang's name of its weights stands for; 0 where it is no number."""
    # SGLang names the weights that it started with "default"
    return int(version) if version.isdecimal() else 0
