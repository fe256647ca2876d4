"""Search-R1's wire format: what a request and a reply look like as JSON, for the server and for the client.

Request: `{"queries": [str], "topk": int, "return_scores": bool}`. Reply with scores: `{"result": [[{"document":
{"id", "contents"}, "score"}]]}`, one list per query, best first; without: `{"result": [[{"id", "contents"}]]}`.
Servers of web searches leave out id and score.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from turngym.core.errors import RetrievalError, SettingsError
from turngym.core.numbers import Count, NotNegative, Number, Positive
from turngym.core.redaction import brief, excerpt
from turngym.core.spec import Spec
from turngym.core.user_files import json_of, too_many_values
from turngym.retrieval.core import Hit
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


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = None
    return_scores: bool = False


COUNTED_FROM = 1 << 20
"""Bytes from which a body's values are counted before they are made."""


def read_request(body: bytes, settings: RetrievalServerSettings) -> SearchRequest:
    """Reads the request in `body`. It may have no queries: Search-R1 sends that when no episode searches.

    Raises:
        BadRequest: not UTF-8 or not JSON (400), unknown fields, wrong types, beyond the limits (422).
    """
    many = f"at most {settings.max_queries} queries, which are strings"
    if len(body) > COUNTED_FROM and too_many_values(body, settings.max_queries + 8):
        raise BadRequest("the body has too many values", field="queries", valid=many)
    try:
        request = msgspec.json.decode(body, type=_Body)
    except msgspec.ValidationError as error:
        # it names the place as `$.queries[1]`, or the field that is unknown
        match = re.search(r"\$\.([\w\[\]]+)|unknown field `(.+)`", str(error), re.DOTALL)
        field = None if match is None else excerpt(match[1] or match[2], 60)
        raise BadRequest(excerpt(error, 200), field=field) from None
    except ValueError as error:
        problem = "the body is empty" if not body.strip() else f"the body is not JSON in UTF-8: {excerpt(error, 60)}"
        raise BadRequest(problem, status=400) from None
    if (request.queries is None) == (request.query is None):
        problem = "there is no queries field" if request.query is None else "both queries and query are given"
        raise BadRequest(f"{problem}; send queries (a list) or query (one string)", field="queries")
    queries = tuple(request.queries or ()) if request.query is None else (request.query,)
    if len(queries) > settings.max_queries:
        raise BadRequest(f"{len(queries)} queries in one request", field="queries", valid=many)
    for number, query in enumerate(queries):
        if len(query) > settings.max_query_chars:
            name = f"queries[{number}]" if request.query is None else "query"
            valid = f"at most {settings.max_query_chars} characters"
            raise BadRequest(f"{name} has {len(query)} characters", field=name, valid=valid)
    # 0 is not given, too, as with the original server
    k = request.topk or settings.topk
    if not 0 < k <= settings.max_topk:
        valid = f"1 to {settings.max_topk}, or null for {settings.topk}"
        raise BadRequest(f"topk is {excerpt(k, 60)}, out of range", field="topk", valid=valid)
    return SearchRequest(queries=queries, k=k, scores=request.return_scores)


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
    """The body of a request. It always asks for scores, because the original server answers wrongly without them."""
    return json.dumps({"queries": list(queries), "topk": k, "return_scores": True}).encode()


def reply_body(answers: Sequence[Sequence[Hit]], scores: bool) -> bytes:
    """The body of an answer, with the original's order of keys. Raises ValueError for a score that is not finite."""

    def entry(hit: Hit) -> dict[str, Any]:
        document = {"id": hit.passage.id, "contents": hit.passage.contents}
        return {"document": document, "score": float(hit.score)} if scores else document

    rows = [[entry(hit) for hit in hits] for hits in answers]
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
        reply = json_of(body)
    except ValueError as error:
        raise WireError(f"the answer is not JSON ({error}): {brief(body, 120)}") from error
    if isinstance(reply, dict) and reply.get("error"):
        # what stands beside it may be half of the hits
        raise WireError(f"the answer is an error: {brief(reply['error'], 120)}")
    try:
        rows = msgspec.convert(reply, _Reply).result
    # half a surrogate pair in a key is a ValueError, too
    except ValueError as error:
        form = '{"result": [[{"document": {"id", "contents"}, "score"}]]}'
        raise WireError(f"the answer is not {form}: {error}: {brief(body, 120)}") from error
    if len(rows) != queries:
        raise WireError(f"the answer has {len(rows)} result lists for {queries} queries")
    # as those of a web search
    ranked = all(entry.score is None and not entry.has_id for row in rows for entry in row)
    answers: list[list[Hit]] = []
    for number, row in enumerate(rows):
        hits: dict[str, Hit] = {}
        for position, entry in enumerate(row):
            where, document = f"result[{number}][{position}]", entry.document
            score = 1 / (position + 1) if ranked else entry.score
            if score is None or not math.isfinite(score):
                value = "missing" if score is None else score
                raise WireError(f"{where}: the score is {value}; it must be a finite number")
            if not entry.has_id and isinstance(document.get("contents"), str):
                # the original server's BM25 sends no ids, but the same contents must still be the same passage
                digest = hashlib.sha256(document["contents"].encode("utf-8", "replace")).hexdigest()
                document["id"] = f"sha256:{digest[:16]}"
            passage = parse_row(document, f"{where}.document")
            # it sends a row that faiss did not find as the last document: a made-up score or a repeat
            if abs(score) < PADDING_SCORE:
                hits.setdefault(passage.id, Hit(passage=passage, score=score))
        answers.append(list(hits.values())[:k])
    return answers


class _Entry(msgspec.Struct):
    document: dict[str, Any]
    score: float | None = None

    @property
    def has_id(self) -> bool:
        # servers that fill in all fields of a form send null for what they lack
        return any(self.document.get(name) is not None for name in ("id", "_id"))


class _Reply(msgspec.Struct):
    result: list[list[_Entry]]
