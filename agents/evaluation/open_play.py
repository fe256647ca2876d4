"""What an evaluation or a rollout plays with: the environment and the agent of an `EvalSpec`, opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turngym.agents.executor.worker_count import PlayWorkload
from turngym.agents.named_agent import OpenedAgent, open_agent, opened_object
from turngym.agents.play_spec import EvalSpec, Game, Own
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import MakeEnv
from turngym.agents.resolve_play import make_arguments
from turngym.core.errors import TurngymError
from turngym.core.nested import differing
from turngym.core.provenance import provenance
from turngym.core.redaction import redacted
from turngym.core.resolve import Resolved
from turngym.core.settings import PROVENANCE, to_toml, toml_table, write_toml_text
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
        """What `--workers auto` decides by."""
        return PlayWorkload.of(getattr(self.opened.agent, "policy", None), episodes)


def open_play(spec: EvalSpec, agent: Agent | OpenedAgent | None = None) -> OpenPlay:
    """Opens what `spec` says.

    Raises TurngymError for an environment or agent that cannot be opened, or that is not as `spec` has recorded it.
    """
    env_id, made = spec.play.env.id, make_arguments(spec.play, spec.compute.data)
    env = probe(env_id, made, spec.compute.workers.step_timeout)
    if agent is None:
        opened = open_agent(spec.agent, lambda: env, spec.compute.slots)
    else:
        assert isinstance(spec.agent, Own)
        opened = opened_object(agent, spec.agent)
    play = scored(spec.play, env)
    return OpenPlay(spec=changed(spec, play=play, agent=opened.spec), opened=opened)


G = TypeVar("G", bound=Game)


def scored(game: G, env: TextEnv) -> G:
    """`game` with what its environment says of its scoring. Raises TurngymError where `game` says otherwise."""
    if game.scoring not in ({}, env.scoring):
        said = f"{game.env.id} scores with {env.scoring}; the settings say {game.scoring}"
        raise TurngymError(f"{said}: other data or tools")
    return changed(game, scoring=env.scoring)


def record_of(spec: EvalSpec) -> dict[str, Any]:
    """`spec` as records hold it: what may be a key is written as ***."""
    found: dict[str, Any] = redacted(to_table(spec))
    return found


def keep_spec(path: Path, found: Resolved[EvalSpec], spec: EvalSpec, command: str | Sequence[str]) -> None:
    """Writes the settings of an evaluation or rollout in the form that `--config` reads: what was asked for (`found`),
    and in `spec` what opening has found out."""
    about: Mapping[str, Any] = provenance(command, seed=spec.play.seed)
    origins = {**found.origins, **dict.fromkeys(differing(record_of(spec), record_of(found.spec)), "found")}
    write_toml_text(path, to_toml(redacted(toml_table(spec)), origins) + "\n" + to_toml({PROVENANCE: about}))
