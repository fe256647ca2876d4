"""Sizes of causal models: parameters, bytes and operations by formula, and a model with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from turngym.trainers.models.model import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3-shaped decoder: grouped queries, gated MLP, norms on queries and keys, no biases."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    """Input and output embedding are one matrix."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys; the values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer: four attention projections, three of the MLP, four norms."""
        attention = 2 * self.width * self.query_width + 2 * self.width * self.kv_width
        return attention + 3 * self.width * self.mlp + 2 * self.width + 2 * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Of the input embedding, and of the head where it is a matrix of its own."""
        return self.vocab * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.width

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values in bfloat16, all layers."""
        return 2 * 2 * self.layers * self.kv_width

    def forward_flops(self, tokens: float, context: float, predicted: float) -> float:
        """Operations of a forward pass over `tokens`, each attending to `context` others on average.

        2 x parameters per token and layer, 4 x query width x context for attention, and the head on `predicted` tokens.
        A backward pass costs twice this.
        """
        layers = self.layers * (2.0 * self.layer_parameters + 4.0 * self.query_width * context)
        return tokens * layers + predicted * 2.0 * self.vocab * self.width


def _qwen3(layers: int, width: int, heads: int, mlp: int, tied: bool) -> ModelShape:
    return ModelShape(
        layers=layers, width=width, heads=heads, kv_heads=8, head_dim=128, mlp=mlp, vocab=151_936, tied=tied
    )


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": ModelShape(layers=2, width=128, heads=4, kv_heads=4, head_dim=32, mlp=256, vocab=600, tied=True),
        "0.6B": _qwen3(28, 1024, 16, 3072, True),
        "1.7B": _qwen3(28, 2048, 16, 6144, True),
        "4B": _qwen3(36, 2560, 32, 9728, True),
        "8B": _qwen3(36, 4096, 32, 12_288, False),
        "14B": _qwen3(40, 5120, 40, 17_408, False),
        "32B": _qwen3(64, 5120, 64, 25_600, False),
    }
)
"""By the names that people use: the dense Qwen3 models, and the tiny one of the embedded worlds."""


def shape_named(name: str) -> ModelShape:
    """One of `SHAPES`. Raises ModelError, with the names, for another."""
    if name not in SHAPES:
        raise ModelError(f"model shape {name!r} is unknown; valid: {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_of(config: Any) -> ModelShape:
    """The shape that a Hugging Face configuration describes. Raises ModelError where a size is missing."""
    try:
        heads = int(config.num_attention_heads)
        return ModelShape(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=heads,
            # absent or None where every query head has keys of its own
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mlp=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
        )
    except (AttributeError, TypeError) as error:
        raise ModelError(f"{type(config).__name__} does not say its sizes as decoders usually do: {error}") from error


def config_of(shape: ModelShape, *, max_length: int = 40_960) -> Any:
    """The Qwen3 configuration of a shape."""
    from transformers import Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": "sdpa",
    }
    return Qwen3Config(**sizes)


def random_model(shape: ModelShape, *, dtype: Any, device: str = "cpu", seed: int = 0) -> nn.Module:
    """A model of this shape with weights drawn on its own device, in evaluation mode: for measuring, not for use."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        # unlike the constructor it takes a dtype: no float32 copy of a large model exists in between
        model = Qwen3ForCausalLM._from_config(config_of(shape), dtype=dtype)
    return model.eval()
