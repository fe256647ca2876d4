"""Forward passes: which rows of ids go through a model together, and how they lie in its input.

Two ways: every row in a line of its own, padded, or all rows of a pass behind one another in one line, without padding,
where what several rows begin with lies once. `passes` divides any rows; `micro_batches` divides a batch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.agents.local_engine.positions import position_limit, sliding_window
from turngym.core.errors import SettingsError
from turngym.trainers.batch import IntArray, RolloutBatch
from turngym.trainers.models import Line, can_keep_rows_apart, hidden_states, length_batches, pad, rows_apart
from turngym.trainers.ranks import Ranks, balanced_shares
from turngym.trainers.run_config import Packing

Ids = NDArray[np.int32] | IntArray
"""Token ids of one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows that go through the model together, the longest first: the numbers `rows`, ids int64 [R, L].

    Padded rows fill a line each (R is their number). Packed ones share a single line: `rows[0]` whole, then of every
    other row m what follows its first `shared[m]` tokens, which are also the first of `rows[0]` and so of the line; the
    row attends to them besides its own. What is there of row m begins at `starts[m]` of the flattened [R * L].
    """

    rows: tuple[int, ...]
    ids_RL: IntArray
    starts: IntArray
    shared: IntArray
    position_RL: IntArray | None = None
    """Packed: position of each token in its own row, as the position embedding needs it; int64 [1, L]."""
    line: Line | None = None
    """Packed: what `models.hidden_states` needs to keep the rows apart."""

    def places(self, member: int, positions: IntArray) -> IntArray:
        """Where in [R * L] the tokens at `positions` of row `rows[member]` are."""
        shared, start = self.shared[member], self.starts[member]
        return np.where(positions < shared, positions, start + positions - shared)

    def states(self, model: Any) -> torch.Tensor:
        """Hidden states [R * L, D]. Packed rows want `rows_apart` around it, and around the backward pass."""
        return hidden_states(model, self.ids_RL, self.position_RL, self.line)


def passes(rows: Sequence[Ids], max_tokens: int, *, packed: bool) -> list[Pass]:
    """Passes of at most `max_tokens` tokens, padding included, that hold every row once; a longer row comes alone.

    The longest come first: a pass too large for memory fails at once.
    """
    if packed:
        return _packed_passes(rows, max_tokens)
    all_passes = []
    for members in length_batches([len(row) for row in rows], max_tokens):
        ids = pad([rows[row] for row in members])
        starts = np.arange(len(members)) * ids.shape[1]
        all_passes.append(Pass(rows=tuple(members), ids_RL=ids, starts=starts, shared=np.zeros_like(starts)))
    return all_passes


# The rows of a pass behind one another in one line: no padding to compute, and what rows begin with computed once.
#
# Rows of one task begin with the same instructions and the same first observation. A hinted prompt of every turn
# repeats the history before it: a teacher who reads one row per turn reads an episode of T turns about T / 2 times.


def _packed_passes(rows: Sequence[Ids], max_tokens: int) -> list[Pass]:
    """Rows are taken in the order of their ids, so that those which begin alike come together."""
    lines: list[list[int]] = []
    # the bytes of ids are in no order that means something, but equal beginnings are equal bytes
    for row in sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row)):
        if lines and sum(size for size, _ in _line(rows, [*lines[-1], row])[1]) <= max_tokens:
            lines[-1].append(row)
        else:
            lines.append([row])
    return sorted((packed_pass(rows, members) for members in lines), key=lambda packed: -packed.ids_RL.size)


def packed_pass(rows: Sequence[Ids], members: Sequence[int]) -> Pass:
    ordered, line = _line(rows, members)
    sizes, shared = np.array(line, np.int64).T
    ids = np.concatenate([rows[row][begin:] for row, begin in zip(ordered, shared, strict=True)])
    return Pass(
        rows=tuple(ordered),
        ids_RL=ids[None].astype(np.int64),
        starts=np.cumsum([0, *sizes[:-1]]),
        shared=shared,
        position_RL=np.concatenate([np.arange(begin, begin + size) for size, begin in line])[None],
        line=line,
    )


def _line(rows: Sequence[Ids], members: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The order of the rows in their line, and of each how many tokens lie there and how many it shares."""
    # the longest stays whole, so that every prefix that the others share with it is in the line
    ordered = sorted(members, key=lambda row: -len(rows[row]))
    longest = rows[ordered[0]]
    # a row that is wholly a prefix of the longest keeps its last token, so that no row is empty
    shared = [0, *(min(shared_tokens(longest, rows[row]), len(rows[row]) - 1) for row in ordered[1:])]
    return ordered, [(len(rows[row]) - begin, begin) for row, begin in zip(ordered, shared, strict=True)]


def shared_tokens(one: Ids, two: Ids) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(two))
    differs = np.flatnonzero(one[:size] != two[:size])
    return int(differs[0]) if len(differs) else size


# A batch in passes: where in each of them the supervised tokens are predicted.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A pass over rows of a batch. `tokens` int64 [n] are the supervised tokens in them, indices in N."""

    passed: Pass
    tokens: IntArray
    predictor_n: IntArray
    """Where in the flattened [R * L] each of them is predicted."""

    def states(self, model: Any) -> torch.Tensor:
        """Hidden states [n, D] that predict the tokens."""
        states = self.passed.states(model)
        return states[torch.from_numpy(self.predictor_n).to(states.device)]


def micro_batches(batch: RolloutBatch, max_tokens: int, ranks: Ranks, *, packed: bool = False) -> list[MicroBatch]:
    """This process's share of a batch in `passes`: whole episodes, about as many tokens as the others'.

    Together they hold every supervised token once, so a sum of weighted losses over them is the sum over all. All
    processes get equally many micro-batches, for a sharded model computes in step; those without work of their own get
    some at the end in which a single token is read and nothing predicted.
    A row longer than `max_tokens`, padding included, has a pass of its own.
    """
    rows = [batch.input_ids_M[start:stop] for start, stop in pairwise(batch.row_offsets)]
    # a row has at least one supervised token, whose episode is the row's
    episode_R = batch.episode_N[np.searchsorted(batch.row_N, np.arange(batch.rows))]
    tokens_E = np.bincount(episode_R, weights=np.diff(batch.row_offsets), minlength=batch.episodes)
    shares = [np.flatnonzero(np.isin(episode_R, members)) for members in balanced_shares(tokens_E, ranks.size)]
    # everybody splits all shares: the largest number of micro-batches is then known without asking
    split = [passes([rows[row] for row in share], max_tokens, packed=packed) for share in shares]
    mine = [_micro_batch(batch, shares[ranks.rank], part) for part in split[ranks.rank]]
    none, nothing = np.empty(0, np.int64), np.zeros((1, 1), np.int64)
    empty = MicroBatch(passed=Pass(rows=(), ids_RL=nothing, starts=none, shared=none), tokens=none, predictor_n=none)
    return mine + [empty] * (max(map(len, split)) - len(mine))


def _micro_batch(batch: RolloutBatch, share: IntArray, passed: Pass) -> MicroBatch:
    tokens, predictors = [], []
    for member, row in enumerate(share[list(passed.rows)]):
        columns = np.arange(*np.searchsorted(batch.row_N, [row, row + 1]))
        tokens.append(columns)
        predictors.append(passed.places(member, batch.position_M[batch.predictor_N[columns]]))
    return MicroBatch(passed=passed, tokens=np.concatenate(tokens), predictor_n=np.concatenate(predictors))


# Models that rows in one line must not be given to.

TOLERANCE = {torch.float32: 1e-4}
"""How far hidden states may differ, relative to the largest; 0.1 in other precisions. Rows that see each other differ
by far more."""


def packing_for(packing: Packing, model: Any) -> Packing:
    """`packing`, with `auto` resolved: `off` for a model that does not keep rows apart.

    Raises SettingsError for `on` with such a model.
    """
    if packing == "auto":
        try:
            check_packing(model)
        # models that know no positions, or no ids as small as those of the trial, say so in many ways
        except (SettingsError, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return "off"
    elif packing == "on":
        check_packing(model)
    return packing


def check_packing(model: Any) -> None:
    """Raise SettingsError unless `model` keeps rows that share a line apart: four rows, alone and in one line.

    Where layers see the last few ids alone, two of the rows are longer than that.
    """
    name = type(model).__name__
    if not can_keep_rows_apart(model):
        raise SettingsError(f"--packing on: {name} has layers other than sdpa attention; train it with padded rows")
    rows = _trial_rows(model)
    line = packed_pass(rows, range(len(rows)))
    with torch.no_grad():
        # by transformers' own attention, which knows its windows
        apart = torch.cat([hidden_states(model, rows[row][None]) for row in line.rows]).float()
        with rows_apart(model):
            together = line.states(model).float()
    where = np.concatenate([line.places(member, np.arange(len(rows[row]))) for member, row in enumerate(line.rows)])
    gap = float((apart - together[torch.from_numpy(where).to(together.device)]).abs().max())
    size = float(apart.abs().max())
    # `not <=`, for a model that gives NaN is refused too
    if not gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * size:
        raise SettingsError(
            f"--packing on: {name} lets rows in one line see each other (hidden states differ by {gap:.1e} of "
            f"{size:.1e}); train it with padded rows"
        )


def _trial_rows(model: Any) -> list[IntArray]:
    """Rows that branch off after different tokens: a wrong mask as well as a wrong position moves some state."""
    rows = [[3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 6, 5], [3, 1, 4, 1, 8, 8], [9, 2, 6]]
    config = model.config.get_text_config()
    window, limit = sliding_window(config)[0], position_limit(config)
    if window is not None and (limit is None or window + len(rows[0]) <= limit):
        # as many ids as the window in front of both: what they do not share lies where the first ids are seen no more
        before = (7 * np.arange(window) % 10).tolist()
        rows[:2] = [before + row for row in rows[:2]]
    return [np.array(row, np.int64) for row in rows]
