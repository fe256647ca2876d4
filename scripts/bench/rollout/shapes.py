"""Random models of a given shape, for measuring engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One random Qwen3-shaped model, and the cells of the table that it plays."""

    layers: int
    """Decoder layers; 0 leaves this model out."""
    width: int
    """Hidden size."""
    heads: int
    """Query heads."""
    key_heads: int
    """Key heads."""
    head: int
    """Width of a head."""
    inner: int
    """Width of the feed-forward layer."""
    vocab: int = 600
    """Size of the vocabulary."""
    turns: tuple[int, ...] = (3, 10, 30)
    """Turns of an episode, one table row each."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Episodes played side by side, one table row each."""
    history_turns: int = 2
    """Turns of each cell on which the peer without a kept cache is run too, evenly spread; 0 leaves it out."""
    continuous: int = 8
    """Most episodes side by side that transformers' continuous batching plays too; 0 leaves it out."""


TINY = Shape(layers=2, width=128, heads=4, key_heads=2, head=32, inner=384)
LARGER = Shape(
    layers=8, width=512, heads=8, key_heads=4, head=64, inner=1536, batches=(1, 8, 32), history_turns=0, continuous=0
)
HALF_BILLION = Shape(
    layers=24,
    width=896,
    heads=14,
    key_heads=2,
    head=64,
    inner=4864,
    vocab=151936,
    turns=(3,),
    batches=(1, 8),
    history_turns=0,
    continuous=0,
)


def build_model(shape: Shape, positions: int, seed: int) -> Any:
    """The random model, for at most `positions` ids, in evaluation mode."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()
