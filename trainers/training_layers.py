"""What a training run stands on where nobody says otherwise, from the bottom up.

environment     what gym.make does where nothing is given
model folder    how the student was trained to be spoken to (turngym.json)
preset          a published set-up

Its evaluations have another environment, the panel's:

environment, then what training plays with and how it speaks to agents (`AGENT_FACING`), then what the panel fixes, then
a preset; with a preset, what is asked for how agents are spoken to stands on top of it. A limit of turns that is asked
for holds in both.

`resolve_training` (train_config.py) puts what people ask for on top.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from turngym.agents.models import hub_folder
from turngym.agents.presets import Preset, find_preset
from turngym.agents.resolve_play import ENV, environment_layer, folder_layer, panel_layer, play_table, require_env_of
from turngym.core.errors import ModelError, SettingsError, TurngymError
from turngym.core.hub import cached_folder
from turngym.core.nested import at
from turngym.core.resolve import Layer, merged
from turngym.core.task import MAX_TURNS, plain_id
from turngym.core.trace import iter_episodes
from turngym.core.user_files import user_path
from turngym.envs.panels import Panel, load_panel

AGENT_FACING = ("on_invalid", "engine", "show_admissible", "list_admissible", "reading", "tool_name", "tool_argument")
"""Arguments of gym.make that a run's evaluations share with its training: how the agent is spoken to. The others say
what is trained on; a panel brings its own."""


def training_layers(given: Mapping[str, Any], max_turns: int | None = None, *, fetch: bool = False) -> list[Layer]:
    """What a run stands on for which so much is `given`, a partial table of whole paths.

    Args:
        given: what people ask for.
        max_turns: the limit of the run that this is a further environment of.
        fetch: whether a student of the hub is fetched, whose folder says how it is spoken to.

    Raises TurngymError for an environment, a preset or a panel that is not there.
    """
    env_id = str(at(given, "play.env.id") or recorded_env(given.get("play", {})) or ENV)
    preset = find_preset(at(given, "play.preset"), env_id)
    layers = [environment_layer(env_id), student_layer(at(given, "models.student"), fetch=fetch)]
    if at(layers[0].table, "play.env.max_turns") is None:
        # an episode of training has an end
        layers.insert(1, Layer(name="default", table={"play": {"env": {"max_turns": MAX_TURNS}}}))
    if preset is not None:
        layers.append(_preset_layer(preset, given))
    if max_turns is not None:
        layers.append(Layer(name="run", table={"play": {"env": {"max_turns": max_turns}}}))
    if given.get("evaluation") is None:
        return layers
    if (panel := at(given, "evaluation.panel")) is None:
        raise SettingsError("evaluation.panel must be given (--panel): `turngym panel list` shows them")
    if not isinstance(panel, str):
        return layers  # `read` refuses it
    played = merged([*(layer.table for layer in layers), given])
    return [*layers, *_evaluation_layers(load_panel(panel), given, at(played, "play.env.max_turns"))]


def student_layer(named: Any, *, fetch: bool) -> Layer:
    """How the student's folder says that it is spoken to. A missing folder gives an empty layer."""
    nothing = Layer(name="model folder", table={})
    if not isinstance(named, str | Path):
        return nothing
    if fetch:
        # of a model that cannot be had the run says so
        with suppress(ModelError):
            hub_folder(named)
    if not (user_path(named).is_dir() or cached_folder(str(named))):
        return nothing
    layer = folder_layer(str(named))
    return replace(layer, table=layer.table.get("agent", {}))


def _preset_layer(preset: Preset, given: Mapping[str, Any]) -> Layer:
    chosen = {"agent": {"chat": given.get("chat", {})}, "play": given.get("play", {})}
    table = preset.beside(chosen)
    env_table = {name: value for name, value in table["play"].items() if name in ("env", "env_kwargs")}
    trained = play_table(preset.env_id, preset.training)["play"]
    return Layer(
        name=f"preset {preset.name}", table={"play": merged([env_table, trained]), "chat": table["agent"]["chat"]}
    )


def _evaluation_layers(panel: Panel, given: Mapping[str, Any], max_turns: Any) -> list[Layer]:
    """What evaluations on `panel` stand on; `max_turns` is the limit of training."""
    require_env_of(panel, str(at(given, "evaluation.game.env.id") or panel.env_id))
    play = given.get("play", {})
    env_arguments = {**play.get("env", {}), **play.get("env_kwargs", {})}
    shared = {name: env_arguments[name] for name in AGENT_FACING if name in env_arguments}
    turns = {"max_turns": max_turns}
    preset = find_preset(play.get("preset"), panel.env_id)

    def training(arguments: Mapping[str, Any]) -> Layer:
        return Layer(name="as in training", table=play_table(panel.env_id, arguments))

    layers = [environment_layer(panel.env_id)]
    if preset is None:
        layers += [training({**turns, **shared}), panel_layer(panel)]
    else:
        layers += [panel_layer(panel), Layer(name=f"preset {preset.name}", table=preset.table), training(shared)]
    if env_arguments.get("max_turns") is not None:
        layers.append(training(turns))
    evaluation_layers = [Layer(name=layer.name, table={"evaluation": {"game": _game(layer.table)}}) for layer in layers]
    panel_env = {"game": {"env": {"id": panel.env_id}}}
    evaluation_layers.append(Layer(name=f"panel {panel.full_name}", table={"evaluation": panel_env}))
    if preset is not None:
        numbers = {"eval_samples": "play.samples", "eval_temperature": "agent.temperature"}
        values = {name: at(preset.table, path) for name, path in numbers.items()}
        table = {name: value for name, value in values.items() if value is not None}
        evaluation_layers.append(Layer(name=f"preset {preset.name}", table={"evaluation": table}))
    return evaluation_layers


def _game(table: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a partial table, without its id, which is the panel's."""
    env = {name: value for name, value in table["play"].get("env", {}).items() if name != "id"}
    return {"env": env, "env_kwargs": table["play"].get("env_kwargs", {})}


def recorded_env(play: Mapping[str, Any]) -> str | None:
    """The environment that the first episodes of `traces` are of; None without any.

    Raises TurngymError where the files begin with episodes of several environments that `also` does not name, or of one
    that is not registered.
    """
    traces, also = (play.get(name) or () for name in ("traces", "also"))
    if not isinstance(traces, list | tuple) or not isinstance(also, list | tuple):
        return None  # `read` refuses it
    envs: dict[str, Path] = {}
    for path in map(user_path, traces):
        # of a file that is not there the run says so
        if path.is_file() and (episode := next(iter_episodes(path), None)) is not None:
            envs.setdefault(episode.task.env_id, path)
    if not envs:
        return None
    env = next(iter(envs))
    if not {plain_id(str(further).partition(",")[0]) for further in also} >= {*envs} - {env}:
        listed = ", ".join(f"{name} ({path})" for name, path in envs.items())
        raise TurngymError(
            f"--traces hold episodes of {listed}: name the run's environment with --env and the others with --also"
        )
    if env not in gym.registry:
        raise TurngymError(
            f"--traces {envs[env]}: its episodes are of {env}, which nothing here has registered: name it with the "
            f"module that does, --env package:{env}"
        )
    print(f"environment: {env}, as recorded in {envs[env]}", file=sys.stderr)
    return env
