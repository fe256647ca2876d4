"""Requests to an engine, and what transformers itself answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from turngym.core.protocols import GenerateRequest, Sampling

# products of small models are fastest in one thread, and always the same
torch.set_num_threads(1)
VOCAB = 61
EOS = (3, 4, 5)
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""Configuration of a small model."""


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model with the sizes of `TINY`, except for `changes`."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**TINY | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def request(session: str, prompt: Any, stream: tuple[int, ...] = (0,), **sampling: Any) -> GenerateRequest:
    """Eight greedy ids, unless `sampling` says otherwise."""
    sampling = {"temperature": 0.0, "max_new_tokens": 8} | sampling
    ids = np.array(prompt, np.int32)
    return GenerateRequest(session=session, prompt_ids=ids, sampling=Sampling(**sampling), stream=stream)


def reference_ids(model: Any, request: GenerateRequest) -> list[int]:
    """transformers' own greedy continuation of the whole history, one row."""
    ids = torch.tensor(request.prompt_ids)[None].long()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.sampling.max_new_tokens,
        eos_token_id=list(request.sampling.stop_ids) or None,
        pad_token_id=0,
    )
    return list(out[0, ids.shape[1] :].tolist())


def reference_logprobs(model: Any, prompt: Any, ids: Any, temperature: float = 1.0) -> Any:
    """Log-probabilities of `ids` from one forward pass over prompt and response, without a cache."""
    full = torch.tensor(np.concatenate((prompt, ids))).long()
    with torch.no_grad():
        logp = (model(full[None], use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return logp[torch.arange(len(prompt) - 1, len(full) - 1), torch.tensor(ids).long()].numpy()


def play(engine: Any, turns: int, sessions: int, temperature: float) -> list[Any]:
    """Multi-turn histories of unequal lengths, not every session in every turn; (request, generation) in order."""
    rng = np.random.default_rng(0)
    history = {f"s{i}": rng.integers(0, VOCAB, rng.integers(1, 30)) for i in range(sessions)}
    played = []
    for turn in range(turns):
        requests = []
        for i, (name, prompt) in enumerate(history.items()):
            if rng.random() < 0.8:
                sampling = {"temperature": temperature, "max_new_tokens": int(rng.integers(1, 9)), "stop_ids": EOS}
                requests.append(request(name, prompt, (7, i, turn), **sampling))
        for sent, generation in zip(requests, engine.generate(requests), strict=True):
            played.append((sent, generation))
            observation = rng.integers(0, VOCAB, rng.integers(1, 12))
            history[sent.session] = np.concatenate((sent.prompt_ids, generation.ids, observation))
    return played
