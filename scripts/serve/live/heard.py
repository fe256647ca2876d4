"""What users say of turns, as votes beside a judge's or in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.envs.episode import Turn
from turngym.envs.protocols import Judgment, Question, joined, separate
from turngym.trainers.judge.episodes import judged
from turngym.trainers.judge.votes import MORE_THAN

FeedbackUse = Literal["override", "vote", "record"]
MARKS = ("[HINT_START]", "[HINT_END]")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardVotes:
    """A user's feedback as a vote on what the judge is asked.

    The thumb is a score; the words with a thumb down, if there are more than 10 characters, are a hint. `override`:
    what the user said counts alone, and the judge is still asked only for what the user left out; `vote`: it is one
    more vote.
    """

    kind: Question
    use: FeedbackUse = "override"

    def settles(self, feedback: Feedback) -> bool:
        """Whether the judge need not be asked: with a thumb up there is nothing to hint at."""
        if self.use != "override":
            return False
        return self.kind == "score" or feedback.score > 0 or _hint(feedback) is not None

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        """`turn` with the user's vote; a second time changes nothing."""
        if self.use == "record":
            return turn
        own, votes = self._vote(feedback), tuple(turn.judge_votes or ())
        if self.use == "vote":
            return turn if own in votes else self._read(turn, (*votes, own))
        if self.settles(feedback):
            return self._read(turn, (own,))
        if self.kind == "hint":
            return turn  # a thumb down without words is no hint: the judge's stands
        hints = [separate(vote)[1] for vote in votes if vote is not None]
        return self._read(turn, tuple(joined(_score_text(feedback), hint) for hint in hints) or (own,))

    def _read(self, turn: Turn, votes: tuple[str | None, ...]) -> Turn:
        bare = replace(turn, hint=None, hint_prompt_ids=None)
        return judged(bare, self.kind, Judgment(votes=votes, cut=turn.judge_cut))

    def _vote(self, feedback: Feedback) -> str:
        hint = _hint(feedback)
        said = "The user has nothing to hint at. \\boxed{-1}" if hint is None else hint
        if self.kind == "score":
            return _score_text(feedback)
        return said if self.kind == "hint" else joined(_score_text(feedback), said) or ""


def _score_text(feedback: Feedback) -> str:
    words = f", {feedback.text!r}" if feedback.text else ""
    # the last box counts, whatever the user wrote
    return f"The user's thumb is {'up' if feedback.score > 0 else 'down'}{words}. \\boxed{{{feedback.score}}}"


def _hint(feedback: Feedback) -> str | None:
    """The user's words as a hint judge writes them; None where they are no hint."""
    text = feedback.text
    for mark in MARKS:
        text = text.replace(mark, " ")
    text = text.strip()
    if feedback.score > 0 or len(text) <= MORE_THAN:
        return None
    return f"{MARKS[0]}{text}{MARKS[1]} \\boxed{{1}}"
