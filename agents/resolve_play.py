"""From what people write to an `EvalSpec`: the one order in which its layers stand on top of each other.

default         samples and tasks, where nobody says otherwise
environment     what gym.make does where nothing is given
panel           its environment's arguments, its hash
model folder    how the model was trained to be spoken to (turngym.json)
preset          a published set-up
a file          --config
command line    or the keywords of a Python call
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turngym.agents.models import hub_folder
from turngym.agents.play_spec import AnyAgent, Environment, EnvPlayer, EvalSpec, Game, MemorySettings
from turngym.agents.presets import Preset, find_preset, require_named
from turngym.agents.rendering.chat_settings import CHAT_FILE, ChatSettings
from turngym.core.errors import AgentError, SettingsError
from turngym.core.nested import KIND, at, flat, put
from turngym.core.resolve import Layer, Resolved, asked_in, merged, read_back, resolve
from turngym.core.setting import short_name
from turngym.core.spec import Spec, expand
from turngym.core.task import plain_id
from turngym.core.user_files import user_path
from turngym.envs.panels import Panel, PanelError, load_panel
from turngym.envs.registration import default_arguments

ENV = "turngym/ALFWorld-v0"
"""The environment where nobody names one."""
ENVIRONMENT = tuple(name for name in Environment.__struct_fields__ if name != "id")
"""Arguments of `gym.make` that every environment has."""


def resolve_play(
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    usual: Mapping[str, Any],
    panel: Panel | None = None,
    preset: Preset | None = None,
) -> Resolved[EvalSpec]:
    """The evaluation or rollout that people ask for.

    Raises TurngymError for settings that do not exist or cannot be meant, an unknown panel, preset or environment.

    Args:
        asked: tables with short names, and who gives them, the last one on top.
        usual: the defaults, as a partial table of whole paths.
        panel: the panel, where it is an object; None: as the tables name it.
        preset: the set-up, where it is an object; None: as the tables name it.
    """
    tables = _asked_layers(asked, play_asked, lambda where, table: resolve_play([(where, table)], usual=usual).spec)
    settings = merged([layer.table for layer in tables])
    if panel is None and (named := at(settings, "play.tasks.panel")) is not None:
        panel = load_panel(str(named))
    env_id = at(settings, "play.env.id") or (ENV if panel is None else panel.env_id)
    if panel is not None:
        require_env_of(panel, env_id)
    layers = [Layer(name="default", table=usual), environment_layer(env_id)]
    if panel is not None:
        layers.append(panel_layer(panel))
    if at(settings, "agent.kind") == "model":
        layers.append(folder_layer(str(at(settings, "agent.folder"))))
    if preset is None:
        preset = find_preset(at(settings, "preset"), env_id)
    if preset is not None:
        layers.append(Layer(name=f"preset {preset.name}", table=preset.beside(settings)))
    if panel is not None:
        # a name without a version is recorded with the version that it stands for
        named = panel_name(panel, str(at(settings, "play.tasks.panel") or ""))
        tables.append(Layer(name=tables[-1].name, table={"play": {"tasks": {"panel": named}}}))
    return asked_in(resolve(EvalSpec, [*layers, *tables]), tables)


def _asked_layers(
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    read: Callable[[Mapping[str, Any], str], dict[str, Any]],
    again: Callable[[str, Mapping[str, Any]], Spec],
) -> list[Layer]:
    """Makes a layer of each table that people give, the lowest first. Records are read back (`read_back`).

    Args:
        asked: who asks, and a table with short names.
        read: turns a table, and who gives it, into a partial table of whole paths.
        again: resolves one of `asked` alone to the whole value.
    """
    tables, top = list[Layer](), dict[str, Any]()
    for where, table in reversed(asked):
        values = read(read_back(table, partial(again, where), flat(top)), where)
        tables.insert(0, Layer(name=where, table=values, asked=True))
        top = merged([values, top])
    return tables


def play_asked(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turns a table with short names into a partial table of whole paths. Arguments of gym.make that every environment
    has may stand among `env_kwargs`, as in a call of `gym.make`.

    Raises SettingsError for settings that do not exist, and for one that is given twice.
    """
    return at_home(unsaid_channel(expand(EvalSpec, table, where)), where, data="compute.data")


def at_home(table: dict[str, Any], where: str, *, data: str) -> dict[str, Any]:
    """Moves those of `play.env_kwargs` that every environment has to `play.env`, and the folder of data to the path
    `data`. Raises SettingsError for an argument that is given twice, and for a channel."""
    kwargs = at(table, "play.env_kwargs")
    if not isinstance(kwargs, dict):
        return table
    if "channel" in kwargs:
        raise SettingsError(
            f"{where}: env_kwargs has channel, which is the agent's: how actions are written (--channel)"
        )
    homes = {**{name: f"play.env.{name}" for name in ENVIRONMENT}, "data": data}
    for name in [name for name in kwargs if name in homes]:
        if at(table, homes[name]) is not None:
            raise SettingsError(f"{where}: {name} is given by itself and among env_kwargs; valid: once")
        put(table, homes[name], kwargs.pop(name))
    return table


def unsaid_channel(table: dict[str, Any], chat: str = "agent.chat") -> dict[str, Any]:
    """Removes a channel of `auto` at the path `chat`: it means that none is given, so that lower layers decide."""
    settings = at(table, chat)
    if isinstance(settings, dict) and settings.get("channel") == "auto":
        del settings["channel"]
    return table


def panel_name(panel: Panel, named: str) -> str:
    """Returns the name to record for a panel given as `named`: its full name, or the path of its manifest."""
    package, colon, _ = named.rpartition(":")
    return named if named.endswith(".json") else f"{package}{colon}{panel.full_name}"


def full_panel_name(named: str) -> str:
    """`panel_name` of the panel that `named` means. Raises TurngymError where there is none."""
    return panel_name(load_panel(named), named)


class OneGame(Spec):
    """An environment by itself."""

    play: Game
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""

    @property
    def made(self) -> dict[str, Any]:
        """All arguments of `gym.make`."""
        return make_arguments(self.play, self.data)


def resolve_game(asked: Sequence[tuple[str, Mapping[str, Any]]]) -> Resolved[OneGame]:
    """The environment that people ask for. Arguments and errors as of `resolve_play`."""
    tables = _asked_layers(asked, _game_asked, lambda where, table: resolve_game([(where, table)]).spec)
    env_id = at(merged([layer.table for layer in tables]), "play.env.id") or ENV
    return asked_in(resolve(OneGame, [environment_layer(env_id), *tables]), tables)


def _game_asked(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    return at_home(expand(OneGame, table, where), where, data="data")


class _Alone(Spec):
    agent: AnyAgent = EnvPlayer()


def resolve_agent(table: Mapping[str, Any], where: str = "agent", below: Sequence[Layer] | None = None) -> AnyAgent:
    """An agent by itself: `{"agent": "model:FOLDER", "temperature": 0.5}`.

    Raises TurngymError for settings that do not exist or cannot be meant.

    Args:
        below: the layers below the table; None: the chat settings in a model's folder.
    """
    settings = unsaid_channel(expand(_Alone, table, where))
    if below is None:
        below = [folder_layer(str(at(settings, "agent.folder")))] if at(settings, "agent.kind") == "model" else []
    return resolve(_Alone, [*below, Layer(name=where, table=settings, asked=True)]).spec.agent


def environment_layer(env_id: str) -> Layer:
    """The environment's defaults of the arguments of `gym.make`."""
    return Layer(name="environment", table=play_table(env_id, default_arguments(env_id)))


def require_env_of(panel: Panel, env_id: str) -> None:
    """Raises PanelError where a panel is of another environment."""
    if plain_id(env_id) != plain_id(panel.env_id):
        raise PanelError(f"{panel.full_name} is a panel of {panel.env_id}; asked for is {env_id}")


def panel_layer(panel: Panel) -> Layer:
    """The settings that a panel fixes."""
    table = play_table(panel.env_id, panel.make_kwargs)
    table["play"]["tasks"] = {"kind": "panel", "panel": panel.full_name, "sha256": panel.sha256}
    table["play"]["tasks"]["size"] = len(panel.tasks)
    return Layer(name=f"panel {panel.full_name}", table=table)


def play_table(env_id: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `gym.make` as a partial table."""
    env = {name: value for name, value in made.items() if name in ENVIRONMENT}
    extra = {name: value for name, value in made.items() if name not in ENVIRONMENT}
    return {"play": {"env": {"id": env_id, **env}, "env_kwargs": extra}}


def folder_layer(folder: str) -> Layer:
    """The chat settings in a model's folder; empty if the folder has none."""
    path = user_path(hub_folder(folder))
    if not (path / CHAT_FILE).exists():
        return Layer(name="model folder", table={})
    return Layer(name=f"{CHAT_FILE} of the model", table={"agent": {"chat": chat_table(ChatSettings.load(path))}})


def chat_table(settings: ChatSettings) -> dict[str, Any]:
    """The chat settings of a folder as a partial table of `ModelChat`."""
    memory = MemorySettings.table_of(settings.memory)
    if settings.prompts is not None:
        memory["prompts"] = "model"
    return {
        "channel": settings.channel,
        "system": settings.system,
        "thinking": {None: "auto", True: "on", False: "off"}[settings.thinking],
        "memory": memory,
        "max_context": settings.max_context,
        "observation_role": settings.observation_role,
        "history": settings.history,
        "max_new_tokens": settings.max_new_tokens,
    }


def make_arguments(play: Game, data: str | None = None) -> dict[str, Any]:
    """All arguments of `gym.make`."""
    env = {name: getattr(play.env, name) for name in ENVIRONMENT}
    # an environment without splits takes no such argument
    if env["split"] is None:
        del env["split"]
    return {**env, **play.env_kwargs, **({} if data is None else {"data": data})}


def asked_of(where: str, settings: Mapping[str, Any], agent: Any, preset: str | Preset | None) -> dict[str, Any]:
    """The keywords of a Python call as a table with short names.

    Raises AgentError for settings of a named agent beside an agent object.
    """
    keywords = dict(settings)
    if preset is not None:
        require_named(preset, agent)
        keywords["preset"] = preset.name if isinstance(preset, Preset) else preset
    if agent is None or isinstance(agent, str):
        return keywords if agent is None else {**keywords, "agent": agent}
    agent_settings = flat(expand(EvalSpec, settings, where).get("agent", {}), "agent")
    paths = dict.fromkeys(path.removesuffix(f".{KIND}") for path in agent_settings)
    usable = () if hasattr(agent, "examples") else ("agent.chat.channel", "agent.chat.system")
    if idle := [short_name(EvalSpec, path) for path in paths if path not in usable]:
        raise AgentError(f"{where}: {', '.join(idle)}: settings of agents that are named; an agent object has its own")
    return {**keywords, "agent": {KIND: "own", "name": f"{type(agent).__module__}:{type(agent).__qualname__}"}}
