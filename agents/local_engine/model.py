"""How the local engine runs a transformers model: forward passes over rows of different lengths in a `RaggedCache`.

`CausalModel` is the model with explicit positions and masks (and, if wanted, a copy in another precision). `prefill`
feeds whole prompts. `choose_cache` decides whether the model can run on the ragged cache at all.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turngym.agents.local_engine.cache import RECURRENT_LAYERS, HybridCache, Ids, RaggedCache, Rows, Step
from turngym.agents.local_engine.decoder import DenseDecoder, Grid, is_lora, merged_weight
from turngym.agents.local_engine.lora_weights import shared_weights
from turngym.agents.local_engine.positions import position_limit, rope_types, sliding_window
from turngym.core.errors import TurngymError
from turngym.retrieval.precision import parameter_dtypes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_dtype(name: str) -> torch.dtype:
    """One of `DTYPES`. Raises TurngymError, with the names, for another."""
    if name not in DTYPES:
        raise TurngymError(f"dtype {name!r} is unknown; valid: {', '.join(DTYPES)}")
    return DTYPES[name]


def cast_copy(model: Any, dtype: torch.dtype) -> Any:
    """A copy of `model` with its floating-point parameters in `dtype`, frozen and in evaluation mode.

    LoRA adapters are merged into it: a layer's weight and adapter become one plain layer, rounded once.
    What changes its precision is what `parameter_dtypes` says: buffers do not.
    """
    wanted = parameter_dtypes(model, dtype)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        # deepcopy uses these in place of the parameters, so a copy in the old precision never exists
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(wanted[name], copy=True), requires_grad=False)
    copied = copy.deepcopy(model, memo).eval()
    adapters = _adapters(model)
    for name in adapters:
        copied.set_submodule(name, copied.get_submodule(name).base_layer)
    if adapters:
        follow(copied, model)
    return copied


@torch.no_grad()
def follow(copied: Any, source: Any) -> None:
    """Copy the current weights of `source` into `copied`, a `cast_copy` of it."""
    adapters = _adapters(source)
    parameters = dict(source.named_parameters())
    for name, mine in copied.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer not in adapters:
            mine.copy_(parameters[name])
        elif kind == "weight":
            mine.copy_(merged_weight(adapters[layer], mine.dtype))
        else:
            mine.copy_(adapters[layer].base_layer.bias)


def _adapters(model: Any) -> dict[str, Any]:
    """Layers with LoRA whose weight no other module uses, as the embedding uses that of a tied head."""
    shared, lora = shared_weights(model), {name: part for name, part in model.named_modules() if is_lora(part)}
    return {name: module for name, module in lora.items() if id(module.base_layer.weight) not in shared}


class EngineError(TurngymError):
    """A request that an engine cannot serve, or a model that it cannot run."""


class CausalModel:
    """Runs `model` on explicit positions and an explicit mask, so that padding and other rows stay invisible.

    If `dtype` is not the model's own, a copy in that precision is run; `follow` updates its weights. Logits are those
    of the first `drawn` ids, or of all.
    """

    def __init__(self, model: Any, dtype: str | None = None, drawn: int | None = None) -> None:
        self.source = model
        """The model as it was given."""
        self.drawn = drawn
        same = dtype is None or named_dtype(dtype) == next(model.parameters()).dtype
        self.model = model if same else cast_copy(model, named_dtype(str(dtype)))
        # multimodal models keep the language model's settings in a config of their own
        self.config = model.config.get_text_config()
        self.kind = str(getattr(model.config, "model_type", type(model).__name__))
        self.layer_types = layer_types(self.config)
        """One name per layer; empty if the configuration has none."""
        self._window, self._by_layer = sliding_window(self.config)
        accepted = inspect.signature(model.forward).parameters
        # logits of all prompt positions, [B, Q, V], would be the largest tensor of a prefill; only the last one is read
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._columns = torch.empty(0, dtype=torch.int64)
        self.dense = DenseDecoder(self.model)
        self._dense_now = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def vocabulary(self) -> int:
        """Number of ids that may be fed."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state that cannot be rewound."""
        return bool(RECURRENT_LAYERS & set(self.layer_types))

    @property
    def full_attention(self) -> bool:
        """Whether every layer sees all of a row's past, so that one mask serves them all."""
        return self._window is None and not self.recurrent

    @property
    def native(self) -> bool:
        """Whether our own decoder runs (while `evaluating`), in which padding and idle rows cost nothing."""
        return self._dense_now

    def new_cache(self, slots: int, capacity: int) -> RaggedCache:
        """An empty cache for at most `slots` rows of `capacity` ids."""
        return HybridCache(slots, capacity, self.layer_types) if self.recurrent else RaggedCache(slots, capacity)

    def forward(self, cache: RaggedCache, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Logits [B, V] of the last column of `ids` int64 [B, Q] at `positions` int64 [B, Q]; V is `drawn`.

        Where `step.cells` is set, only rows whose last id is real are returned.
        """
        masks = self._mask(positions, step.length) if step.mask is None else step.mask
        if self._dense_now:
            return self.dense.forward(cache, ids, step, masks)[..., : self.drawn]
        # transformers calls cache.update() itself and has no way to pass it rows and positions
        cache.step = step
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self._keep,
        )
        cache.settle()
        return output.logits[:, -1, : self.drawn][Grid(len(ids), ids.shape[1], step.cells).last_rows()]

    def plain(self, ids: Ids, past: Any = None, *, cached: bool = False) -> tuple[Tensor, Any]:
        """Logits [V] after the last of `ids` [L]: of the whole row, or `cached`, with the model's own cache, which the
        last call returned (`past`)."""
        start = len(ids) - 1 if past is not None else 0
        input_ids = torch.from_numpy(ids[start:].astype(np.int64))[None].to(self.device)
        # a model without past_key_values (a state-space model) is fed the whole row every time
        cache = {} if past is None else {"past_key_values": past}
        output = self.model(input_ids=input_ids, use_cache=cached, **cache)
        return output.logits[0, -1, : self.drawn], getattr(output, "past_key_values", None) if cached else None

    def follow(self) -> None:
        """Take over the model's new weights."""
        if self.model is not self.source:
            follow(self.model, self.source)
        self.dense.follow()

    def weights_stamp(self) -> int:
        """A number that changes when weights are changed in place or replaced (optimizer step, `load_state_dict`)."""
        # inference tensors do not count their changes and raise on `_version`
        return hash(tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.source.parameters()))

    @contextmanager
    def evaluating(self, *, inference: bool = True) -> Iterator[None]:
        """No gradients and no dropout inside; the modules' own training flags come back afterwards.

        `inference=False` for models that change their own buffers in a pass (dynamic rope): buffers made in inference
        mode could not be trained with.
        """
        training = [module for module in self.model.modules() if module.training]
        if training:
            self.model.eval()
        try:
            with torch.inference_mode() if inference else torch.no_grad():
                self._dense_now = self.dense.ready()
                yield
        finally:
            for module in training:
                # not module.train(): it would also switch on children that the caller keeps in evaluation mode
                module.training = True

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor | None]:
        """Additive mask [B, 1, Q, length]: 0 where key k may be seen from `positions` p (k <= p, k > p - window)."""
        if len(self._columns) < length or self._columns.device != positions.device:
            # kept, and doubled when too short: in decoding `length` grows by one at every step
            self._columns = torch.arange(max(length, 2 * len(self._columns)), device=positions.device)
        queries = positions[:, None, :, None]
        columns = self._columns[:length]
        full = additive_mask(columns > queries, self.dtype)
        if self.recurrent:
            # a layer with a state reads every id of its pass; such passes have no padding to hide
            return {"full_attention": full} | dict.fromkeys(RECURRENT_LAYERS)
        if self._window is None:
            return full
        sliding = full.masked_fill(columns <= queries - self._window, -torch.inf)
        # transformers models that mix layer types look their mask up by the layer's type
        return {"full_attention": full, "sliding_attention": sliding} if self._by_layer else sliding


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a position may be seen and -inf where it is `hidden`."""
    # -inf cannot make a softmax NaN here: every query, padding included, sees its own position
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def layer_types(config: Any) -> tuple[str, ...]:
    """The configured kind of each layer; empty if all layers are alike."""
    # GPT-Neo's are `attention_layers`: its local ones keep a window of their own, which the trial's rows do not reach
    names = ("layer_types", "layers_block_type", "attention_layers")
    return tuple(next((types for name in names if (types := getattr(config, name, None))), ()))


CELLS = 1 << 24
"""Most pairs of a fed id and a key in one pass: their mask lies in memory, and grows with the square of a history."""


def prefill(
    model: CausalModel,
    cache: RaggedCache,
    slots: Sequence[int],
    starts: Sequence[int],
    new: Sequence[Ids],
    *,
    tokens: int,
) -> Tensor:
    """Feed `new[i]` (one id or more) at positions `starts[i]`... of row `slots[i]`; logits [B, V] after the last ids.

    Rows of similar length share a pass of at most about `tokens` padded ids, fewer if histories are long (`CELLS`).
    Rows of a hybrid model are fed without padding, and their states are saved before the last id.
    """
    if isinstance(cache, HybridCache):
        return _prefill_pieces(model, cache, slots, starts, new, tokens)
    logits: Tensor | None = None
    for group in _groups([len(ids) for ids in new], tokens):
        rows = [slots[i] for i in group]
        part = _prefill_group(model, cache, rows, [starts[i] for i in group], [new[i] for i in group], tokens)
        if logits is None:
            logits = part.new_empty(len(new), part.shape[-1])
        logits[group] = part
    assert logits is not None
    return logits


def as_rows(slots: Sequence[int], device: torch.device) -> Rows:
    """A slice if the slots are adjacent and ascending, else their numbers."""
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def _prefill_group(
    model: CausalModel, cache: RaggedCache, slots: list[int], starts: list[int], new: list[Ids], tokens: int
) -> Tensor:
    lengths = np.array([len(ids) for ids in new])
    width, ends = int(lengths.max()), np.array(starts) + lengths
    cache.reserve(max(slots) + 1, int(ends.max()))
    # Left padding, so that the last column is every row's last id. Padding looks at position 0 (so it stays finite) and
    # its keys go to the scratch row.
    column = np.arange(width)[None, :] - (width - lengths)[:, None]
    positions = np.maximum(column + np.array(starts)[:, None], 0)
    ids = np.zeros((len(new), width), np.int64)
    for row, values in enumerate(new):
        ids[row, width - len(values) :] = values
    write_rows = np.where(column >= 0, np.array(slots)[:, None], cache.scratch_row)
    ids_t, positions_t, write_t = (torch.from_numpy(array).to(model.device) for array in (ids, positions, write_rows))
    real = column >= 0
    rows = as_rows(slots, model.device)
    chunk = max(min(tokens, CELLS // int(ends.max())) // len(new), 1)
    logits: Tensor | None = None
    for begin in range(0, width, chunk):
        part = slice(begin, begin + chunk)
        length = int(positions[:, part].max()) + 1
        step = Step(
            rows=rows,
            write_rows=write_t[:, part],
            write_positions=positions_t[:, part],
            length=length,
            cells=None if real[:, part].all() else torch.from_numpy(np.flatnonzero(real[:, part])).to(model.device),
        )
        logits = model.forward(cache, ids_t[:, part], positions_t[:, part], step)
    assert logits is not None
    return logits


def _prefill_pieces(
    model: CausalModel, cache: HybridCache, slots: Sequence[int], starts: Sequence[int], new: Sequence[Ids], tokens: int
) -> Tensor:
    """Feed all but the last ids in pieces whose widths are powers of two, then the last id of every row in one pass.

    Whatever the lengths, the passes are few: about one for each bit of the longest.
    """
    # at once: piece by piece the cache would be copied, and grow beyond what is needed
    cache.reserve(max(slots) + 1, max(start + len(ids) for start, ids in zip(starts, new, strict=True)))
    done = [0] * len(new)
    left = [len(ids) - 1 for ids in new]

    def feed(part: Sequence[int], width: int) -> Tensor:
        """One pass over the next `width` ids of the rows `part`."""
        ids = [new[i][done[i] : done[i] + width] for i in part]
        offsets = [starts[i] + done[i] for i in part]
        return _prefill_group(model, cache, [slots[i] for i in part], offsets, ids, tokens)

    while any(left):
        width = 1 << (min(max(left), tokens).bit_length() - 1)
        rows = [i for i, count in enumerate(left) if count >= width]
        size = max(tokens // width, 1)
        for begin in range(0, len(rows), size):
            feed(rows[begin : begin + size], width)
        for i in rows:
            done[i] += width
            left[i] -= width
    cache.save(slots)
    return feed(range(len(new)), 1)


def _groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices by similar length: each group at most `tokens` padded ids, its shortest at least half its longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= tokens and 2 * lengths[index] + 16 >= longest:
            groups[-1].append(index)
        else:
            groups.append([index])
    # the caller's rows are in slot order, and rows in adjacent ascending slots are read without a copy
    return [sorted(group) for group in groups]


_LENGTHS = (11, 6)
"""Ids of the two rows that `ragged_problem` tries."""
_CUTS = (4, 3)
"""The rows are fed in two pieces, cut here: padding, holes and reuse all take part in the trial."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def context_limit(model: CausalModel, wanted: int | None) -> int:
    """Most ids of a prompt and its response; EngineError if `wanted` does not fit the model's positions."""
    limit = position_limit(model.config)
    if wanted is None:
        if limit is None:
            raise EngineError(
                f"model type {model.kind!r} states no max_position_embeddings; valid: --max-context N (in Python "
                "max_length)"
            )
        return limit
    if not 1 <= wanted <= (limit or wanted):
        raise EngineError(f"max_length {wanted} does not fit this {model.kind!r} model; use 1..{limit or 'any'}")
    return wanted


def choose_cache(model: CausalModel, cache: str) -> bool:
    """Whether to run on the ragged cache; EngineError if `cache` asks for what `model` cannot do."""
    if cache not in ("auto", "ragged", "recompute"):
        raise EngineError(f"cache {cache!r} is unknown; use 'auto', 'ragged' or 'recompute'")
    problem = None if cache == "recompute" else ragged_problem(model)
    if problem is None:
        return cache != "recompute"
    text = f"model type {model.kind!r} cannot keep its cache across turns: {problem}"
    if cache == "ragged":
        raise EngineError(f'{text}. Use cache="recompute"')
    warnings.warn(
        f'{text}. Every turn feeds its whole history, one row at a time (cache="recompute"): slow', stacklevel=3
    )
    return False


def ragged_problem(model: CausalModel) -> str | None:
    """Why `model` cannot keep a ragged cache, or None if it can.

    Its configuration is read first; then two short rows are fed in pieces and compared with a plain pass.
    """
    config = model.config
    kinds = set(model.layer_types)
    supported = {"full_attention", "global"} | (RECURRENT_LAYERS if model.recurrent else {"sliding_attention"})
    if not kinds <= supported:
        return f"it has layers of type {', '.join(sorted(kinds - supported))}, whose state this engine does not know"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"its attention implementation {attention!r} takes no explicit mask; load it with 'sdpa' or 'eager'"
    for rope in rope_types(config) & set(_LENGTH_DEPENDENT_ROPE):
        return f"its rope type {rope!r} depends on the longest row of a batch, so cached keys would go stale"
    return _compare(model)


def _compare(model: CausalModel) -> str | None:
    """Why logits from the ragged cache differ from those of a plain pass, or None if they agree."""
    vocabulary = model.vocabulary
    rows = [(np.arange(count) * 7 + 1 + i).astype(np.int32) % vocabulary for i, count in enumerate(_LENGTHS)]
    try:
        with model.evaluating():
            cache = model.new_cache(len(rows), max(_LENGTHS))
            prefill(model, cache, [0, 1], [0, 0], [row[:cut] for row, cut in zip(rows, _CUTS, strict=True)], tokens=64)
            rests = [row[cut:] for row, cut in zip(rows, _CUTS, strict=True)]
            got = prefill(model, cache, [0, 1], list(_CUTS), rests, tokens=64)
            want = torch.stack([model.plain(row)[0] for row in rows])
    # any model code may run here, and any failure means the same: recompute
    except Exception as error:
        return f"a trial on two short rows failed: {type(error).__name__}: {error}"
    problem = logits_problem(got, want)
    return problem and f"a trial on two short rows {problem}"


def keeps_own_cache(model: CausalModel) -> bool:
    """Whether the cache that `model` brings gives the logits of whole rows, id by id; with a warning where it does not.

    Those of some families do not (MiniMax's), and their scores are always those of whole rows.
    """
    row = (np.arange(_LENGTHS[0]) * 7 + 1).astype(np.int32) % model.vocabulary
    try:
        with model.evaluating(inference=False):
            past = None
            for end in range(_LENGTHS[1], len(row) + 1):
                got, past = model.plain(row[:end], past, cached=True)
            problem = logits_problem(got, model.plain(row)[0])
    # as above
    except Exception as error:
        problem = f"failed: {type(error).__name__}: {error}"
    if problem is not None:
        warnings.warn(
            f"model type {model.kind!r} has a cache that is not to be used, for a trial on a short row {problem}. "
            "Every id is drawn from a pass over its whole row: very slow",
            stacklevel=3,
        )
    return problem is None


def logits_problem(got: Tensor, want: Tensor) -> str | None:
    """Why the logits `got` [..., V] are further from those of a plain pass, `want`, than rounding; or None."""
    tolerance = 1e-3 if want.dtype == torch.float32 else 0.25
    got, want = got.float(), want.float()
    # Relative to the spread of the logits, which a wrong mask or position reaches, and up to a constant, which softmax
    # does not see. The root mean square and not the largest of 49,152: 30 layers in bfloat16 are a tenth of the spread
    # away from a plain pass, and that one is as far away from float32.
    difference, most = float((got - want).std()), tolerance * max(float(want.std()), 1e-6)
    # not `>`, so that NaN counts as a failure
    return None if difference <= most else f"gave logits {difference:.2g} away from a plain pass (allowed {most:.2g})"
