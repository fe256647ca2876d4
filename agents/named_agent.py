"""The agent that a name stands for: `expert`, `random`, `replay:TRACE`, `model:FOLDER`, `openai:MODEL`, or your own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turngym.agents.agent_options import AGENTS, AgentOptions
from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.model_agent import ModelAgent, ModelPlayer
from turngym.agents.models import file_hashes, hub_folder, load_policy, load_tokenizer, trained_on
from turngym.agents.playing.agent import Agent, system_message
from turngym.agents.playing.scripted import PLAYERS, ExpertAgent, RandomAgent, ReplayAgent, named_player
from turngym.agents.rendering.chat_settings import ChatSettings, describe
from turngym.agents.rendering.conversation import Memory
from turngym.agents.rendering.examples import Examples, read_examples
from turngym.agents.rendering.open_renderer import complete_settings, renderer_of
from turngym.agents.servers.open_servers import eval_policy, load_outside
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.errors import AgentError as AgentError
from turngym.core.errors import nearest
from turngym.core.hub import pinned
from turngym.core.plugins import find, installed, need
from turngym.core.task import content_hash
from turngym.core.trace import read_episodes
from turngym.core.user_files import user_path
from turngym.envs.base import TextEnv
from turngym.envs.channels import VERL_AGENT, Channel, make_channel

KINDS = ("expert", "random", "replay:TRACE", "model:FOLDER", "openai:MODEL")


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
    fingerprint: str | None = None
    """Hash of a model's files: two checkpoints of one name are not the same player."""
    dtype: str | None = None
    """Precision of a model that plays in this process: another one draws other episodes."""
    origin: str | None = None
    """`ORG/NAME@COMMIT` of a model from the hub."""
    memory: str | None = None
    """What a model's prompts hold of the episode; None for agents that read none."""
    prompts: str | None = None
    """A hash of the templates of a model's prompts; None without any."""
    examples: Examples = field(default_factory=Examples)
    """What the prompt shows in front of the task."""
    player: str | None = None
    """The place of an agent that did not come with turngym: its own name may say anything."""


MakeAgent = Callable[[TextEnv, AgentOptions], Agent | OpenedAgent]
"""An agent from another package: `--agent package.module:name`, or a name in its entry points `turngym.agents`.

It is given the environment that will be played, closed: that says its `tool`, `players` and `env_id`. An `Agent` alone
speaks as `options.channel` says, by default in bare actions; an `OpenedAgent` says more.
"""


def open_agent(options: AgentOptions, probe: Callable[[], TextEnv], servers: PolicyServer | None = None) -> OpenedAgent:
    """The agent that `options.agent` names. `probe` gives the environment it will play, if it must be asked.

    A model plays in this process, or on `servers`.

    Raises:
        AgentError: a missing trace, a folder that holds no model.
        PluginError: an unknown agent, or one that cannot be imported.
    """
    name, channel = options.agent, _plain_channel(options)
    kind, _, argument = name.partition(":")
    found: Agent
    if name == "random":
        found = RandomAgent()
    elif kind == "replay" and argument:
        found = ReplayAgent(read_episodes(argument), name=f"replay {Path(argument).name}")
    elif kind == "model" and argument:
        env = probe()
        _warn_of_transfer(argument, env.env_id)
        return _open_model(argument, options, env, servers or PolicyServer())
    elif kind == "openai" and argument:
        return _open_endpoint(argument, options, probe())
    elif options.examples is not None:
        raise AgentError(f"--examples are for models (model:FOLDER, openai:MODEL), not for the agent {name!r}")
    # `expert` plays in every environment, so that one need not be asked
    elif name == "expert" or name in (env := probe()).players or name in installed(PLAYERS):
        shown = f"{name} (noise {options.noise:g})" if options.noise else name
        found = ExpertAgent(expert=named_player(name), noise=options.noise, name=shown)
    elif hint := _meant(name):
        raise AgentError(f"unknown agent {name!r}. {hint}")
    else:
        make: MakeAgent = find(AGENTS, name, {}, known=(*KINDS, *env.players))
        made = make(env, options)
        opened = made if isinstance(made, OpenedAgent) else OpenedAgent(agent=made, channel=channel)
        return replace(opened, player=name, system=options.system if opened is not made else opened.system)
    return OpenedAgent(agent=found, channel=channel, system=options.system)


def _meant(name: str) -> str:
    """What a name that nothing stands for was meant as; "" where it may be an agent of another package."""
    path, (kind, colon, rest) = user_path(name), name.partition(":")
    near = nearest(kind, [known.partition(":")[0] for known in KINDS if ":" in known], cutoff=0.6)
    if colon and near and find_spec(kind.partition(".")[0]) is None:
        return f"Did you mean '{near[0]}:{rest}'?"
    if path.suffix == ".jsonl":
        return f"A trace is replayed as --agent replay:{name}."
    if path.exists() or path.suffix == ".gguf" or (not colon and "/" in name):
        return f"A model in a folder is named as --agent model:{name}."
    return ""


def as_opened(
    agent: str | Agent | OpenedAgent,
    settings: Mapping[str, Any],
    probe: Callable[[], TextEnv],
    servers: PolicyServer | None = None,
) -> OpenedAgent:
    """The agent that Python code or a command names: a name, opened with `settings` (of `AgentOptions`), or an object.

    A `ModelAgent` brings its channel and temperature; any other object speaks as `channel` and `system` say.

    Args:
        agent: a name as on the command line, or an object.
        settings: fields of `AgentOptions`. With an object only `temperature`, `slots`, `threads`, `channel` and
            `system` may differ from their defaults, with an OpenedAgent only the first three.
        probe: gives the environment, to be asked for its tool and players.
        servers: those that play with a model's weights; None: this process.
    """
    options = AgentOptions.of(settings)
    if isinstance(agent, str):
        return open_agent(replace(options, agent=agent), probe, servers)
    usable = ("temperature", "slots", "threads", *(() if isinstance(agent, OpenedAgent) else ("channel", "system")))
    idle = [name for name in settings if name not in usable and settings[name] != AgentOptions().flat()[name]]
    if idle:
        raise AgentError(f"{', '.join(idle)}: settings of agents that are named; an agent object has its own")
    if isinstance(agent, OpenedAgent):
        return agent
    if isinstance(agent, ModelAgent):
        channel = None if agent.channel is None else agent.channel.name
        temperature = agent.sampling.temperature
        opened = OpenedAgent(agent=agent, channel=channel, system=options.system, temperature=temperature)
    elif isinstance(agent, EndpointAgent):
        opened = _opened_endpoint(agent, options.system)
    else:
        opened = OpenedAgent(agent=agent, channel=_plain_channel(options), system=options.system)
    return replace(opened, player=f"{type(agent).__module__}:{type(agent).__qualname__}")


def _plain_channel(options: AgentOptions) -> str | None:
    """Scripted agents speak in bare actions unless they are told otherwise."""
    return None if options.channel in ("auto", "none") else options.channel


def _open_model(folder: str, options: AgentOptions, env: TextEnv, servers: PolicyServer) -> OpenedAgent:
    tool, folder = env.tool, str(hub_folder(folder))
    settings = _settings(ChatSettings.load(folder), options, env.env_id)
    path = Path(folder).resolve()
    engine, model, tokenizer = _engine(folder, settings, options, servers)
    settings = complete_settings(settings, tokenizer, tool)
    channel = make_channel(settings.channel, tool)
    examples = _examples(options, env, channel)
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
        agent=player.agent(options.heat, name),
        channel=settings.channel,
        system=system,
        chat=describe(settings),
        temperature=options.heat,
        fingerprint=_fingerprint(
            folder,
            settings,
            # another engine draws other episodes from the same seed
            **({"engine": engine.fleet.dialect.name.lower()} if servers.policy_server else {}),
            **({"examples": examples.identity} if examples.identity else {}),
        ),
        dtype=None if servers.policy_server else options.dtype,
        origin=origin,
        memory=settings.memory,
        prompts=_prompts(settings.remembers),
        examples=examples,
    )


def _fingerprint(folder: str | Path, settings: ChatSettings, **more: Any) -> str:
    return content_hash({"files": file_hashes(folder), "settings": settings.identity, **more})[:16]


def model_fingerprint(folder: str | Path, env: TextEnv) -> str:
    """The `fingerprint` of `model:FOLDER` with its own chat settings in `env`; the weights are not loaded."""
    settings = complete_settings(ChatSettings.load(folder), load_tokenizer(folder), env.tool)
    return _fingerprint(folder, settings)


def _examples(options: AgentOptions, env: TextEnv, channel: Channel) -> Examples:
    if options.examples is None:
        return Examples()
    form, shown_for = options.examples_as, options.examples_for
    found = read_examples(options.examples, form, env.env_id, channel, env.tool, shown_for)
    if found.skills is not None:
        found.skills.check(env)
    return found


def _warn_of_transfer(folder: str, env_id: str) -> None:
    trained = trained_on(folder)
    if trained and env_id not in trained:
        names = ", ".join(trained)
        warnings.warn(
            f"model:{folder} was trained on {names} and plays {env_id} here: a result of transfer, if that is meant",
            stacklevel=2,
        )


def _open_endpoint(model: str, options: AgentOptions, env: TextEnv) -> OpenedAgent:
    own = "tool" if options.channel == "tool" else "user"
    if options.observation_role not in ("auto", own):
        raise AgentError("--observation-role is not for endpoints: results of calls are of role tool, others of user")
    if options.channel not in ("auto", "text", VERL_AGENT, "tool", "tool:hermes"):
        raise AgentError(
            f"--channel is {options.channel}: an endpoint reads its model's calls; valid: text, {VERL_AGENT}, tool"
        )
    # text works with every endpoint, and its traces look the same for every agent
    channel = make_channel("text" if options.channel == "auto" else options.channel, env.tool)
    examples = _examples(options, env, channel)
    if examples.skills is not None:
        raise AgentError(f"--examples {options.examples}: skills are for model:FOLDER, not for an endpoint")
    system = options.system
    if examples.text:
        system = examples.in_system(system_message(env, channel, None) if system is None else system)
    agent = EndpointAgent(
        model,
        options.endpoint,
        channel,
        env.tool,
        examples=examples.episodes,
        temperature=options.heat,
        thinking=options.thinking,
        max_tokens=options.max_new_tokens,
        max_context=options.max_context,
        memory=ChatSettings(**ChatSettings().memory_of(options.memory, options.prompts, env.env_id)).remembers,
        parallel=options.slots,
    )
    opened = _opened_endpoint(agent, system)
    if examples.identity is None:
        return opened
    fingerprint = content_hash({"agent": opened.fingerprint, "examples": examples.identity})[:16]
    return replace(opened, fingerprint=fingerprint, examples=examples)


def _opened_endpoint(agent: EndpointAgent, system: str | None) -> OpenedAgent:
    return OpenedAgent(
        agent=agent,
        channel=agent.channel.name,
        system=system,
        temperature=agent.temperature,
        fingerprint=agent.fingerprint(system),
        memory=agent.memory.name,
        prompts=_prompts(agent.memory),
    )


def _prompts(memory: Memory) -> str | None:
    return None if memory.templates is None else memory.templates.sha256[:16]


def _engine(folder: str, settings: ChatSettings, options: AgentOptions, servers: PolicyServer) -> tuple[Any, Any, Any]:
    """What generates, the model as far as it is loaded, and the tokenizer."""
    if servers.policy_server:
        need("transformers", "a tokenizer", "train")
        tokenizer, model = load_tokenizer(folder), load_outside(folder)
        return eval_policy(servers, Path(folder), tokenizer, settings.max_context), model, tokenizer
    # first: it says what is missing where torch is
    model, tokenizer = load_policy(folder, options.device, options.dtype)
    from turngym.agents.local_engine.engine import LocalEngine

    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    engine = LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context, max_batch=options.slots)
    return engine, model, tokenizer


def _settings(settings: ChatSettings, options: AgentOptions, env_id: str) -> ChatSettings:
    """The model's own settings with those of the command line on top."""
    if options.channel == "none":
        raise AgentError("a model needs a channel to write actions in: --channel text or tool")
    unset: dict[str, str | None] = {"channel": "auto", "observation_role": "auto"}
    unset |= dict.fromkeys(("system", "max_new_tokens", "max_context"))
    changes: dict[str, Any] = {name: given for name in unset if (given := getattr(options, name)) != unset[name]}
    if options.thinking != "auto":
        changes["thinking"] = options.thinking == "on"
    return replace(settings, **changes, **settings.memory_of(options.memory, options.prompts, env_id))
