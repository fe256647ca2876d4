"""PRM-RL and OPD with hints in one: a judge's score on every turn, and a hinted teacher where the judge gave a hint.

Read next: trainers/algorithms/prm_rl.py, trainers/algorithms/opd_hints.py, trainers/algorithms/judge_targets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.episode import Episode, Turn
from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, FixedDepth, Scorers, TargetFn, Targets, TokenLoss
from turngym.trainers.algorithms.grpo_opd import WeightedSum, combined_advantage
from turngym.trainers.algorithms.judge_targets import (
    TurnScore,
    batch_turns,
    hint_teacher,
    hinted_topk,
    score_turns,
    up_to_rejection,
)
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.config import ConfigError, DistillConfig, RunConfig, fingerprint
from turngym.trainers.judged import HintedTurns, ScoredTurns, without
from turngym.trainers.losses import TAILS, PolicyGradient, Regularized, SupportKL, sampled_advantage
from turngym.trainers.targets import WithReference, label_logprobs
from turngym.trainers.token_weights import WEIGHTS

Located = tuple[Episode, Turn, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredOrHinted:
    """Keeps the turns that either part can teach from (an `EpisodeFilter`); `scored` says which scores count.

    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    """

    scored: ScoredTurns = field(default_factory=ScoredTurns)

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [kept for episode in episodes if (kept := without(episode, self.reasons(episode))) is not None]

    def reasons(self, episode: Episode) -> dict[int, str]:
        """Turn index -> why it is left out, for the policy's turns."""
        unhinted = HintedTurns().reasons(episode)
        return {index: reason for index, reason in self.scored.reasons(episode).items() if index in unhinted}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAndHint:
    """A_i = w_reward s_t + w_hint h_t (log q(label_i | prompt with the hint) - log p(label_i | prompt)), in one column.

    s_t as in `TurnScore`; h_t is 1 on turns with `hint_prompt_ids`, else 0; q and p as in `HintAdvantage`.
    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    Raises TargetError for a teacher that does not answer exactly R finite log-probabilities for R tokens.
    """

    w_reward: float = 1.0
    w_hint: float = 1.0
    reject_below: float = 0.0
    """As of `HintAdvantage`; the score still counts there."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        score_N = _scores(batch, episodes, scorers)
        hinted = _hinted(batch, episodes)
        if not hinted:
            return Targets(advantage_N=np.float32(self.w_reward) * score_N)
        where_N = _where(batch, hinted)
        student_logp_N = label_logprobs(scorers.student, batch, "student")
        # as likely as the student finds it where nobody was told anything: a log-ratio of 0
        teacher_logp_N = student_logp_N.copy()
        teacher_logp_N[where_N] = score_turns(hinted, hint_teacher(scorers).logprobs)
        ratio_N = sampled_advantage(student_logp_N, teacher_logp_N)
        if self.reject_below:
            ratio_N[~up_to_rejection(batch, episodes, teacher_logp_N, self.reject_below) & where_N] = 0.0
        advantage_N = combined_advantage(score_N, ratio_N, w_reward=self.w_reward, w_teacher=self.w_hint)
        return Targets(advantage_N=advantage_N, label_logp_N=teacher_logp_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAndHintTopK:
    """`TurnScore`'s advantage, and on hinted turns the hinted teacher's K most likely ids; `kl_mask_N` says where.

    Elsewhere the support is a placeholder that the mask takes out.
    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    """

    k: int = 50
    reject_below: float = 0.0
    """As of `HintTopK`; the score still counts there."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        hinted = _hinted(batch, episodes)
        where_N = _where(batch, hinted)
        # half of the mass on K ids, so that every form of the KL is finite there
        ids_NK = np.tile(np.arange(self.k, dtype=np.int64), (batch.tokens, 1))
        logp_NK = np.full((batch.tokens, self.k), -np.log(2 * self.k), np.float32)
        kl_mask_N = where_N
        if hinted:
            asked = max(self.k, int(1 / self.reject_below)) if self.reject_below else self.k
            ids_HK, logp_HK = hinted_topk(hinted, scorers, asked)
            ids_NK[where_N], logp_NK[where_N] = ids_HK[:, : self.k], logp_HK[:, : self.k]
            if self.reject_below:
                label_N = np.zeros(batch.tokens, np.float32)
                own_HK = ids_HK == batch.label_N[where_N][:, None]
                label_N[where_N] = np.where(own_HK, logp_HK, -np.inf).max(axis=1)
                kl_mask_N = where_N & up_to_rejection(batch, episodes, label_N, self.reject_below)
        scored = TurnScore()(batch, episodes, scorers)
        return replace(scored, topk_ids_NK=ids_NK, topk_logp_NK=logp_NK, kl_mask_N=kl_mask_N)


def _scores(batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> NDArray[np.float32]:
    found = TurnScore()(batch, episodes, scorers).advantage_N
    assert found is not None
    return found


def _hinted(batch: RolloutBatch, episodes: Sequence[Episode]) -> list[Located]:
    """The batch's turns with a hint in their prompt."""
    return [place for place in batch_turns(batch, episodes) if place[1].hint_prompt_ids is not None]


def _where(batch: RolloutBatch, turns: Sequence[Located]) -> NDArray[np.bool_]:
    """bool [N]: the tokens of `turns`."""
    where_N = np.zeros(batch.tokens, np.bool_)
    for _, _, tokens in turns:
        where_N[tokens] = True
    return where_N


@dataclass(frozen=True, slots=True, kw_only=True)
class PrmOpdConfig:
    """A judge's scores and hints together."""

    form: Literal["sampled", "topk"] = "sampled"
    """`sampled`: one clipped surrogate on the weighted sum of both advantages; `topk`: the weighted sum of the score's
    surrogate and the reverse KL on the hinted teacher's top-K."""
    w_reward: float = 1.0
    """Weight of the judge's score."""
    w_hint: float = 1.0
    """Weight of what the hinted teacher says, on turns with a hint."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    kl_coef: float = 0.02
    """Weight of the KL (k3, cut to 10 nats) to the initial policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mask_neutral: bool = False
    """Also leave out turns with a score of 0 and no hint."""
    hint_position: Literal["last_user", "last_message"] = "last_user"
    """Which message gets the hint; they differ where observations are tool results."""
    reject_below: float = 0.0
    """A hint teaches up to a response's first token that the hinted teacher gives less than this probability. 0: to the
    response's end."""
    weight: Literal["turn_mean", "trajectory", "token_mean"] = "turn_mean"
    """Whether every response, every episode or every token counts the same."""

    def __post_init__(self) -> None:
        if min(self.w_reward, self.w_hint) < 0 or not self.w_reward + self.w_hint:
            raise ConfigError(
                f"w_reward is {self.w_reward} and w_hint {self.w_hint}; valid: at least 0, and not both 0"
            )
        # the teacher is asked for its 1 / reject_below most likely ids
        if self.reject_below and not 0.001 <= self.reject_below < 1.0:
            raise ConfigError(f"reject_below is {self.reject_below}; valid: 0, or 0.001 to below 1")


def build(config: PrmOpdConfig, distill: DistillConfig, run: RunConfig, *, teacher: bool = False) -> Algorithm:
    """Clipped policy gradient on A_i = w_reward s_t + w_hint h_t (log q(y_i | x', y_<i) - log p(y_i | x, y_<i)).

    s_t is the judge's score of the turn, h_t 1 where the judge's hint is in x', else 0. `topk`: l_i = w_reward
    surrogate(s_t) + w_hint h_t KL_S(p || q). Both plus kl_coef KL_i(policy, initial) - entropy_coef H_i. Turns that
    were neither scored nor hinted are left out. q is the frozen initial policy, or (`teacher`) a model of its own.
    Source: [openclaw-rl]; docs/algorithms.md#prm-opd.
    Differs from the paper: a turn with a hint has its score too, also a score of 0; no group. The code's top-K form
    takes the student's ids and, of several hints, the one whose teacher agrees most; this one the teacher's ids and the
    longest hint.
    """
    low, high = config.clip
    signal: TargetFn = ScoreAndHint(w_reward=config.w_reward, w_hint=config.w_hint, reject_below=config.reject_below)
    loss: TokenLoss = PolicyGradient(
        eps_low=low, eps_high=high, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef
    )
    if config.form == "topk":
        signal = ScoreAndHintTopK(k=distill.top_k, reject_below=config.reject_below)
        both = WeightedSum(
            loss=PolicyGradient(eps_low=low, eps_high=high),
            support=SupportKL(tail=TAILS[distill.tail], importance=distill.importance),
            w_reward=config.w_reward,
            w_hint=config.w_hint,
        )
        loss = Regularized(loss=both, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef)
    return Algorithm(
        name="prm-opd",
        depth=FixedDepth(h_max=run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=loss,
        select=ScoredOrHinted(scored=ScoredTurns(mask_neutral=config.mask_neutral)),
        needs_teacher=teacher,
        judge="both",
        hint_position=config.hint_position,
        needs_reference=bool(config.kl_coef) or not teacher,  # without a teacher it reads the hints
        entropy_gradient=bool(config.entropy_coef),
        distill_temperature=distill.temperature,
        settings={**fingerprint(config), **fingerprint(distill)},
    )


ALGORITHM = AlgorithmSpec(
    name="prm-opd",
    config=PrmOpdConfig,
    build=lambda config, given: build(config, given.distill, given.run, teacher=given.has_teacher),
    uses=frozenset({"teacher", "distill", "judge", "expert"}),
)
