"""Returns and advantages per token, over an episode's supervised tokens; observation tokens between them are holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.trainers.algorithm import Scorers, Targets
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.group_advantage import AdvantageError
from turngym.trainers.targets import TargetError

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
Whitening = Literal["unbiased", "population", "none"]


def gae(
    reward_N: FloatN,
    value_N: FloatN,
    episode_N: IntN,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    cut_E: NDArray[np.bool_] | None = None,
) -> tuple[FloatN, FloatN]:
    """Generalized advantage estimation: advantages and returns, float64 [N].

    Tokens of one episode are adjacent and in order; the token after t is the next supervised one, however many
    observation tokens lie between. delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, both zero
    beyond the last token; return_t = A_t + V_t. An episode of which `cut_E` says that a limit broke it off would have
    gone on: V beyond its last token is not 0 but the value of that token, the last state that the critic has seen.
    Source: [gae] eq. 16, [ppo] eq. 11; docs/algorithms.md#generalized-advantage-estimation.
    Errors: AdvantageError for numbers that are not finite.
    """
    for name, values_N in (("reward", reward_N), ("value", value_N)):
        if len(bad := np.flatnonzero(~np.isfinite(values_N))):
            raise AdvantageError(
                f"the {name} of token {int(bad[0])} (episode {int(episode_N[bad[0]])}) is {values_N[bad[0]]}; "
                "it must be finite"
            )
    last_N = _is_last(episode_N)
    beyond_N = 0.0 if cut_E is None else np.where(cut_E[episode_N], value_N, 0.0)
    following_N = np.where(last_N, beyond_N, np.roll(value_N, -1))
    delta_N = (reward_N + gamma * following_N - value_N).tolist()
    advantage_N, carried = np.zeros(len(delta_N)), 0.0
    for token in reversed(range(len(delta_N))):
        # nothing is carried from one episode into the one before it
        carried = delta_N[token] + gamma * lam * (0.0 if last_N[token] else carried)
        advantage_N[token] = carried
    return advantage_N, advantage_N + value_N


def whiten(advantage_N: FloatN, kind: Whitening = "unbiased", eps: float = 1e-8) -> FloatN:
    """Advantages with mean 0 and standard deviation 1 over all tokens: float64 [N].

    `kind` says which deviation: unbiased (N - 1 in the divisor) or of the population (N); none leaves them as they are.
    """
    if kind == "none":
        return advantage_N
    # a single token has no unbiased deviation, and eps only guards a batch in which all advantages are equal
    ddof = int(kind == "unbiased" and len(advantage_N) > 1)
    return (advantage_N - advantage_N.mean()) / (advantage_N.std(ddof=ddof) + eps)


def rewards_to_go(reward_N: FloatN, episode_N: IntN, *, gamma: float = 1.0) -> FloatN:
    """R_t = sum over tokens t' >= t of the episode of gamma^(t' - t) r_t': float64 [N].

    Tokens of one episode are adjacent and in order. Errors: AdvantageError as `gae`.
    """
    # with values of 0 and lambda 1 the advantage is the discounted sum
    total_N, _ = gae(reward_N, np.zeros(len(reward_N)), episode_N, gamma=gamma, lam=1.0)
    return total_N


def minillm_returns(reward_N: FloatN, episode_N: IntN, *, gamma: float = 0.95) -> FloatN:
    """MiniLLM's length-normalized returns: float64 [N], reward per token.

    R_t = (sum over tokens t' >= t of the episode of gamma^(t' - t) r_t') / (number of tokens from t on): it is divided
    by a count, not by the discounted count. Tokens of one episode are adjacent and in order.
    Source: [minillm] section 2.2; docs/algorithms.md#minillm-returns.
    Errors: AdvantageError as `gae`.
    """
    left_N = rewards_to_go(np.ones(len(reward_N)), episode_N)
    return rewards_to_go(reward_N, episode_N, gamma=gamma) / left_N


def against_critic(
    reward_N: FloatN,
    batch: RolloutBatch,
    episodes: Sequence[Episode],
    scorers: Scorers,
    *,
    gamma: float,
    lam: float,
    bootstrap: bool,
    whitening: Whitening,
) -> Targets:
    """Whitened GAE of token rewards against the run's critic, and what the critic should have predicted.

    Source: [gae] eq. 16; docs/algorithms.md#generalized-advantage-estimation.
    Errors: TargetError without a critic, AdvantageError as `gae`.
    `bootstrap`: an episode that a limit broke off goes on with the critic's last value, and not with 0.
    """
    if scorers.critic is None:
        raise TargetError("this algorithm needs a critic, and none was given")
    value_N = scorers.critic(batch)
    cut_E = np.array([bootstrap and episodes[source].status.is_cut for source in batch.source_E], np.bool_)
    advantage_N, return_N = gae(
        reward_N, value_N.astype(np.float64), batch.episode_N, gamma=gamma, lam=lam, cut_E=cut_E
    )
    return Targets(
        advantage_N=whiten(advantage_N, whitening).astype(np.float32),
        return_N=return_N.astype(np.float32),
        value_N=value_N,
        reward=reward_N,
    )


def at_last_token(value_E: FloatN, episode_N: IntN) -> FloatN:
    """A number per episode, placed on its last supervised token and zero elsewhere: float64 [N]."""
    return np.where(_is_last(episode_N), value_E[episode_N], 0.0)


def of_next_token(value_N: FloatN, episode_N: IntN) -> FloatN:
    """The value of each token's successor in its episode, 0 behind the last: float64 [N]."""
    return np.where(_is_last(episode_N), 0.0, np.roll(value_N, -1))


def _is_last(episode_N: IntN) -> NDArray[np.bool_]:
    """Whether a token is the last supervised one of its episode: bool [N]."""
    return np.append(episode_N[1:] != episode_N[:-1], True)
