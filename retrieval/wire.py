"""Search-R1's wire format: what a request and a reply look like as JSON, for the server and for the client.

Request: `{"queries": [str], "topk": int, "return_scores": bool}`. Reply with scores: `{"result": [[{"document":
{"id", "contents"}, "score"}]]}`, one list per query, best first; without: `{"result": [[{"id", "contents"}]]}`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from turngym.retrieval.core import Hit, Passage, RetrievalError
from turngym.retrieval.corpus import parse_row

FINGERPRINT_HEADER = "Turngym-Fingerprint"
"""Reply header with the fingerprint of the index that answered: a client notices when it changes."""
PADDING_SCORE = 3.4e38
"""faiss fills up short answers with rows -1 and float32's extremes; the original server sends them as documents."""


class WireError(RetrievalError):
    """A reply that cannot be read; the text says where in it and what was expected."""


def normalize(query: str) -> str:
    """The query as it is searched and remembered: white space collapsed, letter case kept, always encodable."""
    return " ".join(query.encode("utf-8", "replace").decode("utf-8").split())


def request_body(queries: Sequence[str], k: int) -> bytes:
    """What a client sends; always with scores, because the original server answers wrongly without them."""
    return json.dumps({"queries": list(queries), "topk": k, "return_scores": True}).encode()


def reply_body(found: Sequence[Sequence[Hit]], scores: bool) -> bytes:
    """What a server answers; key order as the original's.

    Raises:
        ValueError: a score that is not finite, which JSON cannot carry.
    """
    rows = [[_entry(hit, scores) for hit in hits] for hits in found]
    return json.dumps({"result": rows}, separators=(",", ":"), allow_nan=False).encode()


def _entry(hit: Hit, scores: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": float(hit.score)} if scores else document


def read_reply(body: bytes, queries: int, k: int) -> list[list[Hit]]:
    """The hits of a reply to `queries` queries, at most `k` each; ours or the original server's.

    Raises:
        WireError: not JSON, another number of lists, an entry without document, contents or a finite score.
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the answer is not JSON ({error}): {_show(body)}") from error
    rows = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(rows, list):
        raise WireError(f'the answer is not {{"result": [...]}}: {_show(body)}')
    if len(rows) != queries:
        raise WireError(f"the answer has {len(rows)} result lists for {queries} queries")
    return [_read_hits(row, f"result[{number}]")[:k] for number, row in enumerate(rows)]


def _read_hits(row: Any, where: str) -> list[Hit]:
    if not isinstance(row, list):
        raise WireError(f"{where} is {_show(row)}; it must be a list of documents with scores")
    hits: dict[str, Hit] = {}
    for number, entry in enumerate(row):
        hit = _read_entry(entry, f"{where}[{number}]")
        # the original sends a row that faiss did not find as the last document: a made-up score or a repeat
        if abs(hit.score) < PADDING_SCORE:
            hits.setdefault(hit.passage.id, hit)
    return list(hits.values())


def _read_entry(entry: Any, where: str) -> Hit:
    if not isinstance(entry, dict) or not isinstance(entry.get("document"), dict) or "score" not in entry:
        raise WireError(f'{where} is {_show(entry)}; it must be {{"document": {{"id", "contents"}}, "score"}}')
    score = entry["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise WireError(f"{where}: score {_show(score)} is not a finite number")
    document = entry["document"]
    if "id" not in document and isinstance(document.get("contents"), str):
        # the original's BM25 leaves ids out: the same contents must still be the same passage
        digest = hashlib.sha256(document["contents"].encode("utf-8", "replace")).hexdigest()
        document = {**document, "id": f"sha256:{digest[:16]}"}
    passage: Passage = parse_row(document, f"{where}.document")
    return Hit(passage=passage, score=float(score))


def _show(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
