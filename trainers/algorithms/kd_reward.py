"""Knowledge distillation as a reward: how likely the teacher finds what the student said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.protocols import Scorer
from turngym.trainers.algorithm import Scorers, TargetFn, Targets, TokenLoss, TokenLosses, Tokens
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.group_advantage import grpo_advantage
from turngym.trainers.losses import LOG_RATIO_LIMIT
from turngym.trainers.returns import Whitening, against_critic, at_last_token, minillm_returns, of_next_token, whiten
from turngym.trainers.run_config import RunConfig
from turngym.trainers.targets import TeacherTopK, label_logprobs
from turngym.trainers.token_losses import SupportKL


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherReward:
    """r_i = coef (log q(label_i), minus log p(label_i) with `student_entropy`): per token, nats."""

    coef: float = 1.0
    student_entropy: bool = False
    """Subtract the student's own log-probability: rewards then sum to minus the sampled reverse KL."""

    def __call__(self, batch: RolloutBatch, scorers: Scorers) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """The reward of every token, and the teacher's log-likelihood that it is made of: [N] each."""
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        # float64: sums over episodes of thousands of tokens are compared with each other
        reward_N = teacher_logp_N.astype(np.float64)
        if self.student_entropy:
            reward_N = reward_N - label_logprobs(scorers.student, batch, "student")
        return self.coef * reward_N, teacher_logp_N


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTeacherAdvantage:
    """Group-relative advantages of the teacher's log-likelihood of whole episodes.

    r_j = mean (or sum) over episode j's supervised tokens of the token reward, plus `env_coef` times its return. An
    episode without supervised tokens said nothing that could be rewarded: it is in no baseline. Where that leaves one
    episode of a group, its advantage is 0: it is its own mean.
    Source: [kd-rewards] Algorithm 1; docs/algorithms.md#teacher-reward.
    Differs from the paper: a mean over tokens by default (`pool=sum` is literal).
    """

    reward: TeacherReward
    pool: Literal["mean", "sum"] = "mean"
    env_coef: float = 0.0
    scale: Literal["std", "none"] = "std"

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        token_N, teacher_logp_N = self.reward(batch, scorers)
        count_E = np.bincount(batch.episode_N, minlength=batch.episodes)
        reward_E = np.bincount(batch.episode_N, weights=token_N, minlength=batch.episodes).astype(np.float64)
        if self.pool == "mean":
            reward_E = reward_E / np.maximum(count_E, 1)
        reward_E = reward_E + self.env_coef * batch.reward_E
        # log-likelihoods are below 0: an episode of no tokens, worth 0, would be the best of its group
        spoke = np.flatnonzero(count_E)
        group_e = batch.group_E[spoke]
        advantage_E = np.zeros(batch.episodes)
        # and a single one would get its raw log-likelihood, which is no contrast to anything
        shared_e = np.bincount(group_e)[group_e] > 1
        advantage_E[spoke] = np.where(shared_e, grpo_advantage(reward_E[spoke], group_e, scale=self.scale), 0.0)
        return Targets(
            advantage_N=advantage_E[batch.episode_N].astype(np.float32),
            label_logp_N=teacher_logp_N,
            reward=reward_E[spoke],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticAdvantage:
    """GAE of the token rewards against the critic; the episode's return, times `env_coef`, comes at its last token.

    So does -`text_coef` L_PT, once for every rollout, where there is a `text`: a number under the student before the
    update, through which no gradient flows. It is logged as `term/lpt`.
    Source: [kd-rewards] Algorithm 3, Algorithm 4; docs/algorithms.md#generalized-advantage-estimation.
    """

    reward: TeacherReward | None
    """None: only the environment's reward counts."""
    env_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    whiten: Whitening = "unbiased"
    bootstrap: bool = True
    """Whether an episode that a limit broke off goes on with the critic's last value, and not with 0."""
    text: Callable[[Scorer, int], float] | None = None
    """L_PT of a training step under a scorer, nats."""
    text_coef: float = 0.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_N, teacher_logp_N = (
            (np.zeros(batch.tokens), None) if self.reward is None else self.reward(batch, scorers)
        )
        once_E, log = self.env_coef * batch.reward_E, {}
        if self.text is not None:
            log["term/lpt"] = self.text(scorers.student, scorers.step)
            once_E = once_E - self.text_coef * log["term/lpt"]
        reward_N = reward_N + at_last_token(once_E, batch.episode_N)
        targets = against_critic(
            reward_N,
            batch,
            episodes,
            scorers,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=self.bootstrap,
            whitening=self.whiten,
        )
        return replace(targets, label_logp_N=teacher_logp_N, log=log)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniLlmAdvantage:
    """MiniLLM's advantages: length-normalized discounted returns of the token rewards, whitened; no critic.

    The episode's return, times `env_coef`, comes at its last token. With a `support` the teacher's rewards count from
    the next token on, and its likeliest ids are there for `SingleStep`.
    Source: [minillm] section 2.2; docs/algorithms.md#minillm-returns.
    """

    reward: TeacherReward
    env_coef: float = 0.0
    gamma: float = 0.95
    whiten: Whitening = "unbiased"
    support: int | None = None
    """How many of the teacher's ids; None: a token's own reward is in its return."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        token_N, teacher_logp_N = self.reward(batch, scorers)
        paid_N, top = at_last_token(self.env_coef * batch.reward_E, batch.episode_N), Targets()
        reward_N = token_N + paid_N
        return_N = minillm_returns(reward_N, batch.episode_N, gamma=self.gamma)
        if self.support is not None:
            top = TeacherTopK(self.support)(batch, episodes, scorers)
            # what the environment pays has no mean that is known: it stays where it is
            later_N, once_N = (minillm_returns(part, batch.episode_N, gamma=self.gamma) for part in (token_N, paid_N))
            return_N = of_next_token(later_N, batch.episode_N) + once_N
        advantage_N = whiten(return_N, self.whiten).astype(np.float32)
        return replace(top, advantage_N=advantage_N, label_logp_N=teacher_logp_N, reward=reward_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStep:
    """l_i = loss_i + coef KL_S(p || q)_i, nats: minus the exact mean of the token's own reward, log q - log p.

    S is the teacher's likeliest ids and a bin of all others. The token that was drawn does not matter here, so no
    importance ratio does. Source: [minillm] section 2.2; docs/algorithms.md#minillm-returns.
    Diagnostics: those of `loss` and of `SupportKL`.
    """

    loss: TokenLoss
    coef: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        inner, exact = self.loss(tokens), SupportKL(importance=None)(tokens)
        loss_n = inner.loss_n + self.coef * exact.loss_n
        return TokenLosses(loss_n=loss_n, diagnostics={**exact.diagnostics, **inner.diagnostics})


def mixture_weight(
    student_logp_N: NDArray[np.float64], teacher_logp_N: NDArray[np.float64], share: float
) -> NDArray[np.float64]:
    """How much more likely the student alone chooses a token than teacher and student mixed: float64 [N].

    w_i = p / ((1 - share) p + share q) = 1 / (1 - share + share exp(log q - log p)), the log-ratio cut to +-20; at most
    1 / (1 - share). Its mean over tokens of the mixture is 1.
    Source: [minillm] eq. 5, by token as the paper approximates it; docs/algorithms.md#teacher-mixed-sampling.
    """
    # cut before exp, which overflows; beyond e^20 the weight is all but 0
    log_ratio_N = np.clip(teacher_logp_N - student_logp_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return 1.0 / (1.0 - share + share * np.exp(log_ratio_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeighted:
    """Another target function's advantages times `mixture_weight`: the teacher chose a `share` of the tokens.

    Teacher and student score the labels once more.
    Source: [minillm] eq. 5; docs/algorithms.md#teacher-mixed-sampling.
    """

    target_fn: TargetFn
    share: float

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        assert targets.advantage_N is not None
        student_logp_N = label_logprobs(scorers.student, batch, "student").astype(np.float64)
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher").astype(np.float64)
        weight_N = mixture_weight(student_logp_N, teacher_logp_N, self.share)
        return replace(targets, advantage_N=(targets.advantage_N * weight_N).astype(np.float32))


def mixed(target_fn: TargetFn, share: float, run: RunConfig) -> TargetFn:
    """`target_fn` for rollouts of which the teacher chooses a `share`; itself where that is 0.

    Raises SettingsError for a rollout at another temperature than models are scored at.
    """
    if not share:
        return target_fn
    if run.temperature != 1.0:
        raise SettingsError(f"teacher_mix needs --temperature 1, at which models are scored; it is {run.temperature}")
    return MixtureWeighted(target_fn=target_fn, share=share)
