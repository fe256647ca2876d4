"""What is an answer worth? How answers are compared, and the rewards of Search-R1.

`RewardRule` knows three rewards: exact match (`em`), containment (`sub_em`), and one that also reads the form of the
whole response (`format`):

    R = 1          the answer matches and the form is valid
        1 - s      it matches, the form is not valid
        s + r      the form is valid and an information block holds an accepted answer
        s          the form is valid
        f          there is an answer
        0          otherwise

The form is valid if it is (think, (search, information, think)*, answer) with white space alone between the tags.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turngym.core.errors import TaskError, checked_choice
from turngym.envs.channels import blocks

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

RewardKind = Literal["em", "sub_em", "format"]
_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_NEXT = {
    ("start", "<think>"): "in think",
    ("informed", "<think>"): "in think",
    ("in think", "</think>"): "thought",
    ("thought", "<search>"): "in search",
    ("in search", "</search>"): "searched",
    ("searched", "<information>"): "in information",
    ("in information", "</information>"): "informed",
    ("thought", "<answer>"): "in answer",
    ("in answer", "</answer>"): "end",
}
"""(state, tag) -> state; every other tag is out of place."""


def normalize(text: str) -> str:
    """The form in which answers (and questions) are compared: lower case, no ASCII punctuation, no articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_f1(prediction: str | None, golden_answers: Iterable[str]) -> float:
    """SQuAD's F1, in [0, 1]: the words that an answer shares with the accepted one that it is most like.

    A word counts as often as both have it. No answer is 0.0. Where normalization leaves nothing, texts must be equal.
    """
    if prediction is None:
        return 0.0
    said = normalize(prediction).split()
    best = 0.0
    for gold in golden_answers:
        wanted = normalize(gold).split()
        shared = sum((Counter(said) & Counter(wanted)).values())
        if said and wanted:
            best = max(best, 2 * shared / (len(said) + len(wanted)))
        elif not said and not wanted:
            best = max(best, float(prediction.lower().split() == gold.lower().split()))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """Which reward an episode ends with."""

    kind: RewardKind = "em"
    s: float = 0.2
    """Reward of a valid form (`format` only)."""
    f: float = 0.1
    """Reward of any answer at all (`format` only)."""
    r: float = 0.0
    """Reward of an accepted answer among the information (`format` only)."""
    strict_compat: bool = False
    """Take the answer as the published code does: from prompt and response, if they hold two answers or more."""

    def __post_init__(self) -> None:
        checked_choice("reward", self.kind, get_args(RewardKind), TaskError)
        for name in ("s", "f", "r"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise TaskError(f"the reward's coefficient {name} is {getattr(self, name)}; it must be from 0 to 1")

    def matches(self, prediction: str | None, golden_answers: Iterable[str]) -> bool:
        """Whether the answer counts as right: containment for `sub_em`, else exact match.

        Answers such as `A`, `The The`, `---` and `A+` are normalized to nothing. They are matched as they stand: by
        exact match (and with `strict_compat`) an empty answer or any article would be right, by containment nothing.
        """
        if prediction is None:
            return False
        if not normalize(prediction) and not self.strict_compat:
            return " ".join(prediction.lower().split()) in {" ".join(gold.lower().split()) for gold in golden_answers}
        return (sub_exact if self.kind == "sub_em" else exact)(prediction, golden_answers)

    def score(
        self, response: str, golden_answers: Sequence[str], *, said: str | None = None, prompt: str = ""
    ) -> float:
        """The reward of a finished episode.

        Args:
            response: everything after the prompt, information blocks included.
            said: what the agent alone wrote, where the answer is looked for; by default all of `response`.
            prompt: read with `strict_compat` only.
        """
        spoken = response if said is None else said
        prediction = published_prediction(prompt + response) if self.strict_compat else last_answer(spoken)
        right = self.matches(prediction, golden_answers)
        if self.kind != "format":
            return float(right)
        if right:
            return 1.0 if valid_form(response) else 1.0 - self.s
        if valid_form(response):
            retrieved = any(sub_exact(block, golden_answers) for block in blocks(response, "information"))
            return self.s + (self.r if retrieved else 0.0)
        return self.f if prediction is not None else 0.0


def exact(prediction: str, golden_answers: Iterable[str]) -> bool:
    """Exact match of the normalized texts with any accepted answer."""
    return normalize(prediction) in {normalize(gold) for gold in golden_answers}


def sub_exact(text: str, golden_answers: Iterable[str]) -> bool:
    """Whether a normalized accepted answer is part of the normalized text. An answer without any word never is."""
    inside = normalize(text)
    return any(gold in inside for gold in map(normalize, golden_answers) if gold)


def last_answer(text: str) -> str | None:
    """The stripped content of the last `<answer>...</answer>`; None without one."""
    answers = list(blocks(text, "answer"))
    return answers[-1].strip() if answers else None


def published_prediction(text: str) -> str | None:
    """The published rule: the last answer of prompt and response together, None if they hold fewer than two.

    A prompt with the original's wording holds two itself (`<answer> and </answer>`, the example), so an episode without
    an answer is judged by the example.
    """
    answers = list(blocks(text, "answer"))
    return answers[-1].strip() if len(answers) > 1 else None


def valid_form(response: str) -> bool:
    """Whether `response` is thoughts, searches, information and one answer in the right order, and nothing else."""
    state = "start"
    for index, part in enumerate(_TAG.split(response)):
        # split() keeps the tags, because the pattern is a group: every second part is one
        if index % 2:
            following = _NEXT.get((state, part))
            if following is None:
                return False
            state = following
        elif part.strip() and not state.startswith("in "):
            return False
    return state == "end"
