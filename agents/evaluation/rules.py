"""What a result may have of its own: its panel alone fixes the tasks and what scores, and every deviation is named.

A packed file comes from anyone. Of the arguments of gym.make that it states, plain values that change what an agent is
told are played as they are stated (`told`), and tables name them. Plain values that change what scores make it a result
of another game (`scored`). Whatever else it states (a class, an address, a path) is never taken from it (`refused`):
who checks it says that.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.agents.playing.env_maker import env_class
from turngym.agents.presets import Preset, find_preset
from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.envs.base import TextEnv
from turngym.envs.panels import Panel, PanelError, shipped_panel
from turngym.envs.registration import make_env

TOLD = frozenset(
    {"max_turns", "on_invalid", "penalty", "invalid_cost", "list_admissible", "show_admissible", "reading"}
)
TOLD |= {"channel", "tool_name", "tool_argument"}
"""Arguments of every environment's guard, as `TextEnv.told_by`."""
MISSING = object()
LONGEST = 200
"""Letters of a text, or items of a list, that a file may state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """How a result's settings deviate from its panel, each argument's name with its value and the expected one."""

    told: Mapping[str, tuple[Any, Any]]
    scored: Mapping[str, tuple[Any, Any]]
    refused: Mapping[str, tuple[Any, Any]]

    @property
    def playable(self) -> dict[str, Any]:
        """Settings of a result that may be played as stated."""
        return {name: value for name, (value, _) in {**self.told, **self.scored}.items()}

    def differences(self) -> list[str]:
        """Why it is no result of the panel; [] if it is one."""
        found = [
            f"settings: make.{_line(*item)}: what scores comes from the panel alone" for item in self.scored.items()
        ]
        return found + [
            f"settings: make.{name} is {_short(value)}, which is not taken from a file; say what it shall be: "
            f"--env-kwargs '{{\"{name}\": ...}}'"
            for name, (value, _) in self.refused.items()
        ]


def stated(
    settings: Mapping[str, Any], panel: Panel, given: Mapping[str, Any] | None = None, preset: Preset | None = None
) -> Stated:
    """How the environment's arguments in `settings` deviate from those that are expected.

    Args:
        settings: of the evaluation.
        panel: its arguments of gym.make are expected, and the environment's defaults for all others.
        given: arguments that whoever checks the result gives; they never count as deviations. None: none.
        preset: its arguments are expected in place of the panel's; None: no preset.
    """
    environment = env_class(panel.env_id)
    defaults = _defaults(environment)
    own = {**panel.make_kwargs, **made(settings)}
    expected = {**panel.make_kwargs, **({} if preset is None else preset.make())}
    kinds = {"told": TOLD | environment.told_by, "scored": environment.scored_by}
    found: dict[str, dict[str, tuple[Any, Any]]] = {"told": {}, "scored": {}, "refused": {}}
    for name in sorted({*expected, *own}):
        # what has no default either is never what anything else is
        wanted = expected.get(name, defaults.get(name, MISSING))
        value = own.get(name, defaults.get(name))
        if name in (given or {}) or _same(value, wanted):
            continue
        kind = next((kind for kind, names in kinds.items() if name in names and _plain(value)), "refused")
        found[kind][name] = value, None if wanted is MISSING else wanted
    return Stated(**found)


def played_with(settings: Mapping[str, Any], panel: Panel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gym.make with which a result is played again: the panel's, what its file may state, what is
    `given`."""
    channel = {"channel": settings["channel"]} if settings.get("channel") is not None else {}
    return {**panel.make_kwargs, **stated(settings, panel, given).playable, **channel, **given}


def made(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gym.make that the settings of a result state."""
    # evaluations of training runs record max_turns beside `make`
    turns = {"max_turns": settings["max_turns"]} if "max_turns" in settings else {}
    return {**(settings.get("make") or {}), **turns}


def panel_of(settings: Mapping[str, Any]) -> Panel | None:
    """The panel that settings of a file name, if it comes with turngym and has the hash that they state."""
    try:
        panel = shipped_panel(str(settings.get("panel")))
    except PanelError:
        return None
    return panel if panel.sha256 == settings.get("panel_sha256") else None


def deviations(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What a table says of a result: why it is no result of its panel, and everything in which it deviates besides.

    A preset's own values are no deviation from it, as far as this turngym knows the preset.
    """
    panel = panel_of(settings)
    if panel is None:
        sha256, own = str(settings.get("panel_sha256")), made(settings)
        return [f"a panel that does not come with turngym, {sha256[:12]}"], [f"{n} {_short(v)}" for n, v in own.items()]
    try:
        preset = find_preset(settings.get("preset"), panel.env_id)
    except TurngymError:
        preset = None
    # of another version's preset everything is named
    if preset is not None and preset.identity["preset_sha256"] != settings.get("preset_sha256"):
        preset = None
    found = stated(settings, panel, preset=preset)
    count = settings.get("limit")
    some = [] if count is None or count >= len(panel.tasks) else [f"the first {count} of {len(panel.tasks)} tasks"]
    apart = {**found.scored, **found.refused}
    return [_line(*item) for item in apart.items()], [*some, *(_line(*item) for item in found.told.items())]


def _line(name: str, values: tuple[Any, Any]) -> str:
    return f"{name} is {_short(values[0])}, not {_short(values[1])}"


def _defaults(environment: type[TextEnv]) -> dict[str, Any]:
    """Values that gym.make uses for arguments that are not given."""
    parameters = {**inspect.signature(environment.__init__).parameters, **inspect.signature(make_env).parameters}
    return {name: one.default for name, one in parameters.items() if one.default is not one.empty}


def _same(value: Any, own: Any) -> bool:
    # 1 == True, but a setting of True is not one of 1
    return bool(value == own and isinstance(value, bool) is isinstance(own, bool)) or (
        isinstance(own, tuple) and value == list(own)
    )


def _plain(value: Any) -> bool:
    """Whether a value is a choice or a number, and nothing that could be a place."""
    if isinstance(value, list):
        return len(value) <= LONGEST and all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= LONGEST)


def _short(value: Any) -> str:
    return excerpt(json.dumps(value, ensure_ascii=True, default=repr), 80)
