"""Asks judges two questions about each turn, and makes one vote of both answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from turngym.envs.protocols import Judge, JudgeRequest, Judgment, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class BothQuestions:
    """Implements `Judge` for requests of kind `both`: vote v is the score's vote v and the hint's vote v, `joined`.

    Where `score` and `hint` are one judge it is asked once, all together. A vote fails where both of its answers do.
    """

    score: Judge
    hint: Judge

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        scores = [replace(request, kind="score") for request in requests]
        hints = [replace(request, kind="hint") for request in requests]
        if self.score is self.hint:
            found = self.score.judge([*scores, *hints])
        else:
            found = [*self.score.judge(scores), *self.hint.judge(hints)]
        return [_together(*pair) for pair in zip(found[: len(scores)], found[len(scores) :], strict=True)]


def _together(score: Judgment, hint: Judgment) -> Judgment:
    return Judgment(
        votes=tuple(joined(*pair) for pair in zip_longest(score.votes, hint.votes)),
        error=score.error or hint.error,
        cut=score.cut + hint.cut,
    )
