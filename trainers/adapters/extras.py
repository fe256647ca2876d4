"""Importing a trainer where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from turngym.envs.core import TurngymError


class MissingExtra(TurngymError, ImportError):
    """A library that an adapter needs and this environment lacks."""


def need(module: str, what: str, extra: str) -> Any:
    """The module called `module`; `what` needs it and the extra `extra` installs it. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        advice = f"pip install 'turngym[{extra}]'" if extra else "see docs/adapters.md for how to install it"
        raise MissingExtra(f"{what} needs {module.partition('.')[0]}: {advice} ({error})") from error
