"""How much gold do retrievers find: recall@3, all-gold and any-gold on real multi-hop questions.

`measure_quality` asks with the question as it stands and, where the data has the chain of facts behind the answer, with
one gold sub-query per hop ("subject relation"), three passages each. Recall@3 is the share of a question's gold
passages among what was found, averaged over questions; all-gold and any-gold are the shares of questions for which all
or at least one was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turngym.envs.core.tables import Table
from turngym.envs.search.questions import Question
from turngym.envs.search.recall import hop_recall, question_recall
from turngym.envs.search.sources import read_questions
from turngym.envs.search.world_questions import open_world
from turngym.retrieval.bm25 import BM25Retriever
from turngym.retrieval.core import Passage, Retriever
from turngym.retrieval.corpus import read_corpus
from turngym.retrieval.dense import DenseRetriever
from turngym.retrieval.encoders import HashingEncoder
from turngym.retrieval.hybrid import CoverageReranker, HybridRetriever, RerankingRetriever

DATASETS = ("hotpotqa", "2wiki")
"""Each has `<name>_corpus.jsonl` and `<name>_questions.jsonl` with gold passage ids."""
EMBEDDED = "embedded"
"""Named instead of a folder: the generated fictional world."""
REFERENCE = {"hotpotqa": 0.665, "2wiki": 0.648}
"""Recall@3 of BM25 (k1 0.9, b 0.4, Lucene's analysis) with the question as query: what ours must reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What one retriever finds on one set of questions."""

    dataset: str
    retriever: str
    queries: str
    """`question` or `sub-queries`."""
    questions: int
    recall: float
    all_gold: float
    any_gold: float


def default_retrievers(passages: Sequence[Passage]) -> dict[str, Retriever]:
    """BM25, hashing vectors, their fusion, and BM25 reranked by coverage."""
    bm25 = BM25Retriever.from_passages(passages)
    hashing = DenseRetriever.from_passages(passages, HashingEncoder.fit(passages))
    hybrid = HybridRetriever([bm25, hashing])
    reranked = RerankingRetriever(bm25, CoverageReranker())
    return {"bm25": bm25, "hashing": hashing, "hybrid": hybrid, "bm25 + coverage": reranked}


def measure_quality(data: str | Path, *, datasets: Sequence[str] = DATASETS, k: int = 3) -> list[Quality]:
    """Measure every default retriever on every set under `data`; `embedded` is the fictional world, without files.

    Raises:
        TurngymError: a file is missing or damaged.
        CorpusError: a corpus cannot be read.
    """
    if str(data) == EMBEDDED:
        world = open_world("full")
        asked = [question for question in world.questions if question.split == "eval"]
        return _measure(EMBEDDED, asked, world.passages, k)
    rows = []
    for dataset in datasets:
        questions = read_questions(Path(data) / f"{dataset}_questions.jsonl")
        rows += _measure(dataset, questions, list(read_corpus(Path(data) / f"{dataset}_corpus.jsonl")), k)
    return rows


def quality_table(rows: Sequence[Quality]) -> Table:
    """One line per set, retriever and kind of query."""
    header = ["set", "queries", "retriever", "recall@3", "all gold", "any gold", "questions"]
    lines = [
        [
            *(row.dataset, row.queries, row.retriever),
            *(f"{share:.3f}" for share in (row.recall, row.all_gold, row.any_gold)),
            str(row.questions),
        ]
        for row in rows
    ]
    return header, lines


def below_reference(rows: Sequence[Quality]) -> list[str]:
    """What BM25 fails to reach, in words; empty if nothing."""
    plain = [row for row in rows if row.retriever == "bm25" and row.queries == "question" and row.dataset in REFERENCE]
    return [
        f"BM25 on {row.dataset}: recall@3 {row.recall:.3f}, {REFERENCE[row.dataset]:.3f} expected"
        for row in plain
        if round(row.recall, 3) < REFERENCE[row.dataset]
    ]


def _measure(dataset: str, questions: Sequence[Question], passages: Sequence[Passage], k: int) -> list[Quality]:
    chained = [question for question in questions if question.hops]
    rows = []
    for name, retriever in default_retrievers(passages).items():
        found = {"question": (questions, question_recall(questions, retriever, k))}
        if chained:
            found["sub-queries"] = (chained, hop_recall(chained, retriever, k))
        for queries, (asked, shares) in found.items():
            row = Quality(dataset=dataset, retriever=name, queries=queries, questions=len(asked), **asdict(shares))
            rows.append(row)
    return rows
