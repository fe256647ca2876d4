"""A policy gradient and a KL on a support in one token loss, each with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from turngym.trainers.algorithm import TokenLoss, TokenLosses, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """l_i = w_reward (policy gradient)_i + w_hint (support KL)_i, the second where `kl_mask` counts the token.

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
        own = {name: values * tokens.kl_mask_n for name, values in hint.diagnostics.items()}
        return TokenLosses(
            loss_n=self.w_reward * reward.loss_n + self.w_hint * hint.loss_n,
            diagnostics={**own, **reward.diagnostics},
        )
