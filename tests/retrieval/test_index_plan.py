"""The plan: figures by hand from round slopes, and costs that grow with the corpus."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import RetrievalError
from turngym.retrieval import index_costs
from turngym.retrieval.index_costs import advice, choices, clusters_for, plan_table, show_time


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = {"PASSAGE_BYTES": 500, "WORDS_BYTES": 300, "WORDS_BUILD_S": 100, "WORDS_QUERY_MS": 4, "BASE_BYTES": 1e8}
    slopes |= {"FLAT_NS": 0.1, "SQ8_NS": 0.05, "CENTRE_NS": 0.1, "PROBE_NS": 0.1, "ASSIGN_NS": 0.01}
    for name, value in slopes.items():
        monkeypatch.setattr(index_costs, name, value)
    words, flat, sq8, ivf = choices(1_000_000, 100)
    assert (words.disk, words.query_ms, words.build_s) == (0.8e9, 4.0, 100.0)
    assert flat.disk == 0.5e9 + 0.4e9
    assert flat.query_ms == pytest.approx(10.0)
    assert flat.serve_memory == 0.1e9 + 0.4e9
    assert sq8.query_ms == pytest.approx(5.0)
    assert ivf.name == "IVF4096,SQ8"
    assert ivf.query_ms == pytest.approx(4096 * 100 * 0.1e-6 + 1_000_000 / 32 * 100 * 0.1e-6)
    assert ivf.build_s == pytest.approx(0.01e-9 * 4096 * 100 * (10 * 48 * 4096 + 1_000_000))


def test_advice_takes_the_most_exact_that_is_fast() -> None:
    assert "--factory Flat," in advice(10_000, 384)[0]
    assert "--factory IVF" in advice(5_000_000, 384)[0]
    assert "misses 10 ms" in advice(200_000_000, 768)[0]


@given(passages=st.integers(1, 10**9), dim=st.integers(1, 4096))
def test_more_passages_never_cost_less(passages: int, dim: int) -> None:
    for small, large in zip(choices(passages, dim), choices(passages * 4, dim), strict=True):
        for field in ("disk", "scratch", "serve_memory", "query_ms", "build_s"):
            assert getattr(small, field) <= getattr(large, field)


def test_clusters() -> None:
    assert [clusters_for(rows) for rows in (1, 10_000, 100_000, 1_000_000, 21_000_000)] == [16, 512, 1024, 4096, 16384]


def test_the_table_has_a_cell_for_every_column() -> None:
    (header, rows), _ = plan_table(21_000_000, 768)
    assert [len(row) for row in rows] == [len(header)] * 4
    with pytest.raises(RetrievalError, match="0 passages"):
        plan_table(0, 768)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0.0042, "4.2 ms"), (0.5, "500 ms"), (1.5, "1.5 s"), (90, "90 s"), (600, "10 min"), (7200, "2 h")),
        (10**6, "12 days"),
    ],
)
def test_times(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown
