"""What a rollout and an evaluation prepare alike: a preset's arguments, and the agent opened for the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turngym.agents.agent import Agent
from turngym.agents.environments import env_maker, probe
from turngym.agents.executor.automatic import Playing
from turngym.agents.executor.open_workers import WorkerOptions
from turngym.agents.named_agent import OpenedAgent, as_opened
from turngym.agents.presets.preset import Preset, require_named
from turngym.agents.presets.published import find_preset
from turngym.agents.rollout import MakeEnv
from turngym.agents.sglang.options import PolicyServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An environment and the agent that is to play it."""

    env: str
    preset: Preset | None
    overrides: Mapping[str, Any]
    """Arguments of gym.make that were given, with the preset's; without those of a panel."""
    kwargs: Mapping[str, Any]
    """All of them."""
    player: Mapping[str, Any]
    """Settings of the agent as they were given, for the configuration file."""
    opened: OpenedAgent
    playing: WorkerOptions

    @property
    def make_env(self) -> MakeEnv:
        """Makes the environment, which reads what the agent writes."""
        return env_maker(self.env, **self.kwargs, channel=self.opened.channel)

    def played(self, episodes: int) -> Playing:
        """What `--workers auto` is told."""
        return Playing.of(getattr(self.opened.agent, "policy", None), episodes)

    @property
    def preset_note(self) -> dict[str, Any]:
        """What the records of episodes say of the preset."""
        return {} if self.preset is None else dict(self.preset.identity)


def prepare(
    env: str,
    agent: str | Agent | OpenedAgent,
    settings: Mapping[str, Any],
    *,
    preset: str | Preset | None,
    base: Mapping[str, Any],
    given: Mapping[str, Any],
    workers: int | Literal["auto"] | WorkerOptions,
    servers: PolicyServer | None,
) -> Prepared:
    """Open `agent` with `settings` for `env`, made with `base` (a panel's arguments), the preset's, and `given`.

    Raises TurngymError for an unknown preset or agent, or a preset for an agent that is an object.
    """
    named = find_preset(preset, env)
    overrides = given if named is None else named.make(dict(given))
    kwargs = {**base, **overrides}
    require_named(named, agent)
    played = settings if named is None else named.player(dict(settings), overrides)
    return Prepared(
        env=env,
        preset=named,
        overrides=overrides,
        kwargs=kwargs,
        player=settings,
        opened=as_opened(agent, played, lambda: probe(env, kwargs), servers),
        playing=WorkerOptions.of(workers),
    )
