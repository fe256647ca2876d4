"""Micro-batching, step by step: a retriever that can be held shows what comes together and what waits."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from turngym.retrieval.batching import MicroBatcher
from turngym.retrieval.core import RetrieverUnavailable

LONG = 3600.0


@pytest.fixture
def batcher(echo: Any) -> Any:
    """A window of an hour: a test that waited for it would never end."""
    batcher = MicroBatcher(echo.search, max_batch=4, window=LONG, max_waiting=6)
    yield batcher
    echo.gate.set()
    batcher.close()


def submit(batcher: MicroBatcher, *queries: str, k: int = 1) -> list[Any]:
    return batcher.submit(queries, k, time.monotonic() + LONG)


def hold(echo: Any, batcher: MicroBatcher, *queries: str) -> list[Any]:
    """Have the retriever busy with `queries`."""
    echo.gate.clear()
    answers = submit(batcher, *queries)
    assert echo.entered.acquire(timeout=10)
    return answers


def test_an_idle_batcher_answers_at_once(echo: Any, batcher: MicroBatcher) -> None:
    for query in ("a", "b"):
        [answer] = submit(batcher, query, k=2)
        assert [hit.passage.id for hit in answer.result(10)] == [f"{query}#0", f"{query}#1"]
    assert echo.calls == [(["a"], 2), (["b"], 2)]


def test_several_queries_of_one_client_do_not_make_it_wait(echo: Any, batcher: MicroBatcher) -> None:
    for queries in (("a", "b"), ("c", "d", "e")):
        for answer in submit(batcher, *queries):
            answer.result(10)
    assert echo.calls == [(["a", "b"], 1), (["c", "d", "e"], 1)]


def test_what_arrives_while_busy_goes_together(echo: Any, batcher: MicroBatcher) -> None:
    answers = hold(echo, batcher, "a")
    for query in "bcdef":
        answers += submit(batcher, query)
    echo.gate.set()
    for answer in answers[:-1]:
        answer.result(10)
    # at most four in one call; the last one waits for the company that the call before it had
    assert not answers[-1].done()
    batcher.close(10)
    assert [answer.result(10)[0].passage.id for answer in answers] == [f"{query}#0" for query in "abcdef"]
    assert echo.calls == [(["a"], 1), (["b", "c", "d", "e"], 1), (["f"], 1)]


def test_company_is_waited_for_only_as_long_as_needed(echo: Any, batcher: MicroBatcher) -> None:
    answers = hold(echo, batcher, "a")
    answers += submit(batcher, "b") + submit(batcher, "c")
    echo.gate.set()
    for answer in answers:
        answer.result(10)
    # the last batch served two clients: one alone now waits for the other, both go at once when it comes
    [first] = submit(batcher, "d")
    assert batcher.load()[0] == 1
    [second] = submit(batcher, "e")
    assert first.result(10)
    assert second.result(10)
    assert echo.calls == [(["a"], 1), (["b", "c"], 1), (["d", "e"], 1)]


def test_the_window_ends_the_wait(echo: Any) -> None:
    batcher = MicroBatcher(echo.search, window=0.001)
    answers = hold(echo, batcher, "a")
    answers += submit(batcher, "b") + submit(batcher, "c")
    echo.gate.set()
    for answer in answers:
        answer.result(10)
    submit(batcher, "d")[0].result(10)
    assert echo.calls[-1] == (["d"], 1)
    batcher.close()


def test_values_of_k_are_never_mixed(echo: Any, batcher: MicroBatcher) -> None:
    answers = hold(echo, batcher, "a")
    answers += submit(batcher, "b", k=3) + submit(batcher, "c", k=5) + submit(batcher, "d", k=3)
    echo.gate.set()
    assert [len(answer.result(10)) for answer in answers[:2]] == [1, 3]
    batcher.close()
    assert [len(answer.result(10)) for answer in answers] == [1, 3, 5, 3]
    assert echo.calls == [(["a"], 1), (["b", "d"], 3), (["c"], 5)]


def test_one_bad_query_does_not_fail_the_others(echo: Any, batcher: MicroBatcher) -> None:
    echo.poison = KeyError("poison")
    answers = hold(echo, batcher, "a")
    answers += submit(batcher, "b") + submit(batcher, "poison") + submit(batcher, "c")
    echo.gate.set()
    assert [answer.result(10)[0].passage.id for answer in (answers[0], answers[1], answers[3])] == ["a#0", "b#0", "c#0"]
    with pytest.raises(KeyError):
        answers[2].result(10)


def test_a_dead_retriever_is_not_asked_once_per_query(echo: Any, batcher: MicroBatcher) -> None:
    answers = hold(echo, batcher, "a")
    answers += submit(batcher, "b") + submit(batcher, "c")
    echo.failures = [RetrieverUnavailable("gone"), RetrieverUnavailable("gone")]
    echo.gate.set()
    for answer in answers:
        with pytest.raises(RetrieverUnavailable):
            answer.result(10)
    assert len(echo.calls) == 2


@pytest.mark.parametrize("found", [[], [[], []]])
def test_another_number_of_answers_is_a_failure(found: list[Any]) -> None:
    batcher = MicroBatcher(lambda queries, k: found)
    with pytest.raises(RetrieverUnavailable, match=f"{len(found)} answers to 1 queries"):
        submit(batcher, "a")[0].result(10)
    batcher.close()


def test_a_score_that_is_no_number_is_a_failure(echo: Any, batcher: MicroBatcher) -> None:
    echo.score = float("nan")
    with pytest.raises(RetrieverUnavailable, match="'a#0' is nan"):
        submit(batcher, "a")[0].result(10)


def test_what_nobody_waits_for_any_more_is_not_searched(echo: Any, batcher: MicroBatcher) -> None:
    hold(echo, batcher, "a")
    [late] = batcher.submit(["late"], 1, time.monotonic() - 1)
    [timely] = submit(batcher, "timely")
    echo.gate.set()
    assert timely.result(10)
    with pytest.raises(RetrieverUnavailable):
        late.result(10)
    assert echo.calls == [(["a"], 1), (["timely"], 1)]


def test_too_many_waiting_are_refused_and_nothing_of_them_is_kept(echo: Any, batcher: MicroBatcher) -> None:
    hold(echo, batcher, "a")
    submit(batcher, *"bcdef")
    with pytest.raises(RetrieverUnavailable, match="5 queries are waiting already"):
        submit(batcher, "g", "h")
    assert batcher.load()[0] == 5


def test_a_stuck_call_is_seen(echo: Any) -> None:
    now = [100.0]
    batcher = MicroBatcher(echo.search, clock=lambda: now[0])
    assert batcher.load() == (0, 0.0)
    echo.gate.clear()
    batcher.submit(["a"], 1, 1000.0)
    assert echo.entered.acquire(timeout=10)
    now[0] = 107.5
    assert batcher.load() == (0, 7.5)
    echo.gate.set()
    batcher.close()


def test_close_answers_what_waits_and_takes_nothing_new(echo: Any, batcher: MicroBatcher) -> None:
    answers = hold(echo, batcher, "a") + submit(batcher, "b", "c")
    closing = threading.Thread(target=batcher.close, args=(10,))
    closing.start()
    echo.gate.set()
    closing.join(10)
    assert [answer.result(10)[0].passage.id for answer in answers] == ["a#0", "b#0", "c#0"]
    with pytest.raises(RetrieverUnavailable):
        submit(batcher, "d")


def test_close_does_not_wait_for_a_stuck_retriever(echo: Any, batcher: MicroBatcher) -> None:
    hold(echo, batcher, "a")
    [waiting] = submit(batcher, "b")
    batcher.close(timeout=0.01)
    with pytest.raises(RetrieverUnavailable):
        waiting.result(10)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(echo: Any, batcher: MicroBatcher) -> None:
    hold(echo, batcher, "a")  # a thread of the parent is inside the retriever, which the child does not have
    child = os.fork()
    if child == 0:
        status = 1
        try:
            echo.gate = threading.Event()
            echo.gate.set()
            status = int(submit(batcher, "b")[0].result(10)[0].passage.id != "b#0")
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
