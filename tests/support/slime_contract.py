"""slime's side of the contract, field by field: what its `Sample` has and what its router answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields that a generate function reads or writes, with slime's names, types and defaults."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None


class SlimeArgs:
    """slime's command line, and the router that it names: SGLang's /generate, answering from a recording."""

    rollout_temperature = 1.0
    rollout_top_p = 1.0
    rollout_top_k = -1
    rollout_max_response_len = 2000
    rollout_stop = None
    rollout_stop_token_ids = None
    rollout_skip_special_tokens = False
    sglang_router_ip = "10.0.0.1"
    sglang_router_port = 3000
    sglang_server_concurrency = 4

    def __init__(self, replay: Any, name: str | None, *, seed: int, abort_at: int | None = None) -> None:
        self.rollout_seed = seed
        self.rollout_batch_size = 2
        self.replay, self.name, self.abort_at = replay, name, abort_at
        self.asked: list[dict[str, Any]] = []

    async def post(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        assert url == "http://10.0.0.1:3000/generate"
        assert body["return_logprob"] is True
        assert body["sampling_params"]["no_stop_trim"] is True
        self.asked.append(body)
        if self.abort_at == len(self.asked) - 1:
            return {"text": "", "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}
        generation = self.replay.after(self.name, body["input_ids"])
        rows = [
            [float(logp), int(token), None] for logp, token in zip(generation.logprobs, generation.ids, strict=True)
        ]
        about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": rows, "weight_version": "5"}
        return {"text": "", "meta_info": about}
