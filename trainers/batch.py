"""Episodes as packed columns: where the label shift and the loss mask happen, once. Here too stands the NOTATION.

The suffix of an array says what its axes run over; what has none is a number or says its shape in its docstring:

    _M   input tokens of a batch, row after row          _n   supervised tokens of one microbatch
    _R   rows: one segment of one episode each           _K   ids of a support (the K most likely)
    _N   supervised tokens (those that carry a loss)     _J   the label and the ids of a support, J = 1 + K
    _E   episodes                                        _V   the whole vocabulary
    _T   turns, 0-based, over all episodes of a batch    _L   tokens of a padded row
    _NK, _nK, _NJ, _nJ, _NV: one row per supervised token; _RL (the rows of a microbatch) and _BL (any rows): padded

`logp` is a natural logarithm of a probability, everything measured in it is in nats. p is the student, q the teacher,
mu or "behavior" the policy that sampled the ids.

A batch of two episodes. The first has two turns: to the prompt 1 2 3 the student answered 10 11, to the observation 4
it answered 12, and the observation 9 came last. The second has one turn: to 5 6 it answered 20 21, whose
log-probabilities are unknown. N columns stand below the token that is their label; the token before it predicts it.

    input_ids_M          1     2     3    10    11     4    12     9  |     5     6    20    21
    row_M                0     0     0     0     0     0     0     0  |     1     1     1     1
    position_M           0     1     2     3     4     5     6     7  |     0     1     2     3
    label_N                               10    11          12        |                20    21
    predictor_N                            2     3           5        |                 9    10
    turn_N                                 0     0           1        |                 0     0
    episode_N                              0     0           0        |                 1     1
    row_N                                  0     0           0        |                 1     1
    behavior_logp_N                     -0.5  -1.0        -2.0        |               nan   nan
    weight_N                             1/6   1/6         1/6        |               1/4   1/4

`weight_N` is `trajectory_weights`: each episode has half of the loss, and its tokens share it. Per episode:

    reward_E           0     1
    success_E      False  True
    depth_E            2     1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import SHORT, Episode, Origin, Status, Turn, drawn_at
from turngym.core.errors import TurngymError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class BatchError(TurngymError):
    """Episodes that cannot be trained on, or rows that do not belong to the batch."""


class EmptyBatchError(BatchError):
    """Episodes that hold nothing to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """One optimizer batch; the suffixes of its columns are those of the notation above.

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
    row_N: IntArray
    behavior_logp_N: FloatArray
    """Log-probability as sampled, nats; NaN where unknown."""
    temperature_N: NDArray[np.float64]
    """Temperature at which the policy drew the label, as its episode says; NaN where it does not."""
    off_policy_N: BoolArray
    """The label was chosen by a demonstrator."""
    reward_E: NDArray[np.float64]
    """Return: the sum of an episode's rewards."""
    success_E: BoolArray
    depth_E: IntArray
    """Number of turns played, demonstrated ones included."""
    truncated_E: BoolArray
    """Stopped by the trainer's depth cap (`truncated_depth`): has neither completed nor succeeded."""
    short_E: BoolArray
    """Played under a cap of its own below the step's (partial probes): trains, but never feeds a probe's statistics."""
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
    def response_N(self) -> IntArray:
        """A number for the response that each token is of: another for each turn of each episode."""
        return self.episode_N * (int(self.turn_N.max()) + 1) + self.turn_N

    @property
    def rows(self) -> int:
        """R."""
        return len(self.row_offsets) - 1

    @property
    def episodes(self) -> int:
        """E."""
        return len(self.reward_E)


def pack(episodes: Sequence[Episode], *, origins: Sequence[Origin] = ("policy",)) -> RolloutBatch:
    """Pack episodes into columns; supervised are the response tokens of turns whose origin is in `origins`.

    Of a response that a demonstrator began, its ids and the policy's own are told apart (`off_policy_N`).
    Error episodes are left out and counted. Observation, template and tool tokens are inputs only. Turns of origin
    "noise", turns that say why they are `excluded` and demonstrations that the environment refused are never
    supervised. Ids are taken as sampled; nothing is tokenized here.
    Source: docs/algorithms.md#supervised-tokens.
    Errors: `BatchError` for an unknown origin or a response that nothing precedes, `EmptyBatchError` for nothing to
    train on.
    """
    for origin in origins:
        if origin not in ("policy", "demonstration"):
            raise BatchError(
                f"cannot train on turns of origin {origin!r}; valid are 'policy' and 'demonstration' (noise never is)"
            )
    counted = [(source, episode) for source, episode in enumerate(episodes) if not episode.status.is_error]
    inputs: list[IntArray] = []
    labels: list[IntArray] = []
    predictors: list[IntArray] = []
    behavior: list[FloatArray] = []
    # (tokens, turn, episode, row, off policy) and the temperature of each run of labels
    spans: list[tuple[int, int, int, int, bool]] = []
    temperatures: list[float] = []
    length = 0
    for index, (_, episode) in enumerate(counted):
        start, segment = 0, -1
        for turn in episode.turns:
            if turn.origin not in origins or turn.excluded is not None or not turn.response_length or was_refused(turn):
                continue
            r0, r1 = turn.response_span
            if r0 == 0:
                raise BatchError(
                    f"episode {episode.task.task_id} sample {episode.sample}, turn {turn.index}: the response starts "
                    f"at position 0 of segment {turn.segment}, so nothing predicts its first token; a prompt must "
                    "precede it"
                )
            # a segment becomes a row with its first supervised turn; one without any is never read by the model
            if turn.segment != segment:
                start, segment = length, turn.segment
                inputs.append(np.asarray(episode.segments[segment], dtype=np.int64))
                length += len(inputs[-1])
            # NaN and not 0, which would claim that the token was certain
            logp = np.full(r1 - r0, np.nan, dtype=np.float32) if turn.logprobs is None else turn.logprobs
            temperature = drawn_at(episode, turn)
            # a demonstrator may have begun the response
            for origin, first, last in ("demonstration", 0, turn.begun), (turn.origin, turn.begun, r1 - r0):
                if origin not in origins or first == last:
                    continue
                # the label shift: a token is predicted at the position before it
                predictors.append(np.arange(start + r0 + first - 1, start + r0 + last - 1, dtype=np.int64))
                labels.append(np.asarray(episode.response_ids(turn)[first:last], dtype=np.int64))
                behavior.append(np.asarray(logp[first:last], dtype=np.float32))
                spans.append((last - first, turn.index, index, len(inputs) - 1, origin == "demonstration"))
                temperatures.append(np.nan if temperature is None else temperature)
    excluded = len(episodes) - len(counted)
    if not labels:
        full = sum(episode.status is Status.TRUNCATED_TOKENS and not episode.turns for episode in episodes)
        raise EmptyBatchError(
            f"nothing to train on: {len(episodes)} episodes, {excluded} of them errors, {full} whose first prompt left "
            f"no room for an answer, no response tokens of origin {' or '.join(origins)}; text-only episodes carry no "
            "token ids"
        )
    lengths = np.array([len(ids) for ids in inputs], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    row_M = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    # one number per turn until here; repeated over its tokens at once, not token by token
    count, *columns = np.array(spans, dtype=np.int64).T
    turn_N, episode_N, row_N, off_policy_N = (np.repeat(column, count) for column in columns)
    return RolloutBatch(
        input_ids_M=np.concatenate(inputs),
        row_M=row_M,
        position_M=np.arange(length, dtype=np.int64) - offsets[row_M],
        row_offsets=offsets,
        predictor_N=np.concatenate(predictors),
        label_N=np.concatenate(labels),
        turn_N=turn_N,
        episode_N=episode_N,
        row_N=row_N,
        behavior_logp_N=np.concatenate(behavior),
        temperature_N=np.repeat(np.array(temperatures, np.float64), count),
        off_policy_N=off_policy_N.astype(np.bool_),
        reward_E=np.array([e.episode_return for _, e in counted], dtype=np.float64),
        success_E=np.array([e.success for _, e in counted], dtype=np.bool_),
        depth_E=np.array([e.depth for _, e in counted], dtype=np.int64),
        truncated_E=np.array([e.status == Status.TRUNCATED_DEPTH for _, e in counted], dtype=np.bool_),
        short_E=np.array([SHORT in e.meta for _, e in counted], dtype=np.bool_),
        group_E=np.array([e.group for _, e in counted], dtype=np.int64),
        task_ids=tuple(e.task.task_id for _, e in counted),
        source_E=np.array([source for source, _ in counted], dtype=np.int64),
        excluded=excluded,
    )


def was_refused(turn: Turn) -> bool:
    """Whether the environment refused a demonstrator's action. Such a turn is not imitated."""
    return turn.origin == "demonstration" and not turn.verdict.valid


def is_trainable(turn: Turn) -> bool:
    """Whether the policy chose the turn, in tokens, and nothing has excluded it yet."""
    return turn.origin == "policy" and turn.excluded is None and turn.response_length > 0
