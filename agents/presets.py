"""Preset: one environment as a paper or a repository set it up, as settings of the environment and of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from turngym.agents.agent_options import AgentOptions
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.conversation import Memory
from turngym.core.errors import AgentError, TurngymError, did_you_mean
from turngym.core.tables import Table
from turngym.core.task import content_hash, plain_id
from turngym.envs.guard import OnInvalid
from turngym.envs.reading import Reading

CHAT = ("channel", "system", "observation_role", "memory", "prompts", "thinking", "max_new_tokens")
"""What a preset says of how a model is spoken to; fields of `AgentOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A set-up of one environment. Whatever is given beside it takes the place of its value."""

    name: str
    """Name of the set-up; presets of several environments share it."""
    env_id: str
    about: str
    """Where it comes from, in a line."""
    sources: tuple[str, ...]
    """Papers, and repositories with the files."""
    differs: tuple[str, ...]
    """What is otherwise than published, and what is not known; each stands under the tables of its results."""
    why: str = ""
    """Why that is so, for the page."""
    max_turns: int
    system: str | None = None
    """The system message, with `{tool}` and `{argument}`; None: the environment's instructions and the channel's."""
    channel: Literal["text", "text:verl-agent", "tool"] = "text"
    observation_role: Literal["user", "tool"] = "user"
    memory: str = "all"
    prompts: str | None = None
    """Templates of the memory `verl-agent:N`."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of chat templates that have one; auto: as published nowhere."""
    max_new_tokens: int | None = None
    """Most tokens of one response; None: as published nowhere."""
    temperature: float | None = None
    """Temperature of evaluations; 0 is greedy, None where none is published. Everything is drawn at top_p 1."""
    samples: int | None = None
    """Episodes per task of an evaluation; None: as published nowhere."""
    show_admissible: bool = False
    on_invalid: OnInvalid = "reject"
    """What an action does that cannot be read or is not possible."""
    reading: Reading = "strict"
    """How responses are read."""
    tool: str
    """The name under which the tool is published."""
    argument: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `gym.make`."""
    train_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gym.make` in training alone: the reward, and what a malformed response costs."""

    def __post_init__(self) -> None:
        if not self.memory.startswith("verl-agent:"):
            Memory(self.memory)

    def make(self, given: Mapping[str, Any] | None = None, *, training: bool = False) -> dict[str, Any]:
        """Arguments of `gym.make`, those that are `given` on top."""
        named: dict[str, Any] = {"max_turns": self.max_turns, "on_invalid": self.on_invalid}
        named |= {"tool_name": self.tool, "tool_argument": self.argument}
        if self.show_admissible:
            named["show_admissible"] = True
        if self.reading != "strict":
            named["reading"] = self.reading
        return {**named, **self.env_kwargs, **(self.train_kwargs if training else {}), **(given or {})}

    def chat(self, make: Mapping[str, Any], channel: str = "auto") -> dict[str, Any]:
        """The fields CHAT that it sets, for an environment that is made with `make`; of another `channel` only those
        that do not depend on the form of answers."""
        values: dict[str, Any] = {name: getattr(self, name) for name in CHAT}
        if channel not in ("auto", self.channel) and not (channel.startswith("tool") and self.channel == "tool"):
            # its message demands a form of answers, and its role comes with it: the channel given brings its own
            for name in ("channel", "system", "observation_role"):
                del values[name]
        elif self.system is not None:
            names = {"tool": make.get("tool_name", self.tool), "argument": make.get("tool_argument", self.argument)}
            values["system"] = self.system.format(**names)
        unset: dict[str, Any] = {item.name: item.default for item in fields(AgentOptions)}
        return {name: value for name, value in values.items() if value != unset[name]}

    def player(self, settings: Mapping[str, Any], make: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `AgentOptions`: the preset's, and on top those of `settings` that are not their defaults."""
        defaults = {item.name: item.default for item in fields(AgentOptions)}
        given = {name: value for name, value in settings.items() if value != defaults.get(name)}
        own: dict[str, Any] = self.chat(make, settings.get("channel", "auto"))
        if self.temperature is not None:
            own["temperature"] = self.temperature
        if not given.get("memory", self.memory).startswith("verl-agent:"):
            own.pop("prompts", None)
        return {**settings, **own, **given}

    def settings(self, settings: ChatSettings, make: Mapping[str, Any]) -> ChatSettings:
        """A model's own settings with the preset's on top; the templates are read by `ChatSettings.memory_of`."""
        values = self.chat(make)
        memory, prompts = values.pop("memory", "all"), values.pop("prompts", None)
        if (thinking := values.pop("thinking", None)) is not None:
            values["thinking"] = thinking == "on"
        return replace(settings, **values, **settings.memory_of(memory, prompts, self.env_id))

    @property
    def values(self) -> dict[str, Any]:
        """Everything that it sets, JSON-able."""
        found: dict[str, Any] = {"env": self.env_id, "make": self.make(), "chat": self.chat(self.make())}
        found |= {"temperature": self.temperature, "samples": self.samples}
        return found | ({"training": dict(self.train_kwargs)} if self.train_kwargs else {})

    @property
    def identity(self) -> dict[str, str]:
        """Its name, and a hash of its values: a later version may have corrected them."""
        return {"preset": self.name, "preset_sha256": content_hash(self.values)[:16]}


def preset_name(preset: Preset | None) -> dict[str, str]:
    """The name that configuration files have."""
    return {} if preset is None else {"preset": preset.name}


def require_named(preset: Preset | None, agent: Any) -> None:
    """Raise AgentError where a preset would have to change how an agent object is spoken to."""
    if preset is not None and not isinstance(agent, str):
        raise AgentError(
            f"preset {preset.name!r} says how an agent is spoken to, which an agent object has decided: name the agent "
            "(`model:FOLDER`), or take the preset's environment alone: env_kwargs=find_preset(...).make()"
        )


# System messages of the presets. They state the facts of the published prompts in sentences of our own.
#
# `{tool}` and `{argument}` stand for the names of the tool and its argument.

TURNOPD_ALFWORLD = """You do household tasks in a house that you know through text alone. The first message names the \
task; every message tells what you see, and ends with the list of commands that are possible at that moment.
Think about what the task still needs, then call the tool {tool} exactly once, with one command of the latest list as \
its argument {argument}. You can carry one object at a time."""
TURNOPD_WEBSHOP = """You shop in a web store for what an instruction asks. Every message shows a page with the \
instruction, and ends with the list of what can be done on that page: a search, where it has a search box, or a click \
on one of its labels.
Think about what the instruction asks for, then call the tool {tool} exactly once, with search[keywords] or \
click[label] as its argument {argument}. Choose the options that are asked for before click[buy now]: buying ends the \
task."""
TURNOPD_SEARCH = """You answer a question that may need several facts, with the help of a search engine.
Think about what you still have to know. Then either call the tool {tool} once, with a short query as its argument \
{argument}, and read the passages that come back; or, as soon as you know enough, end with the answer alone between \
<answer> and </answer>."""
REACT_ALFWORLD = """You solve a household task by thinking and acting in turn. The message begins with the house and \
the task, and goes on with your thoughts, your actions and what you saw after each of them.
Write your next thought between <think> and </think>, then your next command between <action> and </action>, for \
example <action>take mug 2 from cabinet 1</action>. Commands: go to, open, close, take ... from ..., put ... in/on \
..., clean, heat or cool ... with ..., use, examine, look, inventory."""
REACT_WEBSHOP = """You buy in a web store what an instruction asks, by thinking and acting in turn. The message \
begins with the first page, and goes on with your thoughts, your actions and the page after each of them.
Write your next thought between <think> and </think>, then your next action between <action> and </action>: \
search[keywords] on the page with the search box, or click[label] for what stands on the page. click[buy now] ends \
the task."""
REACT_SEARCH = """You answer a question by thinking and acting in turn. The message begins with the question, and \
goes on with your thoughts, your actions and what they brought.
Write your next thought between <think> and </think>, then one action: <search>query</search> brings passages, \
<answer>answer</answer> ends the task."""

# The published set-ups, by name and environment. docs/presets.md has them as a table.

ALFWORLD, WEBSHOP, SEARCH = "turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"
_TURNOPD = "TurnOPD (arXiv:2607.05804), Table 7 and appendix A.1"
_TURNOPD_FORM: Any = {
    "name": "turnopd",
    "differs": (
        "prompts in our own words",
        "lengths of prompt and response, the role of observations and what a mistake does are our reading",
    ),
    "why": (
        "the paper's text was not at hand: limits, lists, the name of the search tool, the temperature and the samples "
        "are as described to us"
    ),
    "channel": "tool",
    "observation_role": "tool",
    "temperature": 0.85,
    "samples": 4,
}
_VERL_AGENT = (
    "verl-agent (github.com/langfengQ/verl-agent), read in public forks: agent_system/environments/prompts/{0}.py, "
    "agent_system/environments/env_package/{0}/projection.py, agent_system/environments/env_manager.py, "
    "agent_system/memory/memory.py, examples/*_trainer/run_{0}.sh"
)
WORDING = "prompts in our own words (--prompts CHECKOUT takes the published ones)"
"""What differs from verl-agent as long as `--prompts` is `own`."""
WORKERS = 128
"""Workers of a validation of verl-agent, its batch size there."""
DRAWN = (
    f"each task of the panel once, there {WORKERS} draws",
    "goals in the order of the original's shuffle and one draw of price caps, there both depend on the worker",
)
"""What differs from verl-agent as long as tasks are not drawn (`--sampling published`)."""
_VERL_AGENT_WHY = (
    "their texts are theirs; a longer prompt is an error there (in Search it loses its beginning); a panel plays the "
    "same tasks for any batch, where the harness's depend on the number of its workers. In training a win is worth 1 "
    "and an invalid response costs {0}, there 10 and {1}: advantages that are divided by a group's standard deviation "
    "are the same"
)
_VERL_AGENT_FORM: Any = {
    "name": "verl-agent",
    "channel": "text:verl-agent",
    "system": "",
    "prompts": "own",
    "thinking": "off",
    "samples": 1,
    "max_new_tokens": 512,
    "on_invalid": "noop",
}
_REACT = "ReAct (arXiv:2210.03629; github.com/ysymyth/ReAct, {})"
_REACT_FORM: Any = {
    "name": "react",
    "memory": "react",
    "on_invalid": "noop",
    "temperature": 0.0,
    "samples": 1,
    "max_new_tokens": 100,
}
_REACT_DIFFERS = (
    "prompts in our own words, without examples unless --examples gives them",
    "a chat message instead of a text to continue",
)
_REACT_WHY = "chat models continue messages; the published examples are theirs"
_ON_ALFWORLD: Any = {"env_id": ALFWORLD, "tool": "alfworld_step", "argument": "action"}
_ON_WEBSHOP: Any = {"env_id": WEBSHOP, "tool": "webshop_step", "argument": "action"}
_ON_SEARCH: Any = {"env_id": SEARCH, "tool": "search", "argument": "query"}
_BEFORE_0_4: Any = {"words": "put"}
"""`put ... in/on` for `move ... to`, `You arrive at loc 3.`, no `help`: alfworld before its release 0.4."""
_SHOP: Any = {"strict_admissible": False, "backdoors": True}
"""The shop's own rules: searches are possible on every page, and so are its special queries."""
PRESETS: tuple[Preset, ...] = (
    Preset(
        **_TURNOPD_FORM,
        **_ON_ALFWORLD,
        about="TurnOPD's ALFWorld: 80 turns, the admissible commands behind every observation",
        sources=(f"{_TURNOPD}.1",),
        max_turns=80,
        system=TURNOPD_ALFWORLD,
        show_admissible=True,
    ),
    Preset(
        **_TURNOPD_FORM,
        **_ON_WEBSHOP,
        about="TurnOPD's WebShop: 50 turns, search box and clickables behind every page",
        sources=(f"{_TURNOPD}.3",),
        max_turns=50,
        system=TURNOPD_WEBSHOP,
        show_admissible=True,
    ),
    Preset(
        **_TURNOPD_FORM,
        env_id=SEARCH,
        about="TurnOPD's Search: 30 turns, searches are calls of search_r1/search, 3 passages",
        sources=(_TURNOPD,),
        max_turns=30,
        system=TURNOPD_SEARCH,
        on_invalid="noop",
        tool="search_r1/search",
        argument="query",
        env_kwargs={"topk": 3},
    ),
    Preset(
        **_VERL_AGENT_FORM,
        **_ON_ALFWORLD,
        about="verl-agent's (GiGPO's) ALFWorld: 50 turns, one prompt a turn with the last 2 turns and all actions",
        sources=(_VERL_AGENT.format("alfworld"),),
        differs=(
            WORDING,
            DRAWN[0],
            "no limit on the prompt, there 2,048 tokens",
        ),
        why=_VERL_AGENT_WHY.format(0.01, 0.1),
        max_turns=50,
        memory="verl-agent:2",
        temperature=0.4,
        train_kwargs={"invalid_cost": 0.01},
    ),
    Preset(
        **{**_VERL_AGENT_FORM, "name": "verl-agent-put"},
        **_ON_ALFWORLD,
        about="verl-agent's ALFWorld in the words of alfworld before 0.4, for models that were trained with them",
        sources=(
            _VERL_AGENT.format("alfworld"),
            "alfworld before 0.4 (github.com/alfworld/alfworld, issue 96 and commit 1fa7e68)",
        ),
        differs=(
            WORDING,
            DRAWN[0],
            "no limit on the prompt, there 2,048 tokens",
        ),
        why="a model that says `put mug 1 in/on shelf 2` wins no game that asks for `move mug 1 to shelf 2`; "
        + _VERL_AGENT_WHY.format(0.01, 0.1),
        max_turns=50,
        memory="verl-agent:2",
        temperature=0.4,
        env_kwargs=_BEFORE_0_4,
        train_kwargs={"invalid_cost": 0.01},
    ),
    Preset(
        **_VERL_AGENT_FORM,
        **_ON_WEBSHOP,
        about="verl-agent's (GiGPO's) WebShop: 15 turns, one prompt a turn with the last 2 turns and all actions",
        sources=(_VERL_AGENT.format("webshop"),),
        differs=(
            WORDING,
            DRAWN[0],
            "no limit on the prompt, there 4,096 tokens",
            DRAWN[1],
        ),
        why=_VERL_AGENT_WHY.format(0.01, 0.1) + "; a win is a score of exactly 1, there and here",
        max_turns=15,
        memory="verl-agent:2",
        temperature=0.4,
        env_kwargs=_SHOP,
        train_kwargs={"invalid_cost": 0.01, "reward": "success"},
    ),
    Preset(
        **_VERL_AGENT_FORM,
        **_ON_SEARCH,
        about="verl-agent's (GiGPO's) Search: 4 turns, one prompt a turn with the last 4 searches, 3 passages",
        sources=(_VERL_AGENT.format("search"),),
        differs=(
            WORDING,
            "no limit on the prompt, there 4,096 tokens",
            "passages stand as text between the information tags, there as JSON",
            "an invalid response is answered with Search-R1's text, there with the tool's error",
        ),
        why="their texts are theirs; a longer prompt loses its beginning there; JSON and the error are accidents of "
        "the tool. In training an answer is worth 1 and an invalid response costs 0.01, there and here",
        max_turns=4,
        memory="verl-agent:4",
        temperature=0.0,
        # the turn limit ends the episode there, whatever the last turn does
        env_kwargs={"topk": 3, "doc_format": "skyrl", "doc_tokens": None, "reward": "em", "search_turns": 4},
        train_kwargs={"invalid_cost": 0.01},
    ),
    Preset(
        **_REACT_FORM,
        **_ON_ALFWORLD,
        about="ReAct's ALFWorld: 49 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("alfworld.ipynb"),),
        differs=(*_REACT_DIFFERS, "thought and action are one turn, there a thought is a step of its own"),
        why=_REACT_WHY,
        max_turns=49,
        system=REACT_ALFWORLD,
        env_kwargs=_BEFORE_0_4,
    ),
    Preset(
        **_REACT_FORM,
        **_ON_WEBSHOP,
        about="ReAct's WebShop: 14 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("WebShop.ipynb"),),
        differs=(
            *_REACT_DIFFERS,
            "thought and action are one turn, there a thought is a step of its own",
            "pages are the text environment's, there written otherwise; a mistake is answered with the page",
        ),
        why=_REACT_WHY,
        max_turns=14,
        system=REACT_WEBSHOP,
        env_kwargs=_SHOP,
    ),
    Preset(
        **_REACT_FORM,
        **_ON_SEARCH,
        about="ReAct's questions: 7 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("hotpotqa.ipynb"),),
        differs=(
            *_REACT_DIFFERS,
            "3 passages are searched, there Wikipedia's pages are opened by title and read by look-up",
            "the last turn cannot search",
        ),
        why=_REACT_WHY,
        max_turns=7,
        system=REACT_SEARCH,
        env_kwargs={"topk": 3},
    ),
    Preset(
        **_ON_SEARCH,
        name="search-r1",
        about="Search-R1: 4 searches of 3 passages and a last turn that can only answer",
        sources=(
            "Search-R1 (arXiv:2503.09516; github.com/PeterGriffinJin/Search-R1, search_r1/llm_agent/generation.py, "
            "verl/trainer/ppo/ray_trainer.py, train_grpo.sh)",
        ),
        differs=(
            "prompts in our own words, instructions in a system message instead of the question's",
            "passages come in messages of their own instead of inside the model's text",
            "each passage is cut at 256 words, there all of a turn's at 500 tokens",
        ),
        why="a conversation is what chat models are trained on; passages of wiki-18 have 100 words, which neither cuts",
        max_turns=5,
        temperature=0.0,
        samples=1,
        max_new_tokens=500,
        on_invalid="noop",
        env_kwargs={"topk": 3, "doc_format": "search_r1", "reward": "em"},
    ),
)


def find_preset(name: str | Preset | None, env_id: str) -> Preset | None:
    """The set-up called `name` for an environment; None for None. A `Preset` is taken as it is.

    Raises TurngymError for an unknown name, and for a set-up that does not have the environment.
    """
    if name is None:
        return None
    env_id = plain_id(env_id)
    found = [name] if isinstance(name, Preset) else [preset for preset in PRESETS if preset.name == name]
    if not found:
        names = sorted({preset.name for preset in PRESETS})
        raise TurngymError(f"unknown preset {name!r}; presets are: {', '.join(names)}.{did_you_mean(str(name), names)}")
    for preset in found:
        if preset.env_id == env_id:
            return preset
    known = ", ".join(preset.env_id for preset in found)
    raise TurngymError(f"preset {found[0].name!r} has no set-up of {env_id}; it has: {known}")


def preset_table() -> Table:
    """What each preset sets, one row each."""
    header = ["preset", "environment", "turns", "actions", "reading", "role", "memory", "list", "a mistake"]
    header += ["temperature", "samples", "response", "thinking", "invalid cost", "tool(argument)"]
    rows = []
    for preset in PRESETS:
        cells = [preset.name, preset.env_id.rpartition("/")[2], str(preset.max_turns), preset.channel, preset.reading]
        listed = preset.show_admissible or (preset.prompts is not None and preset.env_id != SEARCH)
        cells += [preset.observation_role, preset.memory, "shown" if listed else "-", preset.on_invalid]
        numbers: tuple[float | None, ...] = (
            preset.temperature,
            preset.samples,
            preset.max_new_tokens,
        )
        cells += ["-" if value is None else f"{value:g}" for value in numbers]
        cost = preset.train_kwargs.get("invalid_cost")
        cells += ["-" if preset.thinking == "auto" else preset.thinking, "-" if cost is None else f"{cost:g}"]
        rows.append([*cells, f"{preset.tool}({preset.argument})"])
    return header, rows
