"""How turngym finds what other packages bring: an agent, a player, a judge, an algorithm, a reward and so on.

`find` takes a built-in name, `package.module:name`, or the name of an entry point. Each group of entry points calls
what it finds in its own way:

- `turngym.agents`: `make(env, options) -> Agent`; `env` is the closed environment, to be asked for its tool and players
  (turngym.agents.named_agent)
- `turngym.players`: `make(guard) -> Player`, called once per episode (turngym.envs.base.Player;
  turngym.agents.playing.scripted.named_player)
- `turngym.judges`: `make(context) -> Judge` (turngym.agents.judges.judges.JudgeContext;
  turngym.core.protocols.Judge)
- `turngym.algorithms`: an algorithm's specification (turngym.trainers)
- `turngym.translations`: what reads a teacher of other ids (turngym.trainers.teacher.Translation)
- `turngym.rewards`: a function `Episode -> float` (`find_reward` below)
- `turngym.encoders`: `make(device) -> Encoder` (turngym.retrieval.encoders)
- `turngym.packages`: a package whose data is listed beside ours, and not imported for it (`installed_folders` below)
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turngym.core.episode import Episode
from turngym.core.errors import EnvBackendError, TurngymError, did_you_mean
from turngym.core.named_module import import_named, look_here
from turngym.core.plugin_values import checked_number

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""`package.module:name`."""


class PluginError(TurngymError):
    """Something of another package does not exist or cannot be imported."""


class MissingExtra(TurngymError, ImportError):
    """A library that an adapter needs is not installed."""


def find(group: str, name: str, built_in: Mapping[str, Any], *, known: Iterable[str] = ()) -> Any:
    """Returns the object that `name` stands for: a built-in, `package.module:name`, or an entry point of `group`.

    Built-in names come first, so that no package can change what they mean.

    Args:
        group: of entry points, such as `turngym.judges`; its last part, in the singular, is the error's word for it.
        built_in: names that stand for an object of ours.
        known: further names that the caller understands itself; they are not looked up, only listed by the error.

    Raises:
        PluginError: nothing has that name, the module cannot be imported, or it has no such object.
    """
    if name in built_in:
        return built_in[name]
    role = group.rpartition(".")[2].removesuffix("s")
    if is_path(name):
        return _load(role, name, EntryPoint(name=name, value=name, group=group))
    points: dict[str, set[str]] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, set()).add(point.value)
    if name in points:
        first, *others = sorted(points[name])
        if others:
            reason = f"{role} {name!r} is the name of several installed ones"
            raise PluginError(f"{reason}; valid: {', '.join((first, *others))}")
        return _load(role, name, EntryPoint(name=name, value=first, group=group))
    names = [*built_in, *known, *(other for other in sorted(points) if other not in built_in)]
    valid = ", ".join([*names, "package.module:name"])
    raise PluginError(f"unknown {role} {name!r}; {role}s are: {valid}.{did_you_mean(name, names)}")


def is_path(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    return PATH.fullmatch(name) is not None


def installed(group: str) -> tuple[str, ...]:
    """Names that installed packages bring to `group`. Nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def package_folder(package: str) -> Path | None:
    """The folder of a package, without importing it unless it lies inside another one; None where there is none."""
    look_here(package)
    try:
        spec = find_spec(package)
    # find_spec raises ValueError for a module without a spec, such as __main__
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def installed_folders() -> dict[str, Path]:
    """Folders of the packages that entry points of `turngym.packages` name, by package: `presets.toml` is read there,
    and `panel_data` is listed."""
    packages = sorted({point.module for point in entry_points(group="turngym.packages")})
    folders = {package: package_folder(package) for package in packages}
    return {package: folder for package, folder in folders.items() if folder is not None}


def _load(role: str, name: str, point: EntryPoint) -> Any:
    try:
        # not EntryPoint.load, which raises a bare AttributeError for a name that the module lacks
        value: Any = import_named(point.module)
    except ImportError as error:
        raise PluginError(f"{role} {name!r}: cannot import {point.module!r} ({error})") from error
    for part in point.attr.split(".") if point.attr else ():
        if not hasattr(value, part):
            hint = did_you_mean(part, [attribute for attribute in dir(value) if not attribute.startswith("_")])
            raise PluginError(f"{role} {name!r}: {point.value.partition(':')[0]} has no {part!r}.{hint}")
        value = getattr(value, part)
    return value


def need(module: str, what: str, extra: str) -> Any:
    """Imports `module`, which `what` needs and the extra `extra` installs. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"pip install 'turngym[{extra}]'" if extra else "see docs/adapters.md for how to install it"
        raise MissingExtra(f"{what} needs {module.partition('.')[0]}: {advice} ({error})") from error


REWARDS = "turngym.rewards"
"""The group of entry points for reward functions."""
RewardFunction = Callable[[Episode], float]
"""Computes a finite number from the whole episode, which replaces the environment's return."""


class RewardError(EnvBackendError):
    """A reward function failed, or its answer is no finite number."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function with the name under which it was found; every answer is checked."""

    name: str
    function: RewardFunction

    def __call__(self, episode: Episode) -> float:
        """The reward of `episode`. Raises RewardError, which names the function, the episode and the answer."""
        where = f"--reward {self.name}: episode {episode.task.task_id} sample {episode.sample}"
        try:
            value = self.function(episode)
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        return checked_number(f"{where}: the answer", value, error=RewardError)


def find_reward(name: str) -> NamedReward:
    """Finds the reward function `name`: `package.module:function`, or an entry point of `turngym.rewards`.

    Raises PluginError if there is none of that name or it cannot be called.
    """
    function = find(REWARDS, name, {})
    if not callable(function):
        raise PluginError(f"reward {name!r} is {function!r}; valid: a function of an episode")
    return NamedReward(name, function)
