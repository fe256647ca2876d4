"""The client against our server, an original server with its quirks, and servers that die, hang or answer garbage."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import Answer, JsonServer

from turngym.core.errors import RetrievalError, SettingsError
from turngym.core.http_connection import address_problem
from turngym.retrieval.core import RetrieverUnavailable
from turngym.retrieval.corpus import CorpusError
from turngym.retrieval.http_format import FINGERPRINT_HEADER, WireError, normalize, read_reply
from turngym.retrieval.http_retriever import Breaker, HttpRetriever

Canned = Callable[[Callable[[str, Any], Any]], Any]
JSON = "application/json"
HTML = (500, "text/html", b"<html><body><h1>Internal Server Error</h1></body></html>")


def good(path: str, asked: Any) -> Any:
    """Two documents per query, ours or the original's: the forms are the same."""
    rows = [
        [{"document": {"id": f"{q}-{n}", "contents": f'"T {q}"\ntext {n}'}, "score": 2.0 - n} for n in range(2)]
        for q in asked["queries"]
    ]
    return 200, JSON, json.dumps({"result": rows}).encode()


@pytest.fixture
def client() -> Iterator[Callable[..., HttpRetriever]]:
    """Clients whose waits between attempts cost nothing."""
    made: list[HttpRetriever] = []

    def make(url: str, **settings: Any) -> HttpRetriever:
        made.append(HttpRetriever(url, sleep=lambda seconds: None, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def shown(found: Any) -> list[list[tuple[str, str, str, float]]]:
    return [[(hit.passage.id, hit.passage.title, hit.passage.text, hit.score) for hit in hits] for hits in found]


def test_our_client_and_our_server(echo: Any, serve: Any, client: Any) -> None:
    retriever = client(serve(echo).url)
    assert retriever.fingerprint == "echo:1"
    found = retriever.search(["b", "a", "b"], 2)
    assert shown(found) == [
        [(f"{q}#{n}", f"About {q}", f"Line {n}.\nMore.", 1.0 - n / 8) for n in range(2)] for q in "bab"
    ]
    assert found == echo.search(["b", "a", "b"], 2)
    assert retriever.search([], 3) == []


class OriginalServer:
    """What the published server does with a request, its mistakes included. `rows` are what faiss found."""

    documents = tuple({"id": str(n), "contents": f'"Title {n}"\nText {n}.'} for n in range(4))

    def __init__(self, rows: list[int], scores: list[float]) -> None:
        self.rows, self.scores = rows, scores

    def __call__(self, path: str, request: Any) -> Any:
        k = request["topk"] or 3
        results = [[self.documents[row] for row in self.rows[:k]] for _ in request["queries"]]
        scores = [self.scores[:k] for _ in request["queries"]]
        if not request.get("return_scores"):
            if len(results) != 2:  # it unpacks the list of results as (results, scores)
                return 500, "text/plain", b"Internal Server Error"
            return 200, JSON, json.dumps({"result": results[0]}).encode()
        rows = [
            [{"document": document, "score": score} for document, score in zip(*both, strict=True)]
            for both in zip(results, scores, strict=True)
        ]
        return 200, JSON, json.dumps({"result": rows}).encode()


def test_our_client_and_an_original_server(canned: Canned, client: Any) -> None:
    server = canned(OriginalServer([2, 0, 1], [0.9, 0.8, 0.7]))
    retriever = client(server.url)
    for queries in (["a"], ["b", "c"], ["d", "e", "f"]):
        assert shown(retriever.search(queries, 3)) == [
            [("2", "Title 2", "Text 2.", 0.9), ("0", "Title 0", "Text 0.", 0.8), ("1", "Title 1", "Text 1.", 0.7)]
        ] * len(queries)
    assert server.asked[0] == ("/retrieve", {"queries": ["a"], "topk": 3, "return_scores": True})
    assert retriever.fingerprint == f"url:{server.url}"


def test_documents_that_the_original_made_of_missing_rows_are_left_out(canned: Canned, client: Any) -> None:
    minimum = -3.4028234663852886e38
    server = canned(OriginalServer([3, 1, -1, -1], [0.9, 0.8, minimum, minimum]))
    assert [hit.passage.id for hit in client(server.url).search(["a"], 4)[0]] == ["3", "1"]
    server = canned(OriginalServer([3, 1, -1], [0.9, 0.8, 0.1]))
    assert [hit.passage.id for hit in client(server.url).search(["a"], 4)[0]] == ["3", "1"]


def test_the_original_bm25_leaves_ids_out() -> None:
    document = {"title": "T", "text": "x", "contents": '"T"\nx'}
    body = json.dumps({"result": [[{"document": document, "score": 1}], [{"document": document, "score": 2}]]}).encode()
    [[one], [two]] = read_reply(body, 2, 3)
    assert one.passage == two.passage
    assert one.passage.id.startswith("sha256:")


def web(*titles: str, **more: Any) -> dict[str, Any]:
    """A result of the original servers for web searches."""
    return {"result": [[{"document": {"contents": f'"{title}"\nA snippet of {title}.'}, **more} for title in titles]]}


def test_hits_of_a_web_search_keep_the_order_of_the_server(canned: Canned, client: Any) -> None:
    pages = json.dumps(web("Tarnby", "Leck", "Tarnby", "Orlen")).encode()
    server = canned(lambda path, asked: (200, JSON, pages))
    (hits,) = client(server.url).search(["a"], 3)
    assert [hit.passage.title for hit in hits] == ["Tarnby", "Leck", "Orlen"]
    assert [hit.score for hit in hits] == [1.0, 0.5, 0.25]
    assert len({hit.passage.id for hit in hits}) == 3
    # the same page is the same passage in the next search
    [[again]] = read_reply(json.dumps(web("Leck")).encode(), 1, 3)
    assert again.passage == hits[1].passage
    assert read_reply(b'{"result": [[]]}', 1, 3) == [[]]
    # null is nothing
    blank = {"result": [[{"document": {"id": None, "contents": '"Leck"\nA snippet of Leck.'}, "score": None}]]}
    assert read_reply(json.dumps(blank).encode(), 1, 3) == [[again]]


@pytest.mark.parametrize("place", [1])
@pytest.mark.parametrize("change", ["score", "id", "_id"])
def test_a_score_may_only_be_missing_everywhere(place: int, change: str) -> None:
    reply = web("Tarnby", "Leck", "Orlen")
    entry = reply["result"][0][place]
    (entry if change == "score" else entry["document"])[change] = 7
    with pytest.raises(WireError, match="the score is missing"):
        read_reply(json.dumps(reply).encode(), 1, 3)
    # in another list, too
    reply = {"result": [*web("Tarnby")["result"], *web("Leck", score=1)["result"]]}
    with pytest.raises(WireError, match=r"result\[0\]\[0\]: the score is missing"):
        read_reply(json.dumps(reply).encode(), 2, 3)


def test_a_reply_of_very_many_values_is_refused_before_they_are_made() -> None:
    with pytest.raises(WireError, match="more than 2,000,000 values"):
        read_reply(b'{"result": [[' + b"[]," * 3_000_000 + b"[]]]}", 1, 3)


def test_a_server_that_ignores_topk_is_cut() -> None:
    assert len(read_reply(good("", {"queries": ["a"]})[2], 1, 1)[0]) == 1


ENTRY = '{"document":{"id":"1","contents":"\\"T\\"\\nx"},"score":%s}'
QUOTED = '"1"'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"detail": "no"}', 'not {"result": [['),
        (
            b'{"error": "the index is being built", "result": [[]]}',
            "the answer is an error: 'the index is being built'",
        ),
        (b'{"result": []}', "0 result lists for 1 queries"),
        (b'{"result": [{"id": "1", "contents": "x"}]}', "Expected `array`, got `object` - at `$.result[0]`"),
        (b'{"result": [["text"]]}', "Expected `object`, got `str`"),
        (b'{"result": [[{"id": "1", "contents": "x"}]]}', "missing required field `document`"),
        (b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}', "result[0][0].document: row '1' has no contents"),
        (f'{{"result": [[{ENTRY % "NaN"}]]}}'.encode(), "the score is nan; it must"),
        (f'{{"result": [[{ENTRY % "null"}]]}}'.encode(), "the score is missing"),
        (f'{{"result": [[{ENTRY % 1}, {ENTRY % QUOTED}]]}}'.encode(), "Expected `float | null`, got `str`"),
    ],
)
def test_garbage_is_unavailable_never_an_empty_result(canned: Canned, client: Any, body: bytes, says: str) -> None:
    server = canned(lambda path, asked: (200, JSON, body))
    with pytest.raises(RetrieverUnavailable) as caught:
        client(server.url).search(["a"], 3)
    assert says in str(caught.value)
    assert isinstance(caught.value.__cause__, WireError | CorpusError)
    assert len(server.asked) == 3


def test_a_failure_that_passes_is_retried(canned: Canned, client: Any) -> None:
    replies = [HTML, (200, JSON, b"{"), None]
    server = canned(lambda path, body: replies.pop(0) or good(path, body))
    assert shown(client(server.url).search(["a"], 1)) == [[("a-0", "T a", "text 0", 2.0)]]
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [429, 529])
def test_a_busy_server_says_how_long(status: int) -> None:
    slept: list[float] = []
    waits = ["3"]

    def answer(path: str, body: Any, headers: Any) -> Answer:
        if waits:
            return Answer({}, status, {"Retry-After": waits.pop()})
        return Answer(good(path, body)[2])

    server = JsonServer(answer)
    retriever = HttpRetriever(server.url, sleep=slept.append, deadline=20.0)
    assert len(retriever.search(["a"], 1)[0]) == 1
    assert slept == [3.0]
    waits.append("30")
    with pytest.raises(RetrieverUnavailable, match=f"in 1 attempt .*status {status}"):
        retriever.search(["b"], 1)
    retriever.close()
    server.stop()


def test_what_a_retry_cannot_help_is_not_retried(canned: Canned, client: Any) -> None:
    server = canned(lambda path, body: (422, JSON, b'{"error": "topk is 900, out of range"}'))
    retriever = client(server.url, breaker_failures=1)
    for _ in range(2):
        with pytest.raises(RetrieverUnavailable, match=r"422: .*topk is 900"):
            retriever.search(["a"], 900)
    assert len(server.asked) == 2


def test_one_query_is_not_taken_for_its_letters(client: Any) -> None:
    with pytest.raises(RetrievalError, match="give a sequence of strings"):
        client("http://127.0.0.1:1").search("lake", 1)


def test_waits_between_attempts_grow_with_jitter(canned: Canned) -> None:
    def waits(seed: int) -> list[float]:
        slept: list[float] = []
        retriever = HttpRetriever(url, sleep=slept.append, retries=4, backoff=0.1, seed=seed)
        with pytest.raises(RetrieverUnavailable, match="5 attempts"):
            retriever.search(["a"], 1)
        retriever.close()
        return slept

    url = canned(lambda path, body: HTML).url
    one, two = waits(1), waits(2)
    assert one == waits(1) != two
    for place, wait in enumerate(one):
        assert 0.05 * 2**place <= wait <= 0.15 * 2**place


def test_a_dead_server_is_left_alone_for_a_while(canned: Canned) -> None:
    now, alive = [0.0], [False]
    server = canned(lambda path, body: good(path, body) if alive[0] else HTML)
    retriever = HttpRetriever(server.url, clock=lambda: now[0], sleep=lambda s: None, retries=0, breaker_failures=2)
    for _ in range(2):
        with pytest.raises(RetrieverUnavailable, match="status 500"):
            retriever.search(["a"], 1)
    with pytest.raises(RetrieverUnavailable, match=r"failed 2 times in a row, next try in 5\.0 s"):
        retriever.search(["a"], 1)
    assert len(server.asked) == 2
    alive[0], now[0] = True, 5.0
    assert len(retriever.search(["a"], 1)[0]) == 1
    alive[0] = False
    with pytest.raises(RetrieverUnavailable, match="status 500"):
        retriever.search(["b"], 1)
    assert retriever.search(["a"], 1)  # remembered
    retriever.close()


def test_an_open_breaker_lets_one_caller_try() -> None:
    now = [0.0]
    breaker = Breaker(1, 5.0, clock=lambda: now[0])
    assert breaker.refusal() is None
    breaker.failed("dead")
    assert breaker.refusal() == "not asked: it failed 1 times in a row, next try in 5.0 s; dead"
    now[0] = 5.0
    assert [breaker.refusal() is None for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.refusal() is None


def test_nobody_listens(client: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RetrieverUnavailable, match=r"3 attempts .*nothing listens at .*turngym serve retrieval"):
        client(url).search(["a"], 1)
    # a fingerprint made up from the url would change the tasks of a run that merely started before its server
    with pytest.raises(RetrieverUnavailable, match="/health gave no usable answer"):
        _ = client(url).fingerprint


def test_a_server_that_comes_back_with_another_index_is_refused(canned: Canned, client: Any) -> None:
    server = canned(good)
    server.headers[FINGERPRINT_HEADER] = "first"
    retriever = client(server.url)
    retriever.search(["a"], 1)
    assert retriever.fingerprint == "first"
    server.headers[FINGERPRINT_HEADER] = "second"
    with pytest.raises(RetrieverUnavailable, match="another index, second; "):
        retriever.search(["b"], 1)


def test_answers_are_remembered_and_large_requests_split(canned: Canned, client: Any) -> None:
    server = canned(good)
    retriever = client(server.url, chunk=2)
    found = retriever.search(["a", "b", " a ", "c"], 2)
    assert [hits[0].passage.id for hits in found] == ["a-0", "b-0", "a-0", "c-0"]
    assert [body["queries"] for _, body in server.asked] == [["a", "b"], ["c"]]
    found[0].clear()
    assert len(retriever.search(["a"], 2)[0]) == 2
    assert len(server.asked) == 2
    retriever.search(["a"], 1)
    assert len(server.asked) == 3


def test_any_text_can_be_asked(canned: Canned, client: Any) -> None:
    server = canned(good)
    retriever = client(server.url, max_query_chars=5)
    assert [hits[0].passage.id for hits in retriever.search(["half \ud800", "", "x" * 9], 1)] == [
        "half-0",
        "-0",
        "xxxxx-0",
    ]
    assert normalize("a \ud800\n b") == "a ? b"


@pytest.mark.parametrize("k", [0, True])
def test_k_must_be_a_positive_number(client: Any, k: Any) -> None:
    with pytest.raises(RetrievalError, match=r"k=.*at least 1"):
        client("http://127.0.0.1:1").search(["a"], k)


LONG = f"http://{'x' * 64}.org"
PORTS = [f"http://127.0.0.1:{port}" for port in (99999, -1, 0, "x")]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host?x=1", "http://host?"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(RetrievalError, match=r"http://|has a"):
        HttpRetriever(url)


@pytest.mark.parametrize(
    "url", [*PORTS, "http://[::1", "http://a b", "http://127.0.0.1:8000/ retrieve", "http://a\tb", LONG]
)
def test_urls_that_no_client_could_ask(url: str) -> None:
    """The one check of all addresses: retrievers, endpoints, policy servers, judges, mirrors."""
    assert address_problem(url)
    with pytest.raises(RetrievalError, match=re.escape(repr(url))):
        HttpRetriever(url)
    assert not any(map(address_problem, ("http://host", "https://[::1]:80/v1?x=1#y", "HTTP://me:pw@host:65535")))


@pytest.mark.parametrize(("name", "value"), [("deadline", "5"), ("attempt", math.inf), ("seed", 1.5)])
def test_settings_that_no_client_can_have(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        HttpRetriever("http://host", **{name: value})


def test_urls_and_settings(client: Any) -> None:
    for url in ("http://host:1", "http://host:1/", "http://host:1/retrieve", "http://host:1/retrieve/"):
        assert client(url).url == "http://host:1/retrieve"
    assert client("https://host/deep/retrieve").url == "https://host/deep/retrieve"
    with pytest.raises(SettingsError, match="timeout"):
        client("http://host", timeout=3)
    copy = pickle.loads(pickle.dumps(client("http://host:1", deadline=2.5)))
    assert (copy.url, copy.settings.deadline) == ("http://host:1/retrieve", 2.5)


def test_threads_share_a_client(canned: Canned, client: Any) -> None:
    retriever = client(canned(good).url, cache=0)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: retriever.search([f"q{n}"], 1)[0][0].passage.id, range(40)))
    assert found == [f"q{n}-0" for n in range(40)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_connects_anew(canned: Canned, client: Any) -> None:
    retriever = client(canned(good).url)
    retriever.search(["a"], 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(retriever.search(["b"], 1)[0][0].passage.id != "b-0")
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert retriever.search(["c"], 1)[0][0].passage.id == "c-0"
