"""How much gold do retrievers find: recall@3, all-gold and any-gold on real multi-hop questions.

`measure_quality` asks with the question as it stands and, where the data has the chain of facts behind the answer, with
one gold sub-query per hop ("subject relation"), three passages each. Recall@3 is the share of a question's gold
passages among what was found, averaged over questions; all-gold and any-gold are the shares of questions for which all
or at least one was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.evaluation.tables import Table
from turngym.envs.core import TurngymError
from turngym.retrieval.bm25 import BM25Retriever
from turngym.retrieval.core import Passage, Retriever
from turngym.retrieval.corpus import read_corpus
from turngym.retrieval.dense.retriever import DenseRetriever
from turngym.retrieval.encoders.hashing import HashingEncoder
from turngym.retrieval.hybrid import HybridRetriever
from turngym.retrieval.rerank import CoverageReranker, RerankingRetriever

DATASETS = ("hotpotqa", "2wiki")
"""Each has `<name>_corpus.jsonl` and `<name>_questions.jsonl` with gold passage ids."""
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


def measure_quality(data: Path, *, datasets: Sequence[str] = DATASETS, k: int = 3) -> list[Quality]:
    """Measure every default retriever on every set under `data`.

    Raises:
        TurngymError: a file is missing.
        CorpusError: a corpus cannot be read.
    """
    rows = []
    for dataset in datasets:
        path = data / f"{dataset}_questions.jsonl"
        if not path.is_file():
            raise TurngymError(f"{path}: there is no such file; name the folder that holds {dataset}_questions.jsonl")
        questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for name, retriever in default_retrievers(list(read_corpus(data / f"{dataset}_corpus.jsonl"))).items():
            rows += _measure(dataset, name, retriever, questions, k)
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
    return [
        f"BM25 on {row.dataset}: recall@3 {row.recall:.3f}, {REFERENCE[row.dataset]:.3f} expected"
        for row in rows
        if row.retriever == "bm25" and row.queries == "question" and round(row.recall, 3) < REFERENCE[row.dataset]
    ]


def _measure(
    dataset: str, name: str, retriever: Retriever, questions: Sequence[Mapping[str, Any]], k: int
) -> list[Quality]:
    kinds = {"question": [(question, [str(question["question"])]) for question in questions]}
    chained = [question for question in questions if question.get("chain")]
    if chained:
        kinds["sub-queries"] = [(q, [f"{subject} {relation}" for subject, relation, _ in q["chain"]]) for q in chained]
    rows = []
    for kind, asked in kinds.items():
        shares = []
        for question, queries in asked:
            found = {hit.passage.id for hits in retriever.search(queries, k) for hit in hits}
            gold = {str(number) for number in question["gold"]}
            shares.append(len(found & gold) / len(gold))
        values = np.array(shares)
        rows.append(
            Quality(
                dataset=dataset,
                retriever=name,
                queries=kind,
                questions=len(values),
                recall=float(values.mean()),
                all_gold=float((values == 1).mean()),
                any_gold=float((values > 0).mean()),
            )
        )
    return rows
