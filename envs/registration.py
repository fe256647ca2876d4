"""How environments, ours and other people's, are registered with Gymnasium and made."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from turngym.core.clean_keys import refuse_credentials
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.named_module import import_named
from turngym.core.redaction import brief, said_by
from turngym.core.task import MAX_TURNS, plain_id
from turngym.envs.base import TextEnv
from turngym.envs.channels import Channel
from turngym.envs.guard import ActionGuard, OnInvalid, limit_of_turns
from turngym.envs.lenient_reading import Reading
from turngym.envs.vector import TextVectorEnv


def register(env_id: str, env_class: type[TextEnv] | str, **defaults: Any) -> None:
    """Makes `gym.make(env_id, ...)` and `gym.make_vec(env_id, n, ...)` give `env_class` inside an ActionGuard.

    Args:
        env_id: `namespace/Name-v0`; the class must have the same attribute `env_id`.
        env_class: the class, or its place (`my_package.guess:GuessEnv`), which is not imported until it is made.
        defaults: arguments of `make_env` and of the class, for example `max_turns=10`; `gym.make` overrides them.

    Registering an id again replaces it, so that a notebook cell can run twice.
    """
    # before the old one goes, which stays where the new one is refused
    class_or_place = _where(env_id, env_class)
    # Gymnasium warns when an id is registered over another
    gym.registry.pop(env_id, None)
    gym.register(
        env_id,
        entry_point="turngym.envs.registration:make_env",
        vector_entry_point="turngym.envs.registration:make_vec",
        # The environments enforce the order of calls themselves and the contract tests run check_env. Without
        # Gymnasium's wrappers for these, gym.make returns the ActionGuard itself, and a step costs nothing more.
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"env_class": class_or_place, **defaults},
    )


def make_env(
    env_class: type[TextEnv] | str,
    *,
    max_turns: int | None = MAX_TURNS,
    on_invalid: OnInvalid | None = None,
    channel: Channel | str | None = None,
    penalty: float = -0.1,
    list_admissible: bool = True,
    show_admissible: bool = False,
    reading: Reading = "strict",
    invalid_cost: float = 0.0,
    tool_name: str | None = None,
    tool_argument: str | None = None,
    **options: Any,
) -> ActionGuard:
    """Makes one environment inside its guard. Arguments that are not described here are those of `ActionGuard`.

    Args:
        env_class: the class, or its place (`my_package.guess:GuessEnv`).
        max_turns: turns of the agent after which the episode is truncated; None: no limit.
        on_invalid: what happens after an invalid action; None: the class's own policy, by default `reject`.
        tool_name: name of the tool that agents see; None: the class's own.
        tool_argument: name of the tool's argument that agents see; None: the class's own.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("env_class", "options")}
    loaded = _load(env_class) if isinstance(env_class, str) else env_class
    max_turns = limit_of_turns(max_turns)
    _check_arguments(loaded, {**arguments, **options})
    refuse_credentials("", options)
    env = loaded(**loaded.options_within(max_turns, options))
    if tool_name is not None or tool_argument is not None:
        env.rename_tool(tool_name, tool_argument)
    policy = loaded.on_invalid if on_invalid is None else on_invalid
    guard_arguments = {name: value for name, value in arguments.items() if not name.startswith("tool_")}
    return ActionGuard(env, **{**guard_arguments, "max_turns": max_turns, "on_invalid": policy})


def _check_arguments(env_class: type[TextEnv], given: Mapping[str, Any]) -> None:
    """Raises TurngymError for an argument that neither the class nor its guard takes, or whose type is another.

    Arguments come from files and options, too, where `"false"` is a text and no text is false.
    """
    types = {name: kind for name, kind in argument_types(make_env).items() if name not in ("env_class", "options")}
    for constructor in _constructors(env_class):
        types = {**argument_types(constructor), **types}
    for name, value in given.items():
        if name not in types:
            names = sorted(types)
            raise TurngymError(
                f"{env_class.env_id} takes no argument {name!r}.{did_you_mean(name, names)} It takes: "
                f"{', '.join(names)}"
            )
        if not _fits(value, types[name]):
            raise TurngymError(f"{env_class.env_id}: {name} is {brief(value, 80)}; valid: {_type_name(types[name])}")


def _constructors(env_class: type[TextEnv]) -> list[Callable[..., Any]]:
    """The constructors of a class to which arguments may go: its own, and its bases' where it hands on what it does not
    know. The bases' come first."""
    constructors: list[Callable[..., Any]] = []
    for base in env_class.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        constructors.insert(0, constructor)
        parameters = inspect.signature(constructor).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return constructors


@cache
def argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The named arguments of a function with their types; Any where it has no type, or none that can be found."""
    try:
        hints = get_type_hints(function)
    # a name that is imported for type checkers alone
    except NameError:
        hints = {}
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds]
    return {name: hints.get(name, Any) for name in names if name != "self"}


def _fits(value: object, kind: Any) -> bool:
    """Whether `value` may be given for the type `kind`, as far as it is of a type that JSON has.

    Which texts a text may be, and any other object, are the environment's own matter.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return True
    if origin is Annotated:
        return _fits(value, inside[0])
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in inside)
    if origin is Literal:
        return any(type(value) is type(member) for member in inside)
    plain = origin or kind
    # a type variable, a new type
    if not isinstance(plain, type):
        return True
    if value is None:
        return plain is NoneType
    if isinstance(value, bool | np.bool_):
        return plain is bool
    if isinstance(value, Real):
        return plain is float or (plain is int and isinstance(value, Integral))
    if isinstance(value, str) and (plain in (Path, os.PathLike) or issubclass(plain, Enum)):
        return True
    if not isinstance(value, str | list | tuple | Mapping):
        return True
    # a protocol says what an object can do, and these can do nothing
    if plain is Callable or getattr(plain, "_is_protocol", False):
        return False
    if issubclass(plain, Mapping) or not issubclass(plain, Iterable) or not inside:
        return isinstance(value, plain)
    items = [value] if isinstance(value, str) else value
    kinds = inside if plain is tuple and Ellipsis not in inside else inside[:1] * len(items)
    return len(kinds) == len(items) and all(map(_fits, items, kinds))


def default_arguments(env_id: str) -> dict[str, Any]:
    """The defaults of `gym.make`: every argument that has a type of JSON. Left out are the channel, the folder of data
    and the render mode, which are no part of the game.

    Raises TurngymError for an unknown id.
    """
    require_env(env_id)
    env_class = registered_class(env_id)
    defaults: dict[str, Any] = {}
    for function in (*_constructors(env_class), make_env):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
    defaults |= {"on_invalid": env_class.on_invalid} | gym.spec(plain_id(env_id)).kwargs
    left_out = ("env_class", "channel", "data", "render_mode")
    return {name: value for name, value in defaults.items() if name not in left_out and _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def make_vec(
    env_class: type[TextEnv] | str,
    num_envs: int = 1,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> TextVectorEnv:
    """Makes `num_envs` environments that are stepped together; `options` are those of `make_env`."""
    return TextVectorEnv([lambda: make_env(env_class, **options)] * num_envs, autoreset_mode)


NOT_GIVEN = ("id", "env_class", "max_episode_steps", "disable_env_checker")
"""Arguments of `gym.make` that belong to Gymnasium or to `register`. A file that could give them would name code to
run, or a limit of turns that no record has."""


def make(env_id: str, given: Mapping[str, Any]) -> gym.Env[Any, Any]:
    """`gym.make` with arguments that come from a file or from options.

    Raises TurngymError for an unknown id, an argument that nobody may give, and an environment that cannot be made.
    """
    require_env(env_id)
    for name in NOT_GIVEN:
        if name in given:
            instead = "; valid: max_turns" if name == "max_episode_steps" else ""
            raise TurngymError(f"{env_id}: {name} is no argument of an environment{instead}")
    try:
        return gym.make(env_id, disable_env_checker=True, **given)
    # these have words of their own at the end of a command
    except (TurngymError, gym.error.Error, ImportError, OSError):
        raise
    # sys.exit in the code of others would end the command without a word
    except (Exception, SystemExit) as error:
        raise TurngymError(f"{env_id} cannot be made: {type(error).__name__}: {said_by(error)}") from error


def require_env(env_id: str) -> str:
    """Returns `env_id` if it is registered; `my_package:namespace/Name-v0` imports `my_package` first.

    Raises TurngymError for a module that cannot be imported, or an id that nothing registered.
    """
    module, colon, plain = env_id.rpartition(":")
    if colon:
        try:
            import_named(module)
        except ImportError as error:
            raise TurngymError(f"environment {env_id!r}: cannot import {module!r} ({error})") from error
    if plain not in gym.registry:
        namespace = plain.rpartition("/")[0]
        imported = f" {module} was imported, and it did not register this one." if colon else ""
        names = [name for name in gym.registry if name.startswith(("turngym/", f"{namespace or 'turngym'}/"))]
        raise TurngymError(
            f"unknown environment {env_id!r}; known: {', '.join(names)}.{did_you_mean(plain, names)}{imported} An "
            "environment of another package is named with the module that registers it: package:namespace/Name-v0"
        )
    return env_id


def registered_class(env_id: str) -> type[TextEnv]:
    """The class of an id that `register` has registered. Raises TurngymError for another one."""
    registered_id = plain_id(env_id)
    env_class = gym.registry[registered_id].kwargs.get("env_class")
    if isinstance(env_class, str):
        return _load(env_class)
    if not (isinstance(env_class, type) and issubclass(env_class, TextEnv)):
        raise TurngymError(
            f"{env_id} is registered without its class, whose arguments and players are read; valid: a TextEnv that "
            f"turngym.envs.register({registered_id!r}, CLASS) registers"
        )
    return env_class


def own_registrations() -> dict[str, Any]:
    """The registrations of this process, by id, beyond those of Gymnasium and of this package.

    Another process may not have run the script, or imported the module, that registered them.
    """
    registrations: dict[str, Any] = {}
    for env_id, spec in gym.registry.items():
        made_by = spec.entry_point
        places = (made_by, spec.kwargs.get("env_class", "turngym."))
        if all(isinstance(place, str) and place.startswith(("gymnasium.", "turngym.")) for place in places):
            continue
        if isinstance(made_by, str) and made_by.startswith("__main__:"):
            # another process has another main program
            creator: Any = gym.envs.registration.load_env_creator(made_by)
            registrations[env_id] = replace(spec, entry_point=creator)
        else:
            registrations[env_id] = spec
    return registrations


def _where(env_id: str, env_class: type[TextEnv] | str) -> type[TextEnv] | str:
    """The class as `module:Name` if that finds it again, so that specs can be written as JSON; else itself."""
    if isinstance(env_class, str):
        if env_class.count(":") != 1:
            raise TurngymError(f"register({env_id!r}): env_class is {env_class!r}; write it as 'package.module:Class'")
        # the name of the main program says nothing to another process
        return _load(env_class) if env_class.startswith("__main__:") else env_class
    if not (isinstance(env_class, type) and issubclass(env_class, TextEnv)):
        raise TurngymError(f"register({env_id!r}): env_class is {env_class!r}; it must be a class that extends TextEnv")
    if getattr(env_class, "env_id", None) != env_id:
        raise TurngymError(
            f"register({env_id!r}): {env_class.__name__}.env_id is {getattr(env_class, 'env_id', None)!r}; "
            "set it to the same id"
        )
    module = sys.modules.get(env_class.__module__)
    found_again = module is not None and getattr(module, env_class.__qualname__, None) is env_class
    # classes of a notebook, a function or type() have no place that another process could import
    if not found_again or env_class.__module__ == "__main__":
        return env_class
    return f"{env_class.__module__}:{env_class.__qualname__}"


def _load(where: str) -> type[TextEnv]:
    module, colon, name = where.partition(":")
    if not colon:
        raise TurngymError(f"{where!r} is no place of a class; valid: my_package.guess:GuessEnv (gym.make takes ids)")
    env_class: Any = getattr(import_module(module), name, None)
    if not (isinstance(env_class, type) and issubclass(env_class, TextEnv)):
        raise TurngymError(f"{where} is {env_class!r}; an environment is a class that extends TextEnv")
    return env_class


def _type_name(kind: Any) -> str:
    """The name of a type for people who write a settings file."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(item) for item in inside)
    if origin is Literal:
        return ", ".join(map(str, inside))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list of " + ", ".join(_type_name(item) for item in inside if item is not Ellipsis)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return "none" if kind is type(None) else names.get(kind, getattr(kind, "__name__", str(kind)))
