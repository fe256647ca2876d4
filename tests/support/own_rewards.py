"""Rewards of somebody else's package, named as `own_rewards:thrift`."""

from __future__ import annotations

from typing import Any

from turngym.core.episode import Episode

LIMIT = 3


def thrift(episode: Episode) -> float:
    """Ten for an even sample, minus a tenth per turn: nothing that an environment pays."""
    return 10.0 * (episode.sample % 2 == 0) - 0.1 * episode.depth


def endless(episode: Episode) -> float:
    return float("inf")


def wordy(episode: Episode) -> Any:
    return f"{episode.depth}"


def broken(episode: Episode) -> float:
    return episode.meta["no such key"]  # type: ignore[no-any-return]
