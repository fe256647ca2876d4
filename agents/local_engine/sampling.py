"""How tokens are drawn: one random stream per request, and batched draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.core.protocols import Sampling

_BELOW_ONE = 1.0 - 2.0**-40
"""Keeps a uniform number below 1 after multiplication by a float64 total, so that a draw never falls off the end."""


def uniforms(stream: Sequence[int], count: int) -> NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of the random stream with entropy `stream`.

    Raises ValueError for a negative part of the stream.
    """
    if any(part < 0 for part in stream):
        raise ValueError(f"the random stream {tuple(stream)} has a negative part; use non-negative integers")
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(part) for part in stream])))
    return generator.random(count) * _BELOW_ONE


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely ids int64 [B] of `logits` [B, V], and their float32 log-probabilities [B] at temperature 1."""
    logits = logits.float()
    ids = logits.argmax(-1)
    return ids, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 [B] of `logits` [B, V] by inverse CDF, and their float32 log-probabilities [B].

    id = min { i : sum_{j <= i} softmax(logits / temperature)_j > uniform }; rows with temperature 0 are greedy.
    `temperature` is float [B], `uniform` float64 [B] in [0, 1).

    The draw depends on its own row and uniform number alone. Logits differ by rounding (about 1e-6) between batches, so
    a uniform number within rounding of a boundary of the CDF may give the neighbor: about one token in a million.
    """
    logits = logits.float()
    is_greedy = temperature == 0
    # greedy rows keep temperature 1: division by 0 would make their log-probabilities NaN
    scaled = logits / temperature.masked_fill(is_greedy, 1.0)[:, None]
    logp = scaled.log_softmax(-1)
    # a float32 sum over a large vocabulary would lose the ids whose probability is below its rounding
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    # the last sum is 1 only up to rounding
    target = (uniform * cdf[:, -1])[:, None]
    # right=True makes a number of exactly 0 skip leading ids of probability 0. The clamp is for NaN logits, whose place
    # is past the end; the engine reports those by their log-probability.
    ids = torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(is_greedy, logits.argmax(-1), ids)
    return ids, logp.gather(-1, ids[:, None])[:, 0]


def check_sampling(sampling: Sampling, *, has_tokenizer: bool) -> str | None:
    """What is wrong with `sampling`, or None."""
    if not (sampling.temperature >= 0 and np.isfinite(sampling.temperature)):
        return f"temperature {sampling.temperature} must be a finite number >= 0 (0 is greedy)"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens {sampling.max_new_tokens} must be at least 1"
    if any(not stop for stop in sampling.stop_text):
        return f"stop_text {sampling.stop_text!r} contains an empty string"
    if sampling.stop_text and not has_tokenizer:
        return f"stop_text {sampling.stop_text!r} needs decoding: build the engine with tokenizer=..."
    return None
