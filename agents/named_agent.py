"""The agent that a name stands for: `expert`, `random`, `replay:TRACE`, `model:FOLDER`, `openai:MODEL`, or your own.

`open_agent` makes it from an `Agent` of `agents.play_spec`, and completes that: what the chat template decides, and the
hashes of the files that it names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from turngym.agents.model_agent import ModelAgent, ModelPlayer
from turngym.agents.models import file_hashes, hub_folder, load_policy, load_tokenizer, trained_on
from turngym.agents.play_spec import (
    AGENTS,
    AnyAgent,
    BareChat,
    EndpointChat,
    EnvPlayer,
    ExampleFile,
    Local,
    Model,
    ModelChat,
    OpenAI,
    Own,
    Random,
    RecordedAgent,
    SkillTexts,
    VerlAgent,
    Window,
)
from turngym.agents.playing.agent import Agent, system_message
from turngym.agents.playing.scripted import PLAYERS, ExpertAgent, RandomAgent, ReplayAgent, named_player
from turngym.agents.rendering.chat_settings import ChatSettings, describe
from turngym.agents.rendering.examples import Examples, read_examples
from turngym.agents.rendering.memory import Memory
from turngym.agents.rendering.open_renderer import complete_settings, renderer_of
from turngym.agents.rendering.skills import SKILLS_PREFIX
from turngym.agents.rendering.verl_agent_prompts import NAMES, read_templates
from turngym.core.errors import AgentError as AgentError
from turngym.core.errors import nearest
from turngym.core.hub import pinned
from turngym.core.plugin_values import failures_of
from turngym.core.plugins import find, installed, need
from turngym.core.redaction import brief
from turngym.core.setting import kind_of
from turngym.core.spec import changed
from turngym.core.task import content_hash, plain_id
from turngym.core.trace import read_episodes
from turngym.core.user_files import user_path
from turngym.envs.base import TextEnv
from turngym.envs.channels import VERL_AGENT, Channel, make_channel

AnyChat = TypeVar("AnyChat", ModelChat, EndpointChat)
AGENT_KINDS = ("expert", "random", "replay:TRACE", "model:FOLDER", "openai:MODEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAgent:
    """An agent with what the environment and the driver must know about it."""

    agent: Agent
    channel: str | None
    system: str | None = None
    temperature: float | None = None
    """None for agents that do not sample."""
    chat: str = ""
    """How a model is spoken to, in a line for people."""
    examples: Examples = field(default_factory=Examples)
    """What the prompt shows in front of the task."""
    spec: AnyAgent = field(default_factory=EnvPlayer)
    """The player as it was opened, with nothing left open. `open_agent` sets it."""


MakeAgent = Callable[[TextEnv, Own], Agent | OpenedAgent]
"""An agent from another package: `--agent package.module:name`, or a name in its entry points `turngym.agents`.

It is given the environment that will be played, closed: that says its `tool`, `players` and `env_id`. An `Agent` alone
speaks as `options.chat.channel` says, by default in bare actions; an `OpenedAgent` says more.
"""


def open_agent(spec: AnyAgent, probe: Callable[[], TextEnv], slots: int = 64) -> OpenedAgent:
    """Opens the agent that `spec` names. `probe` makes the environment to be played, if it is needed.

    Raises:
        AgentError: a missing trace, a folder that holds no model, or another model than the settings say.
        PluginError: an unknown agent, or one that cannot be imported.
    """
    if isinstance(spec, Model):
        env = probe()
        if (trained := trained_on(spec.folder)) and env.env_id not in trained:
            text = f"model:{spec.folder} was trained on {', '.join(trained)} and plays {env.env_id} here"
            warnings.warn(f"{text}: a result of transfer, if that is meant", stacklevel=2)
        return _open_model(spec, env, slots)
    if isinstance(spec, OpenAI):
        return _open_endpoint(spec, probe(), slots)
    if isinstance(spec, Own):
        return _open_own(spec, probe())
    agent: Agent
    if isinstance(spec, Random):
        agent = RandomAgent()
    elif isinstance(spec, RecordedAgent):
        if not (episodes := read_episodes(spec.trace)):
            raise AgentError(f"there is no episode to replay in {spec.trace}; valid: a trace with episodes")
        agent = ReplayAgent(episodes, name=f"replay {Path(spec.trace).name}")
    else:
        name = spec.name
        # `expert` plays in every environment, so that one need not be asked
        if name != "expert" and name not in (env := probe()).players and name not in installed(PLAYERS):
            if hint := _meant(name):
                raise AgentError(f"unknown agent {name!r}. {hint}")
            # raises an error with the known names
            find(AGENTS, name, {}, known=(*AGENT_KINDS, *env.players))
        label = f"{name} (noise {spec.noise:g})" if spec.noise else name
        agent = ExpertAgent(expert=named_player(name), noise=spec.noise, name=label)
    return OpenedAgent(agent=agent, channel=_plain_channel(spec.chat), system=spec.chat.system, spec=spec)


def opened_object(agent: Agent | OpenedAgent, spec: Own) -> OpenedAgent:
    """Opens an agent object. `spec` says how it is prompted.

    A `ModelAgent` has a channel and temperature of its own, an `OpenedAgent` everything. Raises AgentError for what is
    not an agent.
    """
    from turngym.agents.endpoint.agent import EndpointAgent

    inner = agent.agent if isinstance(agent, OpenedAgent) else agent
    name = f"{type(inner).__module__}:{type(inner).__qualname__}"
    with failures_of(f"the agent {name}", inner, AgentError):
        lacks = [member for member in ("name", "writer", "respond", "release") if not hasattr(inner, member)]
    if lacks or isinstance(inner, type):
        where = f"--agent {spec.name}: " if spec.name else ""
        wrong = "is a class" if isinstance(inner, type) else f"has no {', '.join(lacks)}"
        raise AgentError(f"{where}{brief(inner, 80)} {wrong}; valid: an Agent")
    if isinstance(agent, OpenedAgent):
        opened = agent
    else:
        channel, temperature = _plain_channel(spec.chat), None
        if isinstance(agent, ModelAgent):
            channel = None if agent.channel is None else agent.channel.name
            temperature = agent.sampling.temperature
        elif isinstance(agent, EndpointAgent):
            channel, temperature = agent.channel.name, agent.temperature
        opened = OpenedAgent(agent=agent, channel=channel, system=spec.chat.system, temperature=temperature)
    chat = changed(spec.chat, channel=opened.channel or "none", system=opened.system)
    return replace(opened, spec=changed(spec, name=name, temperature=opened.temperature, chat=chat))


def _open_own(spec: Own, env: TextEnv) -> OpenedAgent:
    if spec.name not in installed(AGENTS) and (hint := _meant(spec.name)):
        raise AgentError(f"unknown agent {spec.name!r}. {hint}")
    make: MakeAgent = find(AGENTS, spec.name, {}, known=(*AGENT_KINDS, *env.players))
    # also where a user named one of our agents in place of a maker of agents
    with failures_of(f"--agent {spec.name}", None, AgentError):
        agent = make(env, spec)
    opened = opened_object(agent, spec)
    return replace(opened, spec=changed(opened.spec, name=spec.name))


def _meant(name: str) -> str:
    """Suggests what an unknown name was meant to be; "" if it may be an agent of another package."""
    path, (kind, colon, rest) = user_path(name), name.partition(":")
    near = nearest(kind, [form.partition(":")[0] for form in AGENT_KINDS if ":" in form], cutoff=0.6)
    if colon and near and find_spec(kind.partition(".")[0]) is None:
        return f"Did you mean '{near[0]}:{rest}'?"
    if path.suffix == ".jsonl":
        return f"A trace is replayed as --agent replay:{name}."
    if path.exists() or path.suffix == ".gguf" or (not colon and "/" in name):
        return f"A model in a folder is named as --agent model:{name}."
    return ""


def _plain_channel(chat: BareChat | ModelChat) -> str | None:
    """Returns the channel of a scripted agent: None (bare actions) unless the settings name one."""
    return None if chat.channel in ("auto", "none") else chat.channel


def _open_model(spec: Model, env: TextEnv, slots: int) -> OpenedAgent:
    tool, folder = env.tool, str(hub_folder(spec.folder))
    path, weights = Path(folder).resolve(), weights_of(folder)
    if spec.weights not in ("", weights):
        raise AgentError(f"{spec.folder} holds weights {weights}; the settings say {spec.weights}: another model")
    settings = chat_settings(spec.chat, ChatSettings.load(folder), env.env_id)
    engine, model, tokenizer, engine_spec = _engine(spec, folder, settings, slots)
    settings = complete_settings(settings, tokenizer, tool)
    channel = make_channel(settings.channel, tool)
    examples = open_examples(spec.chat.examples, env, channel)
    renderer = renderer_of(model, tokenizer, settings, tool, examples.episodes, examples.skills)
    system = settings.system
    if examples.text:
        system = examples.in_system(system_message(env, channel, renderer) if system is None else system)
    # weights often lie in a folder `model` of their checkpoint, whose name tells more
    origin = pinned(path)
    name = f"model {path.parent.name if path.name == 'model' else path.name}"
    if origin is not None:
        # of a commit the first letters tell enough in a name; the whole of it is in the settings
        name = f"model {origin.partition('@')[0]}@{path.name[:8]}"
    player = ModelPlayer(engine=engine, renderer=renderer, settings=settings, tool=tool)
    return OpenedAgent(
        agent=player.agent(spec.temperature, name),
        channel=settings.channel,
        system=system,
        chat=describe(settings),
        temperature=spec.temperature,
        examples=examples,
        spec=changed(
            spec,
            folder=origin or spec.folder,
            weights=weights,
            engine=engine_spec,
            chat=completed_chat(spec.chat, settings.remembers, examples, settings),
        ),
    )


def weights_of(folder: str | Path) -> str:
    """A hash of the files of a model."""
    return content_hash(file_hashes(folder))[:16]


def chat_settings(chat: ModelChat, own: ChatSettings, env_id: str) -> ChatSettings:
    """Converts chat settings to the form that renderers take.

    Raises AgentError for templates of another environment than `env_id`.
    """
    if chat.channel == "none":
        raise AgentError("a model needs a channel to write actions in: --channel text or tool")
    memory = chat.memory
    named = str(kind_of(type(memory)))
    if isinstance(memory, Window | VerlAgent):
        named = f"{named}:{memory.turns}"
    return ChatSettings(
        channel="text" if chat.channel == "auto" else chat.channel,
        system=chat.system,
        observation_role=chat.observation_role,
        thinking={"auto": None, "on": True, "off": False}[chat.thinking],
        history=chat.history,
        max_new_tokens=chat.max_new_tokens,
        max_context=chat.max_context,
        memory=named,
        prompts=_templates(memory, own, env_id) if isinstance(memory, VerlAgent) else None,
    )


def _templates(memory: VerlAgent, own: ChatSettings, env_id: str) -> tuple[str, str, str] | None:
    """The templates as `ChatSettings.prompts` has them."""
    if memory.prompts != "model":
        read = read_templates(memory.prompts, env_id)
        return read.kind, read.first, read.later
    if own.prompts is not None and own.prompts[0] != NAMES.get(plain_id(env_id)):
        raise AgentError(f"the model's prompts are of {own.prompts[0]}, it plays {env_id}: give others (--prompts own)")
    return own.prompts


def completed_chat(chat: AnyChat, memory: Memory, examples: Examples, settings: ChatSettings | None = None) -> AnyChat:
    """Completes `chat` with the choices of the chat template and the hashes of the files that it names."""
    changes: dict[str, Any] = {}
    if isinstance(chat.memory, VerlAgent) and memory.templates is not None:
        changes["memory"] = changed(chat.memory, sha256=memory.templates.sha256)
    if chat.examples is not None:
        changes["examples"] = changed(chat.examples, content=examples.identity or "")
    if settings is not None:
        changes |= {"channel": settings.channel, "observation_role": settings.observation_role}
    return changed(chat, **changes)


def open_examples(asked: ExampleFile | SkillTexts | None, env: TextEnv, channel: Channel) -> Examples:
    """Opens the examples that the settings name; None means none. Raises AgentError for a file without examples, or
    with other examples than the settings record."""
    if asked is None:
        return Examples()
    if isinstance(asked, SkillTexts):
        examples = read_examples(f"{SKILLS_PREFIX}{asked.folder}", "auto", env.env_id, channel, env.tool)
    else:
        examples = read_examples(asked.file, asked.form, env.env_id, channel, env.tool, asked.shown_for)
    if examples.skills is not None:
        examples.skills.check(env)
    if asked.content not in ("", examples.identity):
        raise AgentError(f"the examples hold {examples.identity}; the settings say {asked.content}: other examples")
    return examples


def _open_endpoint(spec: OpenAI, env: TextEnv, slots: int) -> OpenedAgent:
    from turngym.agents.endpoint.agent import EndpointAgent

    chat = spec.chat
    if chat.channel not in ("auto", "text", VERL_AGENT, "tool", "tool:hermes"):
        raise AgentError(
            f"--channel is {chat.channel}: an endpoint reads its model's calls; valid: text, {VERL_AGENT}, tool"
        )
    # text works with every endpoint, and its traces look the same for every agent
    channel = make_channel("text" if chat.channel == "auto" else chat.channel, env.tool)
    if isinstance(chat.examples, SkillTexts):
        raise AgentError(f"--examples skills:{chat.examples.folder}: skills are for model:FOLDER, not for an endpoint")
    examples = open_examples(chat.examples, env, channel)
    system = chat.system
    if examples.text:
        system = examples.in_system(system_message(env, channel, None) if system is None else system)
    model_chat = ModelChat(channel=channel.name, memory=chat.memory)
    memory = chat_settings(model_chat, ChatSettings(), env.env_id).remembers
    agent = EndpointAgent(
        spec.model,
        spec.endpoint,
        channel,
        env.tool,
        examples=examples.episodes,
        temperature=spec.temperature,
        thinking=chat.thinking,
        max_tokens=chat.max_new_tokens,
        max_context=chat.max_context,
        memory=memory,
        parallel=slots,
    )
    return OpenedAgent(
        agent=agent,
        channel=channel.name,
        system=system,
        temperature=spec.temperature,
        examples=examples,
        spec=changed(spec, chat=changed(completed_chat(chat, memory, examples), channel=channel.name)),
    )


def _engine(spec: Model, folder: str, settings: ChatSettings, slots: int) -> tuple[Any, Any, Any, Any]:
    """Returns the engine, the model as far as it is loaded, the tokenizer, and the engine's settings with the kind of
    server filled in."""
    engine_spec = spec.engine
    if not isinstance(engine_spec, Local):
        need("transformers", "a tokenizer", "train")
        from turngym.agents.servers.open_servers import eval_policy, load_outside

        tokenizer, model = load_tokenizer(folder), load_outside(folder)
        served = eval_policy(engine_spec, Path(folder), tokenizer, settings.max_context)
        completed = changed(engine_spec, server=served.fleet.dialect.name.lower())
        return served, model, tokenizer, completed
    # first: it says what is missing where torch is
    model, tokenizer = load_policy(folder, engine_spec.device, engine_spec.dtype)
    from turngym.agents.local_engine.engine import LocalEngine

    if engine_spec.threads:
        import torch

        torch.set_num_threads(engine_spec.threads)
    engine = LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context, max_batch=slots)
    return engine, model, tokenizer, engine_spec
