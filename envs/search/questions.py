"""What is asked: questions with their accepted answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turngym.core.errors import TaskError, first_few
from turngym.core.task import content_hash
from turngym.envs.search.reward import normalize


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question. `gold_ids` and `hops` are empty where they are not known."""

    id: str
    """Unique within `data_source`."""
    question: str
    golden_answers: tuple[str, ...]
    """Accepted answers; the first is the one that an oracle gives."""
    data_source: str
    """Row of the result tables: `hotpotqa`, `2wikimultihopqa`, `nq`, ..."""
    gold_ids: tuple[str, ...] = ()
    """Ids of the passages that hold the facts, in the corpus of the data source."""
    hops: tuple[str, ...] = ()
    """Gold sub-queries, in order: what an oracle searches before it answers."""
    split: str = "eval"
    corpus: str = ""
    """Which corpus of its source it belongs to; empty: that of its data source."""

    @property
    def task_id(self) -> str:
        return f"{self.data_source}/{self.id}"

    def sha256(self, corpus: str | None) -> str:
        """Identity of the task: the question, its answers and the corpus that belongs to it (its fingerprint).

        What retrieves from a corpus is a setting, like the model that plays; it is not part of the task. `corpus` is
        None for questions that come without one (PopQA, NQ): they may be played against any.
        """
        return content_hash(
            {
                "question": self.question,
                "golden_answers": list(self.golden_answers),
                "data_source": self.data_source,
                "gold_ids": list(self.gold_ids),
                "corpus": corpus,
            }
        )


def assert_disjoint(train: Iterable[Question], evaluation: Iterable[Question]) -> None:
    """Raise TaskError if a question is in both, by id or by its normalized words; names the first few."""
    ids, id_of_words = set(), {}
    for question in train:
        ids.add(question.task_id)
        id_of_words[normalize(question.question)] = question.task_id
    shared = []
    for question in evaluation:
        twin = question.task_id if question.task_id in ids else id_of_words.get(normalize(question.question))
        if twin is not None:
            shared.append(question.task_id + ("" if twin == question.task_id else f" (in training as {twin})"))
    if shared:
        raise TaskError(f"{len(shared)} evaluation questions are also training questions: {first_few(shared)}")
