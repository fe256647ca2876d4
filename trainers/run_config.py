"""Settings of a training run. The defaults are the reference configuration (TurnOPD, Table 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from turngym.core.errors import SettingsError
from turngym.core.nested import KIND
from turngym.core.numbers import FINITE, BelowOne, Count, Million, NotNegative, Number, Portion, Positive, Seed, Share
from turngym.core.setting import Within, fields_of
from turngym.core.spec import Spec, Unread, needing, to_table
from turngym.core.task import MAX_TURNS

Packing = Literal["auto", "on", "off"]
"""Whether rows of a batch share lines (`microbatch`)."""
PASS_TOKENS, PASS_TOKENS_CPU = 8192, 2048
"""Padded tokens per pass where nothing else is said: on a GPU, and on a CPU."""


class OptimizerConfig(Spec):
    """AdamW, its schedule, and how often a collected batch is used."""

    lr: NotNegative = 1e-6
    """Peak learning rate. By default 1e-6, 1e-5 for sft, and with adapters ten times that: it suits billions of
    parameters; tiny models need 1e-4 to 1e-3, and with adapters ten times as much."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up. Linear and cosine fall to zero at the last step."""
    lr_warmup: Within[Number] = 0
    """Steps over which the rate rises to `lr`. It rises linearly."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm. 0 leaves them as they are."""
    ppo_epochs: Million = 1
    """How many times a collected batch is used."""
    minibatches: Million = 1
    """Optimizer updates per pass. Each takes an equal share of the episodes."""


class SupportConfig(Spec):
    """A loss between student and teacher on the ids of a support: the reverse KL."""

    top_k: Count = 50
    """Size K of the support. Student and teacher are compared on it."""
    tail: Literal["bin", "raw", "renorm"] = "bin"
    """Mass outside the support. One more bin, ignored, or both sides renormalized over the support."""
    temperature: Positive = 1.0
    """Temperature of student and teacher alike. Both distributions are compared at it."""
    importance: tuple[Portion, Annotated[float, Meta(ge=1, le=FINITE)]] = (0.1, 10.0)
    """Range of the detached ratio train / rollout probability that multiplies the loss (1 on fresh rollouts)."""
    vocabulary: str = "same"
    """What a teacher with other ids means. `same` refuses one whose ids mean other tokens than the student's. `other`
    compares the two by the text that their tokens are (docs/other_vocabulary.md), `package.module:function` by a
    `Translation` of yours; with one vocabulary they change nothing."""


class DivergenceConfig(SupportConfig):
    """A loss between student and teacher on a support, of several divergences."""

    form: Literal["topk", "forward", "jsd", "mixed"] = "topk"
    """What is minimized. `topk` is the reverse KL on the support, `forward` the forward KL, which teaches what the
    student never does; `jsd` the generalized Jensen-Shannon divergence between them, `mixed` their weighted sum."""
    beta: Share = 0.5
    """Place between forward and reverse (`form=jsd`, `form=mixed`). 0 is the forward KL, 1 the reverse KL."""

    def unread(self) -> Unread:
        if self.form not in ("jsd", "mixed"):
            yield from needing("form jsd or mixed", "beta")


class DistillConfig(DivergenceConfig):
    """The loss between student and teacher: of opd, turnopd, loopstop, tcod and their relatives."""

    form: Literal["topk", "forward", "jsd", "mixed", "sampled"] = "topk"  # type: ignore[assignment]
    """What is minimized. `topk` is the reverse KL on the support, `forward` the forward KL, which teaches what the
    student never does; `jsd` the generalized Jensen-Shannon divergence between them, `mixed` their weighted sum;
    `sampled` a clipped surrogate with advantage log q - log p."""
    support: Literal["teacher", "student"] = "teacher"
    """Whose K most likely ids are compared."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the surrogate (`form=sampled`)."""

    def unread(self) -> Unread:
        yield from super().unread()
        if self.form == "sampled":
            yield from needing("a form other than sampled", "top_k", "tail", "support", "importance")
        else:
            yield from needing("form sampled, a loss with a probability ratio", "clip", "../dual_clip")


def has_rows(path: Path) -> bool:
    """Whether a file of pre-training text has a document in each row, by its name."""
    return Path(path.name.removesuffix(".gz")).suffix in (".parquet", ".jsonl", ".json", ".tsv", ".csv")


class LmLossConfig(Spec):
    """L_PT, the term of grpo-minillm and ppo-minillm."""

    files: tuple[Path, ...] = ()
    """Text files, whose blank lines separate documents, or files of rows (.parquet, .jsonl, .csv, ...)."""
    column: str = "text"
    """Column of the rows."""
    coef: NotNegative = 1.0
    """Weight of the term (lambda)."""
    documents: Million = 8
    """Documents per update."""
    max_length: Count = 512
    """Tokens after which a document is cut."""
    mean: Literal["token", "document"] = "token"
    """Mean over all tokens of the step's documents, or (literal) over documents, each with the sum of its tokens."""
    in_reward: NotNegative = 0.0
    """How much L_PT costs in the reward. ppo-minillm, literal: instead of the loss term, so many times L_PT is
    subtracted from every rollout's reward. No gradient reaches the text; the critic learns the offset, and nothing is
    kept from being forgotten."""

    def unread(self) -> Unread:
        if not any(map(has_rows, self.files)):
            yield from needing("a file of rows (.parquet, .jsonl)", "column")
        if self.in_reward:
            yield from needing("L_PT in the loss (no in_reward)", "coef")


class CriticConfig(Spec):
    """The critic of PPO."""

    kind: Literal["model", "head"] = "model"
    """What predicts. `model`: a copy of the initial policy with a value head; `head`: a small network on the policy's
    own hidden states, which its gradient does not reach."""
    lr: Positive = 1e-5
    """The critic's learning rate. Tiny models need 1e-3."""
    clip: Positive | None = 0.2
    """Largest change of a value per batch. More does not lower the loss, in the unit of the return; None for the plain
    squared error. Where returns are tens of nats 0.2 takes a hundred steps to reach them (`critic_explained` tells)."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm. 0 leaves them as they are."""


class Stale(Spec):
    """How far what plays may be behind what learns."""

    staleness: Number
    """Most updates that a turn may be behind the student when it is trained on. Older ones are left out."""
    importance_cap: Annotated[float, Meta(ge=1, le=FINITE)] = 2.0
    """Most that a stale token's probability ratio new / old counts for: truncated importance sampling."""


class Ahead(Stale):
    """Playing that lags behind learning by a fixed number of steps."""

    staleness: Count
    """Steps by which playing lags behind. Batch t is played by the student after step t - 1 - K (at the start: the
    untrained one), whatever the timing."""


class Tracker(Spec, tag_field=KIND):
    """What shows a run's numbers."""


class Tensorboard(Tracker, tag="tensorboard"):
    """tensorboard, where it is installed."""


class Wandb(Tracker, tag="wandb"):
    """Weights & Biases."""

    project: str = "turngym"
    """The project under which the run appears, by the name of its folder."""


class Trackio(Tracker, tag="trackio"):
    """trackio."""

    project: str = "turngym"
    """The project under which the run appears, by the name of its folder."""


class LoopConfig(Spec):
    """What the loop does, whichever algorithm it runs."""

    steps: Count = 100
    """Training steps K_total."""
    episodes: Million = 64
    """Episodes collected per step. They are tasks x n, where an algorithm compares n attempts at a task."""
    seed: Seed = 0
    """Fixes tasks, sampling and shuffling."""
    eval_every: Number = 10
    """Steps between evaluations. The first is before step 1, the last after the last step; 0 for none."""
    checkpoint_every: Number = 10
    """Steps between checkpoints. One is also written at the end and on Ctrl-C."""
    keep_checkpoints: Million = 2
    """How many checkpoints stay on disk."""
    micro_tokens: Count | None = None
    """Padded tokens per forward and backward pass. By default 8192 on a GPU and 2048 on a CPU, where more take memory
    and no less time. It changes memory and speed, and the result to rounding; a resumed run may have less."""
    head_chunk: Count = 1024
    """Positions that go through the LM head at once. It changes memory, not the result."""
    autocast: Literal["off", "bfloat16", "bfloat16-body"] = "off"
    """Compute the update in bfloat16. Weights stay float32, and log-probabilities too; `-body` leaves the LM head in
    float32: closer numbers, but on a GPU the head then takes most of the time."""
    gradient_checkpointing: bool = False
    """Recompute activations going backward, but for what attention gives. It takes less memory and up to a third more
    time."""
    packing: Packing = "auto"
    """Several short episodes in one line. In the forward passes of update and teacher: less padding, the same result to
    rounding. auto: where the model keeps episodes in one line apart (docs/distributed.md); a resumed run goes on as it
    began."""
    tracker: Tensorboard | Wandb | Trackio | None = Tensorboard()
    """What shows the numbers of metrics.jsonl, too. `tensorboard` (where it is installed), `wandb` (Weights & Biases)
    or `trackio`, which need pip install 'turngym[wandb]' or [trackio]; none: nothing."""


class Renewed(Spec):
    """A reference of the KL that is renewed: the student of some steps before, in place of the initial policy."""

    reference_every: Within[Count]
    """Steps after which the reference is renewed. The reference of the KL is then the student as it is. It is the
    teacher, too, of opd-hints without one."""
    reference_rate: Portion = 1.0
    """What --reference-every mixes in. It is reference + rate (student - reference); below 1, with --reference-every 1,
    the reference is a moving average of the student."""


def near_initial(coef: float, *names: str) -> Unread:
    """For `unread` of an algorithm's settings: nothing reads these `names`, and what is said of the initial policy,
    without a KL to it."""
    if not coef:
        yield from needing("a KL to the initial policy (kl_coef above 0)", *names, "../frozen", "../reference")


class RunConfig(LoopConfig):
    """All that the loop reads: what every algorithm has, and what some have alone."""

    max_turns: Count = MAX_TURNS
    """Full depth of an episode, in turns: the environment's limit."""
    temperature: NotNegative = 1.0
    """Sampling temperature of training rollouts."""
    reference: Renewed | None = None
    """The reference of the KL; None: it stays the initial policy."""

    @property
    def full_depth(self) -> int:
        """Most turns of an episode."""
        return self.max_turns

    @property
    def pass_tokens(self) -> int:
        """Padded tokens per pass."""
        return PASS_TOKENS if self.micro_tokens is None else self.micro_tokens

    def check_turns(self, settings: Any, *names: str) -> None:
        """Raises SettingsError for one of the `names` in `settings` that is chosen and of more turns than an episode
        has."""
        usual = {item.name: item.default for item in fields_of(type(settings))}
        for name in names:
            if (value := getattr(settings, name)) not in (None, usual[name]) and value > self.full_depth:
                raise SettingsError(
                    f"{name} is {value}; valid: at most {self.full_depth}, the turns of an episode (--max-turns)"
                )


def tables_of(*configs: Spec) -> dict[str, Any]:
    """The settings of `configs` as tables by the names of their classes."""
    return {type(config).__name__: to_table(config) for config in configs}
