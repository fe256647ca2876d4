"""Signals: what a batch's tokens are compared with, found before any update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core import TurngymError
from turngym.envs.protocols import Scorer
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.pieces import Targets
from turngym.trainers.scorer import SupportScorer


class SignalError(TurngymError):
    """A teacher that is missing or answers something else than it was asked."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """The label itself is the target (supervised fine-tuning)."""

    def __call__(self, batch: RolloutBatch, *, teacher: Scorer | None, student: Scorer) -> Targets:
        return Targets()


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """The teacher's K most likely ids at each supervised position, and their log-probabilities."""

    k: int = 50

    def __call__(self, batch: RolloutBatch, *, teacher: Scorer | None, student: Scorer) -> Targets:
        ids, positions = rows(batch)
        found = _present(teacher).topk(ids, positions, self.k)
        return Targets(
            topk_ids_NK=_stack([item.ids for item in found], batch).astype(np.int64),
            topk_logp_NK=_stack([item.logp for item in found], batch).astype(np.float32),
        )


@dataclass(frozen=True, slots=True)
class StudentTopK:
    """The student's K most likely ids before the update, scored by the teacher (which must be a `SupportScorer`)."""

    k: int = 50

    def __call__(self, batch: RolloutBatch, *, teacher: Scorer | None, student: Scorer) -> Targets:
        ids, positions = rows(batch)
        support = [item.ids.astype(np.int64) for item in student.topk(ids, positions, self.k)]
        if not hasattr(_present(teacher), "gather"):
            raise SignalError(
                f"support=student needs a teacher that scores chosen ids; {type(teacher).__name__} has no gather()"
            )
        logp = cast(SupportScorer, teacher).gather(ids, positions, support)
        return Targets(topk_ids_NK=_stack(support, batch), topk_logp_NK=_stack(logp, batch).astype(np.float32))


@dataclass(frozen=True, slots=True)
class SampledAdvantage:
    """A_i = log q - log p on the sampled id, student detached and before the update."""

    def __call__(self, batch: RolloutBatch, *, teacher: Scorer | None, student: Scorer) -> Targets:
        ids, positions = rows(batch)
        theirs = _stack(_present(teacher).logprobs(ids, positions), batch)
        mine = _stack(student.logprobs(ids, positions), batch)
        return Targets(advantage_N=(theirs - mine).astype(np.float32))


def rows(batch: RolloutBatch) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64]]]:
    """Ids of each row and the positions of its labels; results row after row are in the order of N."""
    ids = [part.astype(np.int32) for part in np.split(batch.input_ids_M, batch.row_offsets[1:-1])]
    labels = batch.position_M[batch.predictor_N] + 1
    cuts = np.searchsorted(batch.row_N, np.arange(1, batch.rows))
    return ids, np.split(labels, cuts)


def _present(teacher: Scorer | None) -> Scorer:
    if teacher is None:
        raise SignalError("this algorithm compares the student with a teacher, and no teacher was given")
    return teacher


def _stack(parts: Sequence[NDArray[Any]], batch: RolloutBatch) -> NDArray[Any]:
    values = np.concatenate(parts)
    if len(values) != batch.tokens:
        raise SignalError(f"the scorer answered {len(values)} positions; {batch.tokens} were asked")
    if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise SignalError(
            f"the scorer answered {values[bad]!r} for token {bad} (turn {batch.turn_N[bad]} of "
            f"{batch.task_ids[batch.episode_N[bad]]}); log-probabilities must be finite"
        )
    return values
