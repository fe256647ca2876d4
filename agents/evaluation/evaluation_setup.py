"""What an evaluation or rollout plays with: an environment, the agent opened for it, and the record of both.

`evaluate` and `play_episodes` begin with `prepare`: explicit arguments override the preset, which overrides the panel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turngym.agents.agent_options import AgentOptions
from turngym.agents.evaluation.original import departures
from turngym.agents.executor.worker_count import WorkerOptions, Workload
from turngym.agents.named_agent import OpenedAgent, as_opened
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker, probe, refuse_channel
from turngym.agents.playing.rollout import MakeEnv
from turngym.agents.presets import Preset, find_preset, require_named
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.provenance import write_config
from turngym.core.settings import to_table
from turngym.envs.panels import Panel

SAMPLES = 4
"""Episodes per task of an evaluation where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An environment and the agent that plays it, with their settings."""

    env: str
    preset: Preset | None
    given: Mapping[str, Any]
    """Explicit arguments of gym.make."""
    overrides: Mapping[str, Any]
    """Explicit arguments of gym.make and those of the preset, without those of a panel."""
    kwargs: Mapping[str, Any]
    """All arguments of gym.make."""
    player: Mapping[str, Any]
    """Settings of the agent as they were given, for the configuration file."""
    played: Mapping[str, Any]
    """Settings of the agent with those of the preset."""
    opened: OpenedAgent
    workers: WorkerOptions

    @property
    def named(self) -> str | None:
        """A model of the hub by the commit that was played; None for other agents."""
        return None if self.opened.origin is None else f"model:{self.opened.origin}"

    @property
    def make_env(self) -> MakeEnv:
        """Makes the environment with the agent's channel."""
        return env_maker(self.env, **self.kwargs, channel=self.opened.channel)

    def workload(self, episodes: int) -> Workload:
        """What `--workers auto` decides by."""
        return Workload.of(getattr(self.opened.agent, "policy", None), episodes)

    def samples(self, given: int | None) -> int:
        """Episodes per task: as given, else the preset's, else 4."""
        own = None if self.preset is None else self.preset.samples
        return next(count for count in (given, own, SAMPLES) if count is not None)

    def departs(
        self,
        panel: Panel | None,
        samples: int,
        limit: int | None,
        scoring: Mapping[str, str],
        drawn: int | None = None,
    ) -> dict[str, list[str]]:
        """What an evaluation or a rollout does otherwise than the original, as its records have it.

        Args:
            panel: what is evaluated; None for a rollout.
            samples: episodes of each task; with `drawn`, validations.
            limit: how many tasks of the panel are played, from the first; None: all.
            scoring: `TextEnv.scoring` of the environment.
            drawn: workers of the published harness; None: the panel's tasks are played.
        """
        return departures(
            self.env,
            panel,
            self.preset,
            self.kwargs,
            played={**self.played, "memory": self.opened.memory},
            channel=self.opened.channel,
            temperature=self.opened.temperature,
            samples=samples,
            limit=limit,
            scoring=scoring,
            drawn=drawn,
        )

    @property
    def preset_note(self) -> dict[str, Any]:
        """The preset as the records of episodes name it."""
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
    """Open `agent` with `settings` for `env`.

    Raises TurngymError for an unknown preset or agent, or a preset for an agent that is an object.

    Args:
        env: Gymnasium id.
        agent: a name as on the command line, or an object.
        settings: fields of `AgentOptions`; those that have their default value get the preset's.
        preset: a published set-up of `env`; None: none.
        base: arguments for gym.make that the preset overrides: those of a panel.
        given: arguments for gym.make that override the preset.
        workers: processes that play; auto takes several if they pay off.
        servers: those that play with a model's weights; None: this process.
    """
    refuse_channel(given)
    named = find_preset(preset, env)
    overrides = given if named is None else named.make(dict(given))
    kwargs = {**base, **overrides}
    require_named(named, agent)
    played = settings if named is None else named.player(dict(settings), overrides)
    return Prepared(
        env=env,
        preset=named,
        given=given,
        overrides=overrides,
        kwargs=kwargs,
        player=settings,
        played=played,
        opened=as_opened(agent, played, lambda: probe(env, kwargs), servers),
        workers=WorkerOptions.of(workers),
    )


def keep_settings(
    path: Path,
    call: Mapping[str, Any],
    agent: str | Agent | OpenedAgent,
    player: Mapping[str, Any],
    servers: PolicyServer | None,
    workers: WorkerOptions,
    command: str | Sequence[str],
) -> None:
    """Write the settings of an evaluation or rollout in the form that `--config` reads.

    An agent that is an object is written by its name, for readers only: no command can find it by that name.

    Args:
        path: the file, config.toml or NAME.config.toml.
        call: arguments of `evaluate` or of its like for rollouts; those that are None are left out.
        agent: who plays.
        player: fields of `AgentOptions`.
        servers: those that play; None: the defaults are written.
        workers: processes that play.
        command: the caller, for readers.
    """
    named = agent.agent if isinstance(agent, OpenedAgent) else agent
    options = AgentOptions.of({**player, "agent": named if isinstance(named, str) else named.name})
    table = {name: value for name, value in call.items() if value is not None}
    # one JSON text, as on the command line; default=str because arguments may hold paths
    table["env_kwargs"] = json.dumps(dict(table.get("env_kwargs", {})), default=str)
    table |= to_table(options) | to_table(servers or PolicyServer()) | to_table(workers)
    write_config(path, table, command, seed=table["seed"])
