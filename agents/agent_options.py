"""Options of demonstrations: who demonstrates, how it is asked, and which demonstrations count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from turngym.agents.endpoint.client import EndpointOptions, EndpointSettings
from turngym.core.errors import AgentError, checked_int, did_you_mean, finite
from turngym.core.plugins import installed
from turngym.core.secrets import refuse_credentials
from turngym.core.settings import (
    FLAT,
    IN_FILE,
    Above0,
    Count,
    Length,
    Needs,
    Processes,
    SettingsError,
    Share,
    Signed,
    Threads,
)

TEMPERATURE = 0.85
"""Temperature at which a model samples where nobody says otherwise."""
AGENTS = "turngym.agents"
"""Entry points of other packages' agents."""

# Options of agents that have a name: which one plays, and how it speaks.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Which agent plays, and how it speaks."""

    agent: str = "expert"
    """`expert` (sees the hidden state), one of the environment's own players (ALFWorld: `searching`; WebShop:
    `first-hit`; Search: `single-shot`), `random`, `replay:TRACE`, `model:FOLDER` (a Hugging Face causal model;
    `model:ORG/NAME[@REVISION]` is one of the hub), `openai:MODEL` (a model behind any OpenAI-compatible endpoint), or
    an agent of yours as `package.module:name`."""
    temperature: float | None = None
    """Sampling temperature of a model; 0 is greedy. By default the preset's, else 0.85."""
    noise: Share = 0.0
    """Share of random actions among an expert's."""
    channel: str = "auto"
    """How actions are written: `text` in tags, `text:verl-agent` in tags that are read as there, `tool` as a tool call
    in the words of the model's family (`tool:DIALECT` names them), `none` as bare actions; auto: as the model was
    trained, else text, and bare actions for scripted agents."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of the chat template; auto: as the model was trained, else the template's default."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of observations after the first; auto: as the model was trained, else what its chat template keeps more of
    the past for."""
    system: str | None = None
    """System message; by default as the model was trained, else the environment's instructions."""
    memory: str | None = None
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), `verl-agent:N` (the templates of --prompts with the last N turns); by default as the model was
    trained, else all."""
    prompts: str | None = None
    """Templates of --memory verl-agent:N: `own` (our words), or the folder of a checkout of verl-agent or of a fork of
    it, whose texts are read and never run."""
    examples: str | None = None
    """File with examples (few-shots) for a model's prompt: a trace, whose successful episodes are shown, or a text; or
    `skills:FOLDER`, texts by the kind of task (docs/algorithms.md#told)."""
    examples_as: Literal["auto", "text", "turns"] = "auto"
    """How examples are shown: `text` at the end of the system message, `turns` as earlier messages of the conversation;
    auto: a trace as turns."""
    examples_for: Literal["all", "category"] = "all"
    """Which tasks are shown an example: `all`, or those of its own `category`, as ReAct does in ALFWorld (as turns)."""
    max_new_tokens: Length | None = None
    """Most tokens of one response; by default as the model was trained, else 512, at an endpoint 4096."""
    max_context: Length | None = None
    """Most tokens of an episode's history and response; by default what the model allows."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of a model."""
    slots: Count = 64
    """Episodes played, and requests generated, at a time."""
    threads: Processes = 0
    """Threads of torch on the CPU; 0 leaves its default. Tiny models are fastest with 1."""
    endpoint: EndpointOptions = field(default_factory=EndpointOptions, metadata=FLAT)
    needs: ClassVar[Needs] = (
        (("examples_as", "examples_for"), "--examples", lambda agent: agent.examples is not None),
        (
            ("temperature", "thinking", "observation_role", "memory", "prompts", "examples", "max_*"),
            "a model as --agent (model:FOLDER, openai:MODEL)",
            lambda agent: agent.kind in ("model", "openai", "own"),
        ),
        (
            ("device", "dtype", "threads"),
            "a model that plays here as --agent (model:FOLDER)",
            lambda agent: agent.kind in ("model", "own"),
        ),
        (
            ("noise",),
            "an expert or another player of the environment as --agent",
            lambda a: a.kind in ("player", "own"),
        ),
        (
            tuple(item.name for item in fields(EndpointOptions)),
            "an endpoint as --agent (openai:MODEL)",
            lambda agent: agent.kind in ("openai", "own"),
        ),
    )

    @property
    def kind(self) -> Literal["model", "openai", "replay", "random", "player", "own"]:
        """What sort of agent plays: `own` is one of another package, which is given all of these options."""
        kind, colon, rest = self.agent.partition(":")
        if kind in ("model", "openai", "replay") and rest:
            return kind  # type: ignore[return-value]
        if colon or self.agent in installed(AGENTS):
            return "own"
        return "random" if self.agent == "random" else "player"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> AgentOptions:
        """Makes options from keywords: those of `EndpointOptions` stand beside the others. Raises AgentError for an
        unknown one."""
        check_keywords(cls.__name__, cls, settings)
        inner = {field.name for field in fields(EndpointOptions)}
        endpoint = EndpointOptions(**{name: value for name, value in settings.items() if name in inner})
        return cls(**{name: value for name, value in settings.items() if name not in inner}, endpoint=endpoint)

    @property
    def heat(self) -> float:
        """The temperature, the default one where none is given."""
        return TEMPERATURE if self.temperature is None else self.temperature

    def flat(self) -> dict[str, Any]:
        """All settings as the keywords that `of` takes."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "endpoint"}
        return own | asdict(self.endpoint)


class AgentSettings(EndpointSettings, total=False):
    """Fields of `AgentOptions` that functions take as further keywords."""

    noise: float
    channel: str
    thinking: Literal["auto", "on", "off"]
    observation_role: Literal["auto", "user", "tool"]
    system: str | None
    memory: str | None
    prompts: str | None
    examples: str | None
    examples_as: Literal["auto", "text", "turns"]
    examples_for: Literal["all", "category"]
    max_new_tokens: int | None
    max_context: int | None
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    threads: int


def check_keywords(call: str, own: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raises AgentError for a keyword that is neither an argument of the function `own` nor a setting of an agent."""
    known = [name for name in inspect.signature(own).parameters if name not in ("settings", "endpoint")]
    known += [field.name for field in (*fields(AgentOptions), *fields(EndpointOptions)) if field.name not in known]
    known.remove("endpoint")
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f" It takes {', '.join(known)}."
            raise AgentError(f"{call}() has no argument {name!r}.{hint}")


def check_call(own: Callable[..., Any], settings: Mapping[str, Any], *, temperature: Any, **counts: Any) -> None:
    """Raises TurngymError for arguments that the function `own` cannot take; of the `counts` each may be None."""
    check_keywords(own.__name__, own, settings)
    refuse_credentials("", dict(settings))
    if temperature is not None:
        finite("temperature", temperature)
    for name, value in counts.items():
        if value is not None:
            checked_int(name, value, 0 if name == "seed" else 1)


def settings_of(options: AgentOptions) -> AgentSettings:
    """`options` as keywords, without the agent's name, the temperature and the slots."""
    given = options.flat()
    settings: AgentSettings = {name: given[name] for name in AgentSettings.__annotations__}  # type: ignore[assignment]
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationOptions:
    """Demonstrations for luffy, tcod b2f and sft."""

    demonstrations: str | None = None
    """Who demonstrates the step's tasks. `expert` or another player, `model:FOLDER`, `openai:MODEL`, an agent of yours
    as `package.module:name`, or a trace file, whose episodes are found by task. By default --expert."""
    demonstrated_tasks: bool = False
    """Play only demonstrated tasks. Of these the trace file has a demonstration that counts."""
    demonstration_success: bool = False
    """Leave out those that did not succeed."""
    demonstration_reward: Signed | None = None
    """Leave out those that are worth less. By --reward, else by their return."""
    demonstration_fits: bool = field(default=True, metadata=IN_FILE)
    """Leave out demonstrations that, in the student's tokens, are longer than its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratorOptions(EndpointOptions):
    """How a model that demonstrates is asked (--demonstrations model:FOLDER, openai:MODEL)."""

    temperature: float = 0.85
    """Sampling temperature; 0 is greedy."""
    channel: str = "auto"
    """How it writes actions, as `--channel` of `turngym rollout`."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of its chat template, or of the endpoint."""
    system: str | None = None
    """Its system message; by default as it was trained, else the environment's instructions."""
    max_new_tokens: Length | None = None
    """Most tokens of one response; by default as it was trained, else 512, at an endpoint 4096."""
    max_context: Length | None = None
    """Most tokens of an episode's history and response; by default what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights."""

    def agent(self, name: str, *, device: str, slots: int) -> AgentOptions:
        """The options of the agent that `name` stands for."""
        given = asdict(self)
        endpoint = EndpointOptions(**{item.name: given.pop(item.name) for item in fields(EndpointOptions)})
        return AgentOptions(agent=name, endpoint=endpoint, device=device, slots=slots, **given)

    @property
    def identity(self) -> dict[str, Any]:
        """What draws other demonstrations, JSON-able."""
        free = {"base_url", "key_env", "request_deadline", "request_retries", "handshake"}
        free |= {"price_in", "price_cached", "price_out"}
        return {f"collect.demonstrator.{name}": value for name, value in asdict(self).items() if name not in free}


NO_MODELS = ("auto", "words", "rules", "expert", "attempts", "episode", "nothing")
"""Judges that come with turngym and ask no model; `skills:FOLDER` is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Who judges the turns of prm-rl and sage-opd, and what others tell a teacher about them."""

    judge: str = "auto"
    """Who judges. `rules` (verdicts and rewards of the environment), `expert` (plays each episode again and asks
    --expert, which by default sees the hidden state), `model:FOLDER`, the url of an OpenAI-compatible endpoint with its
    version (http://127.0.0.1:8000/v1; the key comes from TURNGYM_JUDGE_KEY), or a judge of yours as
    `package.module:name`. For hints alone: `skills:FOLDER` (texts by the kind of task; `skills:alfworld`, `webshop` and
    `search` come along), `attempts` (what another attempt of the group did that succeeded), `episode` (what the
    finished episode itself teaches), `nothing`. auto: rules where scores are asked for, else expert."""
    judge_strict: bool = False
    """Only the expert's own action is not bad. expert: a possible action that is not the expert's own scores -1, not
    0."""
    judge_repeats: Count | None = None
    """Most times in a row for one hint. expert: the same hint at most so many times in a row; by default as often as it
    applies."""
    judge_votes: Count = 3
    """Votes per turn of a model. Rules and experts have one."""
    judge_temperature: float = field(default=0.6, metadata=IN_FILE)
    """Sampling temperature of a judge model."""
    judge_max_tokens: Length = 1024
    """Most tokens of one vote."""
    judge_model: str = "default"
    """Name of the model behind a url."""
    judge_parallel: Threads = field(default=16, metadata=IN_FILE)
    """Votes that a judge behind a url is asked for at a time."""
    judge_timeout: Above0 = field(default=120.0, metadata=IN_FILE)
    """Seconds for one vote: of a judge behind a url from the first request to the last byte, with all attempts; of the
    expert for playing an episode again; of a judge of yours for each request on average."""
    judge_tries: Count = field(default=3, metadata=IN_FILE)
    """Attempts at a vote in a row; the proxy goes on asking later, other runs count a vote that failed so often."""
    judge_unread: Share = field(default=0.9, metadata=IN_FILE)
    """Stop when more than this share of the votes holds no valid box in three steps in a row; 1 never stops."""
    judge_every: int = field(default=10, metadata=IN_FILE)
    """Steps between those whose judged episodes are kept as traces in OUT/judged; 0 keeps none."""
    needs: ClassVar[Needs] = (
        (
            ("judge_votes", "judge_temperature", "judge_max_tokens"),
            "a model as --judge",
            lambda judging: not (judging.judge in NO_MODELS or judging.judge.startswith("skills:")),
        ),
        (("judge_model", "judge_parallel", "judge_tries"), "a url as --judge", lambda judging: "://" in judging.judge),
        (("judge_strict", "judge_repeats"), "--judge expert", lambda judging: judging.judge in ("auto", "expert")),
    )

    def __post_init__(self) -> None:
        refuse_credentials("judge", self.judge)
        if not 0.0 <= self.judge_unread <= 1.0:
            raise SettingsError(f"judge_unread is {self.judge_unread}; valid: a share, 0 to 1")
        for name in ("judge_votes", "judge_parallel", "judge_tries"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; valid: at least 1")
        if not self.judge_timeout > 0:
            raise SettingsError(f"judge_timeout is {self.judge_timeout}; valid: more than 0 seconds")
