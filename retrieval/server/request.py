"""Reads the body of a request and says exactly what is wrong with a bad one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from turngym.retrieval.core import RetrievalError
from turngym.retrieval.server.settings import ServerSettings

FIELDS = ("queries", "query", "topk", "return_scores")
EXAMPLE = '{"queries": ["who wrote Hamlet"], "topk": 3, "return_scores": true}'


class BadRequest(RetrievalError):
    """A request that cannot be answered: HTTP status, the field at fault, and what would be valid."""

    def __init__(self, text: str, *, status: int = 422, field: str | None = None, valid: str = EXAMPLE) -> None:
        super().__init__(text)
        self.status, self.field, self.valid = status, field, valid

    def as_json(self) -> dict[str, Any]:
        return {"error": str(self), "field": self.field, "valid": self.valid}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search; `k` is within the server's limits."""

    queries: tuple[str, ...]
    k: int
    scores: bool


def read_request(body: bytes, settings: ServerSettings) -> SearchRequest:
    """The request in `body`. No queries at all are fine: Search-R1 asks that when no episode searches.

    Raises:
        BadRequest: not UTF-8 or not JSON (400), unknown fields, wrong types, beyond the limits (422).
    """
    fields = _fields(body)
    return SearchRequest(
        queries=_queries(fields, settings), k=_topk(fields.get("topk"), settings), scores=_scores(fields)
    )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = body[error.start]
        raise BadRequest(f"the body is not UTF-8: byte 0x{byte:02x} at offset {error.start}", status=400) from None
    except (ValueError, RecursionError) as error:
        what = "the body is empty" if not body.strip() else f"the body is not JSON: {_show(str(error))}"
        raise BadRequest(what, status=400) from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {_type(fields)}; it must be a JSON object")
    for name in fields:
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            valid = f"fields {', '.join(FIELDS)}"
            raise BadRequest(f"unknown field {_show(name)!r}{hint}", field=_show(name), valid=valid)
    return fields


def _queries(fields: dict[str, Any], settings: ServerSettings) -> tuple[str, ...]:
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


def _text(query: Any, field: str, settings: ServerSettings) -> str:
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


def _topk(topk: Any, settings: ServerSettings) -> int:
    if isinstance(topk, bool) or not isinstance(topk, int | None):
        raise BadRequest(f"topk is {_type(topk)}; it must be a whole number or null", field="topk")
    # 0 as well: the original server takes it for not given
    if not topk:
        return settings.topk
    if not 0 < topk <= settings.max_topk:
        valid = f"1 to {settings.max_topk}, or null for {settings.topk}"
        raise BadRequest(f"topk is {_show(str(topk))}, out of range", field="topk", valid=valid)
    return topk


def _scores(fields: dict[str, Any]) -> bool:
    scores = fields.get("return_scores", False)
    if not isinstance(scores, bool):
        what = f"return_scores is {_type(scores)}; it must be true or false"
        raise BadRequest(what, field="return_scores", valid="true or false")
    return scores


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    for kind, name in ((str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return f"the number {_show(json.dumps(value))}"


def _show(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
