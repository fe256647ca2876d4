"""Who plays search without a model: one that searches the question once and picks a span, one that searches again only
where it is told to, random moves, mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from turngym.envs.search import turn_protocol
from turngym.envs.search.passage_text import harmless
from turngym.envs.search.questions import Question
from turngym.envs.search.reward import normalize
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
_CHOICE = re.compile(r"([^,?]{1,200}?),?\s{1,9}or\s{1,9}([^,?]{1,200})\?*$")
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at by did do does for from had has have how in is it of on or that the their this to was were "
        "what when where which who whom whose why with"
    )
)


@dataclass(frozen=True, slots=True)
class SearchScene:
    """What a player sees: the question, what was searched so far, what the last search found."""

    question: Question
    queries: Sequence[str]
    hits: Sequence[Hit]
    may_search: bool
    """Whether the turn that begins now may search."""


def single_shot(scene: SearchScene) -> str:
    """One search for the question as it stands, one answer taken from what it brings."""
    question = scene.question.question
    if not scene.queries and scene.may_search:
        return turn_protocol.search(harmless(question))
    return turn_protocol.answer(harmless(extract(question, [hit.passage for hit in scene.hits])))


class ReadingSearchPlayer:
    """The gold chain, but it does not know how long a chain is: it searches again only where a text says so.

    A text says so by the word `again`. Without it the player searches the chain's first query and answers with a span
    of what comes back (the first accepted answer where that was the whole chain). A model that imitates it learns to
    read such texts, and nothing about which questions need several searches.
    """

    def __init__(self, look: Callable[[], SearchScene]) -> None:
        self._look = look
        self._again = False

    def read(self, text: str) -> None:
        """Search again from now on, or not, as this text says."""
        self._again = "again" in _WORD.findall(text)

    def observe(self, action: str) -> None:
        """Does nothing: the scene says what was searched."""

    def act(self) -> str | None:
        """The next search, or the answer."""
        scene = self._look()
        chain = [harmless(query) for query in chain_of(scene.question)]
        left = [query for query in chain if query.strip() not in scene.queries]
        allowed = left if self._again else left[: len(left) - len(chain) + 1]
        if allowed and scene.may_search:
            return turn_protocol.search(allowed[0])
        if not left:
            return turn_protocol.answer(scene.question.golden_answers[0])
        extracted = extract(scene.question.question, [hit.passage for hit in scene.hits])
        return turn_protocol.answer(harmless(extracted))


def chain_of(question: Question) -> Sequence[str]:
    """The queries of the gold chain, one per hop; the question itself if no chain is known."""
    return question.hops or (question.question,)


def extract(question: str, passages: Sequence[Passage]) -> str:
    """The span of the passages that fits the question's kind and stands nearest to its words; "yes" or "" if none.

    A choice ("A or B?") gives the half whose words the passages hold more often.
    """
    asked = normalize(question)
    if choice := _CHOICE.search(question):
        return max((choice[1].rpartition(", ")[2], choice[2]), key=lambda half: _support(half, passages)).strip()
    if _YES_NO.match(question):
        return "yes"
    # what the answer looks like: a number, a date, or else a name
    pattern = _NAME
    if re.search(r"\bhow (?:many|much|old|long|far|tall)\b", asked):
        pattern = _NUMBER
    elif re.search(r"\bwhen\b|\b(?:what|which) (?:year|date)\b|\bdate of\b", asked):
        pattern = _DATE
    wanted = {word for word in asked.split() if word not in _COMMON}
    votes: dict[str, float] = {}
    for rank, passage in enumerate(passages, 1):
        for sentence in _SENTENCE.split(f"{passage.title}. {passage.text}"):
            near = len(wanted.intersection(normalize(sentence).split()))
            for match in pattern.finditer(sentence):
                span = match[0].strip(" .,-")
                normalized = normalize(span)
                if normalized and normalized not in asked and normalized not in _COMMON:
                    votes[span] = votes.get(span, 0.0) + near / rank
    return max(votes, key=lambda span: (votes[span], span)) if votes else ""


def sample_action(scene: SearchScene, rng: np.random.Generator) -> str:
    """A search for a few random words of question and passages (7 in 10), or a random name of theirs as answer."""
    texts = _texts(scene)
    if scene.may_search and rng.random() < 0.7:
        return turn_protocol.search(harmless(_some_words(texts, rng)))
    return turn_protocol.answer(harmless(_some_name(texts, rng) or "yes"))


def plausible_mistake(scene: SearchScene, rng: np.random.Generator) -> str | None:
    """A search that wastes a turn: for nothing, for the same again, for the question, a name or loose words.

    None where no search is left.
    """
    if not scene.may_search:
        return None
    kind = int(rng.integers(8))
    if kind == 0:
        return turn_protocol.search("")
    if kind == 1 and scene.queries:
        return turn_protocol.search(scene.queries[int(rng.integers(len(scene.queries)))])
    texts = _texts(scene)
    if kind == 2:
        query = scene.question.question
    else:
        query = (_some_name(texts, rng) if kind < 7 else "") or _some_words(texts, rng)
    return turn_protocol.search(harmless(query))


def _texts(scene: SearchScene) -> list[str]:
    return [scene.question.question, *(f"{hit.passage.title}. {hit.passage.text}" for hit in scene.hits)]


def _some_name(texts: Sequence[str], rng: np.random.Generator) -> str:
    """A random capitalized name that occurs in the texts; empty if there is none."""
    sentences = (sentence for text in texts for sentence in _SENTENCE.split(text))
    candidates = [match[0].rstrip(".") for sentence in sentences for match in _NAME.finditer(sentence)]
    names = [name for name in candidates if name.lower() not in _COMMON]
    return names[int(rng.integers(len(names)))] if names else ""


def _some_words(texts: Sequence[str], rng: np.random.Generator) -> str:
    words = [match[0] for text in texts for match in _WORD.finditer(text)] or ["anything"]
    return " ".join(words[int(index)] for index in rng.integers(len(words), size=int(rng.integers(1, 6))))


def _support(half: str, passages: Sequence[Passage]) -> int:
    words = set(normalize(half).split())
    return sum(len(words.intersection(normalize(f"{passage.title} {passage.text}").split())) for passage in passages)
