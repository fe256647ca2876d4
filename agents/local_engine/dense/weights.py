"""Weights of the Llama family, read out of a transformers model for `decoder`; or why they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turngym.agents.local_engine.dense.parts import Linear, Norm, folded, make_norm

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of models made of the same parts: RMS norms, rotary grouped attention, gated SiLU feed-forward."""
FUSE_BYTES = 1 << 28
"""Larger models are read where they are: what one product instead of three saves is small there, a copy is not."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    kind: str
    """Its name in `layer_types`: which mask it sees."""
    before_attention: Norm
    qkv: Linear
    head_norm: Norm | None
    """Of queries and keys (Qwen3), its weight [query heads + key heads, D]."""
    out: Linear
    before_feed_forward: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model."""

    embedding: Tensor
    """[V, H]."""
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    scale: float
    """Of the scores, D^-0.5."""
    heads: int
    key_heads: int
    head_dim: int
    rotary: nn.Module
    """transformers' own, whose cosines and sines are taken."""


def dense_problem(model: Any) -> str | None:
    """Why `model` is not one of `FAMILY` exactly as transformers builds it, or None if it is."""
    name, kind = type(model).__name__, str(getattr(model.config, "model_type", ""))
    if kind not in FAMILY or type(model).__module__ != f"transformers.models.{kind}.modeling_{kind}":
        return f"{name} is not a model of {', '.join(FAMILY)}"
    if not name.endswith("ForCausalLM") or model.config.hidden_act != "silu":
        return f"{name} with {model.config.hidden_act} is built differently"
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        return f"its parameters have several types: {', '.join(sorted(map(str, dtypes)))}"
    return next(_changed(model, kind), None)


def hooked(model: Any) -> bool:
    """Whether somebody listens to or changes what passes through a module."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def read_weights(model: Any) -> Weights:
    """The weights as they are now; a small model's are copied side by side, a large one's are the model's own."""
    core, config = model.model, model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(core.layers)
    fuse = sum(parameter.nbytes for parameter in model.parameters()) <= FUSE_BYTES
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    layers = [_layer(layer, kind, heads, key_heads, fuse) for layer, kind in zip(core.layers, kinds, strict=True)]
    norm, head = _pair(core.norm, fuse, model.lm_head)
    return Weights(
        embedding=core.embed_tokens.weight.detach(),
        layers=tuple(layers),
        norm=norm,
        head=head,
        scale=core.layers[0].self_attn.scaling,
        heads=heads,
        key_heads=key_heads,
        head_dim=core.layers[0].self_attn.head_dim,
        rotary=core.rotary_emb,
    )


def _layer(layer: Any, kind: str, heads: int, key_heads: int, fuse: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        both = [attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(key_heads, -1)]
        head_norm = make_norm(torch.cat(both).detach(), attention.q_norm.variance_epsilon)
    before_attention, qkv = _pair(layer.input_layernorm, fuse, attention.q_proj, attention.k_proj, attention.v_proj)
    before_feed_forward, gate_up = _pair(layer.post_attention_layernorm, fuse, mlp.gate_proj, mlp.up_proj)
    return Layer(
        kind=kind,
        before_attention=before_attention,
        qkv=qkv,
        head_norm=head_norm,
        out=_linear(fuse, attention.o_proj),
        before_feed_forward=before_feed_forward,
        gate_up=gate_up,
        down=_linear(fuse, mlp.down_proj),
    )


def _pair(norm: Any, fuse: bool, *modules: nn.Linear) -> tuple[Norm, Linear]:
    pair = make_norm(norm.weight.detach(), norm.variance_epsilon), _linear(fuse, *modules)
    return folded(*pair) if fuse else pair


def _linear(fuse: bool, *modules: nn.Linear) -> Linear:
    weights = tuple(module.weight.detach().t() for module in modules)
    biases = tuple(None if module.bias is None else module.bias.detach() for module in modules)
    if not fuse:
        return Linear(weights, biases)
    given = [bias for bias in biases if bias is not None]
    # a model of the family has biases on all of queries, keys and values, or on none
    return Linear((torch.cat(weights, 1).contiguous(),), (torch.cat(given) if given else None,))


def _changed(model: Any, kind: str) -> Iterator[str]:
    """What stands where transformers puts something else: adapters, quantized layers, parametrizations, shards."""
    own = (f"transformers.models.{kind}.", "transformers.activations", "torch.nn.modules.activation")
    for name, module in model.named_modules():
        name = name or "the model"
        plain = type(module) in (nn.Linear, nn.Embedding, nn.ModuleList)
        if not plain and not type(module).__module__.startswith(own):
            yield f"{name} is a {type(module).__name__}"
        if "forward" in vars(module):
            yield f"{name} has a forward of its own"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            yield f"{name} is a {type(parameter).__name__}"
