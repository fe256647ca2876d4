"""Target functions: what each token of a batch is compared with, found before any update.

grpo_advantage, grpo_split_advantage      rewards of episodes, compared within their group
TeacherTopK, SampledAdvantage, ...        target functions: a batch and its scorers to `Targets`
ComparableGroups                          which groups have something to compare
RewardedCollect                           a rollout source whose episodes are worth what a function says
gae, whiten, minillm_returns              returns and advantages per token
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.playing.timed_calls import STEP_TIMEOUT, CallResult, TimedCalls
from turngym.envs.core.episode import Episode, TopK, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import NamedReward
from turngym.envs.core.protocols import RolloutSource, Scorer
from turngym.envs.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm import Scorers, TargetFn, Targets, TokenLoss
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.config import ConfigError, DistillConfig
from turngym.trainers.losses import (
    SEQUENCE,
    TAILS,
    ClippedAdvantage,
    JensenShannon,
    MixedKL,
    SupportKL,
    TokenKL,
    bin_forward_kl,
    sampled_advantage,
)

FloatE = NDArray[np.float64]
GROUP_EPS = 1e-6
"""Added to a group's standard deviation."""


class AdvantageError(TurngymError):
    """Rewards or groups that give no advantage."""


def grpo_advantage(reward_E: FloatE, group_E: NDArray[np.int64], *, scale: str = "std") -> FloatE:
    """Group-relative advantages: float64 [E], in standard deviations (`scale="std"`) or reward units (`"none"`).

    A_j = (r_j - mean_g) / (std_g + 1e-6), std unbiased; a group of one has mean 0 and std 1.
    Source: [grpo] section 4.1.2; docs/algorithms.md#group-relative-advantage.
    Errors: AdvantageError for rewards that are not finite.
    """
    everyone = np.ones(len(reward_E), np.bool_)
    return grpo_split_advantage(reward_E, group_E, everyone, scale=scale)


def grpo_split_advantage(
    reward_E: FloatE, group_E: NDArray[np.int64], on_policy_E: NDArray[np.bool_], *, scale: str = "std"
) -> FloatE:
    """Group-relative advantages whose baseline comes from the policy's own episodes only: float64 [E].

    A_j = (r_j - mean_g) / (std_g + 1e-6), mean and unbiased std over the on-policy episodes of group g, for all of its
    episodes; std 0 counts as 1; a single on-policy episode has mean 0 and std 1.
    Source: [luffy] eq. 4; docs/algorithms.md#split-advantage.
    Differs from the paper: eq. 4 takes mean and deviation over all of the group; the split is its code's option.
    Errors: AdvantageError for a group without an on-policy episode, or rewards that are not finite.
    """
    _check_groups(reward_E, group_E, scale)
    advantage_E = np.zeros(len(reward_E))
    for group, members in _groups(group_E):
        own = reward_E[members & on_policy_E]
        if not len(own):
            raise AdvantageError(
                f"group {group} has {int(members.sum())} episodes, none of them on-policy: there is no baseline; "
                "leave at least one episode of every group without a demonstration"
            )
        mean, std = (float(own.mean()), float(own.std(ddof=1))) if len(own) > 1 else (0.0, 1.0)
        # equal rewards leave no spread to divide by: differences then stay in units of reward
        unit = ((std or 1.0) + GROUP_EPS) if scale == "std" else 1.0
        advantage_E[members] = (reward_E[members] - mean) / unit
    return advantage_E


def has_spread(reward_E: FloatE) -> bool:
    """Whether the rewards of one group differ by more than rounding does (1e-6, what is added to their deviation)."""
    return bool(np.ptp(reward_E) > GROUP_EPS)


def _groups(group_E: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    for group in np.unique(group_E):
        yield int(group), group_E == group


def _check_groups(reward_E: FloatE, group_E: NDArray[np.int64], scale: str) -> None:
    if scale not in ("std", "none"):
        raise AdvantageError(f"scale is {scale!r}; valid: std, none")
    if len(reward_E) != len(group_E):
        raise AdvantageError(f"there are {len(reward_E)} rewards and {len(group_E)} group numbers; they must pair up")
    bad = np.flatnonzero(~np.isfinite(reward_E))
    if len(bad):
        raise AdvantageError(f"the reward of episode {int(bad[0])} is {reward_E[bad[0]]}; rewards must be finite")


# What an episode is worth: the reward that group-relative algorithms optimize and filter by.

Reward = Literal["return", "success", "score"]


def episode_reward(episode: Episode, kind: Reward) -> float:
    """An episode's return, its score in [0, 1], or 1.0 for success."""
    if kind == "return":
        return episode.episode_return
    return float(episode.success) if kind == "success" else episode.score


def rewards(batch: RolloutBatch, episodes: Sequence[Episode], kind: Reward) -> NDArray[np.float64]:
    """`episode_reward` of each episode of the batch: float64 [E]."""
    return np.array([episode_reward(episodes[source], kind) for source in batch.source_E], np.float64)


def demonstrated(episode: Episode) -> bool:
    """Whether a demonstrator chose some of its turns, or began one."""
    return any(turn.origin == "demonstration" or turn.begun for turn in episode.turns)


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
        return support_targets(_present(scorers.teacher).topk(ids, positions, self.k), batch)


@dataclass(frozen=True, slots=True)
class StudentTopK:
    """The student's K most likely ids before the update, scored by the teacher (whose `gather` looks them up)."""

    k: int = 50

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        ids, positions = rows(batch)
        support = [item.ids.astype(np.int64) for item in scorers.student.topk(ids, positions, self.k)]
        return support_targets(_present(scorers.teacher).gather(ids, positions, support), batch)


@dataclass(frozen=True, slots=True)
class SampledAdvantage:
    """A_i = log q - log p on the sampled id, student detached and before the update."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        student_logp_N = label_logprobs(scorers.student, batch, "student")
        advantage_N = sampled_advantage(student_logp_N, teacher_logp_N)
        return Targets(advantage_N=advantage_N, label_logp_N=teacher_logp_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage:
    """Each episode's group-relative advantage on all of its tokens; `reward` names what an episode is worth."""

    reward: Reward = "return"
    scale: Literal["std", "none"] = "std"

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        advantage_E = grpo_advantage(reward_E, batch.group_E, scale=self.scale)
        return Targets(advantage_N=advantage_E[batch.episode_N].astype(np.float32), reward=reward_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAdvantage:
    """LUFFY's advantages: the baseline of a group comes from episodes without a demonstration (or from all of them).

    Times `alpha` on demonstrated tokens, `beta` on the policy's own. From the reward go `kl_coef` times the k1
    estimates of the KL to the initial policy, summed over an episode's tokens, the student taken before the update.
    """

    reward: Reward = "return"
    scale: Literal["std", "none"] = "std"
    split: bool = True
    alpha: float = 1.0
    beta: float = 1.0
    kl_coef: float = 0.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        own_E = np.ones(batch.episodes, np.bool_)
        if self.split:
            own_E = np.array([not demonstrated(episodes[source]) for source in batch.source_E], np.bool_)
        reward_E = rewards(batch, episodes, self.reward)
        if self.kl_coef:
            student_N = label_logprobs(scorers.student, batch, "student").astype(np.float64)
            kl_N = student_N - label_logprobs(scorers.reference, batch, "reference (the frozen initial policy)")
            reward_E = reward_E - self.kl_coef * np.bincount(batch.episode_N, kl_N, minlength=batch.episodes)
        advantage_E = grpo_split_advantage(reward_E, batch.group_E, own_E, scale=self.scale)
        factor_N = np.where(batch.off_policy_N, self.alpha, self.beta)
        advantage_N = (advantage_E[batch.episode_N] * factor_N).astype(np.float32)
        return Targets(advantage_N=advantage_N, reward=reward_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithReference:
    """Another target function's targets, and the log-probabilities of the labels under the frozen initial policy."""

    target_fn: TargetFn

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        found = label_logprobs(scorers.reference, batch, "reference (the frozen initial policy)")
        return replace(targets, reference_logp_N=found.astype(np.float32))


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


def label_logprobs(scorer: Scorer | None, batch: RolloutBatch, role: str) -> NDArray[np.float32]:
    """Log-probability of each label under `scorer`, which plays `role`: float32 [N], nats.

    Raises TargetError where there is no such scorer, or it does not answer one finite number per token.
    """
    if scorer is None:
        raise TargetError(f"this algorithm needs a {role}, and none was given")
    found: NDArray[np.float32] = _stack(scorer.logprobs(*rows(batch)), batch)
    return found


def rows(batch: RolloutBatch) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64]]]:
    """Ids of each row and the positions of its labels; results row after row are in the order of N."""
    # without the first and last offset: np.split takes the inner borders only
    ids = [part.astype(np.int32) for part in np.split(batch.input_ids_M, batch.row_offsets[1:-1])]
    labels = batch.position_M[batch.predictor_N] + 1
    cuts = np.searchsorted(batch.row_N, np.arange(1, batch.rows))
    return ids, np.split(labels, cuts)


def _present(teacher: Scorer | None) -> Scorer:
    if teacher is None:
        raise TargetError("this algorithm compares the student with a teacher, and no teacher was given")
    return teacher


def support_targets(found: Sequence[TopK], batch: RolloutBatch) -> Targets:
    """A teacher's answers, row after row, as the targets of a batch's tokens."""
    tails = [item.tail for item in found if item.tail is not None]
    return Targets(
        topk_ids_NK=_stack([item.ids for item in found], batch).astype(np.int64),
        topk_logp_NK=_stack([item.logp for item in found], batch).astype(np.float32),
        topk_tail_N=_stack(tails, batch).astype(np.float32) if len(tails) == len(found) else None,
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
        low, high = config.clip
        return SampledAdvantage(), ClippedAdvantage(eps_low=low, eps_high=high)
    signal = (TeacherTopK if config.support == "teacher" else StudentTopK)(config.top_k)
    return signal, support_kl(config)


def support_kl(config: DistillConfig) -> SupportKL:
    """The divergence on the support that the settings name; ConfigError for a tail that only the reverse KL has."""
    others: dict[str, TokenKL] = {
        "forward": bin_forward_kl,
        "jsd": JensenShannon(config.beta),
        "mixed": MixedKL(config.beta),
    }
    if config.form in others and config.tail != "bin":
        raise ConfigError(f"distill tail is {config.tail} with form {config.form}; valid: bin")
    return SupportKL(kl=others.get(config.form, TAILS[config.tail]), importance=config.importance)


def is_trainable(turn: Turn) -> bool:
    """Whether the policy chose the turn, in tokens, and nothing has excluded it yet."""
    return turn.origin == "policy" and turn.excluded is None and turn.response_length > 0


# Which of the collected episodes are trained on, where the episodes of a group are compared with each other.


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableGroups:
    """Implements `EpisodeFilter`: groups in which there is something to compare.

    Episodes that failed (status error) are left out first: they are no failures of the policy. Then go the groups of
    which less than two episodes are left, for a single one has no contrast. With `own`, groups without an episode that
    began without a demonstration go too, for there is no baseline. With `spread` go those in which all episodes are
    worth the same by `reward`, the reward that is optimized: all of their advantages are zero. Episodes that a limit
    cut short count with the reward that they reached. With `tokens` an episode is only compared if the policy chose
    tokens in it.
    Source: [dapo] section 3.2; docs/algorithms.md#group-filter.
    """

    reward: Reward = "return"
    spread: bool = True
    own: bool = False
    tokens: bool = False
    most: int | None = None
    """Keep only the first so many groups; None: all."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]:
        kept = [group for group, members in self._groups(episodes) if self._reason(members) is None][: self.most]
        return [episode for episode in episodes if self._counts(episode) and episode.group in kept]

    def row(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """How many groups of a step are kept, and why the others go."""
        groups = [members for _, members in self._groups(episodes)]
        found = Counter(self._reason(members) for members in groups)
        same = [members for members in groups if self._reason(members) == "uniform"]
        kept = found[None] if self.most is None else min(found[None], self.most)
        row = {"groups/kept": kept, "groups/lost": found["lost"]}
        if self.spread:
            solved = sum(all(episode.success for episode in members) for members in same)
            row |= {"groups/uniform": len(same), "groups/uniform_solved": solved}
        return row

    def _reason(self, members: Sequence[Episode]) -> str | None:
        """Why a group is left out; None where it is kept."""
        alone = len(members) < 2
        if alone or (self.own and all(demonstrated(episode) for episode in members)):
            return "lost"
        reward_E = np.array([episode_reward(episode, self.reward) for episode in members])
        return "uniform" if self.spread and not has_spread(reward_E) else None

    def _groups(self, episodes: Sequence[Episode]) -> Iterator[tuple[int, list[Episode]]]:
        for group in sorted({episode.group for episode in episodes}):
            yield group, [episode for episode in episodes if episode.group == group and self._counts(episode)]

    def _counts(self, episode: Episode) -> bool:
        if episode.status.is_error:
            return False
        return not self.tokens or any(is_trainable(turn) for turn in episode.turns)


# A rollout source whose episodes are worth what a function says, not what their environment paid.

PAID = "environment_return"
"""Key in `meta` of a rewarded episode: the return that its environment paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedCollect:
    """Implements `RolloutSource`: episodes of `collect` with `reward` as their return; failed ones stay as they are.

    An episode whose reward fails, or takes more than `timeout` seconds, becomes a failed one.
    So whatever reads a return reads the reward: advantages, group filters, terms of a teacher's algorithm, metrics. The
    environment's own return is kept in `meta`, and so is the reward's name; rewards of turns stay the environment's.
    """

    collect: RolloutSource
    reward: NamedReward
    timeout: float = STEP_TIMEOUT

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        episodes = self.collect(request)
        # a failed back end says nothing about the policy: there is nothing to reward
        played = [episode for episode in episodes if not episode.status.is_error]
        calls = TimedCalls(self.timeout, f"--reward {self.reward.name}")
        paid = iter(calls.run([partial(self.reward, episode) for episode in played]))
        calls.close()
        return [episode if episode.status.is_error else self._rewarded(episode, next(paid)) for episode in episodes]

    def _rewarded(self, episode: Episode, paid: CallResult) -> Episode:
        meta = {**episode.meta, PAID: episode.episode_return, "reward": self.reward.name}
        if paid.failure:
            return replace(episode, status=paid.status, meta={**meta, "error": paid.failure})
        return replace(episode, episode_return=paid.value, meta=meta)


# Returns and advantages per token, over an episode's supervised tokens; observation tokens between them are holes.

FloatN = NDArray[np.float64]
Whitening = Literal["unbiased", "population", "none"]
IntN = NDArray[np.int64]


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
    Errors: AdvantageError for shapes, factors or numbers that do not fit, or an episode whose tokens are not adjacent.
    """
    _check_returns(episode_N, gamma, {"reward": reward_N, "value": value_N})
    if not 0.0 <= lam <= 1.0:
        raise AdvantageError(f"lam is {lam}; valid: 0 to 1")
    place = _Grid(episode_N)
    last_N = _is_last(episode_N)
    beyond_N = 0.0 if cut_E is None else np.where(cut_E[episode_N], value_N, 0.0)
    following_N = np.where(last_N, beyond_N, np.roll(value_N, -1))
    delta = place.fill(reward_N + gamma * following_N - value_N)
    advantage, carried = np.zeros_like(delta), np.zeros(len(delta))
    for column in reversed(range(delta.shape[1])):
        carried = delta[:, column] + gamma * lam * carried
        # a shorter episode is padded on the right with zeros: nothing is carried out of the padding
        advantage[:, column] = carried
    advantage_N = place.take(advantage)
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


def minillm_returns(reward_N: FloatN, episode_N: IntN, *, gamma: float = 0.95) -> FloatN:
    """MiniLLM's length-normalized returns: float64 [N], reward per token.

    R_t = (sum over tokens t' >= t of the episode of gamma^(t' - t) r_t') / (number of tokens from t on): it is divided
    by a count, not by the discounted count. Tokens of one episode are adjacent and in order.
    Source: [minillm] section 2.2; docs/algorithms.md#minillm-returns.
    Errors: AdvantageError as `gae`.
    """
    zero_N = np.zeros(len(reward_N))
    # with values of 0 and lambda 1 the advantage is the discounted sum
    total_N, _ = gae(reward_N, zero_N, episode_N, gamma=gamma, lam=1.0)
    left_N, _ = gae(zero_N + 1.0, zero_N, episode_N, gamma=1.0, lam=1.0)
    return total_N / left_N


def at_last_token(value_E: FloatN, episode_N: IntN) -> FloatN:
    """A number per episode, placed on its last supervised token and zero elsewhere: float64 [N]."""
    return np.where(_is_last(episode_N), value_E[episode_N], 0.0)


def _is_last(episode_N: IntN) -> NDArray[np.bool_]:
    """Whether a token is the last supervised one of its episode: bool [N]."""
    return np.append(episode_N[1:] != episode_N[:-1], True)


class _Grid:
    """Ragged tokens as rows of a rectangle, one per episode, padded on the right with zeros."""

    def __init__(self, episode_N: IntN) -> None:
        first = np.flatnonzero(np.append(True, episode_N[1:] != episode_N[:-1]))
        if len(np.unique(episode_N)) != len(first):
            raise AdvantageError("the tokens of an episode are not adjacent; pass them in the order of the batch")
        lengths = np.diff(np.append(first, len(episode_N)))
        self.row_N = np.repeat(np.arange(len(first)), lengths)
        self.column_N = np.arange(len(episode_N)) - np.repeat(first, lengths)
        self.shape = (len(first), int(lengths.max()))

    def fill(self, values_N: FloatN) -> FloatN:
        grid = np.zeros(self.shape)
        grid[self.row_N, self.column_N] = values_N
        return grid

    def take(self, grid: FloatN) -> FloatN:
        taken: FloatN = grid[self.row_N, self.column_N]
        return taken


def _check_returns(episode_N: IntN, gamma: float, columns: dict[str, FloatN]) -> None:
    if not 0.0 <= gamma <= 1.0:
        raise AdvantageError(f"gamma is {gamma}; valid: 0 to 1")
    if not len(episode_N):
        raise AdvantageError("there are no tokens")
    for name, values_N in columns.items():
        if len(values_N) != len(episode_N):
            raise AdvantageError(f"{name} has {len(values_N)} tokens, the batch has {len(episode_N)}")
        bad = np.flatnonzero(~np.isfinite(values_N))
        if len(bad):
            raise AdvantageError(
                f"the {name} of token {int(bad[0])} (episode {int(episode_N[bad[0]])}) is {values_N[bad[0]]}; "
                "it must be finite"
            )
