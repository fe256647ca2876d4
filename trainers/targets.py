"""What each token of a batch is compared with, found before any update.

TeacherTopK, StudentTopK, SampledAdvantage      target functions that ask a teacher
WithReference, WithSequences                    what they add to the targets of another one
label_logprobs, rows, support_targets           how a batch is put to a scorer, and its answers become columns
initial_kl                                      how far each token is from the initial policy
distillation                                    target function and loss of opd, turnopd and tcod
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode, TopK
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.protocols import Scorer
from turngym.trainers.algorithm import Scorers, TargetFn, Targets, TokenLoss
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.losses import SEQUENCE, TAILS, JensenShannon, MixedKL, TokenKL, bin_forward_kl
from turngym.trainers.run_config import DistillConfig
from turngym.trainers.token_losses import ClippedAdvantage, PolicyGradient, SupportKL


class TargetError(TurngymError):
    """A teacher that is missing or answers something else than it was asked."""


@dataclass(frozen=True, slots=True)
class NoTargets:
    """The label itself is the target (supervised fine-tuning)."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        return Targets()


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """The teacher's K most likely ids at each supervised position, and their log-probabilities."""

    k: int = 50

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        ids, positions = rows(batch)
        return support_targets(given(scorers.teacher, "teacher").topk(ids, positions, self.k), batch)


@dataclass(frozen=True, slots=True)
class StudentTopK:
    """The student's K most likely ids before the update, scored by the teacher (whose `gather` looks them up)."""

    k: int = 50

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        ids, positions = rows(batch)
        support = [item.ids.astype(np.int64) for item in scorers.student.topk(ids, positions, self.k)]
        return support_targets(given(scorers.teacher, "teacher").gather(ids, positions, support), batch)


@dataclass(frozen=True, slots=True)
class SampledAdvantage:
    """A_i = log q - log p on the sampled id, nats, the student before the update; its mean is minus the reverse KL.

    Source: [minillm] eq. 2, [opd-post]; docs/algorithms.md#sampled-token-distillation.
    """

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        student_logp_N = label_logprobs(scorers.student, batch, "student")
        # teacher minus student: descent on -A raises what the teacher finds likelier than the student does
        return Targets(advantage_N=teacher_logp_N - student_logp_N, label_logp_N=teacher_logp_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithReference:
    """Another target function's targets, and the log-probabilities of the labels under the frozen initial policy."""

    target_fn: TargetFn

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        reference_logp_N = label_logprobs(scorers.reference, batch, "reference (the frozen initial policy)")
        return replace(targets, reference_logp_N=reference_logp_N.astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSequences:
    """Another target function's targets, and which tokens share one importance ratio: the column `sequence`.

    `turn`: those of a response; `episode`: all of an episode, which must then be one row (one segment), for a
    microbatch holds whole rows. Source: [gspo]; docs/algorithms.md#sequence-ratio.
    """

    target_fn: TargetFn
    unit: Literal["turn", "episode"]

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        sequence_N = batch.response_N if self.unit == "turn" else batch.episode_N
        if self.unit == "episode" and len(np.unique(batch.episode_N)) < batch.rows:
            raise TargetError(
                "ratio=episode needs episodes of one segment; a memory that rewrites the history makes several: take "
                "ratio=turn"
            )
        return replace(targets, extra={**targets.extra, SEQUENCE: sequence_N})


def given(scorer: Scorer | None, role: str) -> Scorer:
    if scorer is None:
        raise TargetError(f"this algorithm needs a {role}, and none was given")
    return scorer


def label_logprobs(scorer: Scorer | None, batch: RolloutBatch, role: str) -> NDArray[np.float32]:
    """Log-probability of each label under `scorer`, which plays `role`: float32 [N], nats.

    Raises TargetError where there is no such scorer, or it does not answer one finite number per token.
    """
    logp_N: NDArray[np.float32] = _stack(given(scorer, role).logprobs(*rows(batch)), batch)
    return logp_N


def initial_kl(batch: RolloutBatch, scorers: Scorers) -> NDArray[np.float64]:
    """log p - log pi_0 of each label, the k1 estimate of the KL to the initial policy: float64 [N], nats.

    The student is taken before the update: the estimate is a number that rewards subtract, not a loss.
    """
    student_N = label_logprobs(scorers.student, batch, "student").astype(np.float64)
    return student_N - label_logprobs(scorers.reference, batch, "reference (the frozen initial policy)")


def combined_advantage(
    reward_N: NDArray[np.float32], log_ratio_N: NDArray[np.float32], *, w_reward: float, w_teacher: float
) -> NDArray[np.float32]:
    """A_i = w_reward A^reward_i + w_teacher (log q - log p): float32 [N].

    `reward_N` is in whatever unit the reward's advantage has (standard deviations of its group), `log_ratio_N` in nats.
    Source: [openclaw-rl], [slime]; docs/contrib_algorithms.md#combined-advantage.
    """
    return (w_reward * reward_N + w_teacher * log_ratio_N).astype(np.float32)


def rows(batch: RolloutBatch) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64]]]:
    """Ids of each row and the positions of its labels; results row after row are in the order of N."""
    # without the first and last offset: np.split takes the inner borders only
    ids = [part.astype(np.int32) for part in np.split(batch.input_ids_M, batch.row_offsets[1:-1])]
    labels = batch.position_M[batch.predictor_N] + 1
    cuts = np.searchsorted(batch.row_N, np.arange(1, batch.rows))
    return ids, np.split(labels, cuts)


def support_targets(answers: Sequence[TopK], batch: RolloutBatch) -> Targets:
    """A teacher's answers, row after row, as the targets of a batch's tokens."""
    tails = [item.tail for item in answers if item.tail is not None]
    return Targets(
        topk_ids_NK=_stack([item.ids for item in answers], batch).astype(np.int64),
        topk_logp_NK=_stack([item.logp for item in answers], batch).astype(np.float32),
        topk_tail_N=_stack(tails, batch).astype(np.float32) if len(tails) == len(answers) else None,
    )


def _stack(parts: Sequence[NDArray[Any]], batch: RolloutBatch) -> NDArray[Any]:
    values = np.concatenate(parts)
    if len(values) != batch.tokens:
        raise TargetError(f"the scorer answered {len(values)} positions; {batch.tokens} were asked")
    # found here, with its token and task: later it would only be a loss that is NaN
    if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise TargetError(
            f"the scorer answered {values[bad]!r} for token {bad} (turn {batch.turn_N[bad]} of "
            f"{batch.task_ids[batch.episode_N[bad]]}); log-probabilities must be finite"
        )
    return values


def distillation(config: DistillConfig) -> tuple[TargetFn, TokenLoss]:
    """The signal and the token loss that opd, turnopd and tcod share.

    Reverse KL on a support S of K ids: l_i = sum_{S + tail} p (log p - log q), p student, q teacher, times the detached
    importance ratio; or the forward KL, sum_{S + tail} q (log q - log p), or a divergence between the two; or, in a
    sampled form, the clipped surrogate with A_i = log q - log p at the sampled id.
    Source: [gkd] Algorithm 1; docs/algorithms.md#opd.
    """
    if config.form == "sampled":
        return SampledAdvantage(), ClippedAdvantage(loss=PolicyGradient(clip=config.clip))
    signal = (TeacherTopK if config.support == "teacher" else StudentTopK)(config.top_k)
    return signal, support_kl(config)


def support_kl(config: DistillConfig) -> SupportKL:
    """The divergence on the support that the settings name; SettingsError for a tail that only the reverse KL has."""
    divergences: dict[str, TokenKL] = {
        "forward": bin_forward_kl,
        "jsd": JensenShannon(config.beta),
        "mixed": MixedKL(config.beta),
    }
    if config.form in divergences and config.tail != "bin":
        raise SettingsError(f"distill tail is {config.tail} with form {config.form}; valid: bin")
    return SupportKL(kl=divergences.get(config.form, TAILS[config.tail]), importance=config.importance)
