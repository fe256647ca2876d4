"""All settings of a training run as one value: what the command line, TOML files and `train()` describe.

    TrainConfig
      models       which model learns, where the run is kept, what it computes on
      play         the environment, and the episodes of a step
      method       the algorithm's own settings, and what it reads besides (`USES`)
      evaluation   on which panel the student is evaluated, and when; or nothing
      run, optimizer, lora, chat, engine, workers

What an algorithm does not read is no part of its `TrainConfig`: `config_class` makes the type for each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from turngym.agents.executor.worker_count import AnyWorkers, AutoWorkers
from turngym.agents.judges.judge_settings import AnyJudge, Expert, OwnJudge, Rules
from turngym.agents.play_spec import SAMPLES, TEMPERATURE, AnyAgent, Game, ModelChat
from turngym.agents.resolve_play import at_home, folder_layer, full_panel_name, unsaid_channel
from turngym.agents.servers.server_options import AnyEngine, AnyTeacher, Here, TeacherServed
from turngym.core.clean_keys import refuse_credentials
from turngym.core.errors import SettingsError, UnknownSettingError
from turngym.core.nested import KIND, at
from turngym.core.numbers import Count, NotNegative, Number, Signed
from turngym.core.resolve import Layer, Resolved, asked_in, merged, read_back, resolve
from turngym.core.setting import Setting, find, named, settings_of, short_name
from turngym.core.spec import Spec, Unread, expand, needing, to_table
from turngym.trainers.algorithm import ExpertPlay
from turngym.trainers.algorithm_spec import BUILT_IN, PLAYS, find_algorithm
from turngym.trainers.learning_rate import usual_lr
from turngym.trainers.lora import LoraConfig
from turngym.trainers.run_config import (
    Ahead,
    DistillConfig,
    DivergenceConfig,
    LmLossConfig,
    LoopConfig,
    OptimizerConfig,
    Renewed,
    RunConfig,
    SupportConfig,
)
from turngym.trainers.training_layers import training_layers

L = TypeVar("L", bound=Spec)
DEFAULT = "turnopd"
"""The algorithm, where neither a call nor its configuration names one."""

# What every run has.


class ModelConfig(Spec):
    """Which model learns, where the run is kept, and what it computes on."""

    student: Path
    """Folder of the model to train, or ORG/NAME[@REVISION]. The latter is one of the hub (extra `hub`). The tokenizer
    lies in the folder, too, and its `turngym.json`, if it has one."""
    out: Path
    """Folder of the run. It gets checkpoints, metrics.jsonl, tensorboard, evaluation traces."""
    resume: bool = False
    """Continue the run in --out. It goes on from its last checkpoint, to the same numbers."""
    device: str = "auto"
    """Where models compute. `cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights. bfloat16 loses updates as small as the reference learning rate's."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of torch on the CPU. 0 leaves its default; tiny models are fastest with 1."""


class PlayConfig(Game):
    """What is played in training."""

    also: tuple[str, ...] = ()
    """Further environments of the same run. Each is
    ENV,share=1,split=train,panel=NAME,data=FOLDER,teacher=FOLDER,env.ARGUMENT=VALUE; only ENV must be there
    (docs/several_envs.md)."""
    data: Annotated[str, Meta(min_length=1)] | None = None
    """Folder of the data. By default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    preset: str | None = None
    """A published set-up by name. turnopd, verl-agent, react or search-r1, for training and evaluations; `--preset
    list` shows what they set. Options that are given beside it, --env-kwargs too, take the place of its values."""
    traces: tuple[Path, ...] = ()
    """Recorded episodes to train on. Nothing is played then: sft imitates them; the others take them as rollouts, cut
    at the depth cap, attempts at one task as a group (not tcod b2f, which replays an expert in the environment).
    Episodes without token ids (of experts, of endpoints) are tokenized for the student. Where --env is not given, it is
    that of the first one."""
    slots: Annotated[int, Meta(ge=1, le=10**6)] = 64
    """Episodes played at a time. Requests are generated together."""
    keep_rollouts: Number = 0
    """Steps whose episodes are kept. The training episodes of the last so many steps stay as traces,
    rollouts/step_K.jsonl in the run's folder."""


class EvaluationConfig(Spec):
    """How the student is evaluated."""

    panel: str
    """Panel to evaluate on. Its tasks are never trained on; without one nothing is evaluated."""
    game: Game
    """The panel's environment. It is as the panel fixes it, then as a preset says; what neither says is as in
    training."""
    eval_samples: Count = SAMPLES
    """Episodes per task of an evaluation (Avg@n)."""
    eval_temperature: NotNegative = TEMPERATURE
    """Sampling temperature of evaluations."""
    eval_limit: Count | None = None
    """Number of tasks that are evaluated. Every category has its share."""
    eval_spread: bool = True
    """Take the --eval-limit of tasks from all categories, in a fixed order; without it the panel's first."""

    def unread(self) -> Unread:
        if self.eval_limit is None:
            yield from needing("--eval-limit", "eval_spread")


# What some algorithms have alone.


class DemonstrationConfig(Spec):
    """Demonstrations, of luffy, tcod b2f and sft."""

    demonstrator: AnyAgent | None = None
    """Who demonstrates the step's tasks. `expert` or another player, `model:FOLDER`, `openai:MODEL`, an agent of yours
    as `package.module:name`, or a trace file, whose episodes are found by task. By default --expert."""
    demonstrated_tasks: bool = False
    """Play only demonstrated tasks. Of these the trace file has a demonstration that counts."""
    demonstration_success: bool = False
    """Leave out those that did not succeed."""
    demonstration_reward: Signed | None = None
    """Leave out those that are worth less. By --reward, else by their return."""
    demonstration_fits: bool = True
    """Leave out demonstrations that, in the student's tokens, are longer than its context."""

    def unread(self) -> Unread:
        if self.demonstrator is None:
            yield from needing("--demonstrations", "demonstrated_tasks")


class FrozenConfig(Spec):
    """How models are held that score and are not trained: the teacher, the initial policy."""

    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights of teacher and initial policy."""
    shard_teacher: bool = False
    """Divide the weights of the teacher, too. Under torchrun, with those of the initial policy: a process holds all of
    them only while it scores."""


class Method(Spec):
    """What some algorithms read besides their own settings, whose table stands beside these (`USES`)."""

    temperature: NotNegative = 1.0
    """Sampling temperature of training rollouts. Episodes of --traces are scored at the one that each records."""
    staleness: Ahead | None = None
    """Steps by which playing lags behind. The student that plays is then older than the one that learns; none: play,
    then learn, exactly."""
    teacher: AnyTeacher | None = None
    """Folder of the teacher, or ORG/NAME[@REVISION]. The latter is one of the hub (extra `hub`). opd-hints and prm-opd
    need none: there the student before training teaches."""
    frozen: FrozenConfig = FrozenConfig()
    reference: Renewed | None = None
    """The reference of the KL; none: it stays the initial policy."""
    distill: DistillConfig = DistillConfig()
    judge: AnyJudge = Rules()
    """Who judges. `rules` (verdicts and rewards of the environment), `expert` (plays each episode again and asks
    --expert, which by default sees the hidden state), `model:FOLDER`, the url of an OpenAI-compatible endpoint with its
    version (http://127.0.0.1:8000/v1; the key comes from TURNGYM_JUDGE_KEY), or a judge of yours as
    `package.module:name`. For hints alone: `skills:FOLDER` (texts by the kind of task; `skills:alfworld`, `webshop` and
    `search` come along), `attempts` (what another attempt of the group did that succeeded), `episode` (what the
    finished episode itself teaches), `nothing`. By default rules where scores alone are asked for, else expert."""
    expert: str = "expert"
    """Who demonstrates. --judge expert asks it, too; `searching` knows only what it has seen."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """Who demonstrates the step's tasks. `expert` or another player, `model:FOLDER`, `openai:MODEL`, an agent of yours
    as `package.module:name`, or a trace file, whose episodes are found by task. By default --expert."""
    reward: str | None = None
    """What an episode is worth, not its return. A function of the episode as `package.module:function`; algorithms that
    read another reward (--grpo.reward success) refuse it."""
    dual_clip: NotNegative | None = None
    """Bound of the ratio under an advantage < 0. Policy gradients: where the advantage is negative, a token's ratio new
    / old counts for at most this, above 1 (a dual clip). By default 3 where episodes may be stale (--staleness,
    --traces, the proxy), else none; 0: never one."""
    lm_loss: LmLossConfig = LmLossConfig()


USES: Mapping[str, frozenset[str]] = {
    "temperature": frozenset({PLAYS}),
    "staleness": frozenset({PLAYS}),
    "teacher": frozenset({"teacher"}),
    "frozen": frozenset({"teacher", "reference"}),
    "reference": frozenset({"reference"}),
    "distill": frozenset({"distill"}),
    "judge": frozenset({"judge"}),
    "expert": frozenset({"expert"}),
    "demonstrations": frozenset({"shown"}),
    "reward": frozenset({"reward", "shown"}),
    "dual_clip": frozenset({"surrogate"}),
    "lm_loss": frozenset({"text"}),
}
"""Which uses of an algorithm give it a setting of `Method`."""


# The whole.


class Learns:
    """What the settings of an algorithm say, for a training run and for a proxy whose clients train a model."""

    __slots__ = ()
    algorithm: str
    method: Method
    lora: LoraConfig | None

    @property
    def own(self) -> Any:
        """The algorithm's own settings."""
        return getattr(self.method, find_algorithm(self.algorithm).table)

    def part(self, name: str) -> Any:
        """A setting of `Method`; its default where the algorithm does not read it."""
        return getattr(self.method, name, getattr(USUAL, name))

    @property
    def teacher(self) -> Path | None:
        """The teacher's folder."""
        teacher: AnyTeacher | None = self.part("teacher")
        return None if teacher is None else teacher.teacher

    @property
    def served_teacher(self) -> TeacherServed | None:
        """The teacher on servers."""
        teacher = self.part("teacher")
        return teacher if isinstance(teacher, TeacherServed) else None

    @property
    def has_teacher(self) -> bool:
        """Whether another model than the student teaches, from a folder or on servers."""
        return self.part("teacher") is not None

    @property
    def distill(self) -> DistillConfig:
        """The loss between student and teacher, with all that some algorithms do not choose."""
        return DistillConfig(**msgspec.structs.asdict(self.part("distill")))


class TrainConfig(Spec, Learns):
    """A training run. `config_class` makes the type whose `method` has what an algorithm reads."""

    algorithm: str
    """Which algorithm trains: a name (`turnopd`), `package.module:NAME`, or an entry point."""
    models: ModelConfig
    play: PlayConfig
    method: Method = Method()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Adapters of this rank learn in place of the weights; they want about ten times the learning rate."""
    evaluation: EvaluationConfig | None = None
    run: LoopConfig = LoopConfig()
    chat: ModelChat = ModelChat()
    """How the student is spoken to. Examples are no part of the model: give them to `turngym eval`, too."""
    engine: AnyEngine = Here()
    """What plays. This process (`local`), `servers` (--policy-server), or a server (`sglang`, `vllm`) that the run
    starts beside itself, on the same GPU."""
    workers: AnyWorkers = AutoWorkers()
    """Processes that play episodes. `N` of them on this machine, 0 for this process, `ray:N` actors of a Ray cluster;
    auto starts several if a tiny model plays so many episodes that starting them pays off. The episodes are the same
    for any number of workers."""

    @property
    def stale(self) -> Ahead | None:
        """How far playing runs ahead of learning; None: not at all."""
        stale: Ahead | None = getattr(self.method, "staleness", None)
        return stale

    @property
    def loop(self) -> RunConfig:
        """All that the loop reads."""
        turns, parts = self.play.env.max_turns, {name: self.part(name) for name in ("temperature", "reference")}
        assert turns is not None, "the layers of a run give it a limit"
        return RunConfig(**msgspec.structs.asdict(self.run), **parts, max_turns=turns)

    def unread(self) -> Unread:
        """What depends on settings of several tables."""
        spec = find_algorithm(self.algorithm)
        judge, demonstrations = self.part("judge"), self.part("demonstrations")
        imitates, played = "imitates" in spec.reads, not self.play.traces
        expert_plays = played and demonstrations.demonstrator is None
        method_table = f"method.{spec.table}"
        if imitates and demonstrations.demonstrator is None:
            yield from needing("--demonstrations", "method.demonstrations")
        if imitates and not expert_plays:
            needed = "an expert who plays (neither --demonstrations nor --traces)"
            yield from needing(needed, *(f"{method_table}.{field.name}" for field in dataclasses.fields(ExpertPlay)))
        # a judge of another package is told the expert's name
        judge_asks = "judge" in spec.reads and isinstance(judge, Expert | OwnJudge)
        if not judge_asks and not ("shown" in spec.reads and expert_plays):
            yield from needing("an expert who plays or judges", "method.expert")
        if not played:
            needed = "episodes that are played (no --traces)"
            yield from needing(needed, "method.staleness", f"{method_table}.refill", "play.keep_rollouts")
        if not played and imitates and self.evaluation is None:
            yield from needing("episodes that are played (no --traces, or a --panel)", "play.env.max_turns")
        if self.evaluation is None and self.run.eval_every:
            yield from needing("--panel", "run.eval_every")


USUAL = Method()


def _narrow(uses: frozenset[str]) -> Any:
    """The class of the settings of `distill` that an algorithm with these uses has."""
    return DistillConfig if "distills" in uses else DivergenceConfig if "form" in uses else SupportConfig


@cache
def config_class(algorithm: str) -> type[TrainConfig]:
    """The class of all settings of a run with `algorithm`. Raises PluginError for an unknown one."""
    return with_method(TrainConfig, algorithm, frozenset(USES))


# cached, because settings made from two classes of the same algorithm would never be equal
@cache
def with_method(base: type[L], algorithm: str, parts: frozenset[str]) -> type[L]:
    """`base` with a `method` that has the settings of `algorithm` and those of `parts` that it reads."""
    spec = find_algorithm(algorithm)
    reserved = {*Method.__struct_fields__, *base.__struct_fields__}
    if spec.table in reserved or not spec.table.isidentifier():
        raise SettingsError(
            f"algorithm {spec.name!r}: its settings cannot be called {spec.table!r}; valid: a name other than "
            f"{', '.join(sorted(reserved))} (AlgorithmSpec.section)"
        )
    members: dict[str, tuple[Any, Any]] = {spec.table: (spec.config, spec.config())}
    for field in msgspec.structs.fields(Method):
        if field.name in parts and USES[field.name] & spec.reads:
            kind = _narrow(spec.reads) if field.name == "distill" else field.type
            members[field.name] = kind, kind() if field.name == "distill" else field.default
    method = _make_class("Method", Spec, members, documented_by=Method)
    made: type[L] = _make_class(base.__name__, base, {"method": (method, method())})
    return made


def _make_class(name: str, base: type[Spec], members: Mapping[str, tuple[Any, Any]], **more: Any) -> Any:
    """A class with these fields, by name: type and default."""
    kinds = {member: kind for member, (kind, _) in members.items()}
    defaults = {member: default for member, (_, default) in members.items()}
    space = {"__annotations__": kinds, "__module__": __name__, **defaults, **more}
    return type(Spec)(name, (base,), space, frozen=True, forbid_unknown_fields=True)  # type: ignore[misc]


# From what people write to the whole.


def resolve_training(algorithm: str, layers: Sequence[Layer], *, fetch: bool = False) -> Resolved[TrainConfig]:
    """The run that the layers give together; their tables may have short names. `fetch` as in `training_layers`.

    Raises SettingsError for a setting that does not exist, has a value that it cannot have, or would not be read.
    """
    cls = config_class(algorithm)

    def given_in(layer: Layer) -> Layer:
        def again(table: Mapping[str, Any]) -> TrainConfig:
            # a record may lack the run's folder, as a study's do, and nothing follows from it
            folder, asked_table = (Layer(name=layer.name, table=part, asked=True) for part in ({"out": "."}, table))
            return resolve_training(str(layer.table["algorithm"]), [folder, asked_table], fetch=fetch).spec

        # what nobody asked this run for is for algorithms that read it
        read = expanded if layer.asked else read_alone
        return replace(layer, table=read(algorithm, read_back(layer.table, again), layer.name))

    read_layers = [*map(given_in, layers)]
    env_ids = [env for layer in read_layers if (env := at(layer.table, "play.env.id")) is not None]
    for layer in read_layers:
        # what nobody asked for of another environment is not for this one: a study's world may build on another
        if not layer.asked and at(layer.table, "play.env.id") not in (None, *env_ids[-1:]):
            for table in ("env", "env_kwargs"):
                layer.table["play"].pop(table, None)
    values = merged([layer.table for layer in read_layers])
    spec = find_algorithm(algorithm)
    usual: dict[str, Any] = {"optimizer": {"lr": usual_lr(spec, adapters=isinstance(at(values, "lora"), Mapping))}}
    if "judge" in spec.reads:
        usual["method"] = {"judge": {KIND: "rules" if "scores" in spec.reads else "expert"}}
    below = [Layer(name=algorithm, table=usual), *training_layers(values, fetch=fetch)]
    # how a model that demonstrates was trained to be spoken to
    if (folder := at(values, "method.demonstrations.demonstrator.folder")) is not None:
        folder_settings = folder_layer(str(folder))
        demonstrator = {"method": {"demonstrations": {"demonstrator": folder_settings.table.get("agent", {})}}}
        below.append(replace(folder_settings, table=demonstrator))
    read_layers.append(Layer(name=read_layers[-1].name, table={"algorithm": algorithm}, asked=True))
    return asked_in(resolve(cls, [*below, *read_layers]), read_layers)


def expanded(algorithm: str, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A partial table of whole paths. Raises SettingsError, which says whose an unknown setting is."""
    given = {name: value for name, value in table.items() if name != "algorithm"}
    refuse_credentials("", given)
    try:
        for name in given:
            require_setting(algorithm, name, where)
        paths = at_home(expand(config_class(algorithm), given, where), where, data="play.data")
    except UnknownSettingError as error:
        if owner := who_reads(error.name):
            raise SettingsError(f"{where}: there is no setting {error.name}. {owner}") from None
        raise
    if isinstance(panel := at(paths, "evaluation.panel"), str):
        # the version that a name without one stands for
        paths["evaluation"]["panel"] = full_panel_name(panel)
    env = at(paths, "play.env")
    if isinstance(env, dict) and env.get("max_turns", 0) is None:
        del env["max_turns"]  # an episode of training has an end, so that this says nothing
    return unsaid_channel(paths, "chat")


def read_alone(algorithm: str, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a run with `algorithm` has of a table that several algorithms share, as a partial table of whole paths."""

    def kept(table: Mapping[str, Any], above: str) -> dict[str, Any]:
        kept_values = dict[str, Any]()
        for key, value in table.items():
            name = f"{above}{key}"
            setting = _setting(algorithm, name.removesuffix(f".{KIND}"))
            if isinstance(value, Mapping) and value and not (setting is not None and setting.free):
                if inner := kept(value, f"{name}."):
                    kept_values[key] = inner
            elif setting is not None:
                kept_values[key] = value
        return kept_values

    return expanded(algorithm, kept(table, ""), where)


def require_setting(algorithm: str, name: str, where: str) -> Setting:
    """The setting that `name` means in a run with `algorithm`. Raises SettingsError where it means none."""
    setting = _setting(algorithm, name)
    if setting is None:
        find(config_class(algorithm), name, where)  # it says what may be meant
        raise UnknownSettingError(name, f"{where}: there is no setting {name}.")
    return setting


@cache
def _setting(algorithm: str, name: str) -> Setting | None:
    """The setting that `name` means in a run with `algorithm`.

    A name means the same in every algorithm: where one lacks `temperature`, no other temperature is meant.
    """
    # the key of a table of any keys: `env_kwargs.profile`
    above = named(TrainConfig, name.rpartition(".")[0])
    if above is not None and above.free:
        return above
    cls = config_class(algorithm)
    setting, usual = named(cls, name), named(TrainConfig, name)
    if setting is None or usual is None or usual.path == setting.path or usual.path in settings_of(cls):
        return setting
    return None


def beyond(config: TrainConfig) -> str:
    """A warning about settings of `config` that someone has chosen and whose steps the run does not have; "" for
    none."""
    table, cls, steps = to_table(config), type(config), config.run.steps
    late = [
        f"--{option_name(cls, path).replace('_', '-')} is {value}"
        for path, setting in settings_of(cls).items()
        if setting.within and (value := at(table, path)) not in (None, setting.default) and value > steps
    ]
    return f"{' and '.join(late)}: the run ends before that, after step {steps}" if late else ""


def train_config(algorithm: str, table: Mapping[str, Any], where: str) -> TrainConfig:
    """The settings of a table with short names (keywords, or a TOML file). Raises as `resolve_training`."""
    return resolve_training(algorithm, [Layer(name=where, table=table, asked=True)]).spec


def has_setting(algorithm: str, name: str) -> bool:
    """Whether a run with `algorithm` has the setting or table `name`. Raises PluginError for an unknown algorithm."""
    return _setting(algorithm, name) is not None


def option_name(cls: type[Any], path: str) -> str:
    """The name of the setting at `path`. The table is part of it if it says what the setting is about (`optimizer.lr`,
    `turnopd.depth.h_min`)."""
    table, _, below = path.partition(".")
    part, dot, _ = below.partition(".")
    if table == "method" and dot and part not in {*Method.__struct_fields__} - {"distill", "lm_loss"}:
        return below
    return path if table in ("optimizer", "lora") else short_name(cls, path)


@cache
def who_reads(name: str) -> str:
    """Names the built-in algorithms that have the setting or table `name`; "" if none has."""
    readers = [algorithm for algorithm in BUILT_IN if has_setting(algorithm, name)]
    if len(readers) in (0, len(BUILT_IN)):
        return ""
    without = [algorithm for algorithm in BUILT_IN if algorithm not in readers]
    return f"It belongs to {', '.join(readers) if len(readers) <= len(without) else 'all but ' + ', '.join(without)}."
