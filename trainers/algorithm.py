"""What an algorithm is made of: a depth controller, a target function, a token weight and a token loss.

The training loop knows these protocols and no algorithm by name: something new is a new part, not a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turngym.core.episode import Episode, Origin
from turngym.core.protocols import Position, Question, Scorer
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.ranks import Ranks
from turngym.trainers.run_config import CriticConfig

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
