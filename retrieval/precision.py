"""Changes the precision of a model: of its parameters, and of nothing else."""

from __future__ import annotations

import re
from typing import Any


def cast_parameters(model: Any, dtype: Any) -> Any:
    """Give the parameters of `model` the precision `dtype`, in place, as `parameter_dtypes` has it. Returns `model`."""
    wanted = parameter_dtypes(model, dtype)
    for name, parameter in model.named_parameters():
        # one after the other, so that the model never exists twice
        parameter.data = parameter.data.to(wanted[name])
    return model


def parameter_dtypes(model: Any, dtype: Any) -> dict[str, Any]:
    """The precision of each parameter, by name, in a model whose precision is `dtype`; tied weights are named once.

    Only floating-point parameters change. Buffers are not named, for they keep what they have: they hold the
    frequencies of positions, and bfloat16 cannot tell positions of a long history apart (`model.to(dtype)` rounds
    them, `from_pretrained(dtype=...)` does not). Parameters that transformers keeps in float32 when it loads a model
    in `dtype` are float32 here, too.
    """
    import torch

    lists = ["_keep_in_fp32_modules_strict"] if dtype in (torch.bfloat16, torch.float16) else []
    # the second list is for float16 alone, whose range is too small for some weights
    lists += ["_keep_in_fp32_modules"] if dtype == torch.float16 else []
    patterns = [name for attribute in lists for name in getattr(model, attribute, None) or ()]
    # names are patterns with stars, found anywhere in a parameter's name, as transformers reads them; (?!) nowhere
    pattern = re.compile("|".join(name.replace("*", ".*") for name in patterns) or "(?!)")
    dtypes = {}
    for name, parameter in model.named_parameters():
        # peft calls the layer inside an adapter base_layer, and "base" may be such a pattern
        half = dtype if pattern.search(name.replace(".base_layer.", ".")) is None else torch.float32
        dtypes[name] = half if parameter.is_floating_point() else parameter.dtype
    return dtypes
