"""Sizes of causal models: parameters, bytes and operations by formula, and a model with random weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from turngym.agents.models import auto_class
from turngym.core.errors import ModelError
from turngym.core.hub import load_problem
from turngym.core.numbers import torch_seed

BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Bytes of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """The linear-attention layers of a hybrid model (gated delta rule, as in Qwen3.5)."""

    layers: int
    """How many of the model's layers are so; the others attend."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    """Ids that the convolution before the rule sees."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def mixer_parameters(self, width: int) -> int:
        """Parameters of one layer less its MLP and the norms around: six projections, convolution, two gates' terms,
        one norm."""
        values = self.value_heads * self.value_dim
        projections = width * (self.channels + 2 * values + 2 * self.value_heads)
        return projections + self.channels * self.kernel + 2 * self.value_heads + self.value_dim

    def adapted_widths(self, width: int) -> int:
        """Inputs and outputs of the projections of one layer, all together."""
        values = self.value_heads * self.value_dim
        return 5 * width + self.channels + 2 * values + 2 * self.value_heads


class CacheNumbers(NamedTuple):
    """How many numbers a cache holds."""

    token: int
    """Numbers of every token: keys and values, or what they are made of."""
    episode: int = 0
    """Numbers of an episode, whatever its length: the last inputs of convolutions."""
    rule: int = 0
    """The same, but always in float32: what linear attention or a state space keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3-shaped decoder: grouped queries, gated MLP, norms on queries and keys, no biases.

    With `linear`, one like Qwen3.5: its attention layers gate what they read, which doubles the query projection.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    """Input and output embedding are one matrix."""
    linear: LinearShape | None = None
    """The layers with linear attention; None if all attend."""
    beside: int = 0
    """Parameters that these sizes leave out: experts that a token is not sent to, biases; below 0 without norms or
    gates that they count."""
    counted: CacheNumbers | None = None
    """What the cache was found to hold; None: what these sizes say."""

    @property
    def attention_layers(self) -> int:
        return self.layers - (0 if self.linear is None else self.linear.layers)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys; the values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer that attends: four attention projections, three of the MLP, four norms."""
        queries = 2 if self.linear is None else 3  # with a gate as wide as the queries
        attention = queries * self.width * self.query_width + 2 * self.width * self.kv_width
        return attention + 3 * self.width * self.mlp + 2 * self.width + 2 * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and, if it is not tied, of the head."""
        return self.vocab * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        layers = self.attention_layers * self.layer_parameters + self._linear_parameters
        return layers + self.embedding_parameters + self.width + self.beside

    @property
    def stored_layer(self) -> int:
        """Parameters of one decoder layer that attends, with its share of those `beside`."""
        return self.layer_parameters + self.beside // self.layers

    @property
    def _linear_parameters(self) -> int:
        if self.linear is None:
            return 0
        around = 3 * self.width * self.mlp + 2 * self.width
        return self.linear.layers * (self.linear.mixer_parameters(self.width) + around)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer but the head: rank x (inputs + outputs) of each."""
        queries = self.query_width * (1 if self.linear is None else 2)  # with a gate as wide as the queries
        mlp = 3 * (self.width + self.mlp)
        attention = 4 * self.width + queries + 2 * self.kv_width + self.query_width + mlp
        between = 0 if self.linear is None else self.linear.layers * (self.linear.adapted_widths(self.width) + mlp)
        return rank * (self.attention_layers * attention + between)

    @property
    def cache(self) -> CacheNumbers:
        """The numbers that the engine's cache holds."""
        if self.counted is not None:
            return self.counted
        token, linear = 2 * self.attention_layers * self.kv_width, self.linear
        if linear is None:
            return CacheNumbers(token)
        rule = linear.value_heads * linear.key_dim * linear.value_dim
        return CacheNumbers(token, linear.layers * linear.channels * linear.kernel, linear.layers * rule)

    def kv_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of one token in the cache, all layers."""
        return BYTES[dtype] * self.cache.token

    def episode_bytes(self, length: int, dtype: str) -> int:
        """Bytes of the engine's cache for one episode of `length` tokens; states are in it twice (live and saved)."""
        _, episode, rule = self.cache
        return self.kv_bytes(dtype) * length + 2 * (BYTES[dtype] * episode + 4 * rule)

    def forward_flops(self, tokens: float, context: float, predicted: float) -> float:
        """Operations of a forward pass over `tokens`, each attending to `context` others on average.

        2 x parameters per token and layer, 4 x query width x context for attention, and the head on `predicted` tokens.
        A backward pass costs twice this.
        """
        layers = self.attention_layers * (2.0 * self.layer_parameters + 4.0 * self.query_width * context)
        layers += 2.0 * self._linear_parameters
        if self.linear is not None:  # the rule: decay, what the key reads, the correction, what the query reads
            state = self.linear.value_heads * self.linear.key_dim * self.linear.value_dim
            layers += 8.0 * self.linear.layers * state
        return tokens * layers + predicted * 2.0 * self.vocab * self.width


def _qwen35(layers: int, width: int, heads: int, mlp: int, value_heads: int, tied: bool) -> ModelShape:
    """Every fourth layer attends."""
    linear = LinearShape(layers=layers - layers // 4, key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128)
    shape = _dense(layers, width, heads, heads // 4, mlp, tied, head_dim=256, vocab=248_320)
    return replace(shape, linear=linear)


def _dense(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    tied: bool,
    *,
    head_dim: int = 128,
    vocab: int = 151_936,
) -> ModelShape:
    """A Qwen3 or Qwen2.5 model, whose biases are too few to count."""
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        tied=tied,
    )


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": ModelShape(layers=2, width=128, heads=4, kv_heads=4, head_dim=32, mlp=256, vocab=600, tied=True),
        "0.6B": _dense(28, 1024, 16, 8, 3072, True),
        "1.7B": _dense(28, 2048, 16, 8, 6144, True),
        "2B": _qwen35(24, 2048, 8, 6144, 16, True),
        "4B": _dense(36, 2560, 32, 8, 9728, True),
        "8B": _dense(36, 4096, 32, 8, 12_288, False),
        "9B": _qwen35(32, 4096, 16, 12_288, 32, False),
        "14B": _dense(40, 5120, 40, 8, 17_408, False),
        "32B": _dense(64, 5120, 64, 8, 25_600, False),
        "Qwen2.5-0.5B": _dense(24, 896, 14, 2, 4864, True, head_dim=64),
        "Qwen2.5-1.5B": _dense(28, 1536, 12, 2, 8960, True),
        "Qwen2.5-3B": _dense(36, 2048, 16, 2, 11_008, True),
        "Qwen2.5-7B": _dense(28, 3584, 28, 4, 18_944, False, vocab=152_064),
    }
)
"""Shapes by the names that people use: dense Qwen3 and Qwen2.5 models, hybrid Qwen3.5 ones (2B, 9B), the worlds' tiny
one."""


def shape_named(name: str) -> ModelShape:
    """One of `SHAPES`, also by its name on the hub (`Qwen/Qwen2.5-1.5B-Instruct`, `Qwen/Qwen3-4B`). Raises ModelError,
    with the names, for another."""
    match = re.fullmatch(r"(?:Qwen/)?(?:Qwen3-)?(.+?)(?:-Instruct)?(?:@.*)?", name)
    name = match[1] if match is not None and match[1] in SHAPES else name
    if name not in SHAPES:
        raise ModelError(f"model shape {name!r} is unknown; valid: {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_of(config: Any) -> ModelShape:
    """The shape that a Hugging Face configuration describes, of a model that also reads images its language model's.

    Of experts its feed-forward layers have the width that a token goes through. Raises ModelError where a size is
    missing or not one, and for a configuration of no causal model.
    """
    try:
        stored, tied, counted = _built(config)
        config = config.get_text_config()
        # none where no layer attends (Mamba)
        heads = int(getattr(config, "num_attention_heads", None) or 0)
        shape = ModelShape(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=heads,
            # absent or None where every query head has keys of its own
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=(getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0,
            mlp=_active_width(config),
            vocab=config.vocab_size,
            tied=tied,
            linear=_linear_of(config),
        )
        if not shape.mlp:
            # as wide as what the layers hold besides makes it
            shape = replace(shape, mlp=(stored - shape.parameters) // (3 * shape.layers * shape.width))
        return replace(shape, beside=stored - shape.parameters, counted=None if counted == shape.cache else counted)
    # families have names of their own, and transformers refuses a size that differs from layer to layer (Gemma 4)
    except Exception as error:
        problem = f"{type(config).__name__} does not say its sizes as decoders usually do: {load_problem(error)}"
        raise ModelError(f"{problem}; valid: the name of a shape of about its size ({', '.join(SHAPES)})") from error


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Names that families give to the number of experts of a layer, and to how many of them a token is sent to."""


def _active_width(config: Any) -> int:
    """Width of the feed-forward layers that a token goes through: of those of its experts, all together; 0 where the
    configuration does not say it."""
    if not (_first(config, EXPERTS) or 0) > 1:
        return int(_first(config, ("intermediate_size",)) or 0)
    expert = _first(config, ("moe_intermediate_size", "intermediate_size"))
    shared_experts = _first(config, ("n_shared_experts",)) or 0
    shared = _first(config, ("shared_expert_intermediate_size",)) or expert * shared_experts
    return int((_first(config, CHOSEN) or 1) * expert + shared)


def _first(config: Any, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _built(config: Any) -> tuple[int, bool, CacheNumbers]:
    """Parameters of the language model of a configuration, its head included, whether head and embedding are one
    matrix, and what its cache holds: of the model itself, built without memory. Configurations of models that also read
    images say the second in one place or the other, and what is kept of the past each family says in its own words."""
    import torch

    with torch.device("meta"):
        # not in float32, which tells apart what is always kept so
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
        decoder = model.get_decoder()
        output = decoder(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True)
    head = model.get_output_embeddings()
    parameters = {*decoder.parameters(), *head.parameters()}
    tied = head.weight is model.get_input_embeddings().weight
    return (
        sum(parameter.numel() for parameter in parameters),
        tied,
        _held(output.get("past_key_values", output.get("cache_params"))),
    )


def _held(cache: Any) -> CacheNumbers:
    """The numbers in transformers' cache after one token."""
    import torch

    layers = [vars(layer) for layer in cache.layers]
    keys = [tensor for layer in layers for name in ("keys", "values") if (tensor := layer.get(name)) is not None]
    states = [
        tensor
        for layer in layers
        for name in ("conv_states", "recurrent_states")
        for tensor in layer.get(name, {}).values()
    ]
    always = [tensor for tensor in states if tensor is not None and tensor.dtype == torch.float32]
    half = [tensor for tensor in states if tensor is not None and tensor.dtype != torch.float32]
    return CacheNumbers(*(sum(tensor.numel() for tensor in part) for part in (keys, half, always)))


def _linear_of(config: Any) -> LinearShape | None:
    # other families call their state spaces so, too (Jamba)
    if not hasattr(config, "linear_num_key_heads"):
        return None
    return LinearShape(
        layers=list(config.layer_types).count("linear_attention"),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )


def config_of(shape: ModelShape, *, max_length: int = 40_960) -> Any:
    """The Qwen3 configuration of a shape, or Qwen3.5's of a hybrid one (its last layers attend, in equal numbers)."""
    from transformers import Qwen3_5TextConfig, Qwen3Config

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
    if shape.linear is None:
        return Qwen3Config(**sizes)
    linear = shape.linear
    sizes |= {
        "full_attention_interval": shape.layers // shape.attention_layers,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.kernel,
    }
    return Qwen3_5TextConfig(**sizes)


def random_model(shape: ModelShape, *, dtype: Any, device: str = "cpu", seed: int = 0) -> nn.Module:
    """A model of this shape with weights drawn on its own device, in evaluation mode: for measuring, not for use.

    torch's own random stream is left as it was.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM

    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(torch_seed(seed))
        # unlike the constructor it takes a dtype: no float32 copy of a large model exists in between
        kind: Any = Qwen3ForCausalLM if shape.linear is None else Qwen3_5ForCausalLM
        model: nn.Module = kind._from_config(config_of(shape), dtype=dtype)
    return model.eval()
