"""Requests to an engine, and what transformers itself answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from turngym.envs.core.protocols import GenerateRequest, Sampling


def request(session: str, prompt: Any, stream: tuple[int, ...] = (0,), **sampling: Any) -> GenerateRequest:
    """Eight greedy ids, unless `sampling` says otherwise."""
    sampling = {"temperature": 0.0, "max_new_tokens": 8} | sampling
    ids = np.array(prompt, np.int32)
    return GenerateRequest(session=session, prompt_ids=ids, sampling=Sampling(**sampling), stream=stream)


def reference_ids(model: Any, asked: GenerateRequest) -> list[int]:
    """transformers' own greedy continuation of the whole history, one row."""
    ids = torch.tensor(asked.prompt_ids)[None].long()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=asked.sampling.max_new_tokens,
        eos_token_id=list(asked.sampling.stop_ids) or None,
        pad_token_id=0,
    )
    return list(out[0, ids.shape[1] :].tolist())
