"""The plan: figures by hand from round slopes, growth that never shrinks, a page without outside files."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.retrieval.core import RetrievalError
from turngym.retrieval.plan import MEASURED, Slopes, advice, choices, clusters_for, plan_page, plan_table, show_time

ROUND = Slopes(
    machine="a made-up machine", passage_bytes=500, words_bytes=300, words_build_s=100, words_build_mb=200,
    words_query_ms=4, hashing_s=60, model_s=1000, flat_ns=0.1, sq8_ns=0.05, centre_ns=0.1, probe_ns=0.1, assign_ns=0.01,
    base_mb=100,
)  # fmt: skip


def test_figures_by_hand() -> None:
    words, flat, sq8, ivf = choices(1_000_000, 100, ROUND)
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
    assert "a made-up machine" in advice(1000, 10, ROUND)[-1]


@given(passages=st.integers(1, 10**9), dim=st.integers(1, 4096))
def test_more_passages_never_cost_less(passages: int, dim: int) -> None:
    for small, large in zip(choices(passages, dim), choices(passages * 4, dim), strict=True):
        for field in ("disk", "scratch", "serve_memory", "query_ms", "build_s"):
            assert getattr(small, field) <= getattr(large, field)


def test_clusters() -> None:
    assert [clusters_for(rows) for rows in (1, 10_000, 100_000, 1_000_000, 21_000_000)] == [16, 512, 1024, 4096, 16384]


def test_page_and_table() -> None:
    page = plan_page(21_000_000, 768)
    assert "21,000,000 passages" in page
    assert "http" not in page
    assert "src=" not in page
    (header, rows), notes = plan_table(21_000_000, 768)
    assert all(len(row) == len(header) for row in rows)
    assert len(notes) == 5
    assert all(value > 0 for value in dataclasses.astuple(MEASURED) if not isinstance(value, str))
    with pytest.raises(RetrievalError, match="0 passages"):
        plan_table(0, 768)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0042, "4.2 ms"),
        (0.5, "500 ms"),
        (1.5, "1.5 s"),
        (90, "90 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (10**6, "12 days"),
    ],
)
def test_times(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown
