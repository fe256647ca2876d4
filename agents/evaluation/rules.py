"""Which settings may a packed result choose? Its panel alone fixes tasks and scoring, and every deviation is named.

Anyone may have written a packed file. Of the arguments of gym.make that it states, plain values that change what an
agent reads are played as stated (`told`), and tables name them. Plain values that change the scoring make it a result
of another game (`scored`). Anything else (a class, an address, a path) is never taken from the file (`refused`): who
checks the file has to give it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.agents.evaluation.departures import panel_of
from turngym.agents.play_spec import EvalSpec, OnPanel, PartOfPanel, PlaySpec
from turngym.agents.playing.env_maker import env_class
from turngym.agents.presets import Preset, find_preset
from turngym.agents.resolve_play import ENVIRONMENT, environment_layer, panel_layer
from turngym.core.errors import TurngymError
from turngym.core.nested import differing
from turngym.core.redaction import excerpt
from turngym.core.resolve import merged
from turngym.core.spec import to_table
from turngym.envs.panels import Panel

LONGEST_VALUE = 200
"""Letters of a text, or items of a list, that a file may state."""
Values = Mapping[str, tuple[Any, Any]]
"""Argument to its value and the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """How a result's settings deviate from its panel."""

    told: Values
    scored: Values
    refused: Values

    @property
    def playable(self) -> dict[str, Any]:
        """Settings of a result that may be played as stated."""
        return {name: value for name, (value, _) in {**self.told, **self.scored}.items()}

    def differences(self, *, other_rules: bool) -> list[str]:
        """Why it is no result of the panel; [] if it is one. With `other_rules` what scores may differ."""
        scored = {} if other_rules else self.scored
        lines = [f"settings: {_line(*item)}: what scores comes from the panel alone" for item in scored.items()]
        return lines + [
            f"settings: {name} is {_short(value)}, which is not taken from a file; say what it shall be: "
            f"--env-kwargs '{{\"{name}\": ...}}'"
            for name, (value, _) in self.refused.items()
        ]


def stated(
    play: PlaySpec, panel: Panel, given: Mapping[str, Any] | None = None, preset: Preset | None = None
) -> Stated:
    """How the environment's arguments in `play` deviate from those that are expected.

    Args:
        panel: its arguments of gym.make are expected, and the environment's defaults for all others.
        given: arguments that whoever checks the result gives; they never count as deviations. None: none.
        preset: its arguments are expected in place of the panel's; None: no preset.
    """
    tables: list[Any] = [environment_layer(panel.env_id).table, panel_layer(panel).table]
    if preset is not None:
        tables.append(preset.table)
    expected, settings = merged(tables)["play"], to_table(play)
    environment = env_class(panel.env_id)
    kinds = {"told": environment.told_by | (set(ENVIRONMENT) - {"split"}), "scored": environment.scored_by}
    values: dict[str, dict[str, tuple[Any, Any]]] = {"told": {}, "scored": {}, "refused": {}}
    for table in ("env", "env_kwargs"):
        for name, (wanted, value) in differing(expected[table], settings[table]).items():
            if name == "id" or name in (given or {}):
                continue
            kind = next((kind for kind, names in kinds.items() if name in names and _plain(value)), "refused")
            values[kind][name] = value, wanted
    return Stated(**values)


def deviations(spec: EvalSpec) -> tuple[list[str], list[str]]:
    """Returns what a table notes on a result: why it is no result of its panel, and all its other deviations.

    A preset's own values are no deviation from it, as far as this turngym knows the preset.
    """
    panel, tasks = panel_of(spec.play), spec.play.tasks
    if not isinstance(tasks, OnPanel):
        return ["a panel that does not come with turngym, none"], []
    size, some = tasks.size if panel is None else len(panel.tasks), []
    if isinstance(tasks.sampling, PartOfPanel) and tasks.sampling.limit < size:
        some.append(tasks.sampling.said_of(size))
    if panel is None:
        return [f"a panel that does not come with turngym, {tasks.sha256[:12]}"], some
    try:
        preset = find_preset(spec.preset, panel.env_id)
    except TurngymError:
        preset = None
    deviating = stated(spec.play, panel, preset=preset)
    apart = {**deviating.scored, **deviating.refused}
    return [_line(*item) for item in apart.items()], [*some, *(_line(*item) for item in deviating.told.items())]


def _line(name: str, values: tuple[Any, Any]) -> str:
    return f"{name} is {_short(values[0])}, not {_short(values[1])}"


def _plain(value: Any) -> bool:
    """Whether a value is a choice or a number, and cannot be a path or an address."""
    if isinstance(value, list):
        return len(value) <= LONGEST_VALUE and all(isinstance(item, int | float) for item in value)
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= LONGEST_VALUE)
    )


def _short(value: Any) -> str:
    return excerpt(json.dumps(value, ensure_ascii=True, default=repr), 80)
