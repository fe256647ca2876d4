"""Clients of the same servers in worker processes, which play while one process gives the servers their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turngym.agents.sglang.client.fleet import Fleet
from turngym.agents.sglang.policy import SglangPolicy
from turngym.agents.sglang.settings import ServerSettings
from turngym.agents.sglang.weights.weight_versions import WeightVersions

Recipe = tuple[Callable[..., Any], tuple[Any, ...]]
"""As `__reduce__` returns it."""

_FLEETS: dict[tuple[Any, ...], Fleet] = {}
"""This process's connections: they outlast a rollout."""


def recipe(policy: SglangPolicy) -> Recipe:
    """What makes a client like `policy` in another process; it knows the weights that the servers have now.

    It cannot repair a server that is restarted with others: its requests fail, and their episodes as `error_engine`.
    """
    fleet = policy.fleet
    options = {"vocabulary": policy.vocabulary, "max_length": policy.max_length, "stops": policy.stops}
    return connected, (tuple(fleet.urls), fleet.settings, fleet.versions, options)


def connected(
    urls: Sequence[str], settings: ServerSettings, versions: WeightVersions, options: dict[str, Any]
) -> SglangPolicy:
    """A client of `urls` whose record of the servers' weights is `versions`."""
    key = (*urls, settings)
    if key not in _FLEETS:
        _FLEETS[key] = Fleet(urls=urls, settings=settings).open()
    _FLEETS[key].versions = versions
    return SglangPolicy(_FLEETS[key], **options)
