"""Search-R1's wire format: what a request and a reply look like as JSON, for the server and for the client.

Request: `{"queries": [str], "topk": int, "return_scores": bool}`. Reply with scores: `{"result": [[{"document":
{"id", "contents"}, "score"}]]}`, one list per query, best first; without: `{"result": [[{"id", "contents"}]]}`.
Servers of web searches leave out id and score.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from turngym.core.errors import RetrievalError
from turngym.core.numbers import Count, NotNegative, Number, Positive
from turngym.core.redaction import brief, excerpt
from turngym.core.spec import SettingsError, Spec
from turngym.core.user_files import too_many_values
from turngym.retrieval.core import Hit, Passage
from turngym.retrieval.corpus import parse_row


class RetrievalServerSettings(Spec):
    """Limits, batching and cache of one retrieval server."""

    topk: Count = 3
    """Passages per query if a request does not say."""
    max_topk: Count = 100
    """Most passages per query that a request may ask for."""
    max_queries: Count = 8192
    """Most queries in one request; Search-R1 sends a whole training batch at once."""
    max_query_chars: Count = 32_768
    """Longest query, in characters."""
    max_body: Count = 32 * 2**20
    """Largest request body, in bytes."""
    max_batch: Count = 32
    """Most queries that one call of the retriever answers. Half of the clients is best: the other half sends its next
    queries meanwhile."""
    window_ms: NotNegative = 3.0
    """How long a batch waits for more queries while several clients are busy; an idle server never waits."""
    workers: Count = 1
    """Threads that call the retriever; faiss uses all cores in each."""
    max_waiting: Number = 32_768
    """Most queries that may wait; further ones are refused with 503 until some are answered."""
    deadline: Positive = 12.0
    """Seconds after which a waiting request is answered with 503; should be less than the client's own deadline."""
    cache: Number = 16_384
    """Queries whose answers are remembered, 4 kB each (a longer one counts as several); 0 remembers none."""

    def __post_init__(self) -> None:
        if self.topk > self.max_topk:
            raise SettingsError(f"topk is {self.topk}; valid: at most {self.max_topk}, max_topk")
        if self.max_waiting < self.max_queries:
            raise SettingsError(
                f"max_waiting is {self.max_waiting}; valid: at least {self.max_queries}, max_queries: a request of "
                "allowed size would always be refused"
            )


FIELDS = ("queries", "query", "topk", "return_scores")
EXAMPLE = '{"queries": ["who wrote Hamlet"], "topk": 3, "return_scores": true}'


class BadRequest(RetrievalError):
    """A request cannot be answered; has the HTTP status, the field at fault, and what would be valid."""

    def __init__(self, text: str, *, status: int = 422, field: str | None = None, valid: str = EXAMPLE) -> None:
        """Makes the error that the client gets as JSON.

        Args:
            field: the field of the request at fault; None: the body as a whole.
            valid: an example of what would be valid.
        """
        super().__init__(text)
        self.status, self.field, self.valid = status, field, valid

    def as_json(self) -> dict[str, Any]:
        return {"error": str(self), "field": self.field, "valid": self.valid}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A request that was checked; `k` is within the server's limits."""

    queries: tuple[str, ...]
    k: int
    scores: bool


def read_request(body: bytes, settings: RetrievalServerSettings) -> SearchRequest:
    """Reads the request in `body`. It may have no queries: Search-R1 sends that when no episode searches.

    Raises:
        BadRequest: not UTF-8 or not JSON (400), unknown fields, wrong types, beyond the limits (422).
    """
    try:
        text = body.decode("utf-8")
        if len(body) > COUNTED_FROM and too_many_values(body, settings.max_queries + 8):
            valid = f"at most {settings.max_queries} queries, which are strings"
            raise BadRequest("the body has too many values", field="queries", valid=valid)
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        byte = body[error.start]
        raise BadRequest(f"the body is not UTF-8: byte 0x{byte:02x} at offset {error.start}", status=400) from None
    except (ValueError, RecursionError) as error:
        what = "the body is empty" if not body.strip() else f"the body is not JSON: {excerpt(error, 60)}"
        raise BadRequest(what, status=400) from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {_type(fields)}; it must be a JSON object")
    for name in fields:
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            valid = f"fields {', '.join(FIELDS)}"
            raise BadRequest(f"unknown field {excerpt(name, 60)!r}{hint}", field=excerpt(name, 60), valid=valid)
    queries = _queries(fields, settings)
    k = fields.get("topk")
    if isinstance(k, bool) or not isinstance(k, int | None):
        raise BadRequest(f"topk is {_type(k)}; it must be a whole number or null", field="topk")
    # 0 is not given, too, as with the original server
    k = k or settings.topk
    if not 0 < k <= settings.max_topk:
        valid = f"1 to {settings.max_topk}, or null for {settings.topk}"
        raise BadRequest(f"topk is {excerpt(k, 60)}, out of range", field="topk", valid=valid)
    scores = fields.get("return_scores", False)
    if not isinstance(scores, bool):
        what = f"return_scores is {_type(scores)}; it must be true or false"
        raise BadRequest(what, field="return_scores", valid="true or false")
    return SearchRequest(queries=queries, k=k, scores=scores)


COUNTED_FROM = 1 << 20
"""Bytes from which a body's values are counted before they are made."""


def _queries(fields: dict[str, Any], settings: RetrievalServerSettings) -> tuple[str, ...]:
    if ("queries" in fields) == ("query" in fields):
        what = "both queries and query are given" if "query" in fields else "there is no queries field"
        raise BadRequest(f"{what}; send queries (a list) or query (one string)", field="queries")
    if "query" in fields:
        return (_text(fields["query"], "query", settings),)
    queries = fields["queries"]
    if not isinstance(queries, list):
        hint = "; send a single one as query" if isinstance(queries, str) else ""
        raise BadRequest(f"queries is {_type(queries)}; it must be a list of strings{hint}", field="queries")
    if len(queries) > settings.max_queries:
        valid = f"at most {settings.max_queries} queries"
        raise BadRequest(f"{len(queries)} queries in one request", field="queries", valid=valid)
    return tuple(_text(query, f"queries[{number}]", settings) for number, query in enumerate(queries))


def _text(query: Any, field: str, settings: RetrievalServerSettings) -> str:
    if not isinstance(query, str):
        raise BadRequest(f"{field} is {_type(query)}; each query must be a string", field=field)
    if len(query) > settings.max_query_chars:
        valid = f"at most {settings.max_query_chars} characters"
        raise BadRequest(f"{field} has {len(query)} characters", field=field, valid=valid)
    try:
        query.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{field} has half a surrogate pair at character {error.start}, which is no text"
        raise BadRequest(what, field=field, valid="any Unicode text") from None
    return query


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    for kind, name in ((str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return f"the number {excerpt(json.dumps(value), 60)}"


FINGERPRINT_HEADER = "Turngym-Fingerprint"
"""Reply header with the fingerprint of the index that answered, so that a client notices when it changes."""
PADDING_SCORE = 3.4e38
"""faiss fills up short answers with row -1 and float32's extremes, and the original server sends these as documents."""


class WireError(RetrievalError):
    """A reply cannot be read; the error says where and what was expected."""


def normalize(query: str) -> str:
    """The query as it is searched and remembered: white space collapsed, letter case kept, valid UTF-8."""
    return " ".join(query.encode("utf-8", "replace").decode("utf-8").split())


def request_body(queries: Sequence[str], k: int) -> bytes:
    """What a client sends. It always asks for scores, because the original server answers wrongly without them."""
    return json.dumps({"queries": list(queries), "topk": k, "return_scores": True}).encode()


def reply_body(found: Sequence[Sequence[Hit]], scores: bool) -> bytes:
    """What a server answers, with the original's order of keys. Raises ValueError for a score that is not finite."""

    def entry(hit: Hit) -> dict[str, Any]:
        document = {"id": hit.passage.id, "contents": hit.passage.contents}
        return {"document": document, "score": float(hit.score)} if scores else document

    rows = [[entry(hit) for hit in hits] for hits in found]
    return json.dumps({"result": rows}, separators=(",", ":"), allow_nan=False).encode()


MOST_VALUES = 2_000_000
"""Values in a reply at most, which is five times what the largest request can ask for; each takes up to 100 bytes."""


def read_reply(body: bytes, queries: int, k: int) -> list[list[Hit]]:
    """Reads the hits of a reply to `queries` queries, at most `k` each, from our server or one of the original ones.

    The original servers of web searches send neither scores nor ids. Their hits keep the server's order, and the score
    of the hit at rank r is 1 / r. A server that has ids, or a score anywhere, must send every score.

    Raises:
        WireError: not JSON, another number of lists, an entry without document, contents or a finite score.
    """
    if len(body) > COUNTED_FROM and too_many_values(body, MOST_VALUES):
        raise WireError(f"the answer has more than {MOST_VALUES:,} values")
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the answer is not JSON ({error}): {brief(body, 120)}") from error
    rows = reply.get("result") if isinstance(reply, dict) else None
    if isinstance(reply, dict) and reply.get("error"):
        # what stands beside it may be half of the hits
        raise WireError(f"the answer is an error: {brief(reply['error'], 120)}")
    if not isinstance(rows, list):
        raise WireError(f'the answer is not {{"result": [...]}}: {brief(body, 120)}')
    if len(rows) != queries:
        raise WireError(f"the answer has {len(rows)} result lists for {queries} queries")
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise WireError(f"result[{number}] is {brief(row, 120)}; it must be a list of documents with scores")
    ranked = all(_has_rank_alone(entry) for row in rows for entry in row)
    return [_read_hits(row, f"result[{number}]", ranked)[:k] for number, row in enumerate(rows)]


def _has_rank_alone(entry: Any) -> bool:
    """Whether a hit has neither a score nor an id, as those of a web search."""
    document = entry.get("document") if isinstance(entry, dict) else None
    return isinstance(document, dict) and "score" not in entry and not {"id", "_id"} & document.keys()


def _read_hits(row: list[Any], where: str, ranked: bool) -> list[Hit]:
    hits: dict[str, Hit] = {}
    for number, entry in enumerate(row):
        hit = _read_entry({**entry, "score": 1 / (number + 1)} if ranked else entry, f"{where}[{number}]")
        # the original server sends a row that faiss did not find as the last document: a made-up score or a repeat
        if abs(hit.score) < PADDING_SCORE:
            hits.setdefault(hit.passage.id, hit)
    return list(hits.values())


def _read_entry(entry: Any, where: str) -> Hit:
    if not isinstance(entry, dict) or not isinstance(entry.get("document"), dict) or "score" not in entry:
        raise WireError(f'{where} is {brief(entry, 120)}; it must be {{"document": {{"id", "contents"}}, "score"}}')
    document, score = entry["document"], _finite(entry["score"])
    if score is None:
        raise WireError(f"{where}: score {brief(entry['score'], 120)} is not a finite number")
    if not {"id", "_id"} & document.keys() and isinstance(document.get("contents"), str):
        # the original server's BM25 sends no ids, but the same contents must still be the same passage
        digest = hashlib.sha256(document["contents"].encode("utf-8", "replace")).hexdigest()
        document = {**document, "id": f"sha256:{digest[:16]}"}
    passage: Passage = parse_row(document, f"{where}.document")
    return Hit(passage=passage, score=score)


def _finite(score: Any) -> float | None:
    """A score as a float; None if it is no finite number."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    try:
        return float(score) if math.isfinite(score) else None
    # a whole number beyond the range of floats
    except OverflowError:
        return None
