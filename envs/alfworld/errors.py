"""What can be wrong with a game file."""

from __future__ import annotations

from turngym.envs.core import TaskError


class GameError(TaskError):
    """A game file that is missing, damaged or contradicts itself; the text names the file and the key."""


class GameUnsupported(GameError):
    """A sound game with rules or facts that the native engine does not know; `engine="textworld"` may play it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f'{where}: the native engine cannot play this game: {what}; try engine="textworld"')


class UnsupportedFacts(ValueError):
    """Rules or facts that are sound PDDL but that the native engine does not model."""
