"""What is played and by whom: `PlaySpec` is everything on which an episode depends but the player, and
`AgentSettings` the player.

    EvalSpec            an evaluation, or a rollout
      play  PlaySpec    the game: environment, tasks, samples, seed, what scores
      agent Agent       the player: who plays, how a model is spoken to, at which temperature
      compute Compute   who computes, and where data lie: changes no episode

`agents.resolve_play` makes them from what people write. A trace begins with its `EvalSpec`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.executor.worker_count import AnyWorkers, AutoWorkers
from turngym.core.errors import SettingsError
from turngym.core.nested import KIND
from turngym.core.numbers import Count, Million, NotNegative, Number, Positive, Seed, Share, Signed
from turngym.core.plugins import installed
from turngym.core.spec import Spec, to_table
from turngym.core.task import Task
from turngym.envs.guard import OnInvalid
from turngym.envs.lenient_reading import Reading

SAMPLES, TEMPERATURE = 4, 0.85
"""Episodes per task, and sampling temperature, of an evaluation where nobody says otherwise."""
AGENTS = "turngym.agents"
"""Entry points of other packages' agents."""


class Environment(Spec):
    """The environment and its guard: arguments of `gym.make` that every environment has."""

    id: str
    """Gymnasium id; `package:namespace/Name-v0` imports `package` first, which registers it."""
    max_turns: Count | None
    """Turns before an episode is cut."""
    on_invalid: OnInvalid
    """What an invalid action does: `noop` as the environment itself, `reject` with the reason and what is possible,
    `penalize`, `terminate`."""
    penalty: Signed
    """Reward of an invalid action with `penalize`."""
    invalid_cost: Signed
    """Taken from the reward of every malformed response."""
    list_admissible: bool
    """Whether refusals list what is possible."""
    show_admissible: bool
    """Whether every observation ends with the list of admissible actions."""
    reading: Reading
    """How responses are read: `strict` as the channel says, `folded` whatever the letter case, `lenient` in any form
    that holds a possible action (a bare line, `Action: ...`, a fence)."""
    tool_name: str | None
    """Name of the tool that agents see; none: the environment's own."""
    tool_argument: str | None
    """Name of the tool's argument that agents see; none: the environment's own."""
    split: str | None = None
    """Split of the environment."""


# Which tasks.


class TaskChoice(Spec, tag_field=KIND):
    """Which tasks of a panel are played."""


class Whole(TaskChoice, tag="panel"):
    """Every task."""


class PartOfPanel(TaskChoice, tag="part"):
    """Some tasks of the panel, the same ones for the same number."""

    limit: Count
    """Play only so many tasks of the panel, of each category its share (`--no-spread`: the panel's first)."""
    spread: bool = True
    """Take the --limit of tasks from all categories, in a fixed order; without it the panel's first."""

    @property
    def said(self) -> str:
        """Which tasks, in words."""
        if self.limit == 1:
            return "1 task" if self.spread else "first task"
        return f"{self.limit} tasks over all categories" if self.spread else f"first {self.limit} tasks"

    def said_of(self, size: int) -> str:
        """Which of `size` tasks, in words."""
        spread = f"{self.limit} of {size} tasks, over all categories"
        return spread if self.spread else f"the first {self.limit} of {size} tasks"


def part_of(tasks: Sequence[Task], sampling: TaskChoice) -> tuple[Task, ...]:
    """The tasks of a panel that are played where nothing is drawn, in the panel's order.

    Spread: the k-th task (from 0) of a category with n tasks has the position (k + 1/2) / n, and the tasks with the
    lowest positions are taken. So every category has its share, and a larger limit contains the tasks of a smaller one.
    """
    if not isinstance(sampling, PartOfPanel):
        return tuple(tasks)
    if not sampling.spread:
        return tuple(tasks[: sampling.limit])
    sizes, seen = Counter(task.category for task in tasks), Counter[str]()
    positions = []
    for number, task in enumerate(tasks):
        # a fraction: equal positions must not differ by rounding
        positions.append((Fraction(2 * seen[task.category] + 1, 2 * sizes[task.category]), number))
        seen[task.category] += 1
    return tuple(tasks[number] for number in sorted(number for _, number in sorted(positions)[: sampling.limit]))


class Published(TaskChoice, tag="published"):
    """The tasks that the published harness draws, as often as it draws them; `samples` counts its validations."""

    harness: Annotated[int, Meta(ge=1, le=10_000)] = 128
    """Workers of the harness. Which tasks it plays depends on their number."""


class Tasks(Spec, tag_field=KIND):
    """Which tasks are played."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """Reads `N`: N tasks."""
        return {KIND: "first", "count": int(text)} if text.isascii() and text.isdigit() else super().table_of(text)


class OnPanel(Tasks, tag="panel"):
    """The tasks of a panel."""

    panel: str
    """Name (newest version), full name, or path of a manifest; `turngym panel list` shows them."""
    sha256: str = ""
    """Hash of the panel."""
    size: Number = 0
    """Number of its tasks."""
    sampling: Whole | PartOfPanel | Published = Whole()
    """`panel`: every task, --samples times. `published`: the tasks that the published harness (verl-agent) draws with
    128 workers, `published:N` with N, in --samples validations; a number so drawn depends on N."""


class FirstTasks(Tasks, tag="first"):
    """Tasks of the environment's own list."""

    count: Million = 10
    """How many."""
    draw: bool = False
    """Draw the tasks with --seed instead of taking the first ones."""


class Listed(Tasks, tag="list"):
    """Tasks by their ids."""

    task: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Task ids."""


class Game(Spec):
    """An environment as it is made."""

    env: Environment
    """Gymnasium id of the environment; `package:namespace/Name-v0` imports `package` first."""
    env_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of gym.make, those of the environment itself. On a command line JSON, for example
    '{"engine": "textworld"}'."""
    scoring: dict[str, str] = msgspec.field(default_factory=dict)
    """What scores depend on besides the tasks, as the environment says it (`TextEnv.scoring`)."""


class PlaySpec(Game, kw_only=True):
    """What is played."""

    tasks: OnPanel | FirstTasks | Listed
    """How many of the environment's tasks are played; --task names them instead."""
    samples: Million
    """Episodes per task."""
    seed: Seed = 0
    """Same seed, same episodes, whatever --slots and --workers."""
    depth: Count | None = None
    """End every episode after so many turns as `truncated_depth`."""


def episodes_of(play: PlaySpec) -> int:
    """How many episodes are asked for."""
    tasks = play.tasks
    if isinstance(tasks, FirstTasks):
        return tasks.count * play.samples
    if isinstance(tasks, Listed):
        return len(tasks.task) * play.samples
    if isinstance(tasks.sampling, Published):
        return tasks.sampling.harness * play.samples
    most = tasks.sampling.limit if isinstance(tasks.sampling, PartOfPanel) else tasks.size
    return min(most, tasks.size) * play.samples


def drawn(play: PlaySpec) -> bool:
    """Whether tasks are drawn as the published harness draws them: every draw counts alike."""
    return isinstance(play.tasks, OnPanel) and isinstance(play.tasks.sampling, Published)


# How a model is spoken to.


class MemorySettings(Spec, tag_field=KIND):
    """What a turn's prompt holds of the episode."""


class All(MemorySettings, tag="all"):
    """All of it."""


class Window(MemorySettings, tag="window"):
    """The task and the last turns."""

    turns: Number
    """Number of the last turns."""


class React(MemorySettings, tag="react"):
    """A transcript."""


class VerlAgent(MemorySettings, tag="verl-agent"):
    """Templates with the last turns, as verl-agent writes them."""

    turns: Number
    """Number of the last turns."""
    prompts: str = "own"
    """Templates: `own` (our words), `model` (those in the model's folder), or the folder of a checkout of verl-agent or
    of a fork of it, whose texts are read and never run."""
    sha256: str = ""
    """Hash of the templates."""


class ExampleSettings(Spec, tag_field=KIND):
    """What the prompt shows in front of the task."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """`skills:FOLDER`, else the path of a file."""
        kind, colon, folder = text.partition(":")
        return {KIND: kind, "folder": folder} if kind == "skills" and colon else {KIND: "file", "file": text}


class ExampleFile(ExampleSettings, tag="file"):
    """Examples (few-shots) of a file."""

    file: str
    """A trace, whose successful episodes are shown, or a text."""
    form: Literal["auto", "text", "turns"] = "auto"
    """How examples are shown: `text` at the end of the system message, `turns` as earlier messages of the conversation;
    auto: a trace as turns."""
    shown_for: Literal["all", "category"] = "all"
    """Which tasks are shown an example: `all`, or those of its own `category`, as ReAct does in ALFWorld (as turns)."""
    content: str = ""
    """Hash of what is shown."""


class SkillTexts(ExampleSettings, tag="skills"):
    """Texts by the kind of task (docs/algorithms.md#told)."""

    folder: str
    """Their folder, or the name of one that comes along."""
    content: str = ""
    """Hash of the texts."""


class Chat(Spec):
    """How a model is spoken to."""

    channel: str = "auto"
    """How actions are written: `text` in tags, `text:verl-agent` in tags that are read as there, `tool` as a tool call
    in the words of the model's family (`tool:DIALECT` names them); auto: as the model was trained, else text."""
    system: str | None = None
    """System message; none: the environment's instructions and the channel's."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of the chat template; auto: the template's default."""
    memory: All | Window | React | VerlAgent = All()
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), `verl-agent:N` (templates with the last N turns)."""
    examples: ExampleFile | SkillTexts | None = None
    """File with examples (few-shots) for the prompt: a trace, whose successful episodes are shown, or a text; or
    `skills:FOLDER`, texts by the kind of task (docs/algorithms.md#told)."""
    max_context: Count | None = None
    """Most tokens of an episode's history and response; none: what the model allows."""


class BareChat(Spec):
    """How an agent writes that reads no prompt."""

    channel: str = "none"
    """How actions are written: `none` as bare actions, else as a model writes them."""
    system: str | None = None
    """System message that the episodes record; none: the environment's instructions and the channel's."""


class ModelChat(Chat):
    """How a model that plays here is spoken to."""

    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of observations after the first; auto: what the chat template keeps more of the past for."""
    history: Literal["template", "append"] = "template"
    """`append` keeps earlier thoughts even if the template would drop them, so an episode is one segment."""
    max_new_tokens: Count = 512
    """Most tokens of one response."""


class EndpointChat(Chat):
    """How a model behind an endpoint is spoken to."""

    max_new_tokens: Count = 4096
    """Most tokens of one response."""


# Who plays.


class AgentSettings(Spec, tag_field=KIND):
    """Who plays."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """`KIND:VALUE`, `random`, the path of a trace; another name with a colon, or of an installed package, is an
        agent of another package; any other one a player of the environment."""
        kind, colon, rest = text.partition(":")
        # the name of a file, even where it does not exist
        if text.endswith((".jsonl", ".json")) and not (colon and kind in ("model", "openai", "replay")):
            return {KIND: "replay", "trace": text}
        if text in ("", "model:", "openai:", "replay:"):
            valid = "expert, random, model:FOLDER, openai:MODEL, replay:TRACE"
            raise SettingsError(f"{text!r} names no agent; valid: {valid}")
        if text == "random" or (kind in ("model", "openai", "replay") and rest):
            return super().table_of(text)
        return {KIND: "own" if colon or text in installed(AGENTS) else "player", "name": text}


class EnvPlayer(AgentSettings, tag="player"):
    """One of the environment's players."""

    name: str = "expert"
    """`expert` (sees the hidden state), or another player of the environment (ALFWorld: `searching`; WebShop:
    `first-hit`; Search: `single-shot`)."""
    noise: Share = 0.0
    """Share of random actions."""
    chat: BareChat = BareChat()
    """How its actions are written."""


class Random(AgentSettings, tag="random"):
    """Chooses among the admissible actions."""

    chat: BareChat = BareChat()
    """How its actions are written."""


class RecordedAgent(AgentSettings, tag="replay"):
    """Says again what was recorded."""

    trace: str
    """The trace whose responses are replayed."""
    chat: BareChat = BareChat()
    """How its actions are written."""


class EngineSettings(Spec, tag_field=KIND):
    """What generates."""


class Local(EngineSettings, tag="local"):
    """This process, or worker processes beside it."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model. Another one draws other episodes."""
    device: str = "auto"
    """Where it computes: `cpu`, `cuda`, ...; auto: cuda where there is one."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of torch on the CPU; 0 leaves its default. Tiny models are fastest with 1."""


class Servers(EngineSettings, tag="servers"):
    """Servers (SGLang, vLLM) that play with the model's weights."""

    policy_server: str
    """Address of a server that plays. `turngym serve policy` starts one; several with commas in between, or that of
    SGLang's router. Which kind it is, is asked."""
    server_parallel: Annotated[int, Meta(ge=1, le=1024)] = 64
    """Most requests in flight on each server."""
    server_deadline: Positive = 600.0
    """Seconds for one response, with retries and waiting for a server that restarts."""
    server: str = ""
    """The kind of server, which is asked: another one draws other episodes from the same seed."""


class Model(AgentSettings, tag="model"):
    """A language model."""

    folder: str
    """Folder of a Hugging Face causal model, or ORG/NAME[@REVISION], one of the hub."""
    weights: str = ""
    """Hash of the model's files."""
    temperature: NotNegative = TEMPERATURE
    """Sampling temperature; 0 is greedy."""
    engine: Local | Servers = Local()
    """What generates: this process, or servers."""
    chat: ModelChat = ModelChat()
    """How it is spoken to."""


class OpenAI(AgentSettings, tag="openai"):
    """A model behind an OpenAI-compatible endpoint."""

    model: str
    """Its name there."""
    temperature: NotNegative = TEMPERATURE
    """Sampling temperature; 0 is greedy."""
    chat: EndpointChat = EndpointChat()
    """How it is spoken to."""
    endpoint: EndpointOptions = msgspec.field(default_factory=EndpointOptions)
    """How it is asked."""


class Own(AgentSettings, tag="own"):
    """An agent of another package, or an object."""

    name: str
    """`package.module:name`, or the name of an entry point."""
    temperature: NotNegative | None = None
    """Sampling temperature; none: it does not sample."""
    noise: Share = 0.0
    """Share of random actions, where it knows what that is."""
    engine: Local = Local()
    """Where it computes, if it has a model."""
    chat: ModelChat = ModelChat()
    """How it is spoken to."""
    endpoint: EndpointOptions = msgspec.field(default_factory=EndpointOptions)
    """How it asks, where it asks an endpoint."""


AnyAgent = EnvPlayer | Random | RecordedAgent | Model | OpenAI | Own


# Who computes.


class Compute(Spec):
    """Who computes, and where things lie. Nothing here changes an episode."""

    slots: Annotated[int, Meta(ge=1, le=10**6)] = 64
    """Episodes played, and requests generated, at a time."""
    data: Annotated[str, Meta(min_length=1)] | None = None
    """Folder of the environment's data; by default where it looks for them (for ALFWorld: $ALFWORLD_DATA)."""
    workers: AnyWorkers = AutoWorkers()
    """Processes that play episodes. `N` of them on this machine, 0 for this process, `ray:N` actors of a Ray cluster;
    auto starts several if a tiny model plays so many episodes that starting them pays off. The episodes are the same
    for any number of workers."""


class EvalSpec(Spec):
    """An evaluation, or a rollout."""

    play: PlaySpec
    """What is played."""
    agent: AnyAgent = EnvPlayer()
    """`expert` (sees the hidden state), one of the environment's own players, `random`, `replay:TRACE`, `model:FOLDER`
    (a Hugging Face causal model; `model:ORG/NAME[@REVISION]` is one of the hub), `openai:MODEL` (a model behind any
    OpenAI-compatible endpoint), or an agent of yours as `package.module:name`."""
    compute: Compute = Compute()
    """Who computes."""
    preset: str | None = None
    """A published set-up by name (turnopd, verl-agent, react, search-r1); `--preset list` shows what they set. What is
    given beside it takes the place of its values."""


def game_of(spec: EvalSpec | None) -> dict[str, Any]:
    """Returns the settings of the game without its player, which all numbers of a table share; empty for None."""
    if spec is None:
        return {}
    game = {name: value for name, value in to_table(spec.play).items() if name not in ("seed", "scoring")}
    # a panel is known by its hash, wherever its manifest lies
    game["tasks"] = {**game["tasks"], "panel": Path(str(game["tasks"].get("panel"))).name}
    return {**game, "temperature": getattr(spec.agent, "temperature", None)}
