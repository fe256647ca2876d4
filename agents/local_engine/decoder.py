"""A fast decoder for the Llama family: a few tensor operations a layer, without transformers' modules.

For small models and batches, calling modules costs more than the products inside them. `DenseDecoder` reads the weights
of a Llama, Mistral or Qwen model, LoRA adapters merged in (`read_weights`), and computes the same logits up to
rounding. Any other model, or one that was changed (hooks, quantized layers), runs through transformers as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from turngym.agents.local_engine.cache import KeyGroup, RaggedCache, Step
from turngym.agents.local_engine.lora_weights import LowRank

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of models made of the same parts: RMS norms, rotary grouped attention, gated SiLU feed-forward."""
FUSE_BYTES = 1 << 30
"""Weights of larger models are used in place: fusing products saves little there, and a copy would cost memory."""
Masks = Tensor | dict[str, Tensor | None]
"""Additive masks [B, 1, Q, length]; by layer type if they differ."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The two layouts of a batch: [B, Q] for attention, and the T real ids alone for everything else.

    Padding and idle rows thus cost no products.
    """

    rows: int
    queries: int
    cells: Tensor | None
    """Which ids are real, as in `Step`."""

    def real(self, values: Tensor) -> Tensor:
        """Select the real ids: [B, Q, ...] to [T, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.cells is None else flat.index_select(0, self.cells)

    def spread(self, values: Tensor) -> Tensor:
        """Put values back in their places: [T, ...] to [B, Q, ...], zeros elsewhere."""
        if self.cells is not None:
            grid = values.new_zeros(self.rows * self.queries, *values.shape[1:])
            values = grid.index_copy_(0, self.cells, values)
        return values.unflatten(0, (self.rows, self.queries))

    def last(self, values: Tensor) -> Tensor:
        """The values of [T, ...] in the last column."""
        if self.cells is None:
            return values[self.queries - 1 :: self.queries]
        return values if self.queries == 1 else values[self._ends(self.cells)]

    def last_rows(self) -> slice | Tensor:
        """The rows whose last id is real."""
        return slice(None) if self.cells is None else self.cells[self._ends(self.cells)] // self.queries

    def _ends(self, cells: Tensor) -> Tensor:
        return cells % self.queries == self.queries - 1


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers with the same input, results side by side: one fused weight, or the model's own several."""

    weights: tuple[Tensor, ...]
    """Each [in, out]: a few rows times a matrix stored this way is up to twice as fast on a CPU."""
    biases: tuple[Tensor | None, ...]

    def __call__(self, values: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        parts = [
            torch.mm(values, weight) if bias is None else torch.addmm(bias, values, weight)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def onto(self, hidden: Tensor, values: Tensor) -> Tensor:
        """`hidden` [T, out] plus the product, in one operation."""
        total = torch.addmm(hidden, values, self.weights[0])
        return total if self.biases[0] is None else total.add_(self.biases[0])


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, x weight / sqrt(mean(x^2) + eps) over the last dimension.

    On a CPU in float32 as x / sqrt(|x|^2 + D eps), three operations where PyTorch's own takes six; `weight` is then
    sqrt(D) times the model's.
    """

    weight: Tensor | None
    """[D] or [heads, D]; None if it was multiplied into the linear layer that follows."""
    eps: float
    floor: Tensor | None
    """sqrt(D eps) on a CPU in float32, else None."""

    def __call__(self, values: Tensor) -> Tensor:
        if self.floor is None:
            normed = functional.rms_norm(values, values.shape[-1:], None, self.eps)
        else:
            length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            normed = values / torch.hypot(length, self.floor)
        return normed if self.weight is None else normed.mul_(self.weight)


def make_norm(weight: Tensor, eps: float) -> Norm:
    """The norm with the model's own weight [D] or [heads, D]."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return Norm(weight, eps, None)
    width = weight.shape[-1]
    return Norm(weight * math.sqrt(width), eps, torch.tensor(math.sqrt(width * eps)))


def folded(norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
    """Multiply the norm's weight into the linear layer that follows; only float32 is exact enough for that."""
    if norm.floor is None or norm.weight is None:
        return norm, linear
    scaled = tuple(weight * norm.weight[:, None] for weight in linear.weights)
    return Norm(None, norm.eps, norm.floor), Linear(scaled, linear.biases)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer."""

    kind: str
    """Its name in `layer_types`, which selects its mask."""
    before_attention: Norm
    qkv: Linear
    head_norm: Norm | None
    """Norm of queries and keys (Qwen3), weight [query heads + key heads, D]."""
    out: Linear
    before_feed_forward: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole model."""

    embedding: Tensor
    """[V, H]."""
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    scale: float
    """Factor of the attention scores, D^-0.5."""
    heads: int
    key_heads: int
    head_dim: int
    rotary: nn.Module
    """transformers' own module, which computes the cosines and sines."""


def dense_problem(model: Any) -> str | None:
    """Why `model` is not exactly a model of `FAMILY` as transformers builds it, or None if it is."""
    name, kind = type(model).__name__, str(getattr(model.config, "model_type", ""))
    if kind not in FAMILY or type(model).__module__ != f"transformers.models.{kind}.modeling_{kind}":
        return f"{name} is not a model of {', '.join(FAMILY)}"
    if not name.endswith("ForCausalLM") or model.config.hidden_act != "silu":
        return f"{name} with {model.config.hidden_act} is built differently"
    # adapters are float32 whatever the model is
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if ".lora_" not in name}
    if len(dtypes) != 1:
        return f"its parameters have several types: {', '.join(sorted(map(str, dtypes)))}"
    return next(_changed(model, kind), None)


def hooked(model: Any) -> bool:
    """Whether any module has forward hooks, which this decoder would not call."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def read_weights(model: Any, old: Weights | None = None, given: frozenset[int] = frozenset()) -> Weights:
    """The current weights. Those of a small model are copied and fused, those of a large model used in place.

    Copies are written where those of `old` lie. Storages in `given` are the model's own.
    """
    core, config = model.model, model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(core.layers)
    fuse = sum(parameter.nbytes for parameter in model.parameters()) <= FUSE_BYTES
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    before = [None] * len(kinds) if old is None or len(old.layers) != len(kinds) else old.layers
    # one after the other, so that old and new copies of one layer alone are there at the same time
    layers = [
        _settled(_layer(layer, kind, heads, key_heads, fuse), held, given)
        for layer, kind, held in zip(core.layers, kinds, before, strict=True)
    ]
    norm, head = _pair(core.norm, fuse, model.lm_head)
    new = Weights(
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
    return _settled(new, old, given)


def _settled(new: Any, old: Any, foreign: frozenset[int]) -> Any:
    """`new`, `Weights` or a part of it, its tensors copied to where those of `old` lie if they have the same layout.

    Memory in `foreign` is somebody else's: it is neither copied nor written.
    """
    if isinstance(new, Tensor):
        if not isinstance(old, Tensor) or new is old or _layout(new) != _layout(old):
            return new
        return new if {_storage(new), _storage(old)} & foreign else old.copy_(new)
    if isinstance(new, tuple):
        same = isinstance(old, tuple) and len(old) == len(new)
        return (
            tuple(_settled(new_part, old_part, foreign) for new_part, old_part in zip(new, old, strict=True))
            if same
            else new
        )
    if isinstance(new, Weights | DecoderLayer | Linear | Norm) and type(new) is type(old):
        pairs = {new_part.name: (getattr(new, new_part.name), getattr(old, new_part.name)) for new_part in fields(new)}
        return replace(new, **{name: _settled(*pair, foreign) for name, pair in pairs.items()})
    return new


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_of(part: Any) -> Iterator[Tensor]:
    """The tensors of `Weights` or a part of it, in a fixed order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for member in part:
            yield from tensors_of(member)
    elif isinstance(part, Weights | DecoderLayer | Linear | Norm):
        for member in fields(part):
            yield from tensors_of(getattr(part, member.name))


def _layer(layer: Any, kind: str, heads: int, key_heads: int, fuse: bool) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        weights = [attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(key_heads, -1)]
        head_norm = make_norm(torch.cat(weights).detach(), attention.q_norm.variance_epsilon)
    before_attention, qkv = _pair(layer.input_layernorm, fuse, attention.q_proj, attention.k_proj, attention.v_proj)
    before_feed_forward, gate_up = _pair(layer.post_attention_layernorm, fuse, mlp.gate_proj, mlp.up_proj)
    return DecoderLayer(
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
    weights = tuple(merged_weight(module).t() for module in modules)
    biases = tuple(None if module.bias is None else module.bias.detach() for module in modules)
    if not fuse:
        return Linear(weights, biases)
    present = [bias for bias in biases if bias is not None]
    # a model of the family has biases on all of queries, keys and values, or on none
    return Linear((torch.cat(weights, 1).contiguous(),), (torch.cat(present) if present else None,))


def merged_weight(module: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [out, in] of a linear layer; with a LoRA adapter W + alpha / rank B A, summed in float32.

    It is rounded to `dtype`, by default the layer's own.
    """
    if not is_lora(module):
        return module.weight.detach()
    (name,) = module.active_adapters
    learned = LowRank(a=module.lora_A[name].weight, b=module.lora_B[name].weight, scale=module.scaling[name])
    return learned.merge(module.base_layer.weight, dtype)


def is_lora(module: Any) -> bool:
    """Whether `module` is peft's linear layer with one LoRA adapter and nothing else that would change its result."""
    if type(module).__name__ != "Linear" or type(module).__module__ != "peft.tuners.lora.layer":
        return False
    names = module.active_adapters
    if len(names) != 1 or module.merged or module.disable_adapters or type(module.base_layer) is not nn.Linear:
        return False
    plain = type(module.lora_dropout[names[0]]) is nn.Identity and module.lora_B[names[0]].bias is None
    return plain and not module.lora_variant and not module.fan_in_fan_out


def _changed(model: Any, kind: str) -> Iterator[str]:
    """Parts that are not as transformers builds them: other adapters, quantized layers, parametrizations, shards."""
    plain_modules = (f"transformers.models.{kind}.", "transformers.activations", "torch.nn.modules.activation")
    adapters = tuple(f"{name}." for name, module in model.named_modules() if is_lora(module))
    for name, module in model.named_modules():
        if f"{name}.".startswith(adapters):
            continue  # `merged_weight` reads it
        name = name or "the model"
        plain = type(module) in (nn.Linear, nn.Embedding, nn.ModuleList)
        if not plain and not type(module).__module__.startswith(plain_modules):
            yield f"{name} is a {type(module).__name__}"
        if "forward" in vars(module):
            yield f"{name} has a forward of its own"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            yield f"{name} is a {type(parameter).__name__}"


class DenseDecoder:
    """Runs `model`, one of `FAMILY`, on a `RaggedCache` with the same logits up to rounding.

    Keys lie in the cache as transformers' own modules would put them, so both may take turns on one cache.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: Weights | None = None
        self._cos = self._sin = torch.empty(0)
        self._stale = True
        self.allocations = 0
        """How often weights or tables were put elsewhere: as long as it is the same, a captured pass reads them."""
        self._still = False
        self._given: frozenset[int] = frozenset()

    def follow(self) -> None:
        """Read the weights again before the next pass: they, or the modules that hold them, have changed."""
        self._stale = True

    def stand_still(self) -> None:
        """Write new weights where the old ones lie from now on; reading them takes a copy of one layer more."""
        self._still = True

    def ready(self) -> bool:
        """Whether the model can be run here as it stands. Reads its weights if they have changed."""
        if self._stale:
            self._read()
        return self._weights is not None and not hooked(self._model)

    def reserve(self, length: int) -> None:
        """Make room for positions 0..length-1."""
        weights = self._weights
        assert weights is not None
        if len(self._cos) < length or _layout(self._cos)[2:] != _layout(weights.embedding)[2:]:
            self._make_table(weights, max(length, 2 * len(self._cos), 256))

    def _read(self) -> None:
        old, places = self._weights if self._still else None, self._places()
        self._stale, self._weights = False, None
        if dense_problem(self._model) is None:
            storages = frozenset(map(_storage, self._model.parameters()))
            # a tensor of the last reading is ours if it was not the model's then
            self._weights = read_weights(self._model, old, storages | self._given)
            self._given = storages
        if self._weights is None or old is None:
            self._cos = torch.empty(0)
        else:
            self._make_table(self._weights, len(self._cos))
        self.allocations += self._places() != places

    def _places(self) -> list[int]:
        """Where all that a pass reads lies, besides the cache."""
        return [tensor.data_ptr() for tensor in tensors_of((self._weights, self._cos, self._sin))]

    def forward(self, cache: RaggedCache, ids: Tensor, step: Step, masks: Masks) -> Tensor:
        """Logits of the last column of `ids`, as `CausalModel.forward` returns them.

        Args:
            ids: int64 [B, Q], padding included.
            masks: added to the scores of attention, [B, 1, Q, step.length]; by layer type if they differ.
        """
        weights = self._weights
        assert weights is not None
        grid = Grid(len(ids), ids.shape[1], step.cells)
        hidden = functional.embedding(grid.real(ids), weights.embedding)
        positions = grid.real(step.write_positions)
        where = (grid.real(step.write_rows), positions)
        self.reserve(step.length)
        # cosines and sines [T, 1, D]; the sines' first half is negative
        cos, sin = (table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
        cache.step = step
        for number, layer in enumerate(weights.layers):
            queries, keys, values = _project(weights, layer, hidden, cos, sin)
            cached = cache.write(number, *where, keys, values)
            mask = masks[layer.kind] if isinstance(masks, dict) else masks
            mixed = attention(grid.spread(queries), *cached, mask, weights.scale, step.key_groups)
            hidden = layer.out.onto(hidden, grid.real(mixed).flatten(1))
            inner = layer.gate_up(layer.before_feed_forward(hidden))
            half = inner.shape[-1] // 2
            hidden = layer.down.onto(hidden, functional.silu(inner[:, :half]).mul_(inner[:, half:]))
        return weights.head(weights.norm(grid.last(hidden)))

    def _make_table(self, weights: Weights, count: int) -> None:
        """Cosines and sines of positions 0..count-1."""
        like, half = weights.embedding.new_empty(0), weights.head_dim // 2
        cos, sin = weights.rotary(like, torch.arange(count, device=like.device)[None])
        new = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        old = self._cos, self._sin
        self._cos, self._sin = _settled(new, old, frozenset())
        self.allocations += self._cos is not old[0]


def _project(
    weights: Weights, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, heads, D], keys and values [T, key heads, D] of `hidden` [T, H]."""
    mixed = layer.qkv(layer.before_attention(hidden)).view(len(hidden), -1, weights.head_dim)
    heads = weights.heads + weights.key_heads
    # queries and keys are normed and rotated together
    rotated, values = mixed[:, :heads], mixed[:, heads:]
    if layer.head_norm is not None:
        rotated = layer.head_norm(rotated)
    rotated = torch.addcmul(rotated * cos, rotated.roll(weights.head_dim // 2, -1), sin)
    return rotated[:, : weights.heads], rotated[:, weights.heads :], values


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    key_groups: tuple[KeyGroup, ...] = (),
) -> Tensor:
    """Attention of queries [B, Q, heads, D] over keys and values [B, key heads, L, D]; returns [B, Q, heads, D].

    The query heads that share a key head are put into one matrix, so that no key is copied for them.

    Args:
        mask: added to the scores, [B, 1, Q, L]; None: everything is seen.
        key_groups: how many keys the rows of each group read, if Q is 1 (else they are not looked at). The results of
            rows in no group are zero. Empty: all rows read all keys.
    """
    rows, count, heads, width = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    if count == 1:
        packed = queries.reshape(rows, shared, group, width)
        return _by_key_group(packed, keys, values, mask, scale, key_groups).view(rows, 1, heads, width)
    # a CPU reads keys once per query head without copying them
    if queries.device.type == "cpu":
        result = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=group > 1
        )
        return result.transpose(1, 2)
    # [B, key heads, group * Q, D], the queries of one head together
    packed = queries.view(rows, count, shared, group, width).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, shared, group * count, width)
    if mask is not None and group > 1:
        mask = mask.repeat(1, 1, group, 1)
    result = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return result.view(rows, shared, group, count, width).permute(0, 3, 1, 2, 4)


def _by_key_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, key_groups: tuple[KeyGroup, ...]
) -> Tensor:
    """Attention of one id per row, queries [B, key heads, group, D], one call per group."""
    result = None
    for start, stop, length, even in key_groups or (KeyGroup(0, len(queries), keys.shape[2], False),):
        rows = slice(start, stop)
        part = functional.scaled_dot_product_attention(
            queries[rows],
            keys[rows, :, :length],
            values[rows, :, :length],
            attn_mask=None if even or mask is None else mask[rows, :, :, :length],
            scale=scale,
        )
        if stop - start == len(queries):
            return part.contiguous()
        result = queries.new_zeros(queries.shape) if result is None else result
        result[rows] = part
    assert result is not None
    return result
