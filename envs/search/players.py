"""Players without a model: search the question once and pick a span; random moves; wasted searches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from turngym.envs.search import protocol
from turngym.envs.search.questions import Question, normalize
from turngym.retrieval.core import Hit, Passage

_WORD = re.compile(r"\w+(?:['’.-]\w+)*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NAME = re.compile(r"[^\W\d_a-z][\w'’.-]*(?:\s+(?:(?:of|the|de|von|van|and)\s+)?[^\W\d_a-z][\w'’-]*)*")
_DATE = re.compile(
    r"(?:\d{1,2}\s+)?(?:January|February|March|April|May|June|July|August|September|October|November|December)"
    r"(?:\s+\d{1,2},?)?\s+\d{3,4}|\b\d{4}\b"
)
_NUMBER = re.compile(r"\b\d[\d,.]*\b")
_YES_NO = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will)\b", re.IGNORECASE)
_CHOICE = re.compile(r"([^,?]+?),?\s+or\s+([^,?]+)\?*$")
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at by did do does for from had has have how in is it of on or that the their this to was were "
        "what when where which who whom whose why with"
    )
)


class State(Protocol):
    """What players see of an environment."""

    @property
    def question(self) -> Question: ...
    @property
    def queries(self) -> tuple[str, ...]: ...
    @property
    def hits(self) -> tuple[Hit, ...]: ...
    @property
    def may_search(self) -> bool: ...


class SingleShot:
    """One search for the question as it stands, one answer taken from what it brings."""

    def __init__(self, state: State) -> None:
        self._state = state

    def observe(self, action: str) -> None:
        """It looks at the state."""

    def act(self) -> str | None:
        question = self._state.question.question
        if not self._state.queries and self._state.may_search:
            return protocol.search(protocol.harmless(question))
        return protocol.answer(protocol.harmless(extract(question, [hit.passage for hit in self._state.hits])))


def extract(question: str, passages: Sequence[Passage]) -> str:
    """A short span that may answer: of the kind the question asks for, near its words, not in it; "yes" or "" if none.

    A choice ("A or B?") gives the half whose words the passages hold more often.
    """
    asked = normalize(question)
    if choice := _CHOICE.search(question):
        return max((choice[1].rpartition(", ")[2], choice[2]), key=lambda half: _support(half, passages)).strip()
    if _YES_NO.match(question):
        return "yes"
    pattern = _wanted(asked)
    wanted = {word for word in asked.split() if word not in _COMMON}
    votes: dict[str, float] = {}
    for rank, passage in enumerate(passages, 1):
        for sentence in _SENTENCE.split(f"{passage.title}. {passage.text}"):
            near = len(wanted.intersection(normalize(sentence).split()))
            for match in pattern.finditer(sentence):
                span = match[0].strip(" .,-")
                words = normalize(span)
                if words and words not in asked and words not in _COMMON:
                    votes[span] = votes.get(span, 0.0) + near / rank
    return max(votes, key=lambda span: (votes[span], span)) if votes else ""


def sample_action(state: State, rng: np.random.Generator) -> str:
    """A search for a few random words of question and passages (7 in 10), or a random name of theirs as answer."""
    texts = list(_texts(state))
    if state.may_search and rng.random() < 0.7:
        return protocol.search(protocol.harmless(_some_words(texts, rng)))
    return protocol.answer(protocol.harmless(_some_name(texts, rng) or "yes"))


def plausible_mistake(state: State, rng: np.random.Generator) -> str | None:
    """A search that wastes a turn: again, of nothing, the question, some name, words that belong to nothing; None where
    none is left."""
    if not state.may_search:
        return None
    kind = int(rng.integers(8))
    if kind == 0:
        return protocol.search("")
    if kind == 1 and state.queries:
        return protocol.search(state.queries[int(rng.integers(len(state.queries)))])
    texts = list(_texts(state))
    if kind == 2:
        query = state.question.question
    else:
        query = (_some_name(texts, rng) if kind < 7 else "") or _some_words(texts, rng)
    return protocol.search(protocol.harmless(query))


def _texts(state: State) -> Iterator[str]:
    yield state.question.question
    for hit in state.hits:
        yield f"{hit.passage.title}. {hit.passage.text}"


def _some_name(texts: Sequence[str], rng: np.random.Generator) -> str:
    """Something with a capital that no sentence begins with by rule; empty where there is nothing of the kind."""
    sentences = (sentence for text in texts for sentence in _SENTENCE.split(text))
    found = [match[0].rstrip(".") for sentence in sentences for match in _NAME.finditer(sentence)]
    names = [name for name in found if name.lower() not in _COMMON]
    return names[int(rng.integers(len(names)))] if names else ""


def _some_words(texts: Sequence[str], rng: np.random.Generator) -> str:
    words = [match[0] for text in texts for match in _WORD.finditer(text)] or ["anything"]
    return " ".join(words[int(place)] for place in rng.integers(len(words), size=int(rng.integers(1, 6))))


def _support(half: str, passages: Sequence[Passage]) -> int:
    words = set(normalize(half).split())
    return sum(len(words.intersection(normalize(f"{passage.title} {passage.text}").split())) for passage in passages)


def _wanted(asked: str) -> re.Pattern[str]:
    """What the answer looks like."""
    if re.search(r"\bhow (?:many|much|old|long|far|tall)\b", asked):
        return _NUMBER
    if re.search(r"\bwhen\b|\b(?:what|which) (?:year|date)\b|\bdate of\b", asked):
        return _DATE
    return _NAME
