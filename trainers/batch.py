"""Episodes as packed columns: where the label shift and the loss mask happen, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode, Origin, Status, Turn

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class BatchError(TurngymError):
    """Episodes that hold nothing to train on, or rows that do not belong to the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """One optimiser batch. Suffixes: `_M` input tokens, `_R` rows, `_N` supervised tokens, `_E` episodes.

    A row is one segment of one episode, and only segments with supervised tokens are rows. Rows, and tokens within a
    row, keep the order of the episodes. The model reads `input_ids_M` and is asked, at position `predictor_N`, for
    `label_N`: the label is the token after its predictor, in the same row.
    """

    input_ids_M: IntArray
    row_M: IntArray
    position_M: IntArray
    """0-based position within the row."""
    row_offsets: IntArray
    """[R+1]: row r is `input_ids_M[row_offsets[r]:row_offsets[r + 1]]`."""
    predictor_N: IntArray
    """Index in M of the token whose output predicts the label."""
    label_N: IntArray
    turn_N: IntArray
    """0-based turn of the label."""
    episode_N: IntArray
    """Index in E."""
    group_N: IntArray
    row_N: IntArray
    behaviour_logp_N: FloatArray
    """Log-probability as sampled, nats; NaN where unknown."""
    off_policy_N: BoolArray
    """The label was chosen by a demonstrator."""
    reward_E: NDArray[np.float64]
    """Return: the sum of an episode's rewards."""
    success_E: BoolArray
    depth_E: IntArray
    """Number of turns played, whoever chose them."""
    status_E: tuple[Status, ...]
    truncated_E: BoolArray
    """Stopped by the trainer's depth cap (`truncated_depth`): trains, but never feeds statistics."""
    group_E: IntArray
    task_ids: tuple[str, ...]
    """[E]."""
    source_E: IntArray
    """Index of each episode in the sequence that was packed."""
    excluded: int
    """Episodes left out because their status is an error."""

    @property
    def tokens(self) -> int:
        """N, the number of supervised tokens."""
        return len(self.label_N)

    @property
    def rows(self) -> int:
        """R."""
        return len(self.row_offsets) - 1

    @property
    def episodes(self) -> int:
        """E."""
        return len(self.reward_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch and every supervised token in them.

    `rows` int64 [r], longest first; `tokens` int64 [n], indices in N, ordered as the rows are. Each row is a line of
    its own, unless `starts` int64 [r] says where in the lines (`shape`: how many, how long) each begins.
    """

    rows: IntArray
    tokens: IntArray
    starts: IntArray | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """A micro-batch as the model reads it, padded on the right to L tokens.

    `input_ids_RL` int64 [r, L]; `attention_RL` bool [r, L]; `predictor_n` int64 [n] indexes the flattened [r * L]
    hidden states, in the order of `MicroBatch.tokens`. `position_RL` int64 [r, L] where rows share lines: every row
    begins at 0, and so does each token of padding.
    """

    input_ids_RL: IntArray
    attention_RL: BoolArray
    predictor_n: IntArray
    position_RL: IntArray | None = None


def pack(episodes: Sequence[Episode], *, origins: Sequence[Origin] = ("policy",)) -> RolloutBatch:
    """Pack episodes into columns; supervised are the response tokens of turns whose origin is in `origins`.

    Error episodes are left out and counted. Observation, template and tool tokens are inputs only. Turns of origin
    "noise", turns that say why they are `excluded` and demonstrations that the environment `refused` are never
    supervised. Ids are taken as sampled; nothing is tokenised here.
    Source: algorithms specification section 0 (token-in, token-out; the single label shift).
    Errors: `BatchError` for an unknown origin, a response that nothing precedes, or nothing to train on.
    """
    _check_origins(origins)
    kept = [(source, episode) for source, episode in enumerate(episodes) if not episode.status.is_error]
    excluded = len(episodes) - len(kept)
    columns = _Columns()
    for index, (_, episode) in enumerate(kept):
        _add_episode(columns, index, episode, origins)
    if not columns.labels:
        raise BatchError(
            f"nothing to train on: {len(episodes)} episodes, {excluded} of them errors, no response tokens of origin "
            f"{' or '.join(origins)}; text-only episodes carry no token ids"
        )
    return columns.batch([episode for _, episode in kept], [source for source, _ in kept], excluded)


class _Columns:
    """Growing columns; one per `pack` call."""

    def __init__(self) -> None:
        self.inputs: list[IntArray] = []
        self.length = 0
        self.labels: list[IntArray] = []
        self.predictors: list[IntArray] = []
        self.behaviour: list[FloatArray] = []
        self.spans: list[tuple[int, int, int, int, int, bool]] = []

    def add_row(self, ids: NDArray[np.int32]) -> int:
        start = self.length
        self.inputs.append(np.asarray(ids, dtype=np.int64))
        self.length += len(ids)
        return start

    def add_turn(self, start: int, index: int, episode: Episode, turn: Turn) -> None:
        r0, r1 = turn.response_span
        count = r1 - r0
        self.predictors.append(np.arange(start + r0 - 1, start + r1 - 1, dtype=np.int64))
        self.labels.append(np.asarray(episode.response_ids(turn), dtype=np.int64))
        logp = np.full(count, np.nan, dtype=np.float32) if turn.logprobs is None else turn.logprobs
        self.behaviour.append(np.asarray(logp, dtype=np.float32))
        off_policy = turn.origin == "demonstration"
        self.spans.append((count, turn.index, index, episode.group, len(self.inputs) - 1, off_policy))

    def batch(self, kept: Sequence[Episode], source: Sequence[int], excluded: int) -> RolloutBatch:
        lengths = np.array([len(ids) for ids in self.inputs], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        row_M = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        spans = np.array(self.spans, dtype=np.int64)
        turn, episode, group, row, off_policy = (np.repeat(column, spans[:, 0]) for column in spans[:, 1:].T)
        return RolloutBatch(
            input_ids_M=np.concatenate(self.inputs),
            row_M=row_M,
            position_M=np.arange(self.length, dtype=np.int64) - offsets[row_M],
            row_offsets=offsets,
            predictor_N=np.concatenate(self.predictors),
            label_N=np.concatenate(self.labels),
            turn_N=turn,
            episode_N=episode,
            group_N=group,
            row_N=row,
            behaviour_logp_N=np.concatenate(self.behaviour),
            off_policy_N=off_policy.astype(np.bool_),
            reward_E=np.array([e.ret for e in kept], dtype=np.float64),
            success_E=np.array([e.success for e in kept], dtype=np.bool_),
            depth_E=np.array([e.depth for e in kept], dtype=np.int64),
            status_E=tuple(e.status for e in kept),
            truncated_E=np.array([e.status == Status.TRUNCATED_DEPTH for e in kept], dtype=np.bool_),
            group_E=np.array([e.group for e in kept], dtype=np.int64),
            task_ids=tuple(e.task.task_id for e in kept),
            source_E=np.array(source, dtype=np.int64),
            excluded=excluded,
        )


def split_rows(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """Micro-batches of rows sorted by length, longest first, each at most `max_tokens` tokens after padding.

    Padding is rows times the longest row. A row longer than `max_tokens` comes alone. Together they hold every row (of
    `rows`, int64, if given) and its supervised tokens once, so a sum of weighted losses over them is the sum over all.
    Errors: `BatchError` if `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    lengths = np.diff(batch.row_offsets)
    order = np.argsort(-lengths, kind="stable")
    if rows is not None:
        order = order[np.isin(order, rows)]
    return [micro_batch(batch, order[start:stop]) for start, stop in _cuts(lengths[order], max_tokens)]


def micro_batch(
    batch: RolloutBatch, rows: Sequence[int] | IntArray, *, starts: IntArray | None = None, shape: Any = None
) -> MicroBatch:
    """The micro-batch of these rows, with every supervised token in them."""
    chosen = np.asarray(rows, np.int64)
    first, last = np.searchsorted(batch.row_N, chosen), np.searchsorted(batch.row_N, chosen + 1)
    tokens = np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)])
    return MicroBatch(rows=chosen, tokens=tokens.astype(np.int64), starts=starts, shape=shape)


def pad_rows(batch: RolloutBatch, micro: MicroBatch, pad_id: int = 0) -> PaddedRows:
    """The rows of `micro` padded on the right with `pad_id`, and where in them each supervised token is predicted.

    A micro-batch without rows becomes one row of padding in which nothing is predicted.
    Errors: `BatchError` for a row outside the batch.
    """
    if len(micro.rows) == 0:
        nothing = np.full((1, 1), pad_id, np.int64)
        return PaddedRows(input_ids_RL=nothing, attention_RL=nothing < 0, predictor_n=np.empty(0, np.int64))
    if micro.rows.min() < 0 or micro.rows.max() >= batch.rows:
        raise BatchError(f"rows {micro.rows.tolist()} are not rows of this batch; valid are 0..{batch.rows - 1}")
    lengths = np.diff(batch.row_offsets)[micro.rows]
    lines, width = micro.shape or (len(micro.rows), int(lengths.max()))
    starts = np.arange(lines) * width if micro.starts is None else micro.starts
    input_ids = np.full(lines * width, pad_id, dtype=np.int64)
    attention = np.zeros(lines * width, dtype=np.bool_)
    positions = np.zeros(lines * width, dtype=np.int64)
    start_of_row = np.zeros(batch.rows, dtype=np.int64)
    start_of_row[micro.rows] = starts
    for row, start, length in zip(micro.rows, starts, lengths, strict=True):
        place = slice(start, start + length)
        input_ids[place] = batch.input_ids_M[batch.row_offsets[row] : batch.row_offsets[row + 1]]
        attention[place], positions[place] = True, np.arange(length)
    position = batch.position_M[batch.predictor_N[micro.tokens]]
    predictor = start_of_row[batch.row_N[micro.tokens]] + position
    return PaddedRows(
        input_ids_RL=input_ids.reshape(lines, width),
        attention_RL=attention.reshape(lines, width),
        predictor_n=predictor,
        position_RL=None if micro.starts is None else positions.reshape(lines, width),
    )


def _cuts(lengths: IntArray, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, given their lengths in descending order."""
    start = 0
    while start < len(lengths):
        size = max(1, int(max_tokens // lengths[start]))
        stop = min(start + size, len(lengths))
        yield start, stop
        start = stop


def _check_origins(origins: Sequence[Origin]) -> None:
    for origin in origins:
        if origin not in ("policy", "demonstration"):
            raise BatchError(
                f"cannot train on turns of origin {origin!r}; valid are 'policy' and 'demonstration' (noise never is)"
            )


def refused(turn: Turn) -> bool:
    """Whether the environment refused what a demonstrator did: such a turn is nobody's example."""
    return turn.origin == "demonstration" and not turn.verdict.valid


def _add_episode(columns: _Columns, index: int, episode: Episode, origins: Sequence[Origin]) -> None:
    start, segment = 0, -1
    for turn in episode.turns:
        if turn.origin not in origins or turn.excluded is not None or turn.response_length == 0 or refused(turn):
            continue
        if turn.response_span[0] == 0:
            raise BatchError(
                f"episode {episode.task.task_id} sample {episode.sample}, turn {turn.index}: the response starts at "
                f"position 0 of segment {turn.segment}, so nothing predicts its first token; a prompt must precede it"
            )
        if turn.segment != segment:
            start, segment = columns.add_row(episode.segments[turn.segment]), turn.segment
        columns.add_turn(start, index, episode, turn)
