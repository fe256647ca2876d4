"""The Llama family as a few tensor operations a layer: what modules do around small products costs more than those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from turngym.agents.local_engine.dense.grid import Grid
from turngym.agents.local_engine.dense.segments import Segment
from turngym.agents.local_engine.dense.weights import Layer, Weights, dense_problem, hooked, read_weights
from turngym.agents.local_engine.kv_cache import RaggedCache, Step

Masks = Tensor | dict[str, Tensor | None]
"""Additive, [B, 1, Q, length]; by the layers' type where they differ."""


class DenseDecoder:
    """`model`, one of `weights.FAMILY`, on a `RaggedCache`: the same logits up to rounding.

    Keys lie in the cache as transformers' own modules would put them, so both may take turns on one cache. `follow`
    has the weights read again.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: Weights | None = None
        self._cos = self._sin = torch.empty(0)
        self._stale = True

    def follow(self) -> None:
        """The weights, or the modules that hold them, have changed."""
        self._stale = True

    def ready(self) -> bool:
        """Whether the model can be run here as it stands; its weights are read if they have changed."""
        if self._stale:
            self._stale, self._weights, self._cos = False, None, torch.empty(0)
            if dense_problem(self._model) is None:
                self._weights = read_weights(self._model)
        return self._weights is not None and not hooked(self._model)

    def forward(self, cache: RaggedCache, ids: Tensor, step: Step, masks: Masks) -> Tensor:
        """Logits of the last column of `ids` int64 [B, Q], as `CausalModel.forward`."""
        weights = self._weights
        assert weights is not None
        grid = Grid(len(ids), ids.shape[1], step.cells)
        hidden = functional.embedding(grid.real(ids), weights.embedding)
        positions = grid.real(step.write_positions)
        place = (grid.real(step.write_rows), positions)
        cos, sin = self._rotation(weights, positions, step.length, hidden.dtype)
        cache.step = step
        for number, layer in enumerate(weights.layers):
            asked, keys, values = _project(weights, layer, hidden, cos, sin)
            seen = cache.write(number, *place, keys, values)
            mask = masks[layer.kind] if isinstance(masks, dict) else masks
            told = attention(grid.spread(asked), *seen, mask, weights.scale, step.segments)
            hidden = layer.out.onto(hidden, grid.real(told).flatten(1))
            hidden = _feed_forward(layer, hidden)
        return weights.head(weights.norm(grid.last(hidden)))

    def _rotation(self, weights: Weights, positions: Tensor, most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D] of `positions` [T] below `most`; the sines' first half is negative."""
        if len(self._cos) < most or self._cos.dtype != dtype:
            count = max(most, 2 * len(self._cos), 256)
            device = positions.device
            cos, sin = weights.rotary(
                torch.empty(0, dtype=dtype, device=device), torch.arange(count, device=device)[None]
            )
            half = weights.head_dim // 2
            self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def _project(weights: Weights, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, heads, D], keys and values [T, key heads, D] of `hidden` [T, H]."""
    mixed = layer.qkv(layer.before_attention(hidden)).view(len(hidden), -1, weights.head_dim)
    heads = weights.heads + weights.key_heads
    turned, values = mixed[:, :heads], mixed[:, heads:]
    if layer.head_norm is not None:
        turned = layer.head_norm(turned)
    turned = torch.addcmul(turned * cos, turned.roll(weights.head_dim // 2, -1), sin)
    return turned[:, : weights.heads], turned[:, weights.heads :], values


def _feed_forward(layer: Layer, hidden: Tensor) -> Tensor:
    inner = layer.gate_up(layer.before_feed_forward(hidden))
    width = inner.shape[-1] // 2
    return layer.down.onto(hidden, functional.silu(inner[:, :width]).mul_(inner[:, width:]))


def attention(
    asked: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, segments: tuple[Segment, ...] = ()
) -> Tensor:
    """What queries [B, Q, heads, D] read from keys and values [B, key heads, L, D]; [B, Q, heads, D].

    The query heads of a key head stand in one matrix with it, so that no key is copied for them; a CPU reads keys once
    per query head without a copy. Rows of `segments` read as many keys as their segment says, rows between them none:
    their results are zero.
    """
    rows, queries, heads, width = asked.shape
    shared = keys.shape[1]
    group = heads // shared
    if queries == 1:
        packed = asked.reshape(rows, shared, group, width)
        return _by_segment(packed, keys, values, mask, scale, segments).view(rows, 1, heads, width)
    if asked.device.type == "cpu":
        told = functional.scaled_dot_product_attention(
            asked.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=group > 1
        )
        return told.transpose(1, 2)
    # [B, key heads, group * Q, D], the queries of one head together
    packed = asked.view(rows, queries, shared, group, width).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, shared, group * queries, width)
    if mask is not None and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    told = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return told.view(rows, shared, group, queries, width).permute(0, 3, 1, 2, 4)


def _by_segment(
    asked: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, segments: tuple[Segment, ...]
) -> Tensor:
    told = None
    for start, stop, length, even in segments or (Segment(0, len(asked), keys.shape[2], False),):
        rows = slice(start, stop)
        part = functional.scaled_dot_product_attention(
            asked[rows],
            keys[rows, :, :length],
            values[rows, :, :length],
            attn_mask=None if even or mask is None else mask[rows, :, :, :length],
            scale=scale,
        )
        if stop - start == len(asked):
            return part.contiguous()
        told = asked.new_zeros(asked.shape) if told is None else told
        told[rows] = part
    assert told is not None
    return told
