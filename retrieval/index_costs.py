"""What an index of a given size will cost in memory, disk and time, from measured slopes, and which to choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turngym.core.errors import RetrievalError
from turngym.core.tables import Table
from turngym.retrieval.faiss_index import default_parameters
from turngym.retrieval.index import show_bytes
from turngym.retrieval.index_vectors import training_rows

# These slopes were measured on this machine. Times are CPU time; passages have 100 words. Encoders at 10,000 passages;
# BM25, Flat and SQ8 at 1,000,000; IVF's two parts from 100,000 and 1,000,000 (x 384 dimensions). Two processes asked at
# once, sharing the memory's bandwidth: alone, full scans were up to twice as fast.
MACHINE = "one core of an AMD EPYC server (AVX-512), faiss-cpu 1.15.1, NumPy 2, torch 2.13"
PASSAGE_BYTES = 674.0
"""Disk per stored passage, offsets and checksums included."""
WORDS_BYTES = 456.0
"""Disk of BM25 per passage."""
WORDS_BUILD_S = 255.0
"""BM25 build per million passages."""
WORDS_BUILD_BYTES = 600e6
"""Peak memory of a BM25 build without mapped files; it does not grow, because the build works in runs."""
WORDS_QUERY_MS = 0.71
"""BM25 query of eight words per million passages, measured at a million. Below, fixed costs of 0.2 ms weigh more;
above, it is an upper bound, because ten times as many passages cost less than twice the time."""
HASHING_S = 210.0
"""Hashing encoder per million passages, counting included."""
MODEL_S = 296_000.0
"""Encoder of BERT-base size per million passages of 130 tokens."""
FLAT_NS, SQ8_NS = 0.33, 0.21
"""Full scan of float32, and of 8-bit codes, per vector and dimension."""
CENTRE_NS = 0.225
"""Choosing the clusters of a query, per cluster and dimension."""
PROBE_NS = 0.25
"""Scan of 8-bit codes in probed clusters, per vector and dimension."""
ASSIGN_NS = 0.021
"""Finding the nearest cluster by matrix products (training, adding), per vector, cluster and dimension."""
BASE_BYTES = 70e6
"""Resident memory of a process that has loaded Python, NumPy and faiss."""
ROUNDS = 10
"""Rounds of k-means in faiss' IVF training."""
SHARD_BYTES = 0.3e9
"""Bytes of one shard's codes, queues and copies while building."""
QUERY_MS = 10.0
"""The advice prefers an index whose single queries take at most this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCosts:
    """Costs of one kind of index."""

    name: str
    """`bm25` or a faiss factory string."""
    disk: float
    """Bytes of the finished index, passages included."""
    scratch: float
    """Further bytes on disk while building (float32 vectors)."""
    build_memory: float
    """Bytes of RAM that building needs."""
    serve_memory: float
    """Bytes of RAM that hold the whole index; with less, a mapped index is slower, but works."""
    build_s: float
    """Seconds on one core, without encoding."""
    query_ms: float
    """One query on one core, with the pages in memory."""
    recall: str
    """Recall@3, compared with the exact answer."""


def clusters_for(passages: int) -> int:
    """IVF clusters for a corpus: the power of two nearest to four times its square root."""
    return 1 << max(4, round(math.log2(4 * math.sqrt(max(passages, 1)))))


def choices(passages: int, dim: int) -> list[IndexCosts]:
    """Costs of BM25, Flat, SQ8 and IVF with 8-bit codes. Raises RetrievalError for passages or dim below 1."""
    if passages < 1 or dim < 1:
        raise RetrievalError(f"{passages} passages of {dim} dimensions; both must be at least 1")
    millions, cells = passages / 1e6, passages * dim * 1e-9
    text, words = PASSAGE_BYTES * passages, WORDS_BYTES * passages
    codes, vectors = 1.0 * passages * dim, 4.0 * passages * dim
    clusters = clusters_for(passages)
    ivf = f"IVF{clusters},SQ8"
    probed = min(1.0, default_parameters(ivf)["nprobe"] / clusters)
    trained = min(passages, training_rows(ivf))
    lists = 4.0 * clusters * dim + 8.0 * passages
    return [
        IndexCosts(
            name="bm25",
            disk=text + words,
            scratch=words,
            build_memory=BASE_BYTES + min(WORDS_BUILD_BYTES, 8 * words),
            serve_memory=BASE_BYTES + words,
            build_s=WORDS_BUILD_S * millions,
            query_ms=WORDS_QUERY_MS * millions,
            recall="other",
        ),
        IndexCosts(
            name="Flat",
            disk=text + vectors,
            scratch=vectors,
            build_memory=BASE_BYTES + SHARD_BYTES,
            serve_memory=BASE_BYTES + vectors,
            build_s=cells,
            query_ms=FLAT_NS * cells * 1e3,
            recall="1.000",
        ),
        IndexCosts(
            name="SQ8",
            disk=text + codes,
            scratch=vectors,
            build_memory=BASE_BYTES + SHARD_BYTES + 4.0 * dim * min(passages, training_rows("SQ8")),
            serve_memory=BASE_BYTES + codes,
            build_s=5 * cells,
            query_ms=SQ8_NS * cells * 1e3,
            recall="0.99",
        ),
        IndexCosts(
            name=ivf,
            disk=text + codes + lists,
            scratch=vectors + codes,
            build_memory=BASE_BYTES + SHARD_BYTES + lists + 4.0 * dim * trained,
            serve_memory=BASE_BYTES + codes + lists,
            build_s=ASSIGN_NS * 1e-9 * clusters * dim * (ROUNDS * trained + passages),
            query_ms=(CENTRE_NS * clusters * dim + PROBE_NS * probed * passages * dim) * 1e-6,
            recall="0.98",
        ),
    ]


def advice(passages: int, dim: int) -> list[str]:
    """Sentences that say what to choose, and on what the figures rest."""
    by_name = {choice.name: choice for choice in choices(passages, dim)}
    fast = [choice for name, choice in by_name.items() if name != "bm25" and choice.query_ms <= QUERY_MS]
    best = fast[0] if fast else next(choice for name, choice in by_name.items() if name.startswith("IVF"))
    words, encode = by_name["bm25"], MODEL_S * passages / 1e6
    missed = f" It misses {QUERY_MS:g} ms: probe fewer clusters (--parameters nprobe N) or spread the load."
    return [
        f"Vectors: --kind dense --factory {best.name}, the most exact index with queries of about "
        f"{show_time(best.query_ms / 1e3)}; {show_bytes(best.disk)} on disk, {show_bytes(best.build_memory)} of RAM to "
        f"build it, {show_bytes(best.serve_memory)} to have all of it at hand." + ("" if fast else missed),
        f"Words: --kind bm25 needs no encoder and no GPU; built in {show_time(words.build_s)}, "
        f"{show_bytes(words.disk)} on disk, {show_time(words.query_ms / 1e3)} per query.",
        f"Encoding comes on top: the hashing encoder takes {show_time(HASHING_S * passages / 1e6)} on one core, "
        f"a model of BERT-base size {show_time(encode)}, so {show_time(encode / 1000)} where a GPU is a thousand times "
        "as fast. Measure your own rate on a thousand passages and scale it.",
        f"While building, {show_bytes(best.scratch)} of float32 vectors lie beside the index and are removed at the "
        "end; a killed build goes on with the vectors it has.",
        f"Measured on {MACHINE}; passages of 100 words; times are of one core, with all pages in memory. "
        "Recall is on made-up vectors in overlapping groups, with nprobe as `turngym index build` stores it.",
    ]


def plan_table(passages: int, dim: int) -> tuple[Table, list[str]]:
    """((header, rows), notes) for people."""
    header = ["index", "disk", "scratch disk", "RAM to build", "RAM to serve", "build, 1 core", "query", "recall@3"]
    rows = [
        [
            *(choice.name, show_bytes(choice.disk), show_bytes(choice.scratch), show_bytes(choice.build_memory)),
            *(show_bytes(choice.serve_memory), show_time(choice.build_s), show_time(choice.query_ms / 1e3)),
            choice.recall,
        ]
        for choice in choices(passages, dim)
    ]
    return (header, rows), advice(passages, dim)


def show_time(seconds: float) -> str:
    """0.0042 -> 4.2 ms; 7200 -> 2.0 h."""
    for unit, size in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        limit = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 2 * 86400.0}[unit]
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
