"""How many gold passages a retriever finds: with the question as it stands, and with the gold sub-queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turngym.envs.search.questions import Question
from turngym.retrieval.core import Retriever


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Shares over questions, each in [0, 1]."""

    recall: float
    """Mean share of a question's gold passages that were found."""
    all_gold: float
    """Share of questions whose gold passages were all found."""
    any_gold: float
    """Share of questions of which at least one gold passage was found."""


def question_recall(questions: Sequence[Question], retriever: Retriever, k: int = 3) -> Recall:
    """The best `k` passages for each question's text."""
    rows = retriever.search([question.question for question in questions], k)
    return _recall(questions, [{hit.passage.id for hit in hits} for hits in rows])


def hop_recall(questions: Sequence[Question], retriever: Retriever, k: int = 3) -> Recall:
    """The best `k` passages for each gold sub-query, taken together per question."""
    rows = iter(retriever.search([hop for question in questions for hop in question.hops], k))
    return _recall(questions, [{hit.passage.id for _ in question.hops for hit in next(rows)} for question in questions])


def _recall(questions: Sequence[Question], found_ids: Sequence[set[str]]) -> Recall:
    pairs = zip(questions, found_ids, strict=True)
    shares = [len(ids.intersection(question.gold_ids)) / len(set(question.gold_ids)) for question, ids in pairs]
    count = max(1, len(shares))
    return Recall(
        recall=sum(shares) / count,
        all_gold=sum(share == 1 for share in shares) / count,
        any_gold=sum(share > 0 for share in shares) / count,
    )
