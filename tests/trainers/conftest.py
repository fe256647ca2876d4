"""Fixtures of the room."""

from __future__ import annotations

from small_episodes import make_episode, models, pair, ragged

__all__ = ["make_episode", "models", "pair", "ragged"]
