"""How a judge's answer is read: one vote by `read_score` and `read_hint`, several by `majority` and `choose_hint`.

The prompts in `model_judges.py` ask for this form.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from turngym.envs.tool_calls import EVERY_STYLE

BOX = "\\boxed"
HINT = ("[HINT_START]", "[HINT_END]")
MEANT = {
    BOX: re.compile(r"\\boxed|[b\b]oxed\s*(?=\{)|\\fbox", re.IGNORECASE),
    HINT[0]: re.compile(r"\[\s*HINT[\s_-]*START\s*\]", re.IGNORECASE),
}
r"""What is meant as a mark: one in other letters, or without its backslash, which JSON reads as a part of `\b`."""
FACES = re.compile(r"\\(?:text|math)(?:bf|it|normal|rm|sf|tt|up)?(?![a-z])|[{}$\s]")
r"""What TeX writes around a number and reads past, such as the `\text{}` of `\text{-1}`; `\textminus` is none of it."""
MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
"""Hyphens, dashes and minus signs that models write for the one of ASCII."""
SCORES = {"1": 1.0, "+1": 1.0, "-1": -1.0, "0": 0.0}
HINT_SCORES = {"1": 1.0, "+1": 1.0, "-1": -1.0}
MORE_THAN = 10
"""A hint must have more characters than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintVote:
    """One vote of a hint judge: 1.0 (there is a hint), -1.0 (there is none), or None where it cannot be read."""

    score: float | None
    hint: str | None
    """The last block, stripped; None without one, or where it is not closed."""


def read_score(text: str) -> float | None:
    r"""The number in the last `\boxed{...}` if that is 1 (or +1), -1 or 0, else None (no vote).

    An earlier box never stands in for a last one that cannot be read, nor one in its thoughts for one that is not said:
    it may say the opposite. Blanks, faces (`\boxed{\text{-1}}`) and other minus signs do not matter.

    Source: [openclaw-rl] section 4.1; docs/algorithms.md#judge-votes.
    """
    return _last_box(_said(text), SCORES)


def read_hint(text: str) -> HintVote:
    r"""The last `\boxed{...}` if that is 1 (or +1) or -1, and the last `[HINT_START]...[HINT_END]`, stripped.

    Of blocks inside each other the inner one is read. Earlier blocks never stand in for a last one that is not closed.
    Source: [openclaw-rl] section 4.2; docs/algorithms.md#judge-votes.
    """
    text = _said(text)
    block, closed, _ = _behind_last(text, HINT[0]).partition(HINT[1])
    return HintVote(score=_last_box(text, HINT_SCORES), hint=block.strip() if closed else None)


def majority(scores: Sequence[float]) -> float:
    """The score with the most votes; 0.0 if the top is tied or there are no votes.

    Source: [openclaw-rl] section 4.1; docs/algorithms.md#judge-votes.
    """
    ranked = Counter(scores).most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return 0.0
    return ranked[0][0]


def choose_hint(votes: Iterable[HintVote]) -> str | None:
    """The longest hint of more than 10 characters among the votes of +1, the first of equally long ones; or None.

    Source: [openclaw-rl] section 4.2; docs/algorithms.md#hint-choice.
    """
    hints = [vote.hint for vote in votes if vote.score == 1.0 and vote.hint is not None and len(vote.hint) > MORE_THAN]
    return max(hints, key=len) if hints else None


def _said(text: str) -> str:
    """`text` without its thoughts, in which a judge tries verdicts; nothing where they do not end."""
    for style in EVERY_STYLE:
        _, text, unread = style.split(text, lambda rest: False)
        if unread is not None:
            return ""
    return text


def _last_box(text: str, valid: Mapping[str, float]) -> float | None:
    box = _braced(_behind_last(text, BOX))
    return None if box is None else valid.get(FACES.sub("", box).translate(MINUS))


def _behind_last(text: str, mark: str) -> str:
    """The text behind the last `mark`; "" without one, or if a later text is meant as one and misspelled."""
    last = next(iter(deque(MEANT[mark].finditer(text), maxlen=1)), None)
    return text[last.end() :] if last is not None and last[0] == mark else ""


def _braced(text: str) -> str | None:
    """The content of the braces with which `text` begins; None if it begins with none, or they stay open."""
    depth = 0
    for index, letter in enumerate(text := text.lstrip()):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[1:index] if index else None
    return None
