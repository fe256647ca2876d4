"""The peers of the local engine: transformers' `generate`, its cache kept across turns or not, and its own batching."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Keeping = Literal["packed", "dynamic", "static"]
_PAGE = 32
"""Ids of a page of continuous batching."""


def left_padded(rows: Sequence[Ids]) -> tuple[Any, Any]:
    """Ids and mask int64 [B, W]."""
    import torch

    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, width - len(values) :] = torch.from_numpy(values)
        mask[row, width - len(values) :] = 1
    return ids, mask


def generate(model: Any, ids: Any, mask: Any, limits: Sequence[int], cache: Any = None) -> Any:
    """transformers' greedy continuation int64 [B, W + longest]; row i is meant to have `limits[i]` new ids."""
    import torch
    from transformers import StoppingCriteriaList

    lengths, width = torch.tensor(limits), ids.shape[1]

    def enough(so_far: Any, scores: Any, **kwargs: Any) -> Any:
        return so_far.shape[1] - width >= lengths

    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(limits),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([enough]),  # type: ignore[list-item]
            disable_compile=True,
            **({} if cache is None else {"past_key_values": cache}),
        )


def cut(out: Any, width: int, limits: Sequence[int]) -> list[Ids]:
    """The new ids of every row."""
    return [row[width : width + limit].numpy().astype(np.int32) for row, limit in zip(out, limits, strict=True)]


def whole_history(model: Any, prompts: Sequence[Ids], limits: Sequence[int]) -> list[Ids]:
    """Responses to whole histories, left-padded into one batch, every id fed again."""
    ids, mask = left_padded(prompts)
    return cut(generate(model, ids, mask, limits), ids.shape[1], limits)


class KeptCache:
    """`generate` on one batch of conversations, only what is new in a turn fed: its cache goes from call to call.

    Rows grow by different amounts, so there are holes between a short response and the next observation, which the
    attention mask hides. `packed` closes them after every turn (one copy of the cache); `dynamic` leaves them; `static`
    leaves them in a cache of fixed size, which every step reads to its end.
    """

    def __init__(self, model: Any, rows: int, capacity: int, keeping: Keeping) -> None:
        import torch
        from transformers import DynamicCache, StaticCache

        static = keeping == "static"
        self._model, self._keeping = model, keeping
        self._cache: Any = StaticCache(config=model.config, max_cache_len=capacity) if static else DynamicCache()
        self._rows = rows
        self._ids = torch.zeros(rows, 0, dtype=torch.int64)
        self._mask = torch.zeros_like(self._ids)

    def begin(self, system: Ids) -> None:
        """What every row begins with: fed once, its keys and values then repeated."""
        import torch
        from transformers import DynamicCache

        ids, once = torch.from_numpy(system.astype(np.int64))[None], DynamicCache()
        with torch.inference_mode():
            self._model(ids, past_key_values=once, use_cache=True, logits_to_keep=1)
            layers: list[Any] = once.layers
            for number, layer in enumerate(layers):
                keys, values = (tensor.repeat(self._rows, 1, 1, 1) for tensor in (layer.keys, layer.values))
                self._cache.update(keys, values, number)
        self._ids = ids.expand(self._rows, -1)
        self._mask = torch.ones_like(self._ids)

    def answer(self, new: Sequence[Ids], limits: Sequence[int]) -> list[Ids]:
        """Responses after `new` ids of every row."""
        import torch

        ids, mask = left_padded(new)
        ids, mask = torch.cat((self._ids, ids), 1), torch.cat((self._mask, mask), 1)
        width = ids.shape[1]
        out = generate(self._model, ids, mask, limits, self._cache)
        drawn = torch.arange(out.shape[1] - width)[None] < torch.tensor(limits)[:, None]
        self._ids, self._mask = out, torch.cat((mask, drawn.long()), 1)
        if self._keeping == "packed":
            self._pack()
        return cut(out, width, limits)

    def _pack(self) -> None:
        """Close the holes: every row's ids end at the last column."""
        import torch

        # a stable sort puts the holes first and leaves the ids in their order
        order = self._mask.sort(dim=1, stable=True).indices
        fewest = int((self._mask == 0).sum(1).min())
        order = order[:, fewest:]
        self._ids, self._mask = self._ids.gather(1, order), self._mask.gather(1, order)
        # the last column was drawn and never fed: where it is a row's own id, the cache ends before it
        rows = torch.arange(len(order))[:, None]
        for layer in self._cache.layers:
            held = layer.keys.shape[2]
            index = order[:, :-1].clamp(max=held - 1)
            layer.keys = layer.keys[rows, :, index].transpose(1, 2)
            layer.values = layer.values[rows, :, index].transpose(1, 2)


class Continuous:
    """transformers' continuous batching: paged keys, requests that enter and leave at every step, shared prefixes.

    Its attention reads pages, so it works on a copy of the model. Use it as a context manager: it has a thread.

    Args:
        rows: requests that are under way at once.
        capacity: most ids of a request.
    """

    def __init__(self, model: Any, rows: int, capacity: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = copy.deepcopy(model)
        self._generation = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0)
        # by itself it would take a share of a GPU's memory
        pages = rows * (capacity // _PAGE + 2)
        self._config = ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=pages, max_batch_tokens=max(rows, 512), use_cuda_graph=False
        )
        self._manager: Any = None

    def __enter__(self) -> Continuous:
        self._manager = self._model.init_continuous_batching(self._generation, self._config)
        self._manager.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.stop(block=True)

    def answer(self, prompts: Sequence[Ids], limits: Sequence[int]) -> list[Ids]:
        """Responses to whole histories. Raises RuntimeError where a request fails."""
        asked = [
            self._manager.add_request(prompt.tolist(), max_new_tokens=limit)
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        found: dict[str, Any] = {}
        while len(found) < len(asked):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {getattr(result, 'error', 'no answer in a minute')}")
            found[result.request_id] = result
        return [np.array(found[name].generated_tokens, np.int32) for name in asked]
