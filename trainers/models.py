"""Causal language models as the trainers see them: run up to the head's input, and shared between processes.

A model is a backbone that gives hidden states and a head that turns them into logits (`lm_head` works on the head). At
the end stands what must hold between two models: one vocabulary for teacher and student.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from turngym.agents.local_engine.model import DTYPES
from turngym.agents.local_engine.positions import position_limit
from turngym.core.errors import ModelError, TurngymError
from turngym.core.hub import load_problem
from turngym.core.numbers import torch_seed
from turngym.trainers.model_shapes import ModelShape, config_of


def tiny_qwen3(
    vocab_size: int,
    *,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    max_length: int = 4096,
    eos_id: int | None = None,
    pad_id: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """A Qwen3-shaped causal model with random float32 weights that depend on `seed` and the sizes only.

    Input and output embeddings are tied, and the feed-forward layers twice as wide as the states.

    Args:
        vocab_size: V, rows of the tied embeddings.
        width: of the hidden states; a multiple of `heads`.
        heads: number of query heads; a multiple of `kv_heads`.
        kv_heads: number of heads of keys and values; None: as many as `heads`.
    """
    from transformers import Qwen3ForCausalLM

    kv_heads = kv_heads or heads
    if width % heads or heads % kv_heads:
        raise ModelError(f"width {width} must be a multiple of heads {heads}, heads a multiple of kv_heads {kv_heads}")
    shape = ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        mlp=2 * width,
        vocab=vocab_size,
        tied=True,
    )
    config = config_of(shape, max_length=max_length)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, eos_id, pad_id
    # a run's random stream must not depend on whether it made a model; no devices, for the weights are drawn on the CPU
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed))
        model = Qwen3ForCausalLM(config)
    return model.float().eval()


def backbone(model: Any) -> nn.Module:
    """The part of a causal model that turns ids into final hidden states (norm included, head excluded)."""
    from transformers import PreTrainedModel

    # transformers' get_decoder and base_model fall back to the model itself, which ends in logits, and some models call
    # a layer of their head `decoder`
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    parts = [decoder, getattr(model, "base_model", None)]
    # Llama 4's base model bears another name than its text part has
    parts += [child for child in model.children() if isinstance(child, PreTrainedModel)]
    inner = next((part for part in parts if isinstance(part, PreTrainedModel) and part is not model), None)
    if inner is None:
        raise ModelError(f"{type(model).__name__} has no backbone apart from its head; use a Hugging Face causal model")
    return inner


def head(model: Any) -> Callable[[Tensor], Tensor]:
    """The map from hidden states [n, D] to logits [n, V], with the soft caps and scales that some families apply."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings, so it is no causal language model")
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    caps = (getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    cap = next((cap for cap in caps if cap is not None), None)
    # Cohere and Falcon-H1 multiply, Granite divides, in a forward() that is bypassed here; HyperCLOVA X multiplies by
    # what Granite divides by
    times = [getattr(text, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    scaling = getattr(text, "logits_scaling", None) or 1.0
    factor = math.prod(times) * (scaling if "hyperclovax" in text.model_type else 1 / scaling)
    if cap is None and factor == 1.0:
        return layer

    def logits(states: Tensor) -> Tensor:
        raw = layer(states) * factor
        return raw if cap is None else cap * torch.tanh(raw / cap)

    return logits


def check_head(model: Any) -> None:
    """Compares `head` with the model's own logits, once, on a few ids, and these with those of fewer ids.

    Families scale their logits by names of their own, and one that `head` does not know would be trained and scored by
    other probabilities than those it plays with. Others read in both directions, and know what they are to predict.
    Raises ModelError for both.
    """
    ids, first = np.arange(1, 9)[None] % vocabulary_size(model), 4
    name = type(model).__name__
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            logits = model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits[0]
            ours, alone = (head(model)(hidden_states(model, part)) for part in (ids, ids[:, :first]))
    except ModelError:
        raise
    except Exception as error:  # a configuration that does not fit the model raises anything
        raise ModelError(f"{name} fails on a trial row of {ids.size} ids: {load_problem(error)}") from error
    most = HEAD_TOLERANCE * logits.float().abs().max().item()
    # Inkling leaves out ids that are padding
    fewer = ours.shape[1] - logits.shape[1]
    gap = math.inf if fewer else (logits.float() - ours.float()).abs().max().item()
    if gap > most:
        reason = f"they differ by {gap:.3g}; {most:.3g} is rounding"
        if fewer:
            reason = f"of {ours.shape[1]} ids it has {fewer} less"
        raise ModelError(
            f"{name} makes its logits in a way that is not known here ({reason}), so it cannot be trained and cannot "
            "score; `turngym eval` plays it"
        )
    moved, spread = (float(part.float().std()) for part in (ours[:first] - alone, ours))
    if moved > MOVED * spread:
        raise ModelError(
            f"{name} predicts an id by those behind it (without them its logits are {moved:.3g} away, and spread over "
            f"{spread:.3g}); valid: a causal language model"
        )


MOVED = 0.25
"""Part of the spread of logits. Rounding in bfloat16 takes a tenth of it in 30 layers, another direction all of it."""
HEAD_TOLERANCE = 0.02
"""Part of the largest logit; bfloat16 rounds to 0.004, and a scale that is forgotten changes more."""


def freeze_unread(model: Any) -> None:
    """Freeze what text does not go through, such as the half of a model that reads images: it gets no gradient."""
    read = {id(used) for part in (backbone(model), model.get_output_embeddings()) for used in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def clipped_norm(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """The norm of the gradients of `parameters`, which are scaled down to `most`; 0 leaves them as they are."""
    norm = nn.utils.clip_grad_norm_(parameters, most if most > 0 else float("inf"))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def vocabulary_size(model: Any) -> int:
    """Rows of the LM head: the padded vocabulary."""
    return int(model.get_output_embeddings().weight.shape[0])


def pad(rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Rows of ids as one array [B, L], padded on the right with zeros."""
    ids = np.zeros((len(rows), max(len(row) for row in rows)), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids


Line = Sequence[tuple[int, int]]
"""What a line holds of every row: how many of its tokens, and how many of the line's first tokens it begins with."""


def hidden_states(
    model: nn.Module,
    ids_BL: NDArray[np.int64],
    positions_BL: NDArray[np.int64] | None = None,
    line: Line | None = None,
) -> Tensor:
    """Final hidden states of rows that are padded on the right: [B * L, D].

    No attention mask: under a causal mask a real position never sees the padding behind it. States at padding positions
    mean nothing. Where several rows share one line (`microbatch.Pass`), `line` tells them apart and
    `positions_BL` holds each token's position in its own row; that wants `rows_apart` around it.

    Raises ModelError for rows that are longer than the model's context (`position_limit`), and for ids that it has no
    embedding for.
    """
    check_embedded(model, ids_BL)
    check_length(model, ids_BL.shape[1] if positions_BL is None else int(positions_BL.max(initial=0)) + 1)
    device = next(model.parameters()).device
    ids = torch.from_numpy(ids_BL).to(device)
    # a sharded model gathers its parameters only when it is entered as a whole (`distributed.shard`)
    run = getattr(model, "final_states", None) or partial(final_states, model)
    if positions_BL is None:
        return run(ids).flatten(0, 1)
    return run(ids, torch.from_numpy(positions_BL).to(device), line).flatten(0, 1)


def check_embedded(model: Any, ids_BL: NDArray[np.int64]) -> None:
    """Raises ModelError for an id that `model` has no row for, as of a token that was added to its tokenizer alone."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size, most = getattr(embedding, "num_embeddings", None), int(ids_BL.max(initial=0))
    if size is not None and most >= size:
        raise ModelError(
            f"id {most} is read, and {type(model).__name__} knows ids 0 to {size - 1}: its tokenizer has tokens that "
            "were not added to the model (resize_token_embeddings does that)"
        )


def check_length(model: Any, size: int) -> None:
    """Raises ModelError for a row of `size` ids, if `model` knows fewer positions.

    Rotary positions give numbers for places that the model never learned, and learned positions an error of torch.
    """
    config = getattr(model, "config", None)
    limit = None if config is None else position_limit(config)
    if limit is not None and size > limit:
        raise ModelError(
            f"a row of {size:,} ids is longer than the {limit:,} positions that {type(model).__name__} knows: play "
            f"with --max-context {limit}, or leave such episodes out"
        )


def final_states(model: Any, ids_BL: Tensor, positions_BL: Tensor | None = None, line: Line | None = None) -> Tensor:
    """Hidden states [B, L, D] behind the last norm, the head's input, in the head's precision.

    Arguments as `hidden_states`, on the model's device.
    """
    options: dict[str, Any] = {} if positions_BL is None else {"position_ids": positions_BL}
    if line is not None:
        options["line"] = line  # through every layer to `_attend_rows`
    # no cache: transformers looks for rows that share a line only where there is neither a cache nor a mask
    states = backbone(model)(input_ids=ids_BL, use_cache=False, **options).last_hidden_state
    # in half precision some families keep these in float32 (Mamba), others their head (HunYuan's fourth)
    head_dtype = model.get_output_embeddings().weight.dtype
    plain = head_dtype in DTYPES.values() and not torch.is_autocast_enabled(states.device.type)
    return states.to(head_dtype) if plain else states


ROWS_APART = "turngym_rows_apart"
"""The name of `_attend_rows` among transformers' attention functions."""


def can_keep_rows_apart(model: Any) -> bool:
    """Whether `model` attends by torch's sdpa, over all positions before or the last few, and nothing carries over."""
    config = getattr(backbone(model), "config", None)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", ROWS_APART):
        return False
    return set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}


@contextmanager
def rows_apart(model: Any, on: bool = True) -> Iterator[None]:
    """Inside, rows that share a line are attended one by one: no mask, and no work on pairs of different rows.

    Backward passes belong inside too, for recomputed layers choose their attention anew.
    """
    if not on:
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ROWS_APART, _attend_rows)
    config: Any = backbone(model).config
    before, config._attn_implementation = config._attn_implementation, ROWS_APART
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    line: Line | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, [1, heads, L, D] -> [1, L, heads, D], of every row by itself.

    A row that begins with the line's first tokens reads their keys and values in front of its own.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attend: Callable[..., Any] = sdpa_attention_forward
    if attention_mask is not None:
        return attend(module, query, key, value, attention_mask, **more)[0], None
    parts, start = [], 0
    for size, shared in line or [(query.shape[2], 0)]:
        span = slice(start, start + size)
        start += size
        keys, values = key[:, :, span], value[:, :, span]
        if shared:
            keys = torch.cat([key[:, :, :shared], keys], dim=2)
            values = torch.cat([value[:, :, :shared], values], dim=2)
        sees = None  # without a mask the function is causal by itself
        if shared or (sliding_window is not None and size > sliding_window):
            sees = torch.ones(size, shared + size, dtype=torch.bool, device=query.device).tril(shared)
            sees = sees if sliding_window is None else sees.triu(shared + 1 - sliding_window)
            # with its dimensions of batch and heads: a row of a single token is attended as a decoding step is
            sees = sees[None, None]
        parts.append(attend(module, query[:, :, span], keys, values, sees, **more)[0])
    return torch.cat(parts, dim=1), None


def autocast(model: nn.Module, on: bool) -> AbstractContextManager[Any]:
    """Compute in bfloat16 what can be, with whatever precision the weights have."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=torch.bfloat16) if on else nullcontext()


_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
"""The fused kernels of attention."""


def _recomputed(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """All but attention, which is most of a long row's forward pass and gives as little to keep as a layer is given."""
    return CheckpointPolicy.MUST_SAVE if operation in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTATION = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _recomputed)}
"""How layers are recomputed in the backward pass: arguments of `torch.utils.checkpoint.checkpoint`."""


class recomputing:
    """Training mode only where recomputation needs it: dropout stays off, as it is when the policy samples.

    transformers recomputes a layer that is in training mode; what is inside it stays in evaluation mode, and a layer
    that drops out by itself has its probability at 0 meanwhile.
    """

    def __init__(self, model: Any, checkpointing: bool) -> None:
        self.model, self.checkpointing = model, checkpointing
        self._dropout: list[tuple[nn.Module, str, float]] = []
        # transformers 5.2x renamed the switch; the older name still works there, with a warning
        self._prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"

    def __enter__(self) -> None:
        self.model.eval()  # a caller's model may come in training mode
        if self.checkpointing:
            try:
                getattr(self.model, f"{self._prefix}_checkpointing_enable")(RECOMPUTATION)
            except ValueError as error:
                name = type(self.model).__name__
                raise ModelError(
                    f"--gradient-checkpointing: {name} cannot recompute; leave it out ({error})"
                ) from error
            for module in self.model.modules():
                # the layers' flag has kept its name
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True  # not train(): what is inside would drop out
                    for name, value in list(vars(module).items()):
                        if "drop" in name and isinstance(value, float):  # dropout, and layerdrop as OPT has it
                            self._dropout.append((module, name, value))
                            setattr(module, name, 0.0)

    def __exit__(self, *error: object) -> None:
        if self.checkpointing:
            getattr(self.model, f"{self._prefix}_checkpointing_disable")()
        for module, name, value in self._dropout:
            setattr(module, name, value)
        self._dropout.clear()
        self.model.eval()


def length_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row numbers into micro-batches, longest rows first, whose padded size stays within `max_tokens`.

    A row longer than `max_tokens` gets a batch of its own.
    """
    # longest first: the first row of a batch is then its width, and a pass too large for memory fails at once
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        width = lengths[batches[-1][0]] if batches else 0
        if batches and width * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


# The trained weights of a model and what AdamW keeps for them, where either may be sharded.

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments, under torch's names."""


def load_full(module: nn.Module, weights: Mapping[str, Tensor], optimizer: Any, state: Mapping[str, Any]) -> None:
    """Put a checkpoint of one process into a module that may be sharded; `state` is its optimizer's `state_dict()`.

    Raises ValueError for weights of another module.
    """
    if differing := sorted(weights.keys() ^ module.state_dict().keys()):
        raise ValueError(f"the weights {', '.join(differing[:3])} are only in one of checkpoint and model")
    with torch.no_grad():
        for name, target in module.named_parameters():
            target.copy_(shard_like(weights[name], target))
    for number, parameter in enumerate(trained(module).values()):
        # torch knows parameters by their number in the optimizer; none has a state before the first update
        if number in state["state"]:
            old = state["state"][number]
            moments = {name: shard_like(old[name], parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": old["step"].clone(), **moments}


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that an optimizer changes, in its order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of `value`, which every rank holds in full, sharded and placed as `like` is."""
    if value.shape != like.shape:
        raise ValueError(f"a weight has shape {tuple(value.shape)}; the model's is {tuple(like.shape)}")
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


# Refuse to distill between models that do not share a vocabulary.

SHOWN_IDS = 5
"""How many ids that differ an error names."""
OTHER = "--distill.vocabulary other compares what the two say as text"


class VocabularyError(TurngymError):
    """Teacher and student give different meanings to the same id."""


def common_vocabulary(student: Any, teacher: Any, student_size: int, teacher_size: int) -> int:
    """Number of ids that both models can score, after checking that every id of theirs means the same token to both.

    `student` and `teacher` are tokenizers (`get_vocab()`, `special_tokens_map`), the sizes are the rows of each model's
    LM head. Padded sizes may differ: both sides are then cut to the smaller one (padding a side with zeros would
    give the invented ids probability). Raises VocabularyError naming the first ids or special tokens that differ.
    """
    # a token without a row in either model, such as a padding token that was added to a tokenizer alone, is in no row
    rows = max(student_size, teacher_size)
    mine, theirs = (
        {int(number): str(token) for token, number in tokenizer.get_vocab().items() if number < rows}
        for tokenizer in (student, teacher)
    )
    wrong = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    if wrong:
        examples = "; ".join(f"id {i}: student {mine.get(i)!r}, teacher {theirs.get(i)!r}" for i in wrong[:SHOWN_IDS])
        raise VocabularyError(
            f"teacher and student have different vocabularies ({len(wrong)} ids differ): {examples}. "
            f"Distillation needs one tokenizer for both; {OTHER}"
        )
    # special tokens decide where turns end, so the same string must play the same role on both sides
    my_roles, their_roles = (getattr(each, "special_tokens_map", None) or {} for each in (student, teacher))
    for role in sorted((my_roles.keys() | their_roles.keys()) - {"pad_token"}):
        if str(my_roles.get(role)) != str(their_roles.get(role)):
            raise VocabularyError(
                f"special token {role} differs: student {my_roles.get(role)!r}, teacher {their_roles.get(role)!r}. "
                f"Make both tokenizers the same; {OTHER}"
            )
    size = min(student_size, teacher_size)
    if mine and max(mine) >= size:
        raise VocabularyError(
            f"the tokenizer uses ids up to {max(mine)}, but the smaller LM head has {size} rows "
            f"(student {student_size}, teacher {teacher_size})"
        )
    return size
