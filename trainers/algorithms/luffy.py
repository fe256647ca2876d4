"""LUFFY: GRPO whose groups hold demonstrations, shaped so that unlikely expert tokens keep their gradient.

Read next: trainers/group_advantage.py, trainers/losses.py, agents/demonstrations.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from turngym.core.errors import SettingsError
from turngym.core.numbers import Count, NotNegative, Number, Positive, Share, Signed
from turngym.core.setting import Within
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, FixedDepth, TokenLosses, Tokens
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.group_advantage import ComparableGroups, SplitAdvantage
from turngym.trainers.losses import LOG_RATIO_LIMIT, check_clip, clipped_objective, kl_k3
from turngym.trainers.rewards import Reward
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.targets import WithReference
from turngym.trainers.token_losses import known_behavior, regularized
from turngym.trainers.token_weights import WEIGHTS

Shape = Literal["no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p_a"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """f(pi), per token, by `shape`; pi = exp(logp), no unit.

    no_reshape pi; logp w log pi; p_logp pi + w log pi; square_root sqrt(pi); pow pi^e; p_div_p_a pi / (pi + a).
    Source: [luffy] section 3.2; docs/algorithms.md#policy-shaping (a = 0.1 there; the other shapes are its code's).
    """

    shape: Shape = "p_div_p_a"
    a: float = 0.1
    """Constant a of p_div_p_a; above 0."""
    w: float = 1.0
    """Weight of logp (demonstrated tokens only) and p_logp."""
    e: float = 0.5
    """Exponent of pow; above 0."""

    def off_policy(self, logp_N: Tensor) -> Tensor:
        """f(pi) of tokens that a demonstrator chose: [N], with gradient. Their behavior probability is taken as 1."""
        if self.shape == "logp":
            return self.w * logp_N
        # powers are taken in the logarithm: sqrt has an infinite slope at pi = 0, exp(logp / 2) has none
        if self.shape == "square_root":
            return (0.5 * logp_N).exp()
        if self.shape == "pow":
            return (self.e * logp_N).exp()
        prob_N = logp_N.exp()
        if self.shape == "p_logp":
            return prob_N + self.w * logp_N
        return prob_N / (prob_N + self.a) if self.shape == "p_div_p_a" else prob_N

    def on_policy(self, logp_N: Tensor, old_logp_N: Tensor) -> Tensor:
        """The value in place of the ratio pi / pi_old: [N], with gradient, its logarithm cut to +-20.

        f(pi) / f(pi_old) where f is a power or a fraction; logp log pi - log pi_old, without w, as in the published
        code; p_logp the plain ratio plus w times that: a quotient of logarithms would turn its sign with them.
        """
        d_N = (logp_N - old_logp_N.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if self.shape == "logp":
            return d_N
        if self.shape == "p_logp":
            return d_N.exp() + self.w * d_N
        if self.shape in ("square_root", "pow"):
            return ((0.5 if self.shape == "square_root" else self.e) * d_N).exp()
        if self.shape == "no_reshape":
            return d_N.exp()
        old_N = old_logp_N.detach().exp()
        # f(pi) / f(old) = (pi / old) (old + a) / (pi + a): no quotient of two numbers that may both vanish
        return d_N.exp() * (old_N + self.a) / (logp_N.exp() + self.a)


def off_policy_loss(
    logp_N: Tensor, advantage_N: Tensor, reshape: Reshape, clamp: tuple[float | None, float | None] = (None, None)
) -> Tensor:
    """l_i = -A_i clamp(f(pi_i)) for tokens of a demonstration: [N], with gradient, not reduced.

    `clamp` are the least and the greatest f, None for no bound; a bound that binds stops the gradient.
    Source: [luffy] eq. 6; docs/algorithms.md#policy-shaping.
    """
    shaped_N = reshape.off_policy(logp_N)
    low, high = clamp
    if low is not None or high is not None:
        shaped_N = torch.clamp(shaped_N, min=low, max=high)
    # minus: descent raises f(pi) where the demonstration did better than the group
    return -advantage_N.detach() * shaped_N


def on_policy_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    reshape: Reshape,
    clip: tuple[float, float] | None = (0.2, 0.2),
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """l_i = max(-A r, -A clip(r, 1 - low, 1 + high)), r the (reshaped) ratio: loss [N] and clipped bool [N].

    `clip` None: l_i = -A r. `dual_clip` c: at most -A c where A < 0, with a `clip` or without.
    Source: [luffy] eq. 5; docs/algorithms.md#policy-shaping.
    """
    advantage_N = advantage_N.detach()
    ratio_N = reshape.on_policy(logp_N, old_logp_N)
    # without a clip: bounds that no ratio crosses
    low, high = (math.inf, math.inf) if clip is None else clip
    return clipped_objective(ratio_N, advantage_N, low, high, dual_clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPolicyGradient:
    """LUFFY: `on_policy_loss` where the policy chose the token, `off_policy_loss` where an expert did.

    Plus kl_coef KL_i (k3) - entropy_coef H_i on both. Source: [luffy] eq. 5, eq. 6; docs/algorithms.md#policy-shaping.
    Diagnostics: `clipped` (own tokens), `off_shaped` = f(pi) on demonstrated tokens, NaN elsewhere.
    """

    off: Reshape
    on: Reshape
    off_clamp: tuple[float | None, float | None] = (None, None)
    clip: tuple[float, float] | None = (0.2, 0.2)
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    dual_clip: float | None = None
    """The bound of `PolicyGradient`, on the policy's own tokens."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_clip(*self.clip)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.advantage_n is None:
            raise ValueError("a policy gradient needs targets with advantage_N")
        # a demonstrator does not sample: its tokens are scored at the distillation temperature, as the shaping assumes
        off_n = off_policy_loss(tokens.logp_n, tokens.advantage_n, self.off, self.off_clamp)
        behavior_n = known_behavior(tokens)
        on_n, clipped_n = on_policy_loss(
            tokens.sampled_logp_n, behavior_n, tokens.advantage_n, self.on, self.clip, self.dual_clip
        )
        more_n, diagnostics = regularized(tokens, self.kl_coef, kl_k3, self.entropy_coef)
        diagnostics["clipped"] = (clipped_n & ~tokens.off_policy_n).float()
        shaped_n = self.off.off_policy(tokens.logp_n.detach())
        diagnostics["off_shaped"] = torch.where(tokens.off_policy_n, shaped_n, torch.nan)
        # where() sends 0 * slope into the side not taken: both sides are kept finite above, or NaN would spread
        return TokenLosses(loss_n=torch.where(tokens.off_policy_n, off_n, on_n) + more_n, diagnostics=diagnostics)


WINDOWS = 10
"""Number of parts into which `linear_max` and `reverse_linear` cut the training."""


class PrefixSchedule(Spec):
    """Ratios in [low, high] for `count` prefixed episodes of each group.

    With t = min((step - 1) / steps, 1): random U(low, high); linear high (1 - t); in the i-th tenth of the training
    (from 0; a step on a border belongs to the earlier one) linear_max U(0, (10 - i) high / 10) and reverse_linear
    U(0, (i + 1) high / 10); fixed low + j (high - low) / (count - 1) for the j-th prefixed episode, high if there is
    only one.
    Source: [luffy] section 3.1; docs/algorithms.md#demonstration-prefixes.
    Differs from the paper: it has whole demonstrations only; the strategies are its published code's, where one
    prefixed episode divides by zero in `fixed`.
    """

    strategy: Literal["random", "linear", "linear_max", "reverse_linear", "fixed"] = "random"
    """How ratios follow the step."""
    count: Count = 1
    """Prefixed episodes per group (n_prefix)."""
    low: Share = 1.0
    """Smallest ratio."""
    high: Share = 1.0
    """Largest ratio. 1.0 is the whole demonstration."""
    steps: Within[Count] = 100
    """Steps over which linear strategies run (S)."""
    unit: Literal["turns", "tokens"] = "turns"
    """What a ratio is a share of. The demonstration's turns, or the tokens of its responses (the paper's code); then a
    prefix may end within a response, which the policy completes."""
    share: bool = False
    """One draw per group instead of one per prefixed episode."""
    seed: Number = 0
    """Seed of the random strategies."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise SettingsError(f"prefix ratios are {self.low} to {self.high}; valid: low <= high")

    def unread(self) -> Unread:
        if self.strategy in ("random", "fixed"):
            yield from needing("strategy linear, linear_max or reverse_linear", "steps")
        else:
            yield from needing("strategy random or fixed", "low")
        if self.strategy in ("linear", "fixed"):
            yield from needing("strategy random, linear_max or reverse_linear", "share", "seed")

    def __call__(self, step: int, groups: int) -> tuple[tuple[float, ...], ...]:
        """Returns the ratios [groups][count] of `step` (1-based)."""
        done = min((step - 1) / self.steps, 1.0)
        low, high = self.low, self.high
        if self.strategy == "linear":
            low = high = high * (1.0 - done)
        elif self.strategy in ("linear_max", "reverse_linear"):
            # whole numbers: a share in floating point would miss borders
            window = min(max(-(-(step - 1) * WINDOWS // self.steps) - 1, 0), WINDOWS - 1)
            parts = WINDOWS - window if self.strategy == "linear_max" else window + 1
            low, high = 0.0, high * parts / WINDOWS
        elif self.strategy == "fixed":
            width = (high - low) / max(self.count - 1, 1)
            # from above, so that the last one is exactly `high`, and an only one too
            return (tuple(high - width * (self.count - 1 - j) for j in range(self.count)),) * groups
        # a stream of its own for each step: a resumed run draws what it would have drawn
        drawn = np.random.default_rng([self.seed, step]).uniform(low, high, (groups, 1 if self.share else self.count))
        return tuple(tuple(float(value) for value in np.broadcast_to(row, self.count)) for row in drawn)


class LuffyConfig(Spec):
    """Learning to reason under off-policy guidance, in turns."""

    n: Number = 8
    """Episodes per task, prefixed ones included."""
    prefix: PrefixSchedule = PrefixSchedule()
    """Which of them begin with a demonstration, and how much of it."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    advantage: Literal["grpo_split", "grpo"] = "grpo_split"
    """Baseline from the policy's own episodes, or from all of the group."""
    scale: Literal["std", "none"] = "std"
    """Divide the advantage by the standard deviation, or not."""
    alpha: NotNegative = 1.0
    """Factor of the advantage on demonstrated tokens."""
    beta: NotNegative = 1.0
    """Factor of the advantage on the policy's own tokens."""
    shape: Shape = "p_div_p_a"
    """Shaping f of demonstrated tokens. It is applied to their probabilities."""
    a: Positive = 0.1
    """Constant a of p_div_p_a; above 0."""
    w: NotNegative = 1.0
    """Weight of the logarithm in logp and p_logp."""
    e: Positive = 0.5
    """Exponent of pow."""
    off_clamp: tuple[Signed | None, Signed | None] = (None, None)
    """Bounds of f; None for no bound."""
    on_shape: Shape = "no_reshape"
    """Shaping of the policy's own ratios, with the same a, w and e."""
    clip: tuple[NotNegative, NotNegative] | None = (0.2, 0.2)
    """Lower and upper clip of own ratios. Those of the policy's own tokens; None for no clip."""
    entropy_coef: NotNegative = 0.001
    """Weight of the entropy bonus."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the initial policy. It is k3, in the loss; 0 needs no copy of the policy."""
    kl_reward_coef: NotNegative = 0.0
    """What an episode's KL (k1, summed over its tokens) to the initial policy costs in its reward, as in the published
    code, whose runs have 0. Groups are filtered by the reward without it."""
    filter_groups: bool = True
    """Leave out groups of equal reward. Nothing tells episodes apart that are all worth the same by `reward`."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""

    def __post_init__(self) -> None:
        if self.n <= self.prefix.count:
            raise SettingsError(
                f"n is {self.n} with {self.prefix.count} prefixed episodes; a group needs at least 1 without a prefix"
            )

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef or self.kl_reward_coef)
        shapes = (self.shape, self.on_shape)
        if "p_div_p_a" not in shapes:
            yield from needing("shape or on_shape p_div_p_a", "a")
        if "pow" not in shapes:
            yield from needing("shape or on_shape pow", "e")
        if self.shape != "logp" and "p_logp" not in shapes:
            yield from needing("shape logp or p_logp, or on_shape p_logp", "w")


def build(config: LuffyConfig, context: BuildContext) -> Algorithm:
    """Mixed-policy gradient over the policy's episodes and demonstrated prefixes that it continues.

    Own tokens: max(-A r, -A clip(r)), r = pi / pi_old. Demonstrated tokens: -A f(pi), f(pi) = pi / (pi + 0.1), their
    behavior probability taken as 1. One mean over the tokens of both kinds, as in the paper (or what `weight` says),
    minus entropy_coef H.
    Source: [luffy] eq. 4, eq. 5, eq. 6; docs/algorithms.md#luffy.
    Differs from the paper: the baseline comes from own episodes and is divided by their deviation (`advantage=grpo`,
    `scale=none`); a prefix is whole turns of the expert, replayed in the environment so that observations stay true;
    groups whose rewards do not differ are left out, which the published code computes but never applies.
    """
    split = config.advantage == "grpo_split"
    signal = SplitAdvantage(
        reward=config.reward,
        scale=config.scale,
        split=split,
        alpha=config.alpha,
        beta=config.beta,
        kl_coef=config.kl_reward_coef,
    )
    return Algorithm(
        name="luffy",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=MixedPolicyGradient(
            off=Reshape(shape=config.shape, a=config.a, w=config.w, e=config.e),
            on=Reshape(shape=config.on_shape, a=config.a, w=config.w, e=config.e),
            off_clamp=config.off_clamp,
            clip=config.clip,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_coef,
        ),
        origins=("policy", "demonstration"),
        group=config.n,
        prefix=config.prefix,
        prefix_unit=config.prefix.unit,
        # an attempt that failed ones left alone has no contrast, and the split baseline needs own episodes
        select=ComparableGroups(reward=config.reward, spread=config.filter_groups, own=split),
        needs_teacher=False,
        needs_reference=bool(config.kl_coef or config.kl_reward_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="luffy",
    config=LuffyConfig,
    build=build,
    uses=frozenset({"expert", "reward", "shown", "reference", "surrogate"}),
)
