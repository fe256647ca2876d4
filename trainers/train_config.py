"""All settings of a training run as one object: what the command line, TOML files and `train()` describe.

`RolloutConfig` says what is played and by whom, `ModelConfig` which models take part, `TrainConfig` is the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from turngym.agents.agent_options import (
    NO_MODELS,
    DemonstrationOptions,
    DemonstratorOptions,
    EndpointOptions,
    JudgeOptions,
)
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.play_spec import Agent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.servers.server_options import RunServers
from turngym.core.needed import check_needed, unread
from turngym.core.settings import (
    FLAT,
    IN_FILE,
    Above0,
    Count,
    Length,
    Needs,
    Processes,
    from_table,
    read_by,
    settings_of,
)
from turngym.trainers.algorithm import BUILT_IN, PLAYS, find_algorithm
from turngym.trainers.lora import LoraConfig
from turngym.trainers.run_config import ConfigError, DistillConfig, LmLossConfig, OptimizerConfig, RunConfig
from turngym.trainers.schedule import AsyncConfig

DEFAULT_ENV = "turngym/ALFWorld-v0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayConfig:
    """What is played in training and evaluations, and by whom."""

    env: str | None = None
    """Gymnasium id of the environment. `package:namespace/Name-v0` imports `package` first. By default that of the
    episodes of --traces, else turngym/ALFWorld-v0."""
    also: tuple[str, ...] = ()
    """Further environments of the same run. Each is
    ENV,share=1,split=train,panel=NAME,data=FOLDER,teacher=FOLDER,env.ARGUMENT=VALUE; only ENV must be there
    (docs/several_envs.md)."""
    share: Above0 = 1.0
    """Share of --env in a step's tasks. The others are those of --also."""
    split: str | None = None
    """Split to train on. By default the environment's own (ALFWorld: generated)."""
    data: str | None = None
    """Folder of the data. By default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON. For example '{"config": "small", "on_invalid": "noop"}'."""
    preset: str | None = None
    """A published set-up by name. turnopd, verl-agent, react or search-r1, for training and evaluations; `--preset
    list` shows what they set. Options that are given beside it, --env-kwargs too, take the place of its values."""
    panel: str | None = None
    """Panel to evaluate on. Its tasks are never trained on; without one nothing is evaluated."""
    eval_samples: Count | None = None
    """Episodes per task of an evaluation (Avg@n). By default the preset's, else 4."""
    eval_temperature: float | None = None
    """Sampling temperature of evaluations. By default the preset's, else 0.85."""
    eval_limit: Length | None = None
    """Number of tasks that are evaluated. They are the panel's first."""
    traces: tuple[Path, ...] = ()
    """Recorded episodes to train on. Nothing is played then: sft imitates them; the others take them as rollouts, cut
    at the depth cap, attempts at one task as a group (not tcod b2f, which replays an expert in the environment).
    Episodes without token ids (of experts, of endpoints) are tokenized for the student."""
    expert: str = field(default="expert", metadata=read_by("expert"))
    """Who demonstrates. --judge expert asks it, too; `searching` knows only what it has seen."""
    slots: Count = 64
    """Episodes played at a time. Requests are generated together."""
    rollout_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision that the student plays with. Of its weights and cache in this process (and in workers); by default that
    of its weights. bfloat16 halves the cache and costs a copy of the weights."""
    keep_rollouts: int = 0
    """Steps whose episodes are kept. The training episodes of the last so many steps stay as traces,
    rollouts/step_K.jsonl in the run's folder."""

    @property
    def evaluates(self) -> bool:
        """Whether there is a panel to evaluate on."""
        return self.panel is not None or any("panel=" in text for text in self.also)

    @property
    def env_id(self) -> str:
        """The environment, the default one where none is named."""
        return self.env or DEFAULT_ENV


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the student is spoken to, where that differs from what its folder's turngym.json says."""

    channel: str | None = None
    """How actions are written. `text`, in tags, `text:verl-agent`, in tags that are read as verl-agent reads them, or
    `tool`, as a tool call in the words of the model's family (`tool:DIALECT` names them); by default as the student's
    folder says, else text."""
    thinking: Literal["on", "off"] | None = None
    """Thinking switch of the chat template. By default as the student's folder says, else the template's default."""
    observation_role: Literal["user", "tool"] | None = None
    """Role of observations after the first. By default as the student's folder says, else what its chat template keeps
    more of the past for."""
    memory: str | None = None
    """What a turn's prompt holds of the episode. `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), `verl-agent:N` (the templates of --prompts with the last N turns), which make every turn a segment of
    its own; by default as the student's folder says, else all."""
    prompts: str | None = None
    """Templates of --memory verl-agent:N. `own` (our words), or the folder of a checkout of verl-agent or of a fork of
    it, whose texts are read and never run. They are kept in the student's turngym.json."""
    max_new_tokens: Length | None = None
    """Most tokens of one response. By default as the student's folder says, else 512."""
    max_context: Length | None = None
    """Most tokens of history and response. By default as the folder says, else what the model allows."""
    system: str | None = None
    """System message. By default as the student's folder says, else the instructions of environment and channel."""

    def applied(self, settings: ChatSettings, env_id: str) -> ChatSettings:
        """`settings` with what is given here on top, for a student that plays `env_id`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.thinking is not None:
            given["thinking"] = self.thinking == "on"
        return replace(settings, **given | settings.memory_of(self.memory, self.prompts, env_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesConfig:
    """Examples (few-shots) in every prompt of a run."""

    examples: str | None = None
    """File with examples (few-shots). They stand in every prompt of the run: those of a trace, whose successful
    episodes are shown, or a text; or `skills:FOLDER`, texts by the kind of task (docs/algorithms.md#told). They are no
    part of the model: give them to `turngym eval`, too."""
    examples_as: Literal["auto", "text", "turns"] = "auto"
    """How examples are shown: `text` at the end of the system message, `turns` as earlier messages of the conversation;
    auto: a trace as turns."""
    examples_for: Literal["all", "category"] = "all"
    """Which tasks are shown an example: `all`, or those of its own `category`, as ReAct does in ALFWorld (as turns)."""
    needs: ClassVar[Needs] = (
        (("examples_as", "examples_for"), "--examples", lambda shots: shots.examples is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What is played in a training run, how the student is spoken to, and who demonstrates and judges."""

    play: PlayConfig = field(default_factory=PlayConfig, metadata=FLAT)
    chat: ChatConfig = field(default_factory=ChatConfig, metadata=FLAT)
    few_shots: ExamplesConfig = field(default_factory=ExamplesConfig, metadata=FLAT)
    judging: JudgeOptions = field(default_factory=JudgeOptions, metadata={**FLAT, **read_by("judge")})
    demonstrations: DemonstrationOptions = field(
        default_factory=DemonstrationOptions, metadata={**FLAT, **read_by("shown")}
    )
    demonstrator: DemonstratorOptions = field(
        default_factory=DemonstratorOptions, metadata={**IN_FILE, **read_by("shown")}
    )
    servers: RunServers = field(default_factory=RunServers, metadata=FLAT)
    workers: WorkerOptions = field(default_factory=WorkerOptions, metadata=FLAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which models take part, where the run is kept, and what it computes on."""

    student: Path
    """Folder of the model to train, or ORG/NAME[@REVISION]. The latter is one of the hub (extra `hub`). The tokenizer
    lies in the folder, too, and its `turngym.json`, if it has one."""
    teacher: Path | None = field(default=None, metadata=read_by("teacher"))
    """Folder of the teacher, or ORG/NAME[@REVISION]. opd-hints and prm-opd need none: there the student before training
    teaches."""
    out: Path
    """Folder of the run. It gets checkpoints, metrics.jsonl, tensorboard, evaluation traces."""
    resume: bool = False
    """Continue the run in --out. It goes on from its last checkpoint, to the same numbers."""
    device: str = "auto"
    """Where models compute. `cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights. bfloat16 loses updates as small as the reference learning rate's."""
    teacher_dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata=read_by("teacher", "reference"))
    """Precision of the weights of teacher and initial policy."""
    threads: Processes = 0
    """Threads of torch on the CPU. 0 leaves its default; tiny models are fastest with 1."""
    shard_teacher: bool = field(default=False, metadata=read_by("teacher", "reference"))
    """Divide the weights of the teacher, too. Under torchrun, with those of the initial policy: a process holds all of
    them only while it scores."""
    process_timeout: Above0 = field(default=120.0, metadata=IN_FILE)
    """Minutes that a process waits for another one under torchrun, while that one plays, evaluates or saves."""


def form_of(config: Any) -> str:
    """How an algorithm with distillation compares student and teacher; opd-hints has a form of its own before it."""
    own: str = getattr(config.own, "form", "topk")
    return own if own != "topk" else str(config.distill.form)


BY_FORM: Needs = (
    (("distill.beta",), "--distill.form jsd or mixed", lambda config: form_of(config) in ("jsd", "mixed")),
    (("distill.clip",), "--distill.form sampled", lambda config: form_of(config) == "sampled"),
    (
        ("distill.top_k", "distill.tail", "distill.support", "distill.importance"),
        "a --distill.form other than sampled",
        lambda config: form_of(config) != "sampled",
    ),
)
"""What each form of the loss between student and teacher has for itself."""


def demonstrator_kind(config: Any) -> str:
    """What kind of agent demonstrates."""
    return str(Agent.table_of(config.rollouts.demonstrations.demonstrations or "expert")["kind"])


ENDPOINT = tuple(f"demonstrator.{item.name}" for item in fields(EndpointOptions))
HERE = ("demonstrator.dtype",)
ANY_MODEL = tuple({f"demonstrator.{item.name}" for item in fields(DemonstratorOptions)} - {*ENDPOINT, *HERE})
BY_DEMONSTRATOR: Needs = (
    (
        ENDPOINT,
        "an endpoint as --demonstrations (openai:MODEL)",
        lambda config: demonstrator_kind(config) in ("openai", "own"),
    ),
    (
        HERE,
        "a model that plays here as --demonstrations (model:FOLDER)",
        lambda config: demonstrator_kind(config) in ("model", "own"),
    ),
    (
        ANY_MODEL,
        "a model as --demonstrations (model:FOLDER, openai:MODEL)",
        lambda config: demonstrator_kind(config) in ("model", "openai", "own"),
    ),
)
"""What each sort of demonstrator is asked with."""


def asks_expert(config: Any) -> bool:
    """Whether the player that --expert names plays, or judges."""
    uses, play, judge = config.uses or (), config.rollouts.play, config.rollouts.judging.judge
    shows = "shown" in uses and config.rollouts.demonstrations.demonstrations is None and not play.traces
    # of scores alone `auto` are the rules; a judge of another package is told the expert's name
    words = ("expert",) if config.section in ("prm_rl", "sage_opd") else ("auto", "expert")
    known = judge in NO_MODELS or "://" in judge or judge.startswith(("skills:", "model:"))
    judges = "judge" in uses and (judge in words or not known)
    return judges or (shows and (config.section != "tcod" or config.own.direction == "b2f"))


def has_frozen_model(config: Any) -> bool:
    """Whether a model scores that is not trained: a teacher, or the policy before training."""
    own = config.own
    kl = any(getattr(own, name, 0) for name in ("kl_coef", "kl_reward_coef"))
    return kl or "teacher" in (config.uses or ()) or getattr(own, "reader", "") == "initial"


def has_ratio(config: Any) -> bool:
    """Whether the loss has a probability ratio, which a form of the loss between student and teacher may lack."""
    # prm-opd's scores have one, whatever the form of its hints
    return "form" not in (config.uses or ()) or config.section == "prm_opd" or form_of(config) == "sampled"


def built_in(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """`holds`, for built-in algorithms: what another package's reads is not known."""
    return lambda config: config.algorithm not in BUILT_IN or holds(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run. `config_class` adds the settings of its algorithm."""

    section: ClassVar[str] = ""
    """Name of the field with the algorithm's own settings."""
    uses: ClassVar[frozenset[str] | None] = None
    """What the algorithm reads (`AlgorithmSpec.reads`): other settings do not exist."""
    algorithm: str
    models: ModelConfig = field(metadata=FLAT)
    run: RunConfig = field(default_factory=RunConfig, metadata=FLAT)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    stale: AsyncConfig = field(default_factory=AsyncConfig, metadata={**FLAT, **read_by(PLAYS)})
    rollouts: RolloutConfig = field(default_factory=RolloutConfig, metadata=FLAT)
    needs: ClassVar[Needs] = (
        (("eval_limit", "eval_samples", "eval_temperature"), "--panel", lambda config: config.rollouts.play.evaluates),
        (("eval_every",), "--panel", lambda config: config.rollouts.play.evaluates or config.run.eval_every == 0),
        (("keep_rollouts",), "episodes that are played (no --traces)", lambda config: not config.rollouts.play.traces),
        (
            ("slots", "rollout_dtype", "workers", "engine"),
            "episodes that are played (no --traces, or a --panel)",
            lambda config: not config.rollouts.play.traces or config.rollouts.play.evaluates,
        ),
        (("share",), "--also", lambda config: bool(config.rollouts.play.also)),
        (
            ("demonstrated_tasks",),
            "--demonstrations",
            lambda config: config.rollouts.demonstrations.demonstrations is not None,
        ),
        (
            ("demonstration_success", "demonstration_reward", "demonstration_fits"),
            "--demonstrations",
            # sft alone can do without: its expert plays as [sft] says
            lambda config: config.section != "sft" or config.rollouts.demonstrations.demonstrations is not None,
        ),
        (
            tuple(f"sft.{name}" for name in ("noise", "mistakes", "players", "hints", "told")),
            "an expert who plays (neither --demonstrations nor --traces)",
            lambda config: config.rollouts.demonstrations.demonstrations is None and not config.rollouts.play.traces,
        ),
        (("dual_clip",), "a loss with a ratio (--distill.form sampled)", built_in(has_ratio)),
        (("expert",), "an expert who plays or judges", built_in(asks_expert)),
        (
            ("teacher_dtype", "shard_teacher"),
            "a teacher, or a KL to the initial policy (kl_coef above 0)",
            built_in(has_frozen_model),
        ),
        (
            ("demonstrations", "demonstration_success", "demonstration_reward", "demonstration_fits"),
            "--tcod.direction b2f",
            lambda config: config.section != "tcod" or config.own.direction == "b2f",
        ),
        *BY_DEMONSTRATOR,
        *BY_FORM,
    )

    @property
    def own(self) -> Any:
        """The algorithm's own settings."""
        return getattr(self, self.section)

    @property
    def has_teacher(self) -> bool:
        """Whether another model than the student teaches, from a folder or on servers."""
        return self.models.teacher is not None or bool(self.rollouts.servers.teacher_server)


# cached, because settings made from two classes of the same algorithm would never be equal
@cache
def config_class(algorithm: str) -> type[TrainConfig]:
    """Returns the class of all settings of a run with `algorithm`. Raises PluginError for an unknown one."""
    spec = find_algorithm(algorithm)
    parts: list[tuple[str, type[Any], Any]] = [(spec.table, spec.config, field(default_factory=spec.config))]
    if "distill" in spec.uses:
        parts.append(("distill", DistillConfig, field(default_factory=DistillConfig)))
    if "text" in spec.uses:
        parts.append(("lm_loss", LmLossConfig, field(default_factory=LmLossConfig)))
    taken = {*TrainConfig.__dataclass_fields__, "distill", "lm_loss"}
    if spec.table in taken or not spec.table.isidentifier():
        raise ConfigError(
            f"algorithm {spec.name!r}: its settings cannot be called {spec.table!r}; valid: a name other than "
            f"{', '.join(sorted(taken))} (AlgorithmSpec.section)"
        )
    made = make_dataclass(
        "TrainConfig",
        parts,
        bases=(TrainConfig,),
        namespace={"section": spec.table, "uses": spec.reads, "__module__": __name__},
        frozen=True,
        slots=True,
        kw_only=True,
    )
    made.__doc__ = f"A training run with {spec.name}."
    return made


def train_config(algorithm: str, table: Mapping[str, Any], where: str, **more: Any) -> TrainConfig:
    """Reads settings from a nested table (keywords, or a TOML file); `more` is that of `from_table`.

    Raises SettingsError for a setting that does not exist, has a value that it cannot have, or would not be read.
    """
    config = _from_table(algorithm, table, where, **more)
    # a file whose missing settings options will give is not the whole
    return config if more else check_needed(config, in_file_of(algorithm))


def unread_keys(algorithm: str, table: Mapping[str, Any], where: str) -> list[str]:
    """The keys of the settings in `table` that nothing would read beside the others. Raises SettingsError for one that
    does not exist or has a value that it cannot have."""
    return [key for key, _, _ in unread(_from_table(algorithm, table, where))]


def _from_table(algorithm: str, table: Mapping[str, Any], where: str, **more: Any) -> TrainConfig:
    def hint(key: str) -> str:
        return "" if key in keys_of(algorithm) else who_reads(key)

    return from_table(config_class(algorithm), {"algorithm": algorithm, **table}, where, hint=hint, **more)


@cache
def keys_of(algorithm: str) -> tuple[str, ...]:
    """The keys of all settings of an algorithm. Raises PluginError for an unknown one."""
    return tuple(setting.key for setting in settings_of(config_class(algorithm)))


@cache
def in_file_of(algorithm: str) -> Mapping[str, Any]:
    """Key -> type of the settings that a file and a Python call may set, and no option of `turngym train`."""
    return {setting.key: setting.type for setting in settings_of(config_class(algorithm)) if setting.in_file}


@cache
def who_reads(key: str) -> str:
    """Says which built-in algorithms have the setting or table `key`; "" where none has."""
    readers = [name for name in BUILT_IN if any(own == key or own.startswith(f"{key}.") for own in keys_of(name))]
    if not readers:
        return ""
    others = [name for name in BUILT_IN if name not in readers]
    return f"It belongs to {', '.join(readers) if len(readers) <= len(others) else 'all but ' + ', '.join(others)}."
