"""What a queue of turns asks of a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.envs.episode import Episode, Turn
from turngym.envs.protocols import JudgeRequest, Judgment


class TurnJudge(Protocol):
    """What is asked about turns, and what an answer means."""

    @property
    def workers(self) -> int:
        """How many threads may ask at a time."""

    @property
    def batch(self) -> int:
        """Most turns that one of them asks about together."""

    def requests(self, episode: Episode) -> list[JudgeRequest]:
        """One for each turn that has a next state and no votes."""

    def ask(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        """One judgment per request, in order; called by several threads."""

    def judged(self, turn: Turn, judgment: Judgment) -> Turn:
        """`turn` with its votes."""

    def settles(self, feedback: Feedback) -> bool:
        """Whether a turn of which a user said this needs no votes."""

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        """`turn`, judged or not, with what a user said of it; the same a second time changes nothing."""

    def finished(self, episode: Episode) -> Episode:
        """A session that has ended, all of whose turns were judged."""
