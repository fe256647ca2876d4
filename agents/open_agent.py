"""The agent that a name stands for: `expert`, `random`, `replay:TRACE`, `model:FOLDER`, or somebody's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turngym.agents.agent import Agent, AgentError
from turngym.agents.models import file_hashes, load_policy, renderer_of
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.scripted import ExpertAgent, RandomAgent, ReplayAgent, named_player
from turngym.agents.sglang.options import PolicyServer
from turngym.envs.base import TextEnv
from turngym.envs.core import ToolSpec, content_hash
from turngym.envs.suggest import did_you_mean

KINDS = ("expert", "random", "replay:TRACE", "model:FOLDER")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Which agent plays, and how it speaks."""

    agent: str = "expert"
    """`expert` (sees the hidden state), one of the environment's own players (ALFWorld: `searching`; WebShop:
    `first-hit`; Search: `single-shot`), `random`, `replay:TRACE` or `model:FOLDER` (a Hugging Face causal model)."""
    temperature: float = 0.85
    """Sampling temperature of a model; 0 is greedy."""
    noise: float = 0.0
    """Share of random actions among an expert's."""
    channel: Literal["auto", "none", "text", "tool"] = "auto"
    """How actions are written; auto: as the model was trained, bare actions for scripted agents."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of the chat template; auto: as the model was trained, else the template's default."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of observations after the first; auto: as the model was trained, else user."""
    max_new_tokens: int | None = None
    """Most tokens of one response; by default as the model was trained, else 512."""
    max_context: int | None = None
    """Most tokens of an episode's history and response; by default what the model allows."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of a model."""
    slots: int = 64
    """Episodes played, and requests generated, at a time."""
    threads: int = 0
    """Threads of torch on the CPU; 0 leaves its default. Tiny models are fastest with 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAgent:
    """An agent with what the environment and the driver must know about it."""

    agent: Agent
    channel: str | None
    system: str | None = None
    temperature: float | None = None
    """None for agents that do not sample."""
    fingerprint: str | None = None
    """Of a model's files: two checkpoints of one name are not the same player."""


def open_agent(options: AgentOptions, probe: Callable[[], TextEnv], servers: PolicyServer | None = None) -> OpenedAgent:
    """The agent that `options.agent` names. `probe` gives the environment it will play, if it must be asked.

    A model plays in this process, or on `servers`.

    Raises:
        AgentError: an unknown agent, a missing trace, a folder that holds no model.
    """
    kind, _, argument = options.agent.partition(":")
    channel = None if options.channel in ("auto", "none") else options.channel
    if kind == "expert":
        return OpenedAgent(
            agent=ExpertAgent(noise=options.noise, name=_noisy("expert", options.noise)), channel=channel
        )
    if kind == "random":
        return OpenedAgent(agent=RandomAgent(), channel=channel)
    if kind == "replay" and argument:
        from turngym.envs.trace import read_trace

        return OpenedAgent(
            agent=ReplayAgent(read_trace(argument)[0], name=f"replay {Path(argument).name}"), channel=channel
        )
    if kind == "model" and argument:
        return _open_model(argument, options, probe().tool, servers or PolicyServer())
    players = probe().players
    if options.agent in players:
        agent = ExpertAgent(expert=named_player(kind), noise=options.noise, name=_noisy(kind, options.noise))
        return OpenedAgent(agent=agent, channel=channel)
    known = [*KINDS, *players]
    raise AgentError(f"unknown agent {options.agent!r}; agents are: {', '.join(known)}.{did_you_mean(kind, known)}")


def _open_model(folder: str, options: AgentOptions, tool: ToolSpec, servers: PolicyServer) -> OpenedAgent:
    from turngym.agents.model_agent import ModelAgent
    from turngym.envs.channels import make_channel
    from turngym.envs.protocols import Sampling

    settings = _settings(ChatSettings.load(folder), options)
    path = Path(folder).resolve()
    engine, model, tokenizer = _engine(folder, settings, options, servers)
    renderer = renderer_of(model, tokenizer, settings, tool)
    agent = ModelAgent(
        engine,
        renderer,
        make_channel(settings.channel, tool),
        Sampling(temperature=options.temperature, max_new_tokens=settings.max_new_tokens),
        max_context=engine.max_length,
        name=f"model {path.parent.name if path.name == 'model' else path.name}",
    )
    return OpenedAgent(
        agent=agent,
        channel=settings.channel,
        system=settings.system,
        temperature=options.temperature,
        fingerprint=content_hash(
            {"files": file_hashes(folder), "settings": asdict(settings)}
            # another engine draws other episodes from the same seed
            | ({"engine": "sglang"} if servers.policy_server else {})
        )[:16],
    )


def _engine(folder: str, settings: ChatSettings, options: AgentOptions, servers: PolicyServer) -> tuple[Any, Any, Any]:
    """What generates, the model as far as it is loaded, and the tokenizer."""
    if servers.policy_server:
        from turngym.agents.sglang.open_servers import eval_policy, load_outside

        model, tokenizer = load_outside(folder)
        return eval_policy(servers, Path(folder), tokenizer, settings.max_context), model, tokenizer
    from turngym.agents.local_engine.engine import LocalEngine

    model, tokenizer = load_policy(folder, options.device, options.dtype)
    engine = LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context, max_batch=options.slots)
    return engine, model, tokenizer


def _settings(settings: ChatSettings, options: AgentOptions) -> ChatSettings:
    """The model's own settings with those of the command line on top."""
    if options.channel == "none":
        raise AgentError("a model needs a channel to write actions in: --channel text or tool")
    changes: dict[str, Any] = {}
    if options.channel != "auto":
        changes["channel"] = options.channel
    if options.thinking != "auto":
        changes["thinking"] = options.thinking == "on"
    if options.observation_role != "auto":
        changes["observation_role"] = options.observation_role
    for name in ("max_new_tokens", "max_context"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    return replace(settings, **changes)


def _noisy(name: str, noise: float) -> str:
    return f"{name} (noise {noise:g})" if noise else name
