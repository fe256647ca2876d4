"""A judge that needs no model: it looks for words of failure, displeasure or thanks in what came next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from turngym.envs.protocols import JudgeRequest, Judgment

FAILED = (
    r"\berrors?\b|\bexception\b|\btraceback\b|\bfailed\b|\bfailure\b|\bnot found\b|\binvalid\b|\bdenied\b|"
    r"\bnothing happens\b|\bnot possible\b|\bcannot\b|\bcan't\b|\bno such\b|\bunknown\b"
)
UNHAPPY = (
    r"\bredo\b|\bwrong\b|\bincorrect\b|\brephrase\b|\btry again\b|\bonce more\b|\bcorrect (?:this|that|it)\b|"
    r"\bnot what i\b|\bthat'?s not\b|\bfix (?:this|that|it)\b"
)
HAPPY = (
    # a bare `correct` is no praise: `correct this` asks for more
    r"\bthanks?\b|\bthank you\b|\bperfect\b|\bgreat\b|\bwell done\b|\bcorrect[.!]|\byou won\b|"
    r"\bsuccess(?:ful(?:ly)?)?\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordJudge:
    r"""Implements `Judge` with one vote per request, for tests and first steps; a judge model sees more.

    -1 where the next message speaks of failure or displeasure, else 1 where it speaks of success or thanks or where a
    tool answered something (`results`), else 0. As a hint judge it repeats a failure's first line; else `\boxed{-1}`.
    """

    failed: str = f"{FAILED}|{UNHAPPY}"
    happy: str = HAPPY
    results: bool = True
    """Whether a tool's result without a word of failure is a good sign."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        return [Judgment(votes=(self._vote(request),)) for request in requests]

    def _vote(self, request: JudgeRequest) -> str:
        state = request.next_state
        failure = re.search(self.failed, state, re.IGNORECASE)
        if request.kind == "hint":
            if failure is None:
                return "Nothing went wrong. \\boxed{-1}"
            line = next(line for line in state.splitlines() if re.search(self.failed, line, re.IGNORECASE))
            return f"[HINT_START]What you are about to do leads to this: {line.strip()[:200]}[HINT_END] \\boxed{{1}}"
        if failure is not None:
            return f"It says {failure.group()!r}. \\boxed{{-1}}"
        pleased = re.search(self.happy, state, re.IGNORECASE)
        if pleased is not None:
            return f"It says {pleased.group()!r}. \\boxed{{1}}"
        good = self.results and request.next_role == "tool" and bool(state.strip())
        return f"Nothing went wrong. \\boxed{{{int(good)}}}"
