"""Memory of answers, one search per query, deadlines, and what is never remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from turngym.retrieval.answer_cache import USUAL_ANSWER, Answers
from turngym.retrieval.batching import Hits
from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable
from turngym.retrieval.http_format import RetrievalServerSettings
from turngym.retrieval.server import RetrievalService
from turngym.retrieval.word_cache import of_words


@pytest.fixture
def make(echo: Any) -> Iterator[Callable[..., RetrievalService]]:
    made: list[RetrievalService] = []

    def start(**settings: Any) -> RetrievalService:
        made.append(RetrievalService(echo, RetrievalServerSettings(**settings)))
        return made[-1]

    yield start
    echo.gate.set()
    for service in made:
        service.close()


def ids(found: Any) -> list[list[str]]:
    return [[hit.passage.id for hit in hits] for hits in found]


def test_answers_are_remembered_by_query_and_k(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make()
    assert ids(service.search(["a", "b"], 2)) == [["a#0", "a#1"], ["b#0", "b#1"]]
    assert ids(service.search(["b", "c", "b"], 2)) == [["b#0", "b#1"], ["c#0", "c#1"], ["b#0", "b#1"]]
    assert ids(service.search(["a"], 1)) == [["a#0"]]
    assert echo.calls == [(["a", "b"], 2), (["c"], 2), (["a"], 1)]
    assert service.stats.as_json()["cache"] == {"hits": 1, "joined": 0, "misses": 4}
    assert service.search([], 2) == []


def test_only_white_space_is_normalized(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make()
    found = service.search(["  Who\n wrote\tIt? ", "Who wrote It?", "who wrote it?"], 1)
    assert ids(found) == [["Who wrote It?#0"], ["Who wrote It?#0"], ["who wrote it?#0"]]
    assert echo.calls == [(["Who wrote It?", "who wrote it?"], 1)]


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    def hits(text: str) -> Hits:
        return (Hit(passage=Passage(id="1", title="t", text=text), score=1.0),)

    remembered = Answers(4)
    long = {"q": "x" * USUAL_ANSWER, "t": "x" * USUAL_ANSWER}
    for number in range(4):
        remembered.keep((f"q{number}", 1), hits("short"))
    assert len(remembered) == 4
    # an answer with its query that takes three places, then one that takes more than there are
    remembered.keep((long["q"], 1), hits(long["t"]))
    assert remembered.get((long["q"], 1)) == hits(long["t"])
    assert len(remembered) == 2
    remembered.keep(("q", 1), hits("x" * 4 * USUAL_ANSWER))
    assert remembered.get(("q", 1)) is None
    calls = list[str]()

    @of_words(9)
    def known(word: str) -> str:
        calls.append(word)
        return word

    for word in ("a", "a", "a" * 65, "a" * 65):
        assert known(word) == word
    assert calls == ["a", "a" * 65, "a" * 65]


def test_the_least_recently_used_is_forgotten(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make(cache=2)
    for query in "abacab":
        service.search([query], 1)
    assert [queries for queries, _ in echo.calls] == [["a"], ["b"], ["c"], ["b"]]
    none = make(cache=0)
    none.search(["a"], 1)
    none.search(["a"], 1)
    assert len(echo.calls) == 6


def test_one_search_however_many_ask(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make()
    echo.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(service.search, ["same"], 1) for _ in range(8)]
        while service.stats.as_json()["queries"] < 8:
            threading.Event().wait(0.001)
        echo.gate.set()
        assert [ids(found.result(10)) for found in asked] == [[["same#0"]]] * 8
    assert echo.calls == [(["same"], 1)]
    assert service.stats.as_json()["cache"] == {"hits": 0, "joined": 7, "misses": 1}


@pytest.mark.parametrize("error", [RuntimeError("disk"), RetrieverUnavailable("disk")])
def test_failures_are_not_remembered(echo: Any, make: Callable[..., RetrievalService], error: Exception) -> None:
    service = make()
    echo.failures = [error]
    with pytest.raises(RetrieverUnavailable) as caught:
        service.search(["a"], 1)
    assert (caught.value.__cause__ or caught.value) is error
    assert ids(service.search(["a"], 1)) == [["a#0"]]


def test_a_stuck_retriever_costs_a_deadline_and_is_reported(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make(deadline=1.5)
    echo.gate.clear()
    with pytest.raises(RetrieverUnavailable, match=r"did not answer within 1\.5 s"):
        service.search(["a"], 1)
    # whoever joins the stuck search gets a deadline, too
    with pytest.raises(RetrieverUnavailable, match=r"did not answer within 1\.5 s"):
        service.search(["a"], 1)
    assert service.health()["status"] == "stuck"
    echo.gate.set()
    while service.health()["status"] == "stuck":
        threading.Event().wait(0.001)
    assert ids(service.search(["b"], 1)) == [["b#0"]]


def test_health_and_statistics_say_what_is_served(make: Callable[..., RetrievalService]) -> None:
    service = make(topk=4)
    assert service.health() == {"status": "ok", "passages": 7, "fingerprint": "echo:1", "topk": 4, "max_topk": 100}
    service.search(["a", "b", "c"], 1)
    service.stats.answered(200, 0.25)
    found = service.statistics()
    assert found["batches"] == {"calls": 1, "queries": 3, "mean": 3.0, "largest": 3, "up_to": {"4": 1}}
    assert found["latency_ms"] == {"p50": 250.0, "p90": 250.0, "p99": 250.0, "max": 250.0}
    assert (found["queries"], found["waiting"], found["remembered"], found["by_status"]) == (3, 0, 3, {"200": 1})


def test_percentiles_are_nearest_ranks(make: Callable[..., RetrievalService]) -> None:
    stats = make().stats
    assert stats.as_json()["latency_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    for milliseconds in range(200, 0, -1):
        stats.answered(200, milliseconds / 1000)
    assert stats.as_json()["latency_ms"] == {"p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}


def test_close_closes_the_retriever(echo: Any, make: Callable[..., RetrievalService]) -> None:
    service = make()
    service.search(["a"], 1)
    service.close()
    assert echo.closed == 1
    assert service.health()["status"] == "stopping"
    assert ids(service.search(["a"], 1)) == [["a#0"]]
    with pytest.raises(RetrieverUnavailable):
        service.search(["new"], 1)


def test_memory_under_threads(make: Callable[..., RetrievalService]) -> None:
    service = make(cache=50)

    def work(start: int) -> None:
        for number in range(start, start + 500):
            assert ids(service.search([str(number % 97)], 1)) == [[f"{number % 97}#0"]]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, start) for start in range(0, 40, 10)]:
            done.result()
    assert service.statistics()["remembered"] == 50
