"""What an algorithm of another package gives is taken by its shape and type.

What broadcasts would train on other numbers in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.plugin_values import failures_of
from turngym.core.redaction import brief
from turngym.trainers.algorithm import Algorithm, CountingFilter, Targets, TokenLosses, WeightArray
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "depth": ("DepthController", ("start", "plan", "learn")),
    "target_fn": ("TargetFn", ("__call__",)),
    "weight": ("Weight", ("__call__", "to_the_end")),
    "token_loss": ("TokenLoss", ("__call__",)),
}
"""The four parts: the protocol of each, and what its objects have."""


def calling(algorithm: Algorithm, name: str) -> AbstractContextManager[None]:
    """Inside, what a part raises that another package wrote is a line that names it, and SettingsError."""
    return failures_of(f"algorithm {algorithm.name}: its {name}", getattr(algorithm, name), SettingsError)


def built(spec: AlgorithmSpec, config: Any, context: BuildContext) -> Algorithm:
    """The algorithm that `spec` builds from its settings.

    Raises SettingsError where its function fails, or gives what cannot be trained with; each of them is named.
    """
    with failures_of(f"algorithm {spec.name}: its build", spec.build, SettingsError):
        algorithm = spec.build(config, context)
    if not isinstance(algorithm, Algorithm):
        raise SettingsError(
            f"algorithm {spec.name}: its build returned {type(algorithm).__name__}; valid: an Algorithm"
        )
    if not isinstance(algorithm.name, str) or not algorithm.name.isprintable():
        raise SettingsError(f"algorithm {spec.name}: its name is {brief(algorithm.name, 80)}; valid: a printable text")
    if not isinstance(algorithm.group, int) or algorithm.group < 1:
        raise SettingsError(
            f"algorithm {spec.name}: its group is {algorithm.group!r}; valid: a whole number of at least 1"
        )
    for name, (kind, members) in PARTS.items():
        part = getattr(algorithm, name)
        if isinstance(part, type) or not all(hasattr(part, member) for member in members):
            valid = f"a {kind}, which has {', '.join(members)}"
            raise SettingsError(f"algorithm {spec.name}: its {name} is {brief(part, 80)}; valid: {valid}")
    try:
        json.dumps(dict(algorithm.settings))
        if any(isinstance(value, float) and math.isnan(value) for value in algorithm.settings.values()):
            raise ValueError("a resumed run compares them, and NaN equals nothing")
    except (TypeError, ValueError) as error:
        problem = f"its settings are no JSON ({error}); valid: tables_of(config)"
        raise SettingsError(f"algorithm {spec.name}: {problem}") from error
    return algorithm


def checked_targets(targets: Any, tokens: int, algorithm: str) -> Targets:
    """Checks a target function's result. Raises SettingsError unless every column is an array with a number for each of
    `tokens`."""
    if not isinstance(targets, Targets):
        raise SettingsError(f"algorithm {algorithm}: its target_fn returned {type(targets).__name__}; valid: Targets")
    columns = {item.name: getattr(targets, item.name) for item in fields(targets) if item.name.endswith(("_N", "_NK"))}
    for name, column in (columns | {f"extra[{name!r}]": column for name, column in targets.extra.items()}).items():
        if column is None:
            continue
        if not isinstance(column, np.ndarray):
            raise SettingsError(f"algorithm {algorithm}: its {name} is {type(column).__name__}; valid: a NumPy array")
        # a further column may have any axes after the first
        axes = column.ndim if name.startswith("extra") else 2 if name.endswith("_NK") else 1
        if column.shape[:1] != (tokens,) or column.ndim != axes:
            valid = f"[{tokens}, K]" if name.endswith("_NK") else f"[{tokens}]"
            raise SettingsError(
                f"algorithm {algorithm}: its {name} has the shape {list(column.shape)}; valid: {valid}, a row for each "
                "supervised token"
            )
        if column.dtype.kind not in "fiub":
            raise SettingsError(f"algorithm {algorithm}: its {name} holds {column.dtype}; valid: numbers")
    reward = targets.reward
    if reward is not None and not (isinstance(reward, np.ndarray) and reward.ndim == 1 and reward.dtype.kind in "fiub"):
        valid = "an array of numbers, one for each episode or token"
        raise SettingsError(f"algorithm {algorithm}: its reward is {brief(reward, 80)}; valid: {valid}")
    ids, logp = targets.topk_ids_NK, targets.topk_logp_NK
    if (None if ids is None else ids.shape) != (None if logp is None else logp.shape):
        raise SettingsError(
            f"algorithm {algorithm}: its topk_ids_NK and topk_logp_NK have different shapes; valid: one"
        )
    return targets


def selected(algorithm: Algorithm, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that a filter keeps; all without one. Raises SettingsError where it gives anything else."""
    if algorithm.select is None:
        return list(episodes)
    # typed, but another package's
    chosen: Any = algorithm.select(episodes)
    if not isinstance(chosen, list | tuple) or not all(isinstance(episode, Episode) for episode in chosen):
        problem = f"its select gave {brief(chosen, 80)}; valid: a list of episodes"
        raise SettingsError(f"algorithm {algorithm.name}: {problem}")
    return list(chosen)


def with_own_numbers(
    row: Mapping[str, Any], algorithm: Algorithm, episodes: Sequence[Episode], log: Mapping[str, Any]
) -> dict[str, Any]:
    """A step's `row` with what the filter counts of its `episodes`, and the `log` of the targets.

    Raises SettingsError for a name that every run has. What is no number is refused where the row is written.
    """
    chosen = algorithm.select.row(episodes) if isinstance(algorithm.select, CountingFilter) else {}
    for where, numbers in (("its log", log), ("the row of its select", chosen)):
        if not isinstance(numbers, Mapping):
            raise SettingsError(f"algorithm {algorithm.name}: {where} is {brief(numbers, 80)}; valid: numbers by name")
        if clashing := sorted(row.keys() & numbers.keys()):
            problem = f"{where} has {clashing[0]!r}, a column of every run; rename it"
            raise SettingsError(f"algorithm {algorithm.name}: {problem}")
    return {**row, **chosen, **log}


def checked_weights(weight: Any, tokens: int, algorithm: str) -> WeightArray:
    """Checks a token weight's result for so many `tokens`. Raises SettingsError for another shape, for numbers below 0
    or not finite, and for a sum other than 1."""
    if not isinstance(weight, np.ndarray) or weight.shape != (tokens,) or weight.dtype.kind != "f":
        shown = f"shape {list(weight.shape)}, {weight.dtype}" if isinstance(weight, np.ndarray) else brief(weight, 80)
        raise SettingsError(f"algorithm {algorithm}: its weight gave {shown}; valid: a float array [{tokens}]")
    total = float(weight.sum(dtype=np.float64))
    if not np.isfinite(weight).all() or (weight < 0).any() or abs(total - 1.0) > 1e-6:
        raise SettingsError(
            f"algorithm {algorithm}: its weights sum to {total:g}, the least is {weight.min():g}; valid: finite, at "
            "least 0, and 1 in sum"
        )
    return weight


OWN_NUMBERS = ("loss", "logp", "sampled_logp", "entropy")
"""Columns that the loop writes for every token; a token loss has other names for its own."""


def checked_losses(losses: Any, tokens: int) -> TokenLosses:
    """Checks a token loss's result for so many `tokens`. Raises SettingsError for a column that is reduced or has
    another shape, for a loss without gradient, and for a diagnostic whose name is taken."""
    if not isinstance(losses, TokenLosses):
        raise SettingsError(f"the token loss gave {type(losses).__name__}; valid: TokenLosses")
    for name, column in {"loss_n": losses.loss_n, **losses.diagnostics}.items():
        if not isinstance(name, str) or name in OWN_NUMBERS:
            reserved = ", ".join(OWN_NUMBERS)
            raise SettingsError(
                f"the token loss has a diagnostic {brief(name, 80)}; valid: a text that is none of {reserved}"
            )
        if not isinstance(column, Tensor) or tuple(column.shape) != (tokens,):
            problem = f"the shape {list(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
            raise SettingsError(
                f"the token loss: its {name} has {problem}; valid: a tensor [{tokens}], a number per token"
            )
    if torch.is_grad_enabled() and not losses.loss_n.requires_grad:
        raise SettingsError("the token loss: its loss_n has no gradient, so that nothing would be learned")
    return losses
