"""Fixtures of the methods' tests."""

from __future__ import annotations

from small_episodes import make_episode, models, pair

__all__ = ["make_episode", "models", "pair"]
