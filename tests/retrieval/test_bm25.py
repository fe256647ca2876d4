"""BM25 over passages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from turngym.core.errors import RetrievalError
from turngym.retrieval.bm25_retriever import BM25Retriever, LuceneIndex, indexed_documents
from turngym.retrieval.core import Hit, Passage, Retriever
from turngym.retrieval.corpus import PassageStore, PassageWriter, read_corpus

PASSAGES = [
    Passage(id="7", title="Lake Orta", text="A lake in Piedmont. Its island is San Giulio."),
    Passage(id="3", title="San Giulio", text="An island with a basilica."),
    Passage(id="5", title="Piedmont", text="A region of Italy."),
]


def found(retriever: Retriever, *queries: str, k: int = 3) -> list[list[str]]:
    return [[hit.passage.id for hit in hits] for hits in retriever.search(queries, k)]


def test_title_and_text_are_found() -> None:
    retriever = BM25Retriever.from_passages(PASSAGES)
    assert found(retriever, "basilica", "lakes of Piedmont", "the", "san") == [["3"], ["7", "5"], [], ["3", "7"]]
    assert found(retriever, "piedmont", k=1) == [["5"]]
    assert retriever.search([], 3) == []
    assert len(retriever) == 3
    hit = retriever.search(["basilica"], 1)[0][0]
    assert isinstance(hit, Hit)
    assert hit.passage is PASSAGES[1]
    assert hit.score > 0


def test_any_iterable_of_passages() -> None:
    assert found(BM25Retriever.from_passages(iter(PASSAGES)), "basilica") == [["3"]]


def test_the_index_on_disk_finds_the_same(tmp_path: Path) -> None:
    LuceneIndex.build(indexed_documents(PASSAGES), tmp_path / "index").close()
    writer = PassageWriter(tmp_path / "passages")
    for passage in PASSAGES:
        writer.add(passage)
    writer.finish()
    store = PassageStore(tmp_path / "passages")
    memory = BM25Retriever.from_passages(PASSAGES)
    disk = BM25Retriever(LuceneIndex.open(tmp_path / "index"), store)
    queries = ["lake piedmont", "san giulio island"]
    assert memory.search(queries, 3) == disk.search(queries, 3)
    assert memory.fingerprint == disk.fingerprint
    assert memory.fingerprint.startswith("bm25:")
    disk.close()
    disk.close()
    with pytest.raises(ValueError, match="closed"):
        store[0]
    with pytest.raises(RetrievalError, match="closed"):
        disk.search(["lake"], 1)


def test_settings_change_the_fingerprint() -> None:
    prints = {BM25Retriever.from_passages(PASSAGES, k1=k1, b=b).fingerprint for k1 in (0.9, 1.2) for b in (0.4, 0.75)}
    assert len(prints) == 4


def test_passages_that_are_not_the_index() -> None:
    index = LuceneIndex.build(indexed_documents(PASSAGES))
    with pytest.raises(RetrievalError, match="3 documents, but there are 2 passages"):
        BM25Retriever(index, PASSAGES[:2])
    with pytest.raises(RetrievalError, match="row 0 is '7' in the index and '5' in the passages"):
        BM25Retriever(index, PASSAGES[::-1])


def test_wrong_use() -> None:
    retriever = BM25Retriever.from_passages(PASSAGES)
    with pytest.raises(RetrievalError, match="give a sequence of strings"):
        retriever.search("lake", 3)
    for k in (0, 2.5, True):
        with pytest.raises(RetrievalError, match=f"k={k}"):
            retriever.search(["lake"], k)  # type: ignore[arg-type]
    with pytest.raises(RetrievalError, match="a query is None"):
        retriever.search([None], 1)  # type: ignore[list-item]
    with pytest.raises(RetrievalError, match="id '7' is used"):
        BM25Retriever.from_passages([*PASSAGES, PASSAGES[0]])
    with pytest.raises(RetrievalError, match="the text of a passage of the corpus is None"):
        BM25Retriever.from_passages([replace(PASSAGES[0], text=None)])  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(("name", "floor"), [("hotpotqa", 0.6649), ("2wiki", 0.652)])
def test_recall_on_real_questions(search_data: Path, name: str, floor: float) -> None:
    retriever = BM25Retriever.from_passages(read_corpus(search_data / f"{name}_corpus.jsonl"))
    with (search_data / f"{name}_questions.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    hits = retriever.search([row["question"] for row in rows], 3)
    shares = [
        len({hit.passage.id for hit in three} & {str(gold) for gold in row["gold"]}) / len(row["gold"])
        for three, row in zip(hits, rows, strict=True)
    ]
    assert sum(shares) / len(shares) > floor
