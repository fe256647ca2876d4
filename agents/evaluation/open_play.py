"""Opens the environment and the agent of an `EvalSpec`, for an evaluation or a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from turngym.agents.executor.worker_count import PlayWorkload
from turngym.agents.named_agent import OpenedAgent, open_agent, opened_object
from turngym.agents.play_spec import EvalSpec, Game, Own
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import MakeEnv
from turngym.agents.resolve_play import make_arguments
from turngym.core.errors import TurngymError
from turngym.core.redaction import redacted
from turngym.core.spec import changed, to_table
from turngym.envs.base import TextEnv

SPEC_FILE = "spec.toml"
"""The settings of an evaluation in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlay:
    """An environment and the agent that plays it."""

    spec: EvalSpec
    """What was asked for, with what opening has found out: hashes of files, what the chat template decides, how the
    environment scores."""
    opened: OpenedAgent

    @property
    def made(self) -> dict[str, Any]:
        """All arguments of `gym.make` but the channel."""
        return make_arguments(self.spec.play, self.spec.compute.data)

    @property
    def make_env(self) -> MakeEnv:
        """Makes the environment with the agent's channel."""
        return env_maker(self.spec.play.env.id, **self.made, channel=self.opened.channel)

    def workload(self, episodes: int) -> PlayWorkload:
        """The numbers from which `--workers auto` decides."""
        return PlayWorkload.of(getattr(self.opened.agent, "policy", None), episodes)


def open_play(spec: EvalSpec, agent: Agent | OpenedAgent | None = None) -> OpenPlay:
    """Opens the environment and the agent of `spec`.

    Raises TurngymError for an environment or agent that cannot be opened, or that is not as `spec` has recorded it.
    """
    env_id, arguments = spec.play.env.id, make_arguments(spec.play, spec.compute.data)
    env = probe(env_id, arguments, spec.compute.workers.step_timeout)
    if agent is None:
        opened = open_agent(spec.agent, lambda: env, spec.compute.slots)
    else:
        assert isinstance(spec.agent, Own)
        opened = opened_object(agent, spec.agent)
    play = scored(spec.play, env)
    return OpenPlay(spec=changed(spec, play=play, agent=opened.spec), opened=opened)


G = TypeVar("G", bound=Game)


def scored(game: G, env: TextEnv) -> G:
    """Records in `game` how its environment scores. Raises TurngymError if `game` records another scoring."""
    if game.scoring not in ({}, env.scoring):
        problem = f"{game.env.id} scores with {env.scoring}; the settings say {game.scoring}"
        raise TurngymError(f"{problem}: other data or tools")
    return changed(game, scoring=env.scoring)


def record_of(spec: EvalSpec) -> dict[str, Any]:
    """Converts `spec` to a table for records, in which *** replaces whatever may be a key."""
    table: dict[str, Any] = redacted(to_table(spec))
    return table
