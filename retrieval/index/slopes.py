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
    """BM25 query of eight words per million passages, taken at a million: below, fixed costs of 0.2 ms weigh more, and
    above it is an upper bound, since ten times as many passages cost less than twice the time."""
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


# Encoders at 10,000 passages; BM25, Flat and SQ8 at 1,000,000; IVF's two parts from 100,000 and 1,000,000 (x 384
# dimensions). Two processes asked at once, sharing the memory's bandwidth: alone, full scans were up to twice as fast.
MEASURED = Slopes(
    machine="one core of an AMD EPYC server (AVX-512), faiss-cpu 1.15.1, NumPy 2, torch 2.13",
    passage_bytes=690.0,
    words_bytes=456.0,
    words_build_s=255.0,
    words_build_mb=600.0,
    words_query_ms=0.71,
    hashing_s=210.0,
    model_s=296_000.0,
    flat_ns=0.33,
    sq8_ns=0.21,
    centre_ns=0.225,
    probe_ns=0.25,
    assign_ns=0.021,
    base_mb=70.0,
)
