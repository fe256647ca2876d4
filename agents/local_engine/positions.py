"""How many ids a model and its layers see at a time: the one place that knows, for playing, scoring and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = ("max_position_embeddings", "max_seq_len", "max_sequence_length")
"""Settings that say how many positions a model knows. transformers gives most families' own names as the first."""


def position_limit(config: Any) -> int | None:
    """Most ids of a row, prompt and response together; None for a model whose configuration states none.

    It is the greatest of `NAMES` in the settings of the text part: where positions are stretched evenly, the first may
    be that of the plain model (Vicuna) or the stretched one (DeepSeek Coder). Two other ways of stretching are apart:

    - YaRN as Qwen2.5's card has it: `max_position_embeddings` stays that of the plain model, and the model knows
      `factor` times its `original_max_position_embeddings`.
    - Longrope (Phi-3): beyond its `original_max_position_embeddings` the model rotates all ids of a row in another way,
      the earlier ones too. What was drawn on one side of that border is computed otherwise on the other, so that rows
      end there. Dynamic rope changes likewise beyond `max_position_embeddings`, where rows end anyway.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # XLNet says -1 of a model without a limit
    limit = max(getattr(text, name, None) or 0 for name in NAMES)
    if limit <= 0:
        return None
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        original = rope.get("original_max_position_embeddings")
        if original and rope.get("rope_type") == "longrope":
            limit = min(limit, original)
        if original and rope.get("rope_type") == "yarn" and rope.get("factor"):
            limit = max(limit, int(original * rope["factor"]))
    return int(limit)


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions, such as `default` and `yarn`; empty for a model without any."""
    return {str(rope.get("rope_type", "default")) for rope in _ropes(getattr(config, "rope_parameters", None))}


def sliding_window(config: Any) -> tuple[int | None, bool]:
    """How many ids a layer sees that slides, None without such layers; and whether only some layers slide."""
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if window is None or not getattr(config, "use_sliding_window", True):
        return None, False
    if types and "sliding_attention" not in types:
        return None, False
    return int(window), "full_attention" in types


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return
    yield parameters
    # models that mix layer types keep one dict of rope parameters per type (Gemma 3)
    for value in parameters.values():
        yield from _ropes(value)
