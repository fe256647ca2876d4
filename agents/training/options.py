"""Settings of the rollout side of a training run: what is played, how the student is spoken to, who judges."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from turngym.agents.demonstrations.options import DemonstrationOptions, DemonstratorOptions
from turngym.agents.executor.open_workers import WorkerOptions
from turngym.agents.judges.make_judge import JudgeOptions
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.sglang.options import TrainServers
from turngym.envs.common.settings import FLAT


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayConfig:
    """What is played in training and evaluations, and by whom."""

    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id of the environment; `package:namespace/Name-v0` imports `package` first."""
    split: str = "generated"
    """Split to train on."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"config": "small", "on_invalid": "noop"}'."""
    preset: str | None = None
    """A published set-up by name (turnopd, verl-agent, react, search-r1), for training and evaluations; `--preset list`
    shows what they set. Options that are given beside it, --env-kwargs too, take the place of its values."""
    panel: str | None = None
    """Panel to evaluate on; its tasks are never trained on. Without one nothing is evaluated."""
    eval_samples: int = 4
    """Episodes per task of an evaluation (Avg@n)."""
    eval_temperature: float = 0.85
    """Sampling temperature of evaluations."""
    eval_limit: int | None = None
    """Evaluate on the first so many tasks of the panel only."""
    traces: tuple[Path, ...] = ()
    """Train on these recorded episodes instead of playing: sft imitates them; the others take them as rollouts, cut at
    the depth cap, attempts at one task as a group (not tcod b2f, which replays an expert in the environment). Episodes
    without token ids (of experts, of endpoints) are tokenized for the student."""
    expert: str = "expert"
    """sft, tcod b2f and luffy: who demonstrates; --judge expert: who is asked. `searching` knows only what it has
    seen."""
    noise: tuple[float, float] = (0.0, 0.0)
    """sft: share of random actions in an episode, drawn from this range; they are never imitated."""
    mistakes: float = 0.0
    """sft: share of those random actions that are plausible mistakes, possible or not, instead of admissible ones."""
    players: str = ""
    """sft: who plays the episodes, with shares, for example expert:.35,noisy:.2,repeat:.2,cycle:.25. `noisy` is the
    expert among its --noise; `repeat` and `cycle` begin like it and then say their last action, or their last two or
    three, for ever. Their loops are turns of a policy: --sft.train-on both. By default all are noisy."""
    loop_after: float = 2.3
    """sft: turns before a player of --players falls into its loop, on average."""
    loop_slips: float = 0.0
    """sft: share of turns in such a loop that are noise, after which it goes on."""
    hints: float = 0.0
    """sft: share of observations that carry the expert's next action as a hint, in the words of --judge expert. A model
    can only teach by hints (opd-hints) what it has learned to read."""
    slots: int = 64
    """Episodes played, and requests generated, at a time."""
    rollout_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the weights and the cache that the student plays with in this process (and in workers); by default
    that of its weights. bfloat16 halves the cache and costs a copy of the weights."""
    keep_rollouts: int = 0
    """Training episodes of the last so many steps are kept as traces, rollouts/step_K.jsonl in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the student is spoken to, where it is to be otherwise than its folder's turngym.json says."""

    channel: str | None = None
    """How actions are written: `text`, in tags, or `tool`, as a tool call in the words of the model's family
    (`tool:DIALECT` names them); by default as the student's folder says, else text."""
    thinking: Literal["on", "off"] | None = None
    """Thinking switch of the chat template; by default as the student's folder says, else the template's default."""
    observation_role: Literal["user", "tool"] | None = None
    """Role of observations after the first; by default as the student's folder says, else what its chat template keeps
    more of the past for."""
    memory: str | None = None
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), which make every turn a segment of its own; by default as the student's folder says, else all."""
    max_new_tokens: int | None = None
    """Most tokens of one response; by default as the student's folder says, else 512."""
    max_context: int | None = None
    """Most tokens of an episode's history and response; by default as the folder says, else what the model allows."""
    system: str | None = None
    """System message; by default as the student's folder says, else the instructions of environment and channel."""

    def applied(self, settings: ChatSettings) -> ChatSettings:
        """`settings` with what is given here on top."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.thinking is not None:
            given["thinking"] = self.thinking == "on"
        return replace(settings, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Everything that the rollout side of a training run can be told."""

    play: PlayConfig = field(default_factory=PlayConfig, metadata=FLAT)
    chat: ChatConfig = field(default_factory=ChatConfig, metadata=FLAT)
    judging: JudgeOptions = field(default_factory=JudgeOptions, metadata=FLAT)
    demonstrations: DemonstrationOptions = field(default_factory=DemonstrationOptions, metadata=FLAT)
    demonstrator: DemonstratorOptions = field(default_factory=DemonstratorOptions)
    servers: TrainServers = field(default_factory=TrainServers, metadata=FLAT)
    workers: WorkerOptions = field(default_factory=WorkerOptions, metadata=FLAT)
