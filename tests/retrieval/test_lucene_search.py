"""Scores and order against the formula written out in pure Python, on made-up corpora."""

from __future__ import annotations

import math
import struct
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import RetrievalError
from turngym.retrieval import bm25_scores as query
from turngym.retrieval.bm25_retriever import LuceneIndex
from turngym.retrieval.bm25_scores import LENGTHS, encode_lengths
from turngym.retrieval.lucene_text import analyze

WORDS = ["red", "blue", "shirt", "shoe", "cotton", "the", "5.5"]
Docs = list[tuple[str, str]]


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def kept_length(length: int) -> int:
    """A length through Lucene's one byte: exact below 24, then four significant bits of the rest."""
    if length < 24:
        return length
    rest, shift = length - 24, max((length - 24).bit_length() - 4, 0)
    return 24 + (rest >> shift << shift)


def by_formula(docs: Docs, text: str, k: int, k1: float = 0.9, b: float = 0.4) -> list[tuple[str, float]]:
    terms = {name: Counter(analyze(body)) for name, body in docs}
    lengths = {name: sum(counts.values()) for name, counts in terms.items()}
    scored = sum(length > 0 for length in lengths.values())
    k1, b = f32(k1), f32(b)
    scores: Counter[str] = Counter()
    for term, times in Counter(analyze(text)).items():
        having = [name for name in terms if term in terms[name]]
        rarity = f32(math.log(1 + (scored - len(having) + 0.5) / (len(having) + 0.5)))
        weight = f32(times * rarity)
        for name in having:
            average = f32(sum(lengths.values()) / scored)
            share = f32(f32(b * kept_length(lengths[name])) / average)
            inverse = f32(1 / f32(k1 * f32(f32(1 - b) + share)))
            scores[name] += f32(weight - f32(weight / f32(1 + f32(terms[name][term] * inverse))))
    ranked = sorted(((f32(score), name) for name, score in scores.items()), key=lambda hit: (-hit[0], hit[1]))
    return [(name, score) for score, name in ranked[:k]]


def numbered(texts: list[str]) -> Docs:
    """Ids in no order of the rows."""
    return [(f"B{row * 7919 % 1000:03}", text) for row, text in enumerate(texts)]


TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join), min_size=1, max_size=25)
QUERY = st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=8).map(" ".join)


@given(texts=TEXTS, text=QUERY, k=st.integers(1, 30), k1=st.sampled_from([0.9, 1.2, 3.0]), b=st.sampled_from([0.4, 1]))
def test_equal_to_the_formula(texts: list[str], text: str, k: int, k1: float, b: float) -> None:
    docs = numbered(texts)
    assert LuceneIndex.build(docs, k1=k1, b=b).search(text, k) == by_formula(docs, text, k, k1, b)


@given(texts=TEXTS, text=QUERY, k=st.integers(1, 5), cost=st.sampled_from([0, 1, 1000]))
def test_skipping_changes_nothing(texts: list[str], text: str, k: int, cost: int) -> None:
    docs = numbered(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query, "_FEW", 0)
        patch.setattr(query, "_LOOKUP_COST", cost)
        patch.setattr(query, "_PRECOMPUTED", -1)
        index = LuceneIndex.build(docs)
        assert index.search(text, k) == by_formula(docs, text, k)
        assert index.search(text, k) == by_formula(docs, text, k), "the sums are cleared"


@pytest.mark.long
def test_a_long_corpus_with_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "_FEW", 30)
    monkeypatch.setattr(query, "_PRECOMPUTED", -1)
    rng = np.random.default_rng(0)
    drawn = np.minimum(rng.zipf(1.3, (700, 30)), 200)
    docs = numbered([" ".join(f"w{word}" for word in row[: rng.integers(1, 30)]) for row in drawn])
    docs = [(f"{name}{row}", text) for row, (name, text) in enumerate(docs)]
    index = LuceneIndex.build(docs)
    for _ in range(60):
        text = " ".join(f"w{word}" for word in np.minimum(rng.zipf(1.3, 6), 200))
        assert index.search(text, 10) == by_formula(docs, text, 10), text


def test_ties_go_to_the_smaller_id_even_where_the_list_is_cut() -> None:
    docs = [(name, "red shirt") for name in ("b", "c", "a", "é", "Z", "😀", "\uffff")]
    hits = LuceneIndex.build(docs).search("shirt", 6)
    assert [name for name, _ in hits] == ["Z", "a", "b", "c", "é", "\uffff"], "order of code points"
    assert len({score for _, score in hits}) == 1


def test_a_score_by_hand() -> None:
    # N=2, df=1: idf = ln 2; average length 1.5; inverse = 1 / (0.9 * (0.6 + 0.4 * 1 / 1.5))
    docs = [("x", "shirt"), ("y", "red shoe")]
    [(name, score)] = LuceneIndex.build(docs).search("shirts", 10)
    assert name == "x"
    assert score == pytest.approx(math.log(2) * (1 - 1 / (1 + 1 / (0.9 * (0.6 + 0.4 / 1.5)))), rel=1e-6)


@pytest.mark.parametrize("text", ["", "the of and", "unknown", "...", "🙂"])
def test_nothing_found_is_an_empty_list(text: str) -> None:
    assert LuceneIndex.build([("x", "red hat"), ("y", "the")]).search(text, 5) == []


def test_documents_without_terms_count_as_documents_but_not_in_scores() -> None:
    docs = [("x", "red hat"), ("y", "blue hat")]
    more = [*docs, ("e", ""), ("f", "the of")]
    assert LuceneIndex.build(more).search("red hat", 5) == LuceneIndex.build(docs).search("red hat", 5)
    assert len(LuceneIndex.build(more)) == 4


def test_no_documents_at_all() -> None:
    index = LuceneIndex.build([])
    assert (len(index), index.search("red", 3)) == (0, [])


def test_wrong_use() -> None:
    index = LuceneIndex.build([("x", "red")])
    with pytest.raises(RetrievalError, match="k=0"):
        index.search("red", 0)
    index.close()
    index.close()
    with pytest.raises(RetrievalError, match="closed"):
        index.search("red", 1)
    for settings_ in ({"k1": -1}, {"b": 1.5}, {"k1": float("nan")}):
        with pytest.raises(RetrievalError, match="k1 must be"):
            LuceneIndex.build([("x", "red")], **settings_)


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        ([("x", "a"), ("y", "b"), ("x", "c")], "id 'x' is used by documents 0 and 2"),
        ([("", "a")], "document 0 .*empty"),
        ([("a\0", "a")], "NUL"),
        ([("\ud83d", "a")], "half a surrogate pair"),
    ],
)
def test_bad_ids(docs: Docs, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        LuceneIndex.build(docs)


def test_length_bytes() -> None:
    assert LENGTHS[:41].tolist() == [*range(40), 40]
    assert LENGTHS[[41, 42, 47, 48, 56, 255]].tolist() == [42, 44, 54, 56, 88, 2_013_265_944]
    lengths = np.array([*range(5000), 10**6, 2**31 - 1])
    assert LENGTHS[encode_lengths(lengths)].tolist() == [kept_length(length) for length in lengths.tolist()]


def test_threads_share_one_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    docs = numbered([" ".join(rng.choice(WORDS, 8)) for _ in range(200)])
    index = LuceneIndex.build(docs, tmp_path / "index")
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(40)]
    alone = [index.search(text, 10) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: index.search(text, 10), texts * 5)) == alone * 5


def test_the_last_spare_array_may_be_taken_by_another_thread(tmp_path: Path) -> None:
    index = LuceneIndex.build(numbered(["red shoe", "blue shirt"]), tmp_path / "i")
    searcher = index._searcher

    class Raced(deque[np.ndarray]):
        def __bool__(self) -> bool:
            return True  # it was there when this thread looked

    searcher._spare = Raced()
    assert [name for name, _ in index.search("red", 1)] == ["B000"]
