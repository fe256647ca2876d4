"""What methods share that compare a reward within the group, and add to it what a told policy says.

sdar, rlsd, skill-sd, opid and agent-opsd: who is told, their targets, their settings, and how they are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.core import Episode, Group, NotNegative, Position, Spec
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    ComparableGroups,
    FixedDepth,
    GroupAdvantage,
    PolicyGradient,
    PrivilegedLogprobs,
    PrivilegedText,
    Reader,
    Reward,
    RolloutBatch,
    Scorers,
    TargetFn,
    Targets,
    TokenLoss,
    TokenLosses,
    Tokens,
    WithReference,
    privileged_logprobs,
    tables_of,
)

LOGP, WHERE = "told_logp", "told"
"""The columns of `Targets.extra` that `WithPrivileged` adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithPrivileged:
    """Another target function's targets, and the reader's log-probabilities of the labels: the columns `told_logp`
    (where nothing was told: the student's) and `told`, 1 where something was, else 0."""

    target_fn: TargetFn
    privileged: PrivilegedText

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        privileged = privileged_logprobs(batch, episodes, scorers, self.privileged)
        extra = {LOGP: privileged.privileged_N, WHERE: privileged.where_N.astype(np.float32)}
        return replace(targets, extra={**targets.extra, **extra}, label_logp_N=privileged.privileged_N)


def with_told(inner: TokenLosses, tokens: Tokens, more_n: Tensor, **shown: Tensor) -> TokenLosses:
    """`inner` plus `more_n` where the turn was told something; there `shown` and `told_gap` (log q - log p, nats) are
    diagnostics, NaN elsewhere."""
    told_n = tokens.extra[WHERE]
    shown["told_gap"] = tokens.extra[LOGP] - tokens.logp_n.detach()
    diagnostics = {name: torch.where(told_n > 0, value, torch.nan) for name, value in shown.items()}
    return TokenLosses(loss_n=inner.loss_n + told_n * more_n, diagnostics={**inner.diagnostics, **diagnostics})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegedAdvantage:
    """Another target function's advantages, changed by what the reader finds: `change(advantage_N, logp, batch, step)`
    gives float64 [N]; the step is 1-based."""

    target_fn: TargetFn
    privileged: PrivilegedText
    change: Callable[[NDArray[np.float64], PrivilegedLogprobs, RolloutBatch, int], NDArray[np.float64]]

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        targets = self.target_fn(batch, episodes, scorers)
        assert targets.advantage_N is not None
        privileged = privileged_logprobs(batch, episodes, scorers, self.privileged)
        changed_N = self.change(targets.advantage_N.astype(np.float64), privileged, batch, scorers.step)
        return replace(targets, advantage_N=changed_N.astype(np.float32), label_logp_N=privileged.privileged_N)


class PrivilegedGroupConfig(Spec):
    """What methods share that compare a reward within a group, and use what a told policy finds beside it.

    Differs from the papers, whose code builds on one harness: there every turn is a row, so a group's mean and
    deviation are over turns (`group_over` turns), and the penalty of an invalid action lowers its own row; here it
    lowers the episode's return. There a dual clip of 3 is always on (`dual_clip = 3`), here where episodes may be
    stale.
    """

    n: Group = 8
    """Episodes per task. They are one group."""
    reader: Reader = "live"
    """Who is told. The student as it is before the update, or the initial policy (with --reference-every K the student
    of up to K steps before, with --reference-rate a moving average)."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    group_over: Literal["episodes", "turns"] = "episodes"
    """What a group's mean and deviation are over. Episodes, or their turns, so that long episodes count more, as
    published."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the initial policy. It is k3; in Search 0.001 was published."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""
    position: Position = "opening"
    """Which message gets what the student is not told: the first observation, the last of role user, the last."""

    def unread(self) -> Iterator[tuple[str, str]]:
        """Settings of the initial policy, which nothing reads if it is not needed."""
        if not self.kl_coef and self.reader == "live":
            yield from ((name, "kl_coef above 0, or reader initial") for name in ("../frozen", "../reference"))

    @property
    def privileged(self) -> PrivilegedText:
        """Where the text is put, and who reads it."""
        return PrivilegedText(position=self.position, reader=self.reader)

    def compared(self, scale: Literal["std", "none"] = "std") -> GroupAdvantage:
        """The group-relative advantage, divided by what `scale` names."""
        return GroupAdvantage(reward=self.reward, scale=scale, over=self.group_over)

    @property
    def surrogate(self) -> PolicyGradient:
        """The clipped policy gradient, with the KL to the initial policy."""
        return PolicyGradient(clip=self.clip, kl_coef=self.kl_coef)


def privileged_group(
    config: PrivilegedGroupConfig, context: BuildContext, *, name: str, target_fn: TargetFn, token_loss: TokenLoss
) -> Algorithm:
    """The composition that these methods share.

    Groups of equal reward stay: what was told may teach there. Student and reader are compared at temperature 1.
    """
    return Algorithm(
        name=name,
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=target_fn) if config.kl_coef else target_fn,
        weight=WEIGHTS[config.weight],
        token_loss=token_loss,
        group=config.n,
        select=ComparableGroups(spread=False),
        needs_teacher=False,
        judge="hint",
        privileged=config.privileged,
        needs_reference=bool(config.kl_coef) or config.privileged.needs_reference(has_teacher=False),
        settings=tables_of(config),
    )


def told_in_groups(
    name: str, config: type[PrivilegedGroupConfig], build: Callable[[Any, BuildContext], Algorithm]
) -> AlgorithmSpec:
    """One of these methods: all read the same settings besides their own."""
    return AlgorithmSpec(
        name=name, config=config, build=build, uses=frozenset({"judge", "expert", "reward", "reference", "surrogate"})
    )
