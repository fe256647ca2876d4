"""A judge made of an environment's verdicts and rewards: no model, no knowledge that the agent did not cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turngym.envs.core import Verdict
from turngym.envs.episode import Episode, Status, Turn, next_state
from turngym.envs.protocols import JudgeRequest, Judgment

HINTS = {
    Verdict.MALFORMED: "Answer with exactly one action, written in the form that the instructions ask for.",
    Verdict.INADMISSIBLE: "That action is not possible here. Choose another one.",
    Verdict.NO_EFFECT: "That action changes nothing here. Choose another one.",
}
CHAT = "proxy"
"""Environment id of chat sessions."""
REPEATED = "This was tried before, with the same result. Choose another action."


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleJudge:
    r"""Implements `Judge` with one vote per request. The first rule that applies decides, for a turn t:

    -1: no action could be read, it was not possible, or it changed nothing (the verdict)
    +1: its reward is positive, or its episode ends here in success
    -1: its reward is negative, or its episode is over here without success
    +1 / -1: the environment's progress (`Turn.progress`: share of goals met, else score) rose / fell
    +1 (`outcome`): the episode ended in success, so the turn was on the way to it
    -1 (`repeats`): the same action had the same answer at an earlier turn, and progress was the same there
     0: anything else

    Rewarding whatever works and is new would teach to walk about: success fell to 0 within ten steps when tried.

    As a hint judge it says what the verdict teaches, on turns of the first kind and on repeated ones; else
    `\boxed{-1}`. On a chat session, which has no verdicts, every vote fails.
    """

    outcome: bool = True
    repeats: bool = True

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [self._one(request) for request in requests]

    def _one(self, request: JudgeRequest) -> Judgment:
        if request.episode is None or request.episode.task.env_id == CHAT:
            return Judgment(votes=(None,), error=f"{request.name}: rules need an environment's verdicts and rewards")
        episode, turn = request.episode, request.episode.turns[request.turn]
        if request.kind == "hint":
            hint = self._hint(episode, turn)
            block = "" if hint is None else f"[HINT_START]{hint}[HINT_END] "
            return Judgment(votes=(f"{block}\\boxed{{{-1 if hint is None else 1}}}",))
        score, reason = self.score(episode, turn)
        return Judgment(votes=(f"{reason} \\boxed{{{score}}}",))

    def score(self, episode: Episode, turn: Turn) -> tuple[int, str]:
        """The score of a turn and the rule that gave it."""
        last = turn.index == episode.depth - 1
        if turn.verdict is not Verdict.OK:
            return -1, f"The action was {turn.verdict.value}."
        if turn.reward > 0 or (last and episode.success):
            return 1, "The environment rewarded it."
        if turn.reward < 0 or (last and episode.status is Status.COMPLETED):
            return -1, "The environment punished it." if turn.reward < 0 else "The task ended here, unsolved."
        before = episode.turns[turn.index - 1].progress if turn.index else 0.0
        if turn.progress is not None and before is not None and turn.progress != before:
            return (1, "A goal was met.") if turn.progress > before else (-1, "A goal was lost.")
        if self.outcome and episode.success:
            return 1, "It was on the way to success."
        if self.repeats and _repeated(episode, turn):
            return -1, "It was done before, with the same result."
        return 0, "Nothing tells whether it helped."

    def _hint(self, episode: Episode, turn: Turn) -> str | None:
        hint = HINTS.get(turn.verdict)
        return REPEATED if hint is None and self.repeats and _repeated(episode, turn) else hint


def _repeated(episode: Episode, turn: Turn) -> bool:
    return any(
        earlier.action == turn.action
        and earlier.progress == turn.progress
        and next_state(episode, earlier) == next_state(episode, turn)
        for earlier in episode.turns[: turn.index]
    )
