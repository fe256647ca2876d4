"""Which settings of two evaluations differ, and which of them make their paired difference one of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from turngym.agents.evaluation.results import ABOUT, PER_EPISODE
from turngym.envs.core import TurngymError
from turngym.envs.panels import load_panel

OWN = ("agent", "model", "chat", "channel", "dtype", "seed")
"""Settings in which two players may differ and still be compared: who plays, how it writes, and its random stream."""
AMOUNT = ("panel", "panel_sha256", "tasks", "limit", "samples")
"""How much was played: whether two evaluations can be paired is asked of their tasks."""

Differing = Mapping[str, tuple[Any, Any]]
"""Name to its values in the first and in the second; None where one of them does not say."""


def recorded(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in the `meta` of a trace's episodes, flat: `make.max_turns`. Values that differ in one trace are
    joined to one text."""
    found: dict[str, dict[str, Any]] = {}
    for meta in metas:
        for name, value in _flat(meta).items():
            found.setdefault(name, {}).setdefault(repr(value), value)
    return {
        name: next(iter(values.values())) if len(values) == 1 else " and ".join(sorted(values))
        for name, values in found.items()
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation as its results have them, flat: `make.max_turns`."""
    return _flat({**settings, "panel": {"name": settings.get("panel")}}) | {"panel": settings.get("panel")}


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in meta.items() if name not in PER_EPISODE and name != "make"}
    # what the panel fixes may be said again by the command: that is no difference
    made = {**_panel_make(meta.get("panel")), **meta.get("make", {})}
    if "max_turns" in found:  # as evaluations of training runs say it
        made["max_turns"] = found.pop("max_turns")
    return found | {f"make.{name}": value for name, value in made.items() if name != "data"} | _said(meta)


def _said(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in ABOUT if name == "chat" and name in meta}


_PANELS: dict[str, Mapping[str, Any]] = {}


def _panel_make(note: Any) -> Mapping[str, Any]:
    """The arguments of gym.make of the panel that an episode names; {} where it is not known here."""
    name = note.get("name") if isinstance(note, Mapping) else None
    if not isinstance(name, str):
        return {}
    if name not in _PANELS:
        _PANELS[name] = {}
        with suppress(TurngymError, OSError):
            _PANELS[name] = load_panel(name).make_kwargs
    return _PANELS[name]


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that are not the same, those of the first in front."""
    return {
        name: (first.get(name), second.get(name)) for name in {**first, **second} if first.get(name) != second.get(name)
    }


def decisive(differ: Differing) -> dict[str, tuple[Any, Any]]:
    """Those that change the game and not the player: a paired difference would be theirs, too.

    A temperature counts where both have one: scripted agents have none.
    """
    return {
        name: values
        for name, values in differ.items()
        if name not in (*OWN, *AMOUNT) and not (name == "temperature" and None in values)
    }


def in_words(differ: Differing) -> str:
    """`make.max_turns 24 and 50; temperature 0.0 and 0.85`."""
    return "; ".join(f"{name} {first!r} and {second!r}" for name, (first, second) in differ.items())
