"""Dense retrieval: exact order by hand, faiss' traps (-1 rows, slow batches, mapping, threads after a fork)."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import RetrievalError
from turngym.retrieval import dense
from turngym.retrieval.core import Passage, RetrieverUnavailable
from turngym.retrieval.dense import DenseRetriever
from turngym.retrieval.faiss_index import (
    load_faiss,
    make_index,
    quickest,
    read_index,
    search_index,
    set_parameters,
    train_index,
    try_index,
)


class Table:
    """An encoder that knows the vectors of its texts."""

    fingerprint = "table"

    def __init__(self, vectors: dict[str, list[float]]) -> None:
        self.vectors = vectors
        self.dim = len(next(iter(vectors.values())))

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([self.vectors[text] for text in texts], np.float32)

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        return self.encode_queries([passage.text for passage in passages])


def passages(*texts: str) -> list[Passage]:
    return [Passage(id=f"p{row}", title="", text=text) for row, text in enumerate(texts)]


TABLE = Table({"x": [1, 0], "y": [0, 1], "xy": [0.6, 0.8], "-x": [-1, 0], "none": [0, 0]})


def test_of_many_equal_passages_the_first_are_found_alone_and_in_a_batch() -> None:
    # by a matrix product equal rows have scores that differ in the last digit, by their place in the block
    drawn = np.random.default_rng(0).normal(size=(300, 96))
    table = Table({f"t{row}": (vector / np.linalg.norm(vector)).tolist() for row, vector in enumerate(drawn)})
    retriever = DenseRetriever.from_passages(passages(*(f"t{row % 250}" for row in range(400)), *["t7"] * 40), table)
    queries = [f"t{row}" for row in range(60)]
    batch = retriever.search(queries, 5)
    assert [hit.passage.id for hit in batch[7]] == ["p7", "p257", "p400", "p401", "p402"]
    assert batch == [retriever.search([query], 5)[0] for query in queries]


def test_inner_product_order_and_ties_by_row() -> None:
    retriever = DenseRetriever.from_passages(passages("y", "xy", "x", "xy", "-x"), TABLE)
    (hits,) = retriever.search(["xy"], 4)
    assert [hit.passage.id for hit in hits] == ["p1", "p3", "p0", "p2"]
    assert [hit.score for hit in hits] == pytest.approx([1.0, 1.0, 0.8, 0.6])
    assert retriever.fingerprint.startswith("dense:Flat:table:corpus=")


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW8", "IVF2,Flat", "IVF2,SQ8"])
def test_more_asked_for_than_there_is(factory: str) -> None:
    """faiss fills up with row -1, which as a Python index would be the last passage."""
    found = DenseRetriever.from_passages(passages("x", "y", "xy", "-x"), TABLE, factory=factory).search(["x"], 50)
    names = [hit.passage.id for hit in found[0]]
    assert len(names) == len(set(names)) <= 4
    assert names[0] == "p0"
    assert all(np.isfinite(hit.score) for hit in found[0])


def test_one_probed_cluster_gives_fewer_not_wrong_hits() -> None:
    retriever = DenseRetriever.from_passages(
        passages("x", "y", "xy", "-x"), TABLE, factory="IVF2,Flat", parameters={"nprobe": 1}
    )
    (hits,) = retriever.search(["-x"], 4)
    assert 1 <= len(hits) < 4
    assert hits[0].passage.id == "p3"
    assert retriever.fingerprint.endswith(":nprobe=1")


def test_one_probed_cluster_is_chosen_or_said() -> None:
    """faiss searches one cluster where nobody says more, and a file keeps that."""
    texts = passages("x", "y", "xy", "-x")
    (hits,) = DenseRetriever.from_passages(texts, TABLE, factory="IVF2,Flat").search(["-x"], 4)
    assert len(hits) == 4
    index = faiss.index_factory(2, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(ROWS)
    index.add(ROWS)
    with pytest.warns(UserWarning, match="in 1 of its 2 clusters"):
        DenseRetriever(index, texts, TABLE, fingerprint="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DenseRetriever(index, texts, TABLE, fingerprint="", parameters={"nprobe": 1})
        index.nprobe = 2
        DenseRetriever(index, texts, TABLE, fingerprint="")


def test_empty_things() -> None:
    retriever = DenseRetriever.from_passages(passages("x", "y"), TABLE)
    assert retriever.search([], 3) == []
    assert retriever.search(["none"], 3) == [[]]
    assert DenseRetriever.from_passages([], TABLE).search(["x"], 3) == [[]]


def test_wrong_use() -> None:
    retriever = DenseRetriever.from_passages(passages("x"), TABLE)
    with pytest.raises(RetrievalError, match="k=0"):
        retriever.search(["x"], 0)
    with pytest.raises(RetrievalError, match="is the string 'x'"):
        retriever.search("x", 1)
    with pytest.raises(RetrievalError, match="1 vectors for 2 passages"):
        DenseRetriever(retriever._index, passages("x", "y"), TABLE, fingerprint="")
    with pytest.raises(RetrievalError, match="has 2 dimensions, the encoder 3"):
        DenseRetriever(retriever._index, passages("x"), Table({"x": [1, 2, 3]}), fingerprint="")
    retriever.close()
    retriever.close()
    with pytest.raises(RetrievalError, match="closed"):
        retriever.search(["x"], 1)


ROWS = np.array([[1, 0], [0, 1], [0.6, 0.8], [-1, 0]], np.float32)


def ready_made(kind: str, metric: int) -> Any:
    index = faiss.index_factory(2, kind, metric)
    index.train(ROWS)
    index.add(ROWS)
    return index


@pytest.mark.parametrize("kind", ["Flat", "HNSW4", "IVF1,Flat", "SQ8", "IDMap,Flat", "PCA2,Flat"])
def test_a_ready_made_index_by_another_metric_is_refused(kind: str, tmp_path: Path) -> None:
    texts = passages("x", "y", "xy", "-x")
    index = faiss.index_factory(2, kind, faiss.METRIC_L2)
    index.train(ROWS)
    (index.add_with_ids(ROWS, np.arange(4)) if kind.startswith("IDMap") else index.add(ROWS))
    faiss.write_index(index, str(tmp_path / "l2.faiss"))
    for opened in (index, tmp_path / "l2.faiss"):
        with pytest.raises(RetrievalError, match="metric L2; valid: METRIC_INNER_PRODUCT"):
            DenseRetriever(opened, texts, TABLE, fingerprint="")
    for other in ("Flat", "HNSW4", "IVF1,Flat"):
        retriever = DenseRetriever(ready_made(other, faiss.METRIC_INNER_PRODUCT), texts, TABLE, fingerprint="")
        assert [hit.passage.text for hit in retriever.search(["x"], 2)[0]] == ["x", "xy"]


def test_what_is_no_index_is_refused() -> None:
    with pytest.raises(RetrievalError, match="must be a faiss index"):
        DenseRetriever([[1.0]], passages("x"), TABLE, fingerprint="")


@pytest.mark.parametrize("kind", ["IDMap,Flat", "IDMap2,Flat", "IVF1,Flat", "IVF1,SQ8", "PCA2,IVF1,Flat"])
@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1000, 1001, 1002, 1003], [0, 1, 2, 2], [-1, 0, 1, 2], [-5, 1, 2, 3]])
def test_ids_of_an_index_are_rows(kind: str, ids: list[int]) -> None:
    texts = passages("x", "y", "xy", "-x")
    index = faiss.index_factory(2, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(ROWS)
    index.add_with_ids(ROWS, np.array([3, 2, 1, 0]))
    (hits,) = DenseRetriever(index, texts, TABLE, fingerprint="").search(["x"], 1)
    assert hits[0].passage.id == "p3"
    index = faiss.index_factory(2, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(ROWS)
    index.add_with_ids(ROWS, np.array(ids))
    with pytest.raises(RetrievalError, match="of the rows 0 to 3 are not among them"):
        DenseRetriever(index, texts, TABLE, fingerprint="")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_vector_in_the_index_that_is_not_finite(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = passages("x", "y", "xy", "-x", "far")
    index = ready_made("Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(np.array([[number, 0]], np.float32))
    with pytest.raises(RetrievalError, match="not finite"):
        DenseRetriever(index, texts, TABLE, fingerprint="")
    # a large index is not looked through when it is opened, nor is one of another kind
    monkeypatch.setattr(dense, "CHECKED_NUMBERS", 0)
    index = faiss.IndexFlatIP(2)
    index.add(np.full((5, 2), number, np.float32))
    graph = faiss.index_factory(2, "HNSW4", faiss.METRIC_INNER_PRODUCT)
    graph.add(np.full((5, 2), np.nan, np.float32))
    for found in (index, graph):
        with pytest.raises(RetrieverUnavailable, match="not finite"):
            DenseRetriever(found, texts, TABLE, fingerprint="").search(["x"], 2)


def test_scores_beyond_what_a_float_holds() -> None:
    index = faiss.IndexFlatIP(2)
    index.add(np.full((4, 2), 3e38, np.float32))
    far = Table({**TABLE.vectors, "x": [3e38, 3e38]})
    with pytest.raises(RetrieverUnavailable, match="score that is not finite"):
        DenseRetriever(index, passages("x", "y", "xy", "-x"), far, fingerprint="").search(["x"], 1)


@pytest.mark.parametrize(
    "vectors",
    [
        [[1.0, np.nan]],
        [[1e300, 0.0]],
        [[1.0, 0.0], [1.0, 0.0]],
        [1.0, 0.0],
        [["x", "y"]],
        [[1.0, 0.0], [1.0]],
        np.array([[1 + 1j, 0]]),
        np.array([[1.0, None]]),
        None,
    ],
)
def test_vectors_are_checked_when_built_and_when_asked(vectors: Any) -> None:
    class Odd(Table):
        def encode_queries(self, texts: Sequence[str]) -> Any:
            return vectors

    odd, index = Odd(TABLE.vectors), ready_made("Flat", faiss.METRIC_INNER_PRODUCT)
    with pytest.raises(RetrieverUnavailable, match="the encoder"):
        DenseRetriever(index, passages("x", "y", "xy", "-x"), odd, fingerprint="").search(["x"], 1)
    with pytest.raises(RetrieverUnavailable, match="the encoder"):
        DenseRetriever.from_passages(passages("x"), odd)


def test_faiss_errors_in_words() -> None:
    with pytest.raises(RetrievalError, match="'IFV3' with 8 dimensions"):
        make_index("IFV3", 8)
    with pytest.raises(RetrievalError, match="IndexFlat takes no search setting nprobe=3"):
        set_parameters(make_index("Flat", 8), {"nprobe": 3})
    for factory in ("IDMap,Flat", "NSG32"):
        with pytest.raises(RetrievalError, match=r"Index\w+ cannot take 3 vectors"):
            try_index(factory, 8, {}, 3)
    index = make_index("IVF1,Flat", 2)
    train_index(index, np.eye(2, dtype=np.float32))
    index.nprobe = 0
    with pytest.raises(RetrievalError, match="IndexIVFFlat cannot be searched"):
        search_index(index, np.eye(2, dtype=np.float32), 1)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e9, 2.5, "4"])
def test_search_settings_that_faiss_would_take_and_not_mean(value: float) -> None:
    for factory, name in (("IVF2,Flat", "nprobe"), ("HNSW8", "efSearch"), ("IVF2_HNSW8,Flat", "quantizer_efSearch")):
        with pytest.raises(RetrievalError, match=f"{name} is {value!r}; .* whole number from 1 to"):
            set_parameters(make_index(factory, 8), {name: value})
    refined = make_index("Flat,RFlat", 8)
    if value == 2.5:
        set_parameters(refined, {"k_factor_rf": value})
    else:
        with pytest.raises(RetrievalError, match=f"k_factor_rf is {value!r}; .* a number from 1 to"):
            set_parameters(refined, {"k_factor_rf": value})
    set_parameters(make_index("IVF2,Flat", 8), {"max_codes": 0})
    with pytest.raises(RetrievalError, match="3 vectors cannot train"):
        train_index(make_index("IVF4,Flat", 8), np.zeros((3, 8), np.float32))


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no such faiss index"):
        read_index(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"no index at all")
    with pytest.raises(RetrievalError, match="damaged faiss index"):
        read_index(tmp_path / "junk")
    index = make_index("Flat", 8)
    index.add(np.ones((100, 8), np.float32))
    faiss.write_index(index, str(tmp_path / "whole"))
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    with pytest.raises(RetrievalError, match="damaged faiss index"):
        read_index(tmp_path / "cut")


def test_a_file_that_ends_within_its_header(tmp_path: Path) -> None:
    """Without the size at which files are mapped, faiss ends the process."""
    index = make_index("HNSW8", 32)
    index.add(np.random.default_rng(0).random((300, 32), np.float32))
    faiss.write_index(index, str(tmp_path / "whole"))
    whole = (tmp_path / "whole").read_bytes()
    for size in (26, 29, 128, 179, 181):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(RetrievalError, match="damaged faiss index"):
            read_index(tmp_path / "cut")


def test_batches_are_matrix_products_and_single_queries_are_not() -> None:
    with quickest(make_index("Flat", 16), 1, exact=True):
        # older versions count queries, newer ones queries times dimensions
        assert faiss.cvar.distance_compute_blas_threshold in (4, 4 * 16)


def test_only_large_exact_searches_use_all_threads() -> None:
    before = load_faiss().omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    used = {}
    for queries, rows, exact in itertools.product((1, 64), (50_000, 1_000_000), (True, False)):
        with quickest(SimpleNamespace(d=384, ntotal=rows), queries, exact=exact):
            used[queries, rows, exact] = faiss.omp_get_max_threads()
    assert faiss.omp_get_max_threads() == 3
    faiss.omp_set_num_threads(before)
    assert used == {case: 1 if case[1:] == (50_000, True) else 3 for case in used}


@given(seed=st.integers(0, 1000), batch=st.integers(1, 70), k=st.integers(1, 12))
def test_a_query_gets_the_same_hits_in_any_batch(seed: int, batch: int, k: int) -> None:
    """Near ties on purpose, four at a time: they differ by less than float32 sums resolve."""
    rng = np.random.default_rng(seed)
    base = np.repeat(rng.standard_normal((15, 16)), 4, axis=0)
    rows = (base + rng.standard_normal((60, 16)) * 1e-7).astype(np.float32)
    index = make_index("Flat", 16)
    index.add(rows)
    retriever = DenseRetriever(index, passages(*["x"] * 60), Table({"x": [0.0] * 16}), fingerprint="")
    queries = rng.standard_normal((batch, 16)).astype(np.float32)
    scores, found = retriever.search_vectors(queries, k)
    for row in range(batch):
        alone_scores, alone = retriever.search_vectors(queries[row : row + 1], k)
        assert (alone_scores[0] == scores[row]).all()
        assert (alone[0] == found[row]).all()


MAPPED = """
import sys, numpy as np
from turngym.retrieval.faiss_index import read_index
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1000
query = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
for path in sys.argv[1:]:
    before = anonymous()
    index = read_index(path)
    index.search(query, 3)
    print(round(anonymous() - before, 1))
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_indexes_are_mapped_not_read(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((20_000, 256)).astype(np.float32)
    sizes = []
    for factory in ("Flat", "SQ8", "IVF16,Flat", "IVF16,SQ8", "HNSW8,SQ8"):
        index = make_index(factory, 256)
        train_index(index, vectors[:2000])
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / factory))
        sizes.append((tmp_path / factory).stat().st_size / 1e6)
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            MAPPED,
            *(str(tmp_path / name) for name in ("Flat", "SQ8", "IVF16,Flat", "IVF16,SQ8", "HNSW8,SQ8")),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    grown = [float(line) for line in run.stdout.split()]
    assert all(more < 0.4 * size for more, size in zip(grown, sizes, strict=True)), (grown, sizes)


FORKED = """
import os, signal, numpy as np
from turngym.retrieval.faiss_index import load_faiss, make_index
faiss = load_faiss()
faiss.omp_set_num_threads(4)
vectors = np.random.default_rng(0).standard_normal((4000, 32)).astype(np.float32)
index = make_index("SQ8", 32)
index.train(vectors); index.add(vectors)
wanted = index.search(vectors[:64], 3)[1]
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if (index.search(vectors[:64], 3)[1] == wanted).all() else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_search_after_a_fork_does_not_hang() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60, check=False).returncode == 0
