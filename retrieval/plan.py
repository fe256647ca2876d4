"""What an index of a given size will cost in memory, disk and time, from measured slopes, and which to choose."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from turngym.retrieval.core import RetrievalError
from turngym.retrieval.index import show_bytes
from turngym.retrieval.index_vectors import default_parameters, training_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Costs as `turngym bench retrieval` measured them. Times are CPU time of one core; passages have 100 words."""

    machine: str
    passage_bytes: float
    """Disk per stored passage, offsets and checksums included."""
    words_bytes: float
    """Disk of BM25 per passage."""
    words_build_s: float
    """BM25 build per million passages."""
    words_build_mb: float
    """Peak memory of a BM25 build without mapped files; it does not grow, because the build works in runs."""
    words_query_ms: float
    """BM25 query of eight words per million passages, measured at a million. Below, fixed costs of 0.2 ms weigh more;
    above, it is an upper bound, because ten times as many passages cost less than twice the time."""
    hashing_s: float
    """Hashing encoder per million passages, counting included."""
    model_s: float
    """Encoder of BERT-base size per million passages of 130 tokens."""
    flat_ns: float
    """Full scan of float32 per vector and dimension."""
    sq8_ns: float
    """Full scan of 8-bit codes per vector and dimension."""
    centre_ns: float
    """Choosing the clusters of a query, per cluster and dimension."""
    probe_ns: float
    """Scan of 8-bit codes in probed clusters, per vector and dimension."""
    assign_ns: float
    """Finding the nearest cluster by matrix products (training, adding), per vector, cluster and dimension."""
    base_mb: float
    """Resident memory of a process that has loaded Python, NumPy and faiss."""


# Encoders at 10,000 passages; BM25, Flat and SQ8 at 1,000,000; IVF's two parts from 100,000 and 1,000,000 (x 384
# dimensions). Two processes asked at once, sharing the memory's bandwidth: alone, full scans were up to twice as fast.
MEASURED = Slopes(
    machine="one core of an AMD EPYC server (AVX-512), faiss-cpu 1.15.1, NumPy 2, torch 2.13",
    passage_bytes=674.0,
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
Table = tuple[list[str], list[list[str]]]
"""Header and rows."""
ROUNDS = 10
"""Rounds of k-means in faiss' IVF training."""
PIECE = 0.3e9
"""Bytes of one shard's codes, queues and copies while building."""
QUERY_MS = 10.0
"""The advice prefers an index whose single queries take at most this."""
SIZES = (10_000, 100_000, 1_000_000, 21_000_000)
"""Sizes for which the HTML page has tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
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


def choices(passages: int, dim: int, slopes: Slopes = MEASURED) -> list[Choice]:
    """Costs of BM25, Flat, SQ8 and IVF with 8-bit codes. Raises RetrievalError for passages or dim below 1."""
    if passages < 1 or dim < 1:
        raise RetrievalError(f"{passages} passages of {dim} dimensions; both must be at least 1")
    millions, cells = passages / 1e6, passages * dim * 1e-9
    base, text = slopes.base_mb * 1e6, slopes.passage_bytes * passages
    vectors, words = 4.0 * passages * dim, slopes.words_bytes * passages
    return [
        Choice(
            name="bm25",
            disk=text + words,
            scratch=words,
            build_memory=base + min(slopes.words_build_mb * 1e6, 8 * words),
            serve_memory=base + words,
            build_s=slopes.words_build_s * millions,
            query_ms=slopes.words_query_ms * millions,
            recall="other",
        ),
        Choice(
            name="Flat",
            disk=text + vectors,
            scratch=vectors,
            build_memory=base + PIECE,
            serve_memory=base + vectors,
            build_s=cells,
            query_ms=slopes.flat_ns * cells * 1e3,
            recall="1.000",
        ),
        *_coded(passages, dim, slopes),
    ]


def _coded(passages: int, dim: int, slopes: Slopes) -> list[Choice]:
    """The kinds with 8-bit codes: SQ8 and IVF."""
    clusters = clusters_for(passages)
    name = f"IVF{clusters},SQ8"
    probed = min(1.0, default_parameters(name, passages)["nprobe"] / clusters)
    trained, cells = min(passages, training_rows(name)), passages * dim * 1e-9
    text, codes, vectors = slopes.passage_bytes * passages, 1.0 * passages * dim, 4.0 * passages * dim
    table, base = 4.0 * clusters * dim + 8.0 * passages, slopes.base_mb * 1e6
    return [
        Choice(
            name="SQ8",
            disk=text + codes,
            scratch=vectors,
            build_memory=base + PIECE + 4.0 * dim * min(passages, training_rows("SQ8")),
            serve_memory=base + codes,
            build_s=5 * cells,
            query_ms=slopes.sq8_ns * cells * 1e3,
            recall="0.99",
        ),
        Choice(
            name=name,
            disk=text + codes + table,
            scratch=vectors + codes,
            build_memory=base + PIECE + table + 4.0 * dim * trained,
            serve_memory=base + codes + table,
            build_s=slopes.assign_ns * 1e-9 * clusters * dim * (ROUNDS * trained + passages),
            query_ms=(slopes.centre_ns * clusters * dim + slopes.probe_ns * probed * passages * dim) * 1e-6,
            recall="0.98",
        ),
    ]


def advice(passages: int, dim: int, slopes: Slopes = MEASURED) -> list[str]:
    """Sentences that say what to choose, and on what the figures rest."""
    found = {choice.name: choice for choice in choices(passages, dim, slopes)}
    fast = [choice for name, choice in found.items() if name != "bm25" and choice.query_ms <= QUERY_MS]
    best = fast[0] if fast else next(choice for name, choice in found.items() if name.startswith("IVF"))
    words, encode = found["bm25"], slopes.model_s * passages / 1e6
    missed = f" It misses {QUERY_MS:g} ms: probe fewer clusters (--set nprobe=...) or spread the load."
    return [
        f"Vectors: --kind dense --factory {best.name}, the most exact index with queries of about "
        f"{show_time(best.query_ms / 1e3)}; {show_bytes(best.disk)} on disk, {show_bytes(best.build_memory)} of RAM to "
        f"build it, {show_bytes(best.serve_memory)} to have all of it at hand." + ("" if fast else missed),
        f"Words: --kind bm25 needs no encoder and no GPU; built in {show_time(words.build_s)}, "
        f"{show_bytes(words.disk)} on disk, {show_time(words.query_ms / 1e3)} per query.",
        f"Encoding comes on top: the hashing encoder takes {show_time(slopes.hashing_s * passages / 1e6)} on one core, "
        f"a model of BERT-base size {show_time(encode)}, so {show_time(encode / 1000)} where a GPU is a thousand times "
        "as fast. Measure your own rate on a thousand passages and scale it.",
        f"While building, {show_bytes(best.scratch)} of float32 vectors lie beside the index and are removed at the "
        "end; a killed build goes on with the vectors it has.",
        f"Measured on {slopes.machine}; passages of 100 words; times are of one core, with all pages in memory. "
        "Recall is on made-up vectors in overlapping groups, with nprobe as `turngym index build` stores it.",
    ]


def plan_table(
    passages: int, dim: int, slopes: Slopes = MEASURED
) -> tuple[tuple[list[str], list[list[str]]], list[str]]:
    """((header, rows), notes) for people."""
    header = ["index", "disk", "scratch disk", "RAM to build", "RAM to serve", "build, 1 core", "query", "recall@3"]
    rows = [
        [
            *(choice.name, show_bytes(choice.disk), show_bytes(choice.scratch), show_bytes(choice.build_memory)),
            *(show_bytes(choice.serve_memory), show_time(choice.build_s), show_time(choice.query_ms / 1e3)),
            choice.recall,
        ]
        for choice in choices(passages, dim, slopes)
    ]
    return (header, rows), advice(passages, dim, slopes)


def plan_page(passages: int, dim: int, slopes: Slopes = MEASURED) -> str:
    """The plan, and how it grows, as one self-contained HTML page."""
    table, notes = plan_table(passages, dim, slopes)
    parts = [f"<h1>An index of {passages:,} passages, {dim} dimensions</h1>", _html(table)]
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    for size in sorted({*SIZES, passages}):
        parts += [f"<h2>{size:,} passages</h2>", _html(plan_table(size, dim, slopes)[0])]
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse;width:100%}"
        "td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:right}"
        "td:first-child,th:first-child{text-align:left}h2{font-size:1.1rem;margin-top:2rem}"
    )
    title = f"Index plan: {passages:,} passages"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def show_time(seconds: float) -> str:
    """0.0042 -> 4.2 ms; 7200 -> 2.0 h."""
    for unit, size in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        limit = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 2 * 86400.0}[unit]
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _html(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
