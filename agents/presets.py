"""Preset: one environment as a paper or a repository set it up, as partial settings of what is played and by whom.

`presets.toml` has ours, a file of that name in an installed package its own. `Preset.table` is a layer of
`agents.resolve_play`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from turngym.agents.play_spec import EvalSpec
from turngym.core.errors import AgentError, TurngymError, did_you_mean
from turngym.core.nested import at
from turngym.core.plugins import installed_folders
from turngym.core.settings import toml_of
from turngym.core.spec import expand
from turngym.core.tables import Table
from turngym.core.task import content_hash, plain_id

ALFWORLD, WEBSHOP, SEARCH = "turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A known or possible difference between a preset and its publication. Tables of its results name it."""

    text: str
    where: str = ""
    """Path of the setting on which it depends; "" where it always holds."""
    is_: str = ""
    """Value of that setting with which it holds."""
    is_not: str = ""
    """Value of that setting with which it does not hold."""

    def holds(self, table: Mapping[str, Any]) -> bool:
        """Whether it holds for an evaluation with the settings in `table`."""
        value = at(table, self.where) if self.where else None
        return (not self.is_ or value == self.is_) and (not self.is_not or value != self.is_not)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A set-up of one environment. Settings given beside it override its values."""

    name: str
    """Name of the set-up; presets of several environments share it."""
    about: str
    """Where it comes from, in a line."""
    sources: tuple[str, ...]
    """Papers, and repositories with the files."""
    differs: tuple[Departure, ...]
    why: str = ""
    """Why it differs, for the page."""
    table: Mapping[str, Any]
    """What it sets of an `EvalSpec`, as nested tables."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gym.make` in training alone: the reward, and what a malformed response costs."""

    @property
    def env_id(self) -> str:
        return str(at(self.table, "play.env.id"))

    def beside(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its settings as they apply beside those that people `asked` for.

        Its system message demands the form of answers of its channel. If another channel is asked for, message and
        observation role are dropped, too. The message names the tool as `asked` does.
        """
        table = deepcopy(dict(self.table))
        chat, own_channel = table["agent"]["chat"], at(self.table, "agent.chat.channel")
        channel = at(asked, "agent.chat.channel") or "auto"
        if channel not in ("auto", own_channel) and not (channel.startswith("tool") and own_channel == "tool"):
            for name in ("channel", "system", "observation_role"):
                chat.pop(name, None)
        elif "system" in chat:
            named = {"tool": "tool_name", "argument": "tool_argument"}
            arguments = {name: at(asked, f"play.env.{key}") or table["play"]["env"][key] for name, key in named.items()}
            chat["system"] = chat["system"].format(**arguments)
        return table

    def make(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the arguments of `gym.make`; those in `given` override the preset's."""
        env = {name: value for name, value in self.table["play"]["env"].items() if name != "id"}
        return {**env, **self.table["play"].get("env_kwargs", {}), **(given or {})}

    @property
    def sha256(self) -> str:
        """Hash of its values: a later version may have corrected them."""
        return content_hash({**self.table, **self.training})[:16]


def require_named(preset: Preset | str, agent: Any) -> None:
    """Raise AgentError where a preset would have to change how an agent object is spoken to."""
    if agent is not None and not isinstance(agent, str):
        name = preset.name if isinstance(preset, Preset) else preset
        raise AgentError(
            f"preset {name!r} says how an agent is spoken to, which an agent object has decided: name the agent "
            "(`model:FOLDER`), or take the preset's environment alone: env_kwargs=find_preset(...).make()"
        )


@cache
def presets() -> tuple[Preset, ...]:
    """Returns the built-in set-ups, then those of installed packages (group `turngym.packages`)."""
    set_ups = in_file(Path(__file__).with_name("presets.toml"))
    for package, folder in installed_folders().items():
        try:
            set_ups += in_file(folder / "presets.toml")
        # the presets of other packages stay usable
        except TurngymError as error:
            print(f"the presets of {package} are left out: {error}", file=sys.stderr)
    return tuple(set_ups)


def in_file(path: Path) -> list[Preset]:
    """Reads the set-ups of a file; none if there is no file. Raises TurngymError for an incomplete one."""
    if not path.is_file():
        return []
    try:
        set_ups = [_preset(row) for row in toml_of(path.read_text(encoding="utf-8"))["preset"]]
        # `_row` reads all values that a preset must set, so that an incomplete one fails here
        for preset in set_ups:
            _row(preset)
    except KeyError as error:
        raise TurngymError(f"{path} is no file of presets: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise TurngymError(f"{path} is no file of presets: {error}") from error
    return set_ups


def _preset(row: Mapping[str, Any]) -> Preset:
    differs = [{"text": entry} if isinstance(entry, str) else entry for entry in row["differs"]]
    return Preset(
        name=row["name"],
        about=row["about"],
        sources=tuple(row["sources"]),
        differs=tuple(
            Departure(
                text=entry["text"],
                where=entry.get("where", ""),
                is_=entry.get("is", ""),
                is_not=entry.get("is_not", ""),
            )
            for entry in differs
        ),
        why=row["why"],
        table=expand(EvalSpec, {name: row[name] for name in ("play", "agent")}, row["name"]),
        training=row.get("training", {}),
    )


def find_preset(name: str | Preset | None, env_id: str) -> Preset | None:
    """The set-up called `name` for an environment; None for None. A `Preset` is taken as it is.

    Raises TurngymError for an unknown name, and for a set-up that does not have the environment.
    """
    if name is None:
        return None
    env_id = plain_id(env_id)
    set_ups = [name] if isinstance(name, Preset) else [preset for preset in presets() if preset.name == name]
    if not set_ups:
        names = sorted({preset.name for preset in presets()})
        raise TurngymError(f"unknown preset {name!r}; presets are: {', '.join(names)}.{did_you_mean(str(name), names)}")
    for preset in set_ups:
        if preset.env_id == env_id:
            return preset
    env_ids = ", ".join(preset.env_id for preset in set_ups)
    raise TurngymError(f"preset {set_ups[0].name!r} has no set-up of {env_id}; it has: {env_ids}")


def preset_table() -> Table:
    """What each preset sets, one row each."""
    header = ["preset", "environment", "turns", "actions", "reading", "role", "memory", "list", "a mistake"]
    header += ["temperature", "samples", "response", "thinking", "invalid cost", "tool(argument)"]
    return header, [_row(preset) for preset in presets()]


def _row(preset: Preset) -> list[str]:
    env, chat = preset.table["play"]["env"], preset.table["agent"]["chat"]
    memory, thinking = chat["memory"], chat.get("thinking", "-")
    memory_text = f"{memory['kind']}:{memory['turns']}" if "turns" in memory else memory["kind"]
    listed = env.get("show_admissible", False) or ("prompts" in memory and preset.env_id != SEARCH)
    numbers = (
        at(preset.table, "agent.temperature"),
        at(preset.table, "play.samples"),
        chat.get("max_new_tokens"),
    )
    temperature, samples, response = ("-" if value is None else f"{value:g}" for value in numbers)
    cost = preset.training.get("invalid_cost")
    return [
        *(preset.name, preset.env_id.rpartition("/")[2], str(env["max_turns"]), chat["channel"]),
        *(env.get("reading", "strict"), chat["observation_role"], memory_text, "shown" if listed else "-"),
        *(env["on_invalid"], temperature, samples, response, thinking, "-" if cost is None else f"{cost:g}"),
        f"{env['tool_name']}({env['tool_argument']})",
    ]
