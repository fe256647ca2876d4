"""Agents and environments from command-line options, shared by eval, rollout and play."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import tyro

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents.agent import Agent, AgentError
from turngym.agents.executor.env_spec import EnvSpec
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.scripted import ExpertAgent, RandomAgent, ReplayAgent, named_player
from turngym.envs.base import TextEnv
from turngym.envs.core import ToolSpec, TurngymError, content_hash
from turngym.envs.guard import guard_of
from turngym.envs.suggest import did_you_mean
from turngym.scripts.server_wiring import PolicyServer, eval_policy, load_outside

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
    batch: int = 64
    """Episodes played, and requests generated, at a time."""
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Which environment is played."""

    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id."""
    split: str | None = None
    """Split of the environment; by default the environment's own default."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    max_turns: int | None = None
    """Turns before the episode is cut; by default the environment's own limit."""
    on_invalid: Literal["reject", "penalize", "noop", "terminate"] | None = None
    """What an invalid action does; by default: reject."""
    make: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"engine": "textworld"}'."""

    def kwargs(self) -> dict[str, Any]:
        """Arguments for gym.make: only what was asked for."""
        named = {name: getattr(self, name) for name in ("split", "data", "max_turns", "on_invalid")}
        return {**json_object("--make", self.make), **{k: v for k, v in named.items() if v is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """An agent with what the environment and the driver must know about it."""

    agent: Agent
    channel: str | None
    system: str | None = None
    temperature: float | None = None
    """None for agents that do not sample."""
    fingerprint: str | None = None
    """Of a model's files: two checkpoints of one name are not the same player."""


def wire_agent(options: AgentOptions, probe: Callable[[], TextEnv]) -> Wired:
    """The agent that `options.agent` names. `probe` gives the environment it will play, if it must be asked.

    Raises:
        AgentError: an unknown agent, a missing trace, a folder that holds no model.
    """
    kind, _, argument = options.agent.partition(":")
    channel = None if options.channel in ("auto", "none") else options.channel
    if kind == "expert":
        return Wired(agent=ExpertAgent(noise=options.noise, name=_noisy("expert", options.noise)), channel=channel)
    if kind == "random":
        return Wired(agent=RandomAgent(), channel=channel)
    if kind == "replay" and argument:
        from turngym.envs.trace import read_trace

        return Wired(agent=ReplayAgent(read_trace(argument)[0], name=f"replay {Path(argument).name}"), channel=channel)
    if kind == "model" and argument:
        return _wire_model(argument, options, probe().tool)
    players = probe().players
    if options.agent in players:
        agent = ExpertAgent(expert=named_player(kind), noise=options.noise, name=_noisy(kind, options.noise))
        return Wired(agent=agent, channel=channel)
    known = [*KINDS, *players]
    raise AgentError(f"unknown agent {options.agent!r}; agents are: {', '.join(known)}.{did_you_mean(kind, known)}")


def _wire_model(folder: str, options: AgentOptions, tool: ToolSpec) -> Wired:
    settings = _settings(ChatSettings.load(folder), options)
    from turngym.agents.model_agent import ModelAgent
    from turngym.envs.channels import make_channel
    from turngym.envs.protocols import Sampling

    path = Path(folder).resolve()
    engine, model, tokenizer = _engine(folder, settings, options)
    renderer = renderer_of(model, tokenizer, settings, tool)
    agent = ModelAgent(
        engine,
        renderer,
        make_channel(settings.channel, tool),
        Sampling(temperature=options.temperature, max_new_tokens=settings.max_new_tokens),
        max_context=engine.max_length,
        name=f"model {path.parent.name if path.name == 'model' else path.name}",
    )
    return Wired(
        agent=agent,
        channel=settings.channel,
        system=settings.system,
        temperature=options.temperature,
        fingerprint=content_hash(
            {"files": _file_hashes(folder), "settings": asdict(settings)}
            # another engine draws other episodes from the same seed
            | ({"engine": "sglang"} if options.servers.policy_server else {})
        )[:16],
    )


def _engine(folder: str, settings: ChatSettings, options: AgentOptions) -> tuple[Any, Any, Any]:
    """What generates, the model as far as it is loaded, and the tokenizer."""
    if options.servers.policy_server:
        model, tokenizer = load_outside(folder)
        return eval_policy(options.servers, Path(folder), tokenizer, settings.max_context), model, tokenizer
    from turngym.agents.local_engine.engine import LocalEngine

    model, tokenizer = load_policy(folder, options.device, options.dtype)
    engine = LocalEngine(model, tokenizer=tokenizer, max_length=settings.max_context, max_batch=options.batch)
    return engine, model, tokenizer


def renderer_of(model: Any, tokenizer: Any, settings: ChatSettings, tool: Any) -> Any:
    """The `ChatRenderer` that a model was trained with; its generation config may name further end tokens."""
    from turngym.agents.rendering.renderer import ChatRenderer

    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or ()
    return ChatRenderer(
        tokenizer,
        tool=tool if settings.channel == "tool" else None,
        thinking=settings.thinking,
        observation_role=settings.observation_role,
        history=settings.history,
        stop_ids=(more,) if isinstance(more, int) else tuple(more),
    )


def load_policy(folder: str, device: str, dtype: str) -> tuple[Any, Any]:
    """A causal model in evaluation mode and its tokenizer, from a folder."""
    path = Path(folder).expanduser()
    if not (path / "config.json").exists():
        raise AgentError(f"{folder} holds no model: config.json, model.safetensors and a tokenizer are needed there")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise AgentError(f"models need torch and transformers: pip install 'turngym[train]' ({error})") from error
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise AgentError(f"cannot load the model in {folder}: {str(error).strip().splitlines()[0]}") from error
    return model.to(target).eval(), tokenizer


def _file_hashes(folder: str) -> dict[str, str]:
    """SHA-256 of every weight, configuration and tokenizer file."""
    hashes = {}
    for path in sorted(Path(folder).expanduser().iterdir()):
        if path.suffix in (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model"):
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


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


def env_maker(env_id: str, **kwargs: Any) -> EnvSpec:
    """A factory of environments without Gymnasium's slow per-step checker, which may be sent to other processes."""
    if env_id not in gym.registry:
        known = [name for name in gym.registry if name.startswith("turngym/")]
        raise TurngymError(f"unknown environment {env_id!r}; known: {', '.join(known)}.{did_you_mean(env_id, known)}")
    return EnvSpec(env_id, kwargs)


def probe(env_id: str, kwargs: Mapping[str, Any]) -> TextEnv:
    """An environment, closed already, to be asked for its tool and players."""
    env = env_maker(env_id, **kwargs)()
    env.close()
    return guard_of(env).base


def json_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TurngymError(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TurngymError(f'{flag} {text!r} must be a JSON object, for example \'{{"split": "valid_seen"}}\'')
    return value


def _noisy(name: str, noise: float) -> str:
    return f"{name} (noise {noise:g})" if noise else name
