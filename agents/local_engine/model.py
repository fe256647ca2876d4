"""One causal transformers model as the local engine sees it: forward passes over ragged rows of a `RaggedCache`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.casting import cast_copy, follow, named_dtype
from turngym.agents.local_engine.dense.decoder import DenseDecoder
from turngym.agents.local_engine.dense.grid import Grid
from turngym.agents.local_engine.hybrid_cache import RECURRENT_LAYERS, HybridCache
from turngym.agents.local_engine.kv_cache import RaggedCache, Step
from turngym.envs.core import TurngymError

Ids = NDArray[np.int32]


class EngineError(TurngymError):
    """A request that an engine cannot serve, or a model that it cannot run."""


class CausalModel:
    """Runs `model` on explicit positions and an explicit mask, so that padding and other rows stay invisible.

    In another precision than its own a copy of it is run; `follow` brings the copy up to date.
    """

    def __init__(self, model: Any, dtype: str | None = None) -> None:
        self.source = model
        """The model as it was given."""
        same = dtype is None or named_dtype(dtype) == next(model.parameters()).dtype
        self.model = model if same else cast_copy(model, named_dtype(str(dtype)))
        # multimodal models keep the language model's settings in a config of their own
        self.config = model.config.get_text_config()
        self.kind = str(getattr(model.config, "model_type", type(model).__name__))
        self.layer_types = layer_types(self.config)
        """One name per layer; empty where the configuration has none."""
        self._window, self._by_layer = _windows(self.config)
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
    def triangular(self) -> bool:
        """Whether every layer sees all of a row's past, so that one mask serves them all."""
        return self._window is None and not self.recurrent

    @property
    def leaves_out(self) -> bool:
        """Whether ids that are not real cost nothing (while `evaluating`)."""
        return self._dense_now

    def new_cache(self, slots: int, capacity: int) -> RaggedCache:
        """An empty cache for at most `slots` rows of `capacity` ids."""
        return HybridCache(slots, capacity, self.layer_types) if self.recurrent else RaggedCache(slots, capacity)

    def forward(self, cache: RaggedCache, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Logits of the last column of `ids` int64 [B, Q] at `positions` int64 [B, Q].

        [B, V], or of the rows alone whose last id is real by `step.cells`.
        """
        masks = self._mask(positions, step.length) if step.mask is None else step.mask
        if self._dense_now:
            return self.dense.forward(cache, ids, step, masks)
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
        return output.logits[:, -1][Grid(len(ids), ids.shape[1], step.cells).last_rows()]

    def plain(self, ids: Ids, past: Any) -> tuple[Tensor, Any]:
        """Logits [V] after the last of `ids` [L] with the model's own cache; `past` is what the last call returned."""
        start = len(ids) - 1 if past is not None else 0
        input_ids = torch.from_numpy(ids[start:].astype(np.int64))[None].to(self.device)
        # A model without past_key_values (a state-space model) gets the whole row every time.
        output = self.model(input_ids=input_ids, use_cache=True, **({} if past is None else {"past_key_values": past}))
        return output.logits[0, -1], getattr(output, "past_key_values", None)

    def follow(self) -> None:
        """The weights have changed."""
        if self.model is not self.source:
            follow(self.model, self.source)
        self.dense.follow()

    def weights_stamp(self) -> int:
        """Changes when weights are changed in place or replaced (an optimizer step, `load_state_dict`)."""
        # inference tensors raise on `_version`: they do not count their changes
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
            # kept and doubled: in decoding `length` grows by one at every step
            self._columns = torch.arange(max(length, 2 * len(self._columns)), device=positions.device)
        here = positions[:, None, :, None]
        columns = self._columns[:length]
        full = bias(columns > here, self.dtype)
        if self.recurrent:
            # a layer with a state reads every id of its pass: there is no padding to hide
            return {"full_attention": full} | dict.fromkeys(RECURRENT_LAYERS)
        if self._window is None:
            return full
        sliding = full.masked_fill(columns <= here - self._window, -torch.inf)
        # transformers models that mix layer types look their mask up by the layer's type
        return {"full_attention": full, "sliding_attention": sliding} if self._by_layer else sliding


def bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask: -inf where `hidden`."""
    # -inf cannot make a softmax NaN here: every query, padding included, sees its own position
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def layer_types(config: Any) -> tuple[str, ...]:
    """What kind each layer is, by its configuration; empty where all are alike."""
    return tuple(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _windows(config: Any) -> tuple[int | None, bool]:
    """(sliding window or None, whether only some layers slide)."""
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if window is None or not getattr(config, "use_sliding_window", True):
        return None, False
    if types and "sliding_attention" not in types:
        return None, False
    return int(window), "full_attention" in types
