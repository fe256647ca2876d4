"""Preset: one environment as a paper or a repository set it up, as settings of the environment and of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from turngym.agents.options import AgentOptions
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.conversation import Memory
from turngym.envs.core.errors import AgentError, TurngymError, did_you_mean
from turngym.envs.core.tables import Table
from turngym.envs.core.task import content_hash, plain_id
from turngym.envs.guard import OnInvalid
from turngym.envs.reading import Reading

CHAT = ("channel", "system", "observation_role", "memory")
"""What a preset says of the agent; fields of `AgentOptions` and of `ChatSettings`."""


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
    differs: str
    """What is otherwise than published, and what is not known."""
    max_turns: int
    system: str | None = None
    """The system message, with `{tool}` and `{argument}`; None: the environment's instructions and the channel's."""
    channel: Literal["text", "tool"] = "text"
    observation_role: Literal["user", "tool"] = "user"
    memory: str = "all"
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

    def __post_init__(self) -> None:
        Memory(self.memory)

    def make(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of `gym.make`, those that are `given` on top."""
        named: dict[str, Any] = {"max_turns": self.max_turns, "on_invalid": self.on_invalid}
        named |= {"tool_name": self.tool, "tool_argument": self.argument}
        if self.show_admissible:
            named["show_admissible"] = True
        if self.reading != "strict":
            named["reading"] = self.reading
        return {**named, **self.env_kwargs, **(given or {})}

    def chat(self, make: Mapping[str, Any], channel: str = "auto") -> dict[str, Any]:
        """The fields CHAT, for an environment that is made with `make`; of another `channel`, memory alone."""
        if channel != "auto" and channel.partition(":")[0] != self.channel:
            # its message demands a form of answers, and its role comes with it: the channel given brings its own
            return {"memory": self.memory}
        values = {name: getattr(self, name) for name in CHAT}
        if self.system is not None:
            names = {"tool": make.get("tool_name", self.tool), "argument": make.get("tool_argument", self.argument)}
            values["system"] = self.system.format(**names)
        return {name: value for name, value in values.items() if value is not None}

    def player(self, settings: Mapping[str, Any], make: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `AgentOptions`: the preset's, and on top those of `settings` that are not their defaults."""
        defaults = {item.name: item.default for item in fields(AgentOptions)}
        given = {name: value for name, value in settings.items() if value != defaults.get(name)}
        return {**settings, **self.chat(make, settings.get("channel", "auto")), **given}

    def settings(self, settings: ChatSettings, make: Mapping[str, Any]) -> ChatSettings:
        """A model's own settings with the preset's on top."""
        return ChatSettings(**{**asdict(settings), **self.chat(make)})

    @property
    def values(self) -> dict[str, Any]:
        """Everything that it sets, JSON-able."""
        return {"env": self.env_id, "make": self.make(), "chat": self.chat(self.make())}

    @property
    def identity(self) -> dict[str, str]:
        """Its name, and a hash of its values: a later version may have corrected them."""
        return {"preset": self.name, "preset_sha256": content_hash(self.values)[:16]}


def preset_name(preset: Preset | None) -> dict[str, str]:
    """As configuration files have it."""
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
VERL_AGENT_ALFWORLD = """You solve household tasks in a text simulation. Each turn you are told the task, how many \
turns you have taken, your latest observations and actions, the present observation, and the actions that are \
admissible now.
Reason first, step by step, between <think> and </think>. Then give one admissible action between <action> and \
</action>."""
VERL_AGENT_WEBSHOP = """You buy products in a web store on your own. Each turn you are told what to buy, how many \
turns you have taken, your latest observations and actions, the present page, and the actions that are admissible on \
it.
Reason first, step by step, between <think> and </think>: which admissible action brings the purchase forward? Then \
give that action between <action> and </action>."""
VERL_AGENT_SEARCH = """You answer a question step by step. Each turn you are told the question, how many turns you \
have taken, your latest searches and what they found.
Reason first, between <think> and </think>. Then do one thing, not both: if you lack some knowledge, write a query \
between <search> and </search>; if you know enough, give the answer alone between <answer> and </answer>, for example \
<answer>Lisbon</answer>."""
REACT_ALFWORLD = """You solve a household task by thinking and acting in turn. The message begins with the house and \
the task, and goes on with your thoughts, your actions and what you saw after each of them.
Write your next thought between <think> and </think>, then your next command between <action> and </action>, for \
example <action>take mug 2 from cabinet 1</action>. Commands: go to, open, close, take ... from ..., move ... to ..., \
clean, heat or cool ... with ..., use, examine, look, inventory."""
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
_TURNOPD_DIFFERS = (
    "the paper's text was not at hand: limits, lists and the name of the search tool are as described to us; that "
    "actions are calls, the role `tool` and what a mistake does are our reading"
)
_VERL_AGENT = (
    "verl-agent (github.com/langfengQ/verl-agent), read in public forks: agent_system/environments/prompts/{}.py, "
    "agent_system/environments/env_manager.py, agent_system/memory/memory.py, examples/*_trainer/run_{}.sh"
)
_VERL_AGENT_DIFFERS = (
    "role and form of answers stand in a system message instead of every user message; the reward of invalid actions "
    "(a penalty of {} in training) is not part of it"
)
_FOLDED = (
    "; there the response is lower-cased before it is read, here the letter case of tags and actions does not count "
    "(reading folded), which is the same where actions are in lower case; there an action without a thought is played "
    "but marked invalid, here it is valid"
)
_REACT = "ReAct (arXiv:2210.03629; github.com/ysymyth/ReAct, {})"
_REACT_DIFFERS = (
    "no examples in the prompt unless `--examples` gives them; a chat message instead of a text to continue; {}"
)
_ON_ALFWORLD: Any = {"env_id": ALFWORLD, "tool": "alfworld_step", "argument": "action"}
_ON_WEBSHOP: Any = {"env_id": WEBSHOP, "tool": "webshop_step", "argument": "action"}
_ON_SEARCH: Any = {"env_id": SEARCH, "tool": "search", "argument": "query"}
_TURNOPD_FORM: Any = {"name": "turnopd", "differs": _TURNOPD_DIFFERS, "channel": "tool", "observation_role": "tool"}
_REACT_FORM: Any = {"name": "react", "memory": "react", "on_invalid": "noop"}
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
        about="TurnOPD's Search: 30 turns, searches are calls of search_r1/search",
        sources=(_TURNOPD,),
        max_turns=30,
        system=TURNOPD_SEARCH,
        on_invalid="noop",
        tool="search_r1/search",
        argument="query",
    ),
    Preset(
        **_ON_ALFWORLD,
        name="verl-agent",
        reading="folded",
        about="verl-agent's (GiGPO's) ALFWorld: 50 turns, one prompt a turn with the last 2 turns and all actions",
        sources=(_VERL_AGENT.format("alfworld", "alfworld"),),
        differs=_VERL_AGENT_DIFFERS.format(0.1)
        + _FOLDED
        + "; its list leaves out `help`; a response without tags is sent to the game there, here it is not",
        max_turns=50,
        system=VERL_AGENT_ALFWORLD,
        memory="window:2",
        show_admissible=True,
        on_invalid="noop",
    ),
    Preset(
        **_ON_WEBSHOP,
        name="verl-agent",
        reading="folded",
        about="verl-agent's (GiGPO's) WebShop: 15 turns, one prompt a turn with the last 2 turns and all actions",
        sources=(_VERL_AGENT.format("webshop", "webshop"),),
        differs=_VERL_AGENT_DIFFERS.format(0.1)
        + _FOLDED
        + "; pages keep their instruction, which is cut out there; its list has a click on the search button",
        max_turns=15,
        system=VERL_AGENT_WEBSHOP,
        memory="window:2",
        show_admissible=True,
        on_invalid="noop",
    ),
    Preset(
        **_ON_SEARCH,
        name="verl-agent",
        reading="folded",
        about="verl-agent's (GiGPO's) Search: 4 turns, one prompt a turn with the last 4 turns",
        sources=(_VERL_AGENT.format("search", "search"),),
        differs=_VERL_AGENT_DIFFERS.format(0.01)
        + "; tags are read in any letter case, as there; a response with both a search and an answer is invalid there; "
        "the last turn cannot search",
        max_turns=4,
        system=VERL_AGENT_SEARCH,
        memory="window:4",
        on_invalid="noop",
    ),
    Preset(
        **_REACT_FORM,
        **_ON_ALFWORLD,
        about="ReAct's ALFWorld: 49 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("alfworld.ipynb"),),
        differs=_REACT_DIFFERS.format("there a thought is a step of its own, here thought and action are one turn"),
        max_turns=49,
        system=REACT_ALFWORLD,
    ),
    Preset(
        **_REACT_FORM,
        **_ON_WEBSHOP,
        about="ReAct's WebShop: 14 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("WebShop.ipynb"),),
        differs=_REACT_DIFFERS.format(
            "there a thought is a step of its own; pages are written otherwise, and a mistake is answered with two "
            "words, here with the page"
        ),
        max_turns=14,
        system=REACT_WEBSHOP,
    ),
    Preset(
        **_REACT_FORM,
        **_ON_SEARCH,
        about="ReAct's questions: 7 steps, the whole transcript as one prompt a turn",
        sources=(_REACT.format("hotpotqa.ipynb"),),
        differs=_REACT_DIFFERS.format(
            "there Wikipedia's pages are opened by title and read by look-up, here passages are searched; the last "
            "turn cannot search"
        ),
        max_turns=7,
        system=REACT_SEARCH,
    ),
    Preset(
        **_ON_SEARCH,
        name="search-r1",
        about="Search-R1: 4 searches of 3 passages and a last turn that can only answer",
        sources=(
            "Search-R1 (arXiv:2503.09516; github.com/PeterGriffinJin/Search-R1, search_r1/llm_agent/generation.py)",
        ),
        differs=(
            "instructions stand in a system message instead of the question's; passages come in messages of their own "
            "instead of inside the model's text"
        ),
        max_turns=5,
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
    header.append("tool(argument)")
    rows = []
    for preset in PRESETS:
        cells = [preset.name, preset.env_id.rpartition("/")[2], str(preset.max_turns), preset.channel, preset.reading]
        cells += [preset.observation_role, preset.memory, "shown" if preset.show_admissible else "-"]
        rows.append([*cells, preset.on_invalid, f"{preset.tool}({preset.argument})"])
    return header, rows
