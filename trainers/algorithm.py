"""What an algorithm is made of: a depth controller, a target function, a token weight and a token loss.

The training loop knows these protocols and no algorithm by name: something new is a new part, not a branch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.core.episode import Episode, Origin
from turngym.core.plugin_values import failures_of
from turngym.core.plugins import find
from turngym.core.protocols import Position, Question, Scorer
from turngym.core.redaction import brief
from turngym.core.spec import SettingsError, Spec
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.ranks import Ranks
from turngym.trainers.run_config import CriticConfig, DistillConfig, LmLossConfig, RunConfig

WeightArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the target function says about each supervised token; None where the algorithm has no use for it."""

    topk_ids_NK: NDArray[np.int64] | None = None
    topk_logp_NK: NDArray[np.float32] | None = None
    """Teacher log-probabilities of `topk_ids_NK`, nats."""
    topk_tail_N: NDArray[np.float32] | None = None
    """Teacher log-probability of all other ids together, nats; None: what `topk_logp_NK` leaves of 1."""
    advantage_N: NDArray[np.float32] | None = None
    reference_logp_N: NDArray[np.float32] | None = None
    """Log-probability of the labels under the frozen initial policy, nats."""
    return_N: NDArray[np.float32] | None = None
    """What a critic should have predicted."""
    value_N: NDArray[np.float32] | None = None
    """What it did predict, before any update."""
    kl_mask_N: NDArray[np.bool_] | None = None
    """Whether the support KL counts the token; None: it counts all."""
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further columns [N] or [N, ...] by name, for a token loss that knows them: it finds them in `Tokens.extra`."""
    label_logp_N: NDArray[np.float32] | None = None
    """Log-probability of the labels under the teacher, nats; only for the log."""
    reward: NDArray[np.float64] | None = None
    """What was rewarded, one number per episode or per token; only for the log."""
    log: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the step, by their names in metrics.jsonl."""

    def select(self, tokens: NDArray[np.int64]) -> Targets:
        """The targets of some tokens."""
        names = [item.name for item in fields(self) if item.name.endswith(("_N", "_NK"))]
        columns = {name: column[tokens] for name in names if (column := getattr(self, name)) is not None}
        return replace(self, **columns, extra={name: column[tokens] for name, column in self.extra.items()})


# What the parts of an algorithm give, taken by shape and type: what broadcasts would train on other numbers in silence.


def checked_targets(targets: Any, tokens: int, algorithm: str) -> Targets:
    """What a target function returned. Raises SettingsError where a column of it is no array of so many `tokens`."""
    if not isinstance(targets, Targets):
        raise SettingsError(f"algorithm {algorithm}: its target_fn returned {type(targets).__name__}; valid: Targets")
    columns = {item.name: getattr(targets, item.name) for item in fields(targets) if item.name.endswith(("_N", "_NK"))}
    for name, column in (columns | {f"extra[{name!r}]": column for name, column in targets.extra.items()}).items():
        if column is None:
            continue
        if not isinstance(column, np.ndarray):
            raise SettingsError(f"algorithm {algorithm}: its {name} is {type(column).__name__}; valid: a NumPy array")
        # a further column may have any axes after the first
        axes = column.ndim if name.startswith("extra") else 2 if name.endswith("_NK") else 1
        if column.shape[:1] != (tokens,) or column.ndim != axes:
            valid = f"[{tokens}, K]" if name.endswith("_NK") else f"[{tokens}]"
            raise SettingsError(
                f"algorithm {algorithm}: its {name} has the shape {list(column.shape)}; valid: {valid}, a row for each "
                "supervised token"
            )
        if column.dtype.kind not in "fiub":
            raise SettingsError(f"algorithm {algorithm}: its {name} holds {column.dtype}; valid: numbers")
    reward = targets.reward
    if reward is not None and not (isinstance(reward, np.ndarray) and reward.ndim == 1 and reward.dtype.kind in "fiub"):
        valid = "an array of numbers, one for each episode or token"
        raise SettingsError(f"algorithm {algorithm}: its reward is {brief(reward, 80)}; valid: {valid}")
    ids, logp = targets.topk_ids_NK, targets.topk_logp_NK
    if (None if ids is None else ids.shape) != (None if logp is None else logp.shape):
        raise SettingsError(
            f"algorithm {algorithm}: its topk_ids_NK and topk_logp_NK have different shapes; valid: one"
        )
    return targets


def selected(algorithm: Algorithm, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that a filter keeps; all without one. Raises SettingsError where it gives anything else."""
    if algorithm.select is None:
        return list(episodes)
    # typed, but another package's
    found: Any = algorithm.select(episodes)
    if not isinstance(found, list | tuple) or not all(isinstance(one, Episode) for one in found):
        said = f"its select gave {brief(found, 80)}; valid: a list of episodes"
        raise SettingsError(f"algorithm {algorithm.name}: {said}")
    return list(found)


def with_own_numbers(
    row: Mapping[str, Any], algorithm: Algorithm, episodes: Sequence[Episode], log: Mapping[str, Any]
) -> dict[str, Any]:
    """A step's `row` with what the filter counts of its `episodes`, and the `log` of the targets.

    Raises SettingsError for a name that every run has. What is no number is refused where the row is written."""
    chosen = algorithm.select.row(episodes) if isinstance(algorithm.select, CountingFilter) else {}
    for where, own in (("its log", log), ("the row of its select", chosen)):
        if not isinstance(own, Mapping):
            raise SettingsError(f"algorithm {algorithm.name}: {where} is {brief(own, 80)}; valid: numbers by name")
        if taken := sorted(row.keys() & own.keys()):
            said = f"{where} has {taken[0]!r}, a column of every run; rename it"
            raise SettingsError(f"algorithm {algorithm.name}: {said}")
    return {**row, **chosen, **log}


def checked_weights(weight: Any, tokens: int, algorithm: str) -> WeightArray:
    """What a weight gave for so many `tokens`. Raises SettingsError for another shape, for numbers that are not finite
    or below 0, and for a sum that is not 1."""
    if not isinstance(weight, np.ndarray) or weight.shape != (tokens,) or weight.dtype.kind != "f":
        found = f"shape {list(weight.shape)}, {weight.dtype}" if isinstance(weight, np.ndarray) else brief(weight, 80)
        raise SettingsError(f"algorithm {algorithm}: its weight gave {found}; valid: a float array [{tokens}]")
    total = float(weight.sum(dtype=np.float64))
    if not np.isfinite(weight).all() or (weight < 0).any() or abs(total - 1.0) > 1e-6:
        raise SettingsError(
            f"algorithm {algorithm}: its weights sum to {total:g}, the least is {weight.min():g}; valid: finite, at "
            "least 0, and 1 in sum"
        )
    return weight


OWN_NUMBERS = ("loss", "logp", "sampled_logp", "entropy")
"""Columns that the loop writes for every token; a token loss has other names for its own."""


def checked_losses(losses: Any, tokens: int) -> TokenLosses:
    """What a token loss gave for so many `tokens`. Raises SettingsError where a column is reduced or has another shape,
    where the loss has no gradient, and for a diagnostic whose name is taken."""
    if not isinstance(losses, TokenLosses):
        raise SettingsError(f"the token loss gave {type(losses).__name__}; valid: TokenLosses")
    for name, column in {"loss_n": losses.loss_n, **losses.diagnostics}.items():
        if not isinstance(name, str) or name in OWN_NUMBERS:
            taken = ", ".join(OWN_NUMBERS)
            raise SettingsError(
                f"the token loss has a diagnostic {brief(name, 80)}; valid: a text that is none of {taken}"
            )
        if not isinstance(column, Tensor) or tuple(column.shape) != (tokens,):
            found = f"the shape {list(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
            raise SettingsError(
                f"the token loss: its {name} has {found}; valid: a tensor [{tokens}], a number per token"
            )
    if torch.is_grad_enabled() and not losses.loss_n.requires_grad:
        raise SettingsError("the token loss: its loss_n has no gradient, so that nothing would be learned")
    return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Who can score ids during a step, all at the distillation temperature; None where the run has no such model."""

    student: Scorer
    """The student before this step's updates."""
    teacher: Scorer | None = None
    reference: Scorer | None = None
    """The frozen initial policy."""
    critic: Callable[[RolloutBatch], NDArray[np.float32]] | None = None
    """The critic's values, [N]: what it predicts before each supervised token was chosen."""
    step: int = 1
    """The training step, 1-based."""


class TargetFn(Protocol):
    """Turns a batch into targets, before any update; `episodes[batch.source_E[e]]` is the batch's episode e."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """n supervised tokens of a micro-batch, as tensors on the model's device; `logp` tensors carry gradients."""

    logp_n: Tensor
    """Student log-probability of the label at the distillation temperature."""
    sampled_logp_n: Tensor
    """Student log-probability of the label at the temperature at which it was drawn, as `behavior_logp_n` is."""
    behavior_logp_n: Tensor
    """Log-probabilities as sampled, nats; NaN where unknown."""
    topk_logp_nK: Tensor | None = None
    """Student log-probabilities at the ids of the targets."""
    teacher_logp_nK: Tensor | None = None
    tail_n: Tensor | None = None
    """Student log-probability of all other ids together; None: what `topk_logp_nK` leaves of 1."""
    teacher_tail_n: Tensor | None = None
    """Teacher log-probability of all other ids together; None: what `teacher_logp_nK` leaves of 1."""
    advantage_n: Tensor | None = None
    reference_logp_n: Tensor | None = None
    kl_mask_n: Tensor | None = None
    """bool, as in the targets."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """The further columns of the targets, by name."""
    off_policy_n: Tensor
    """bool: the label was chosen by a demonstrator."""
    entropy_n: Tensor
    """Entropy of the student's whole distribution, nats; carries gradients where the algorithm asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses [n], never reduced, and detached diagnostics [n] by name.

    `kl_bin`, `kl_raw`, `clipped` and a few more have columns of their own in metrics.jsonl; any other diagnostic is
    written there as `token/<name>`, its mean over the supervised tokens that have a number.
    """

    loss_n: Tensor
    diagnostics: Mapping[str, Tensor]


class TokenLoss(Protocol):
    """A pure function of the tokens."""

    def __call__(self, tokens: Tokens) -> TokenLosses: ...


class Weight(Protocol):
    """Token weights float64 [N] for `step` (1-based) of `total_steps`, summing to 1."""

    @property
    def to_the_end(self) -> bool:
        """Whether the weights depend on `total_steps`, so that a run cannot get another end."""

    def __call__(self, batch: RolloutBatch, *, step: int, total_steps: int) -> WeightArray: ...


@runtime_checkable
class Blended(Protocol):
    """A weight that stands between trajectories (alpha 0) and turns (alpha 1), for the log."""

    def alpha(self, *, step: int, total_steps: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthState:
    """What a depth controller carries from step to step; `hbar` is never rounded."""

    hbar: float
    """Smoothed depth, turns."""
    h_eff: int = 0
    """Center of the divergence mass at the last probe, turn index."""
    h_cov: int = 0
    """Covering depth of the successful episodes at the last probe that had enough of them."""
    probes: int = 0
    """Probes taken in so far."""
    loop_ratio: float | None = None
    """KL per token of turns in loops over that of all others, smoothed; None before any was seen (LoopStop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPlan:
    """What to collect in one step."""

    cap: int
    """Turns to play at most in this step."""
    probe: bool = False
    """Whether the step measures."""
    adaptive_cap: int | None = None
    """What the cap would be without a probe."""
    full_depth: bool = False
    """Whether `cap` is the full depth of the run: an episode that is cut there has failed, not only been stopped."""
    short_share: float = 0.0
    """Partial probes: this share of the episodes stops at `adaptive_cap`, and is not measured."""
    loop_share: float = 0.0
    """This share of the episodes, the last of the step, ends where it begins to loop (LoopStop)."""
    demonstration_turns: int | None = None
    """TCOD B2F: turns that the student plays at the end, after a demonstration. None: it plays all."""


class DepthController(Protocol):
    """A piece of an algorithm: a pure state machine over training steps (1-based)."""

    def start(self) -> DepthState: ...

    def plan(self, state: DepthState, step: int) -> DepthPlan: ...

    def learn(
        self,
        state: DepthState,
        plan: DepthPlan,
        batch: RolloutBatch,
        episodes: Sequence[Episode],
        kl_N: NDArray[np.floating],
        /,
    ) -> DepthState:
        """The state after a step; `kl_N` [N] is the raw KL to the teacher in nats, 0 where the algorithm has none.
        `episodes[batch.source_E[e]]` is the batch's episode e.

        Args:
            state: before the step.
            plan: what was played at the step.
            batch: what was trained on.
            episodes: what `batch` was packed from.
            kl_N: the raw KL [N] to the teacher, nats.
        """


class EpisodeFilter(Protocol):
    """Which collected episodes are trained on; what it leaves out is counted, never lost from the traces."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]: ...


@runtime_checkable
class CountingFilter(EpisodeFilter, Protocol):
    """A filter with numbers for metrics.jsonl."""

    def row(self, episodes: Sequence[Episode]) -> Mapping[str, Any]:
        """How much of a step's episodes it leaves out, and why."""


@runtime_checkable
class TurnFilter(EpisodeFilter, Protocol):
    """A filter that looks at single turns."""

    def reasons(self, episode: Episode) -> dict[int, str]:
        """Why turns of the policy are left out, by their index."""


class Term(Protocol):
    """A loss beside the batch's, such as language modeling on pre-training text."""

    name: str

    def backward(self, model: Any, step: int, ranks: Ranks) -> float:
        """Add the term's gradient to the model's parameters (this process's share of it, times `ranks.size`, for
        sharded models average); returns the value of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlay:
    """How the expert plays whom a student imitates (`agents.rollout_sources.ExpertSource`)."""

    noise: tuple[float, float] = (0.0, 0.0)
    """Range from which each episode draws its share of random actions."""
    mistakes: float = 0.0
    """Share of these that are plausible mistakes."""
    players: str = ""
    """Who plays, with shares (`PlayerMix.parse`); empty: the noisy expert alone."""
    loop_after: float = 2.3
    """Mean number of turns before a player of `players` falls into a loop."""
    loop_slips: float = 0.0
    """Share of noise in such a loop."""
    hints: float = 0.0
    """Share of observations that carry the expert's next action as a hint."""
    told: str = ""
    """The folder of skills, `skills:FOLDER`, of which half of the episodes are told a text."""


Reader = Literal["initial", "live"]
"""Who reads what the student is not told, where no other model teaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegedText:
    """What becomes of a judge's hints: where they stand in a prompt, and who reads them (`trainers/privileged.py`)."""

    position: Position = "last_user"
    reader: Reader = "initial"
    """The initial policy (with --reference-every the student of some steps before, or its moving average), or the
    student as it is before the step's update. A teacher of its own, where there is one, reads them in place of the
    initial policy."""

    def needs_reference(self, *, has_teacher: bool) -> bool:
        """Whether the initial policy must be kept to read."""
        return self.reader == "initial" and not has_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A frozen composition of parts. Whatever an algorithm does otherwise than others is a field here: the loop, the
    rollout side and the command line never ask for its name."""

    name: str
    depth: DepthController
    target_fn: TargetFn
    weight: Weight
    token_loss: TokenLoss
    origins: tuple[Origin, ...] = ("policy",)
    """Whose turns are trained on."""
    group: int = 1
    """Episodes per task: they are compared with each other."""
    prefix: Callable[[int, int], tuple[tuple[float, ...], ...]] | None = None
    """How much of a demonstration the first episodes of each group begin with: (step, groups) to shares in [0, 1], a
    row for each group with a share for each prefixed episode; steps are 1-based."""
    prefix_unit: Literal["turns", "tokens"] = "turns"
    """What these are shares of: the demonstration's turns, or the ids of its responses."""
    select: EpisodeFilter | None = None
    terms: tuple[Term, ...] = ()
    teacher_mix: float = 0.0
    """Share of the tokens that the teacher chooses while the student plays."""
    guide: Callable[[int], float] | None = None
    """The share of turns that the teacher plays, whole, at a step (1-based); None: none. They have origin
    `demonstration`."""
    to_the_end: bool = False
    """Whether a step depends on how many there will be beside the weights, so that a run cannot get another end."""
    needs_teacher: bool = True
    needs_reference: bool = False
    critic: CriticConfig | None = None
    """The critic that this algorithm learns beside the policy."""
    refill: int = 0
    """Rounds in which further tasks may be played for a step where `select` leaves groups out."""
    states: bool = False
    """Whether its episodes carry a hash of the environment's exact state before every turn."""
    imitates: ExpertPlay | None = None
    """How an expert plays the episodes, whom the student imitates; None: the student plays them."""
    cut_recorded: bool = True
    """Whether recorded episodes (`--traces`) end at the step's depth cap, as played ones do."""
    judge: Question | None = None
    """What a judge is asked about every turn; None: nothing is judged."""
    privileged: PrivilegedText | None = None
    """What becomes of the judge's hints; None: it reads none."""
    entropy_gradient: bool = False
    """Whether the token loss uses the entropy of the distribution."""
    distill_temperature: float = 1.0
    settings: Mapping[str, Any]
    """Flat, JSON-able: what makes two runs of this algorithm the same, for checkpoints."""


# What an algorithm's file offers: its name, its settings, and how it is built from them.

Uses = Literal[
    "teacher",
    "distill",
    "judge",
    "text",
    "expert",
    "reward",
    "shown",
    "reference",
    "surrogate",
    "imitates",
    "form",
    "distills",
]
"""What only some algorithms have, and whose settings therefore exist for those alone:

    teacher     another model that teaches           distill    a loss between student and teacher (`DistillConfig`)
    judge       verdicts on turns                    text       pre-training text (`LmLossConfig`)
    expert      the environment's expert             reward     what an episode is worth
    shown       demonstrations                       reference  the initial policy, to stay near it or to read hints
    surrogate   a probability ratio that is clipped  imitates   it plays no episodes of the student's, but an expert's
    form        a choice of the KL (`distill.form`)  distills   `targets.distillation`: all forms, either's support
"""
PLAYS = "plays"
"""The use of all algorithms that do not imitate: the student plays the episodes that it learns from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm may be built from beside its own configuration."""

    run: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lm_loss: LmLossConfig = field(default_factory=LmLossConfig)
    has_teacher: bool = False
    """Whether another model than the student can teach."""
    tokenizer: Any = None
    """The student's tokenizer."""
    env_id: str = ""
    """Gymnasium id of the environment that is played; empty where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm as its file offers it: `ALGORITHM = AlgorithmSpec(name="mine", config=MyConfig, build=build)`."""

    name: str
    config: type[Any]
    """A `Spec` whose fields have defaults and a docstring each: they become `--mine.field`, and `[mine]` in
    configuration files."""
    build: Callable[[Any, BuildContext], Algorithm]
    """Builds the algorithm from such a configuration."""
    section: str = ""
    """Name of the settings, if not `name` (two algorithms may share them)."""
    uses: frozenset[Uses] = frozenset()
    """What it has that not all algorithms have; settings of everything else do not exist for it."""
    about: str = ""
    """What the algorithm is, in a line, if not the first line of its configuration's docstring."""

    @property
    def reads(self) -> frozenset[str]:
        """Whose settings it reads: its `uses`, and `PLAYS` unless it imitates."""
        return self.uses if "imitates" in self.uses else self.uses | {PLAYS}

    @property
    def table(self) -> str:
        """Name of the settings' table, an identifier."""
        return (self.section or self.name).replace("-", "_")

    @property
    def help(self) -> str:
        """What the algorithm is, in a line."""
        return self.about or (self.config.__doc__ or "").strip().split("\n")[0]


# Algorithms by name: those of this package, and how those of another are found.

GROUP = "turngym.algorithms"
"""Entry points under which packages offer their `AlgorithmSpec`."""
_HERE, _CONTRIB = "turngym.trainers.algorithms", "turngym.trainers.contrib"
BUILT_IN: Mapping[str, str] = {
    "sft": f"{_HERE}.sft:ALGORITHM",
    "opd": f"{_HERE}.opd:ALGORITHM",
    "turnopd": f"{_HERE}.turnopd:ALGORITHM",
    "tcod": f"{_HERE}.tcod:ALGORITHM",
    "grpo": f"{_HERE}.grpo:ALGORITHM",
    "gigpo": f"{_HERE}.gigpo:ALGORITHM",
    "rloo": f"{_HERE}.rloo:ALGORITHM",
    "reinforce++": f"{_HERE}.reinforce_pp:ALGORITHM",
    "ppo": f"{_HERE}.ppo:ALGORITHM",
    "luffy": f"{_HERE}.luffy:ALGORITHM",
    "prm-rl": f"{_HERE}.prm_rl:ALGORITHM",
    "opd-hints": f"{_HERE}.opd_hints:ALGORITHM",
    "prm-opd": f"{_HERE}.prm_opd:ALGORITHM",
    "grpo-kd": f"{_HERE}.grpo_kd:ALGORITHM",
    "grpo-minillm": f"{_HERE}.grpo_kd:WITH_TEXT",
    "ppo-kd": f"{_HERE}.ppo_kd:ALGORITHM",
    "ppo-minillm": f"{_HERE}.ppo_kd:WITH_TEXT",
    "loopstop": f"{_CONTRIB}.loopstop:ALGORITHM",
    "guided-opd": f"{_CONTRIB}.guided_opd:ALGORITHM",
    "atod": f"{_CONTRIB}.atod:ALGORITHM",
    "sage-opd": f"{_CONTRIB}.sage_opd:ALGORITHM",
    "sod": f"{_CONTRIB}.sod:ALGORITHM",
    "grpo-opd": f"{_CONTRIB}.grpo_opd:ALGORITHM",
    "sdar": f"{_CONTRIB}.sdar:ALGORITHM",
    "rlsd": f"{_CONTRIB}.rlsd:ALGORITHM",
    "skill-sd": f"{_CONTRIB}.skill_sd:ALGORITHM",
    "opid": f"{_CONTRIB}.opid:ALGORITHM",
    "agent-opsd": f"{_CONTRIB}.agent_opsd:ALGORITHM",
}
"""The algorithms of this package, and where they are."""


def find_algorithm(name: str) -> AlgorithmSpec:
    """The algorithm that a built-in name, `package.module:name` or an entry point stands for.

    Raises PluginError for an unknown name, SettingsError for an object that is no AlgorithmSpec.
    """
    found = find(GROUP, BUILT_IN.get(name, name), {}, known=BUILT_IN)
    if not isinstance(found, AlgorithmSpec):
        raise SettingsError(f"algorithm {name!r} is {type(found).__name__}; valid: an AlgorithmSpec (turngym.trainers)")
    known, uses = get_args(Uses), found.uses
    if not isinstance(uses, frozenset) or not uses <= {*known}:
        raise SettingsError(f"algorithm {name!r}: its uses are {uses!r}; valid: a frozenset of {', '.join(known)}")
    for field_name, value, holds, valid in (
        ("name", found.name, isinstance(found.name, str), "a text"),
        (
            "config",
            found.config,
            isinstance(found.config, type) and issubclass(found.config, Spec),
            "a Spec (turngym.core)",
        ),
        ("build", found.build, callable(found.build), "a function of its settings and a BuildContext"),
    ):
        if not holds:
            raise SettingsError(f"algorithm {name!r}: its {field_name} is {value!r}; valid: {valid}")
    return found


PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "depth": ("DepthController", ("start", "plan", "learn")),
    "target_fn": ("TargetFn", ("__call__",)),
    "weight": ("Weight", ("__call__", "to_the_end")),
    "token_loss": ("TokenLoss", ("__call__",)),
}
"""The four parts: the protocol of each, and what its objects have."""


def calling(algorithm: Algorithm, name: str) -> AbstractContextManager[None]:
    """Inside, what a part raises that another package wrote is a line that names it, and SettingsError."""
    return failures_of(f"algorithm {algorithm.name}: its {name}", getattr(algorithm, name), SettingsError)


def built(spec: AlgorithmSpec, config: Any, context: BuildContext) -> Algorithm:
    """The algorithm that `spec` builds from its settings.

    Raises SettingsError where its function fails, or gives what cannot be trained with; each of them is named.
    """
    with failures_of(f"algorithm {spec.name}: its build", spec.build, SettingsError):
        made = spec.build(config, context)
    if not isinstance(made, Algorithm):
        raise SettingsError(f"algorithm {spec.name}: its build returned {type(made).__name__}; valid: an Algorithm")
    if not isinstance(made.name, str) or not made.name.isprintable():
        raise SettingsError(f"algorithm {spec.name}: its name is {brief(made.name, 80)}; valid: a printable text")
    if not isinstance(made.group, int) or made.group < 1:
        raise SettingsError(f"algorithm {spec.name}: its group is {made.group!r}; valid: a whole number of at least 1")
    for name, (kind, members) in PARTS.items():
        part = getattr(made, name)
        if isinstance(part, type) or not all(hasattr(part, member) for member in members):
            valid = f"a {kind}, which has {', '.join(members)}"
            raise SettingsError(f"algorithm {spec.name}: its {name} is {brief(part, 80)}; valid: {valid}")
    try:
        json.dumps(dict(made.settings))
        if any(isinstance(value, float) and math.isnan(value) for value in made.settings.values()):
            raise ValueError("a resumed run compares them, and NaN equals nothing")
    except (TypeError, ValueError) as error:
        said = f"its settings are no JSON ({error}); valid: tables_of(config)"
        raise SettingsError(f"algorithm {spec.name}: {said}") from error
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDepth:
    """The same depth in every step: vanilla OPD, and TurnOPD without its depth controller."""

    h_max: int

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.h_max))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """Play `h_max` turns."""
        return DepthPlan(cap=self.h_max, full_depth=True)

    def learn(self, state: DepthState, *measured: object) -> DepthState:
        """Learns nothing: this depth depends on the step alone."""
        return state
