"""PRM-RL and OPD with hints in one: a judge's score on every turn, and a hinted teacher where the judge gave a hint.

Read next: trainers/algorithms/prm_rl.py, trainers/algorithms/opd_hints.py, trainers/algorithms/judge_targets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.numbers import BelowOne, NotNegative
from turngym.core.protocols import Position
from turngym.core.spec import Spec
from turngym.trainers.algorithm import Algorithm, FixedDepth, PrivilegedText, TokenLoss, TokenLosses, Tokens
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms.judge_targets import HintTargets
from turngym.trainers.judged_episodes import HintedTurns, ScoredTurns, masked
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import WithReference, support_kl
from turngym.trainers.token_losses import PolicyGradient, Regularized
from turngym.trainers.token_weights import WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredOrHinted:
    """Keeps the turns that either part can teach from (an `EpisodeFilter`); `scored` says which scores count.

    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    """

    scored: ScoredTurns = field(default_factory=ScoredTurns)

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        return masked(episodes, self.reasons)

    def reasons(self, episode: Episode) -> dict[int, str]:
        """Turn index -> why it is left out, for the policy's turns."""
        unhinted = HintedTurns().reasons(episode)
        return {index: reason for index, reason in self.scored.reasons(episode).items() if index in unhinted}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """l_i = w_reward (policy gradient)_i + w_hint (support KL)_i, the second where `kl_mask_N` counts the token.

    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    Diagnostics: those of both, `clipped` that of `loss`; those of `support` are 0 where it does not count.
    """

    loss: TokenLoss
    """The policy gradient."""
    support: TokenLoss
    w_reward: float = 1.0
    w_hint: float = 1.0

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.kl_mask_n is None:
            raise ValueError("a weighted sum needs targets with kl_mask_N: where the support counts")
        reward, hint = self.loss(tokens), self.support(tokens)
        # placeholders stand where no hint was given
        hint_numbers = {name: values * tokens.kl_mask_n for name, values in hint.diagnostics.items()}
        return TokenLosses(
            loss_n=self.w_reward * reward.loss_n + self.w_hint * hint.loss_n,
            diagnostics={**hint_numbers, **reward.diagnostics},
        )


class PrmOpdConfig(Spec):
    """A judge's scores and hints together."""

    form: Literal["sampled", "topk"] = "sampled"
    """What is minimized. `sampled`: one clipped surrogate on the weighted sum of both advantages; `topk`: the weighted
    sum of the score's surrogate and the reverse KL on the hinted teacher's top-K."""
    w_reward: NotNegative = 1.0
    """Weight of the judge's score."""
    w_hint: NotNegative = 1.0
    """Weight of the hinted teacher. It counts on turns with a hint."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.02
    """Weight of the KL to the initial policy. It is k3, cut to 10 nats."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    mask_neutral: bool = False
    """Leave out turns with score 0 and no hint."""
    position: Position = "last_user"
    """Which message gets the hint: the first observation, the last of role user, the last."""
    reject_below: BelowOne = 0.0
    """Probability where a hint's lesson ends. It teaches up to a response's first token that the hinted teacher gives
    less than this probability. 0: to the response's end."""
    weight: Literal["turn_mean", "trajectory", "token_mean"] = "turn_mean"
    """What counts the same. Every response, every episode or every token."""

    def __post_init__(self) -> None:
        if not self.w_reward + self.w_hint:
            raise SettingsError(f"w_reward is {self.w_reward} and w_hint {self.w_hint}; valid: not both 0")


def build(config: PrmOpdConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on A_i = w_reward s_t + w_hint h_t (log q(y_i | x', y_<i) - log p(y_i | x, y_<i)).

    s_t is the judge's score of the turn, h_t 1 where the judge's hint is in x', else 0. `topk`: l_i = w_reward
    surrogate(s_t) + w_hint h_t KL_S(p || q). Both plus kl_coef KL_i(policy, initial) - entropy_coef H_i. Turns that
    were neither scored nor hinted are left out. q is the frozen initial policy, or (`teacher`) a model of its own.
    Source: [openclaw-rl]; docs/algorithms.md#prm-opd.
    Differs from the paper: a turn with a hint has its score too, also a score of 0; no group. The code's top-K form
    takes the student's ids and, of several hints, the one whose teacher agrees most; this one the teacher's ids and the
    longest hint.
    """
    topk = config.form == "topk"
    privileged = PrivilegedText(position=config.position)
    signal = HintTargets(
        k=context.distill.top_k if topk else None,
        reject_below=config.reject_below,
        w_reward=config.w_reward,
        w_hint=config.w_hint,
        privileged=privileged,
    )
    loss: TokenLoss = PolicyGradient(clip=config.clip, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef)
    if topk:
        token_loss = WeightedSum(
            loss=PolicyGradient(clip=config.clip),
            support=support_kl(context.distill),
            w_reward=config.w_reward,
            w_hint=config.w_hint,
        )
        loss = Regularized(loss=token_loss, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef)
    return Algorithm(
        name="prm-opd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=loss,
        select=ScoredOrHinted(scored=ScoredTurns(mask_neutral=config.mask_neutral)),
        needs_teacher=context.has_teacher,
        judge="both",
        privileged=privileged,
        needs_reference=bool(config.kl_coef) or privileged.needs_reference(has_teacher=context.has_teacher),
        entropy_gradient=bool(config.entropy_coef),
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="prm-opd",
    config=PrmOpdConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "form", "judge", "expert", "reference", "surrogate"}),
)
