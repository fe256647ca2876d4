"""A judge of guesses, as docs/write_a_judge.md explains it: it reads the episode and needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turngym.core import Episode, Judge, JudgeRequest, Judgment

HIGHEST = 20


@dataclass(frozen=True, slots=True)
class GuessJudge:
    """A guess is good if the answers before it left it open, and bad if they had ruled it out."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [self._one(request) for request in requests]

    def _one(self, request: JudgeRequest) -> Judgment:
        episode = request.episode
        if episode is None:
            return Judgment(votes=(None,), error=f"{request.name}: guesses can only be judged with their episode")
        low, high = left_open(episode, request.turn)
        action = episode.turns[request.turn].action or ""
        guess = int(action.removeprefix("guess ")) if action.removeprefix("guess ").isdigit() else 0
        good = low <= guess <= high
        if request.kind == "score":
            return Judgment(votes=(f"{low} to {high} was left. \\boxed{{{1 if good else -1}}}",))
        if good:
            return Judgment(votes=("Nothing to say. \\boxed{-1}",))
        return Judgment(votes=(f"[HINT_START]Guess a number from {low} to {high}.[HINT_END] \\boxed{{1}}",))


def left_open(episode: Episode, turn: int) -> tuple[int, int]:
    """Lowest and highest number that the answers before `turn` leave possible."""
    low, high = 1, HIGHEST
    for earlier in range(turn):
        number = (episode.turns[earlier].action or "").removeprefix("guess ")
        answer = episode.turns[earlier + 1].observation
        if answer == "Higher.":
            low = max(low, int(number) + 1)
        elif answer == "Lower.":
            high = min(high, int(number) - 1)
    return low, high


def make(context: Any) -> Judge:
    """What `--judge` calls, with a `turngym.agents.judges.judges.JudgeContext`; this judge needs nothing of it."""
    return GuessJudge()
