"""Connections of a worker process to servers whose weights another process updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.settings import SglangSettings
from turngym.agents.sglang.weights.weight_versions import WeightVersions

_FLEETS: dict[tuple[Any, ...], Fleet] = {}
"""This process's connections: they outlast a rollout."""


def shared_fleet(urls: Sequence[str], settings: SglangSettings, versions: WeightVersions) -> Fleet:
    """This process's fleet of `urls`, opened once; `versions` replaces its record of the servers' weights."""
    key = (*urls, settings)
    if key not in _FLEETS:
        _FLEETS[key] = Fleet(urls=urls, settings=settings).open()
    _FLEETS[key].versions = versions
    return _FLEETS[key]
