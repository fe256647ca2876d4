"""What retrieval costs per passage, as `turngym bench retrieval` measured it; `turngym index plan` computes from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Measured costs. Times are CPU time of one core; passages have 100 words."""

    machine: str
    passage_bytes: float
    """Disk per stored passage, id table and offsets included."""
    words_bytes: float
    """Disk of BM25 per passage."""
    words_build_s: float
    """BM25 build per million passages."""
    words_build_mb: float
    """Peak memory of a BM25 build, without what is mapped; it works in runs, so this does not grow."""
    words_query_ms: float
    """BM25 query of eight words per million passages; taken at 10,000, where fixed costs weigh most: an upper bound."""
    hashing_s: float
    """Hashing encoder per million passages, counting included."""
    model_s: float
    """Encoder of BERT-base size per million passages of 130 tokens."""
    flat_ns: float
    """Full scan of float32 per vector and dimension."""
    sq8_ns: float
    """Full scan of 8-bit codes per vector and dimension."""
    centre_ns: float
    """Choice of clusters by a query, per cluster and dimension."""
    probe_ns: float
    """Scan of 8-bit codes in probed clusters, per vector and dimension."""
    assign_ns: float
    """Nearest of many clusters by matrix products (training rounds, adding), per vector, cluster and dimension."""
    base_mb: float
    """Resident memory of a process that has loaded Python, NumPy and faiss."""


# BM25 and the encoders at 10,000 passages, Flat and SQ8 at 100,000, IVF at 1,000,000 (x 384 dimensions).
MEASURED = Slopes(
    machine="one core of an AMD EPYC server (AVX-512), faiss-cpu 1.15.1, NumPy 2, torch 2.13",
    passage_bytes=690.0,
    words_bytes=420.0,
    words_build_s=232.0,
    words_build_mb=600.0,
    words_query_ms=15.0,
    hashing_s=210.0,
    model_s=296_000.0,
    flat_ns=0.16,
    sq8_ns=0.074,
    centre_ns=0.16,
    probe_ns=0.13,
    assign_ns=0.022,
    base_mb=70.0,
)
