"""Leaves out turns that weights of too long ago have drawn."""

from __future__ import annotations

from dataclasses import replace

from turngym.envs.episode import Episode


def without_stale(episode: Episode, version: int, most: int | None) -> Episode:
    """`episode` with the turns excluded whose oldest ids are more than `most` versions behind `version`; None: none."""
    if most is None:
        return episode
    turns = tuple(
        replace(turn, excluded=f"{version - turn.policy_version} versions old")
        if turn.excluded is None and version - turn.policy_version > most
        else turn
        for turn in episode.turns
    )
    return replace(episode, turns=turns)
