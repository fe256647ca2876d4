"""Finds what other packages bring: by built-in name, by `package.module:name`, or by entry point.

A seam is a group of entry points. What stands behind each group, and what it is called with:

- `turngym.agents`: `make(env, options) -> Agent`; `env` is the environment, closed, to be asked for its tool and
  players (turngym.agents.named_agent.MakeAgent)
- `turngym.players`: `make(guard) -> Player`, one for every episode (turngym.envs.base.Player: `act() -> str | None`,
  `observe(action)`; turngym.agents.scripted.named_player)
- `turngym.judges`: `make(context) -> Judge` (turngym.agents.judges.make_judge.JudgeContext;
  turngym.envs.protocols.Judge)
- `turngym.algorithms`: an algorithm's specification (turngym.trainers)
- `turngym.rewards`: a function `Episode -> float` (turngym.envs.common.rewards)
- `turngym.encoders`: `make(device) -> Encoder` (turngym.retrieval.encoders.find, which has a finder of its own)
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from turngym.envs.core import TurngymError
from turngym.envs.suggest import did_you_mean

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""`package.module:name`."""


class PluginError(TurngymError):
    """Something from another package that is not there, or cannot be imported."""


def find(group: str, name: str, built_in: Mapping[str, Any], *, known: Iterable[str] = ()) -> Any:
    """What `name` stands for: a built-in, an object as `package.module:name`, or an entry point of `group`.

    Built-in names come first, so that no package can change what they mean. `known` are further names for the error.

    Raises:
        PluginError: nothing of that name, a module that cannot be imported, or one without such an object.
    """
    if name in built_in:
        return built_in[name]
    what = group.rpartition(".")[2].removesuffix("s")
    if is_path(name):
        return _load(what, name, EntryPoint(name=name, value=name, group=group))
    points = {point.name: point for point in entry_points(group=group)}
    if name in points:
        return _load(what, name, points[name])
    every = [*built_in, *known, *(other for other in sorted(points) if other not in built_in)]
    valid = ", ".join([*every, "package.module:name"])
    raise PluginError(f"unknown {what} {name!r}; {what}s are: {valid}.{did_you_mean(name, every)}")


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    return PATH.fullmatch(name) is not None


def installed(group: str) -> tuple[str, ...]:
    """Names that installed packages bring to `group`; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def _load(what: str, name: str, point: EntryPoint) -> Any:
    try:
        # not EntryPoint.load, which raises a bare AttributeError for a name that the module lacks
        found: Any = importlib.import_module(point.module)
    except ImportError as error:
        raise PluginError(f"{what} {name!r}: cannot import {point.module!r} ({error})") from error
    for part in point.attr.split(".") if point.attr else ():
        if not hasattr(found, part):
            hint = did_you_mean(part, [other for other in dir(found) if not other.startswith("_")])
            raise PluginError(f"{what} {name!r}: {point.value.partition(':')[0]} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found
