"""ServerScorer: every number belongs to the id and the position that it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.policy import ServerScorer, bounded_tail
from turngym.agents.servers.server_connection import BadAnswer, ClientLimits, ServerDown, ServerError, WrongWeights
from turngym.agents.servers.sglang_dialect import SglangDialect

FakeServer, VOCABULARY, logprobs = fake.FakeServer, fake.VOCABULARY, fake.logprobs
ROWS = [np.array([5, 6, 7, VOCABULARY - 1, 8], np.int32), np.array([9, 3], np.int32), np.array([4, 4, 4], np.int32)]
PLACES = [np.array([2, 3, 4]), np.array([1]), np.array([], np.int64)]


@pytest.fixture(scope="module")
def setup() -> Iterator[tuple[Any, ServerScorer]]:
    with FakeServer() as server:
        fleet = Fleet(urls=[server.url], settings=ClientLimits(backoff=0.01)).open()
        yield server, ServerScorer(fleet=fleet, vocabulary=VOCABULARY, block=2)
        fleet.close()


@pytest.fixture(autouse=True)
def as_it_was(setup: Any) -> Iterator[None]:
    """The server forgets after each test what it was asked, and how to fail."""
    yield
    server = setup[0]
    server.asked.clear()
    server.orders.clear()
    server.edit, server.weights, server.tempers = fake.as_it_is, "default", False


def test_log_probabilities_of_given_ids(setup: Any) -> None:
    server, scorer = setup
    found = scorer.logprobs(ROWS, PLACES)
    assert [len(one) for one in found] == [3, 1, 0]
    for row, places, scores in zip(ROWS, PLACES, found, strict=True):
        wanted = [logprobs(row[:place].tolist(), "default")[row[place]] for place in places]
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)
    first = next(body for body in server.of("/generate") if len(body["input_ids"]) == 5)
    assert first["logprob_start_len"] == 1  # what comes before may be in the server's cache
    assert first["sampling_params"]["max_new_tokens"] == 0
    assert len(server.of("/generate")) == 2  # a row without positions is no request


def test_the_most_likely_ids(setup: Any) -> None:
    best = setup[1].topk(ROWS, PLACES, 3)
    assert [one.ids.shape for one in best] == [(3, 3), (1, 3), (0, 3)]
    for row, places, one in zip(ROWS, PLACES, best, strict=True):
        for line, place in enumerate(places):
            logp = logprobs(row[:place].tolist(), "default")
            np.testing.assert_array_equal(one.ids[line], np.argsort(-logp)[:3])
            np.testing.assert_allclose(one.logp[line], np.sort(logp)[::-1][:3], rtol=1e-6)
            np.testing.assert_allclose(np.exp(one.tail[line]), 1 - np.exp(np.sort(logp)[-3:]).sum(), rtol=1e-5)


def test_the_tail_of_a_sure_teacher_is_what_follows_its_likeliest_ids() -> None:
    """Log-probabilities in float32 leave noise of 1e-7 of 1: the ids behind the K bound the tail from both sides."""
    random, size, k = np.random.default_rng(3), 1000, 7
    for power in range(1, 13):
        inside = random.dirichlet(np.ones(k), 50) * (1 - 10.0**-power)
        # a tail that falls off quickly, as one does
        outside = np.exp(-np.minimum(np.arange(size - k), 99)) * random.uniform(0.5, 1.0, (50, size - k))
        outside *= 10.0**-power / outside.sum(axis=1, keepdims=True)
        logp = np.log(-np.sort(-np.concatenate([inside, outside], axis=1))).astype(np.float32)
        right = np.log(np.exp(logp[:, k:].astype(np.float64)).sum(axis=1))
        tail = bounded_tail(logp[:, :k], logp[:, k : k + 16], size)
        assert tail.dtype == np.float32
        # within what the listed ids leave open, however small the tail is
        assert np.abs(tail - right).max() < 1e-3
        # nothing but the K: as good as their rounding, and never below it
        plain = bounded_tail(logp[:, :k], logp[:, k:k], size)
        assert plain.min() >= np.float32(np.log(1e-7))
        assert (np.abs(plain - right).max() < 1e-2) == (power < 6)
    # all ids are listed: their sum is the tail
    whole = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    assert bounded_tail(whole[:, :2], whole[:, 2:], 4) == pytest.approx(np.log(0.25))
    # a heavy tail lies between its listed part and as much of each other id as of the last listed one
    np.testing.assert_allclose(bounded_tail(whole[:, :1], whole[:, 1:2], 4), np.log([0.5]), rtol=1e-6)
    assert bounded_tail(whole[:, :1], np.log(np.array([[0.4]], np.float32)), 2) == pytest.approx(np.log(0.4))
    assert bounded_tail(whole[:, :1], np.log(np.array([[0.1]], np.float32)), 4) == pytest.approx(np.log(0.3))


def test_scores_at_another_temperature(setup: Any) -> None:
    """Each kind of question asks for it, and takes no answer that does not say that it has it."""
    server, plain = setup
    scorer = ServerScorer(fleet=plain.fleet, vocabulary=VOCABULARY, block=2, temperature=2.0)
    support = [np.array([[0, 39, 7]] * 3), np.array([[5, 6, 7]]), np.empty((0, 3), np.int64)]
    asks: list[Any] = [scorer.logprobs, lambda *about: scorer.topk(*about, 3), lambda *a: scorer.gather(*a, support)]
    for ask in asks:
        with pytest.raises(ServerError, match="scores at temperature 1, not at 2"):
            ask(ROWS, PLACES)
    server.tempers = True
    given, best, chosen = (ask(ROWS, PLACES) for ask in asks)
    for row, places, one, top, own in zip(ROWS, PLACES, given, best, chosen, strict=True):
        for line, place in enumerate(places):
            logits = np.asarray(logprobs(row[:place].tolist(), "default"), np.float64) / 2
            logp = logits - np.log(np.exp(logits).sum())
            np.testing.assert_allclose(one[line], logp[row[place]], rtol=1e-5)
            np.testing.assert_allclose(top.logp[line], np.sort(logp)[::-1][:3], rtol=1e-5)
            np.testing.assert_allclose(own.logp[line][:1], logp[[0]] if len(row) == 5 else logp[[5]], rtol=1e-5)


def test_ids_that_somebody_else_chose(setup: Any) -> None:
    server, scorer = setup
    support = [np.array([[0, 39, 7], [7, 7, 1], [2, 3, 4]]), np.array([[5, 6, 7]]), np.empty((0, 3), np.int64)]
    found = scorer.gather(ROWS, PLACES, support)
    for row, places, chosen, answer in zip(ROWS, PLACES, support, found, strict=True):
        scores = answer.logp
        assert np.array_equal(answer.ids, chosen)
        assert scores.shape == chosen.shape
        for line, place in enumerate(places):
            wanted = logprobs(row[:place].tolist(), "default")[chosen[line]]
            np.testing.assert_allclose(scores[line], wanted, rtol=1e-6)
    asked = {tuple(body["token_ids_logprob"]) for body in server.of("/generate")}
    assert asked == {(0, 1, 7, 39), (2, 3, 4), (5, 6, 7)}  # two positions at a time, each id once


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12), min_size=1, max_size=5), st.data())
def test_any_rows_and_positions(setup: Any, rows: list[list[int]], data: Any) -> None:
    ids = [np.array(row, np.int32) for row in rows]
    places = [
        np.array(sorted(data.draw(st.sets(st.integers(1, len(row) - 1)), label="positions")), np.int64) for row in rows
    ]
    for row, where, scores in zip(ids, places, setup[1].logprobs(ids, places), strict=True):
        wanted = [logprobs(row[:place].tolist(), "default")[row[place]] for place in where]
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.logprobs([ROWS[0]], [np.array([0])]), "positions 0..0 must lie in 1..4"),
        (lambda s: s.logprobs([ROWS[0]], [np.array([5])]), "positions 5..5 must lie in 1..4"),
        (lambda s: s.logprobs([np.array([3, 99], np.int32)], [np.array([1])]), "ids 0..39"),
        (lambda s: s.topk(ROWS, PLACES, VOCABULARY + 1), "the model shares 40"),
        (lambda s: s.topk(ROWS, PLACES, 0), "the 0 most likely"),
        (lambda s: s.gather([ROWS[1]], [PLACES[1]], [np.array([[40]])]), "ids 0..39"),
        (lambda s: s.logprobs([np.zeros(60, np.int32)], [np.array([5])]), "at most 59"),
    ],
)
def test_questions_without_sense_never_leave(setup: Any, call: Any, words: str) -> None:
    server, scorer = setup
    with pytest.raises(ServerError, match=words):
        call(scorer)
    assert not server.of("/generate")


def test_a_likely_id_that_the_student_lacks_is_a_part_of_the_tail(setup: Any) -> None:
    server, scorer = setup
    fewer = ServerScorer(fleet=scorer.fleet, vocabulary=VOCABULARY, shared=30)
    (every,), (found,) = (one.topk([ROWS[0]], [PLACES[0]], 8) for one in (scorer, fewer))
    assert every.ids.max() >= 30 > found.ids.max()
    for row, place in enumerate(PLACES[0]):
        logp = server.logp(ROWS[0][:place].tolist(), "default")
        best = np.argsort(-logp[:30], kind="stable")[:8]
        assert found.ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(found.logp[row], logp[best], rtol=1e-5)
    # too few of those that the server lists are the student's
    with pytest.raises(ServerError, match="the student has 10 ids"):
        ServerScorer(fleet=scorer.fleet, vocabulary=VOCABULARY, shared=10).topk([ROWS[0]], [PLACES[0]], 10)


@pytest.mark.parametrize("value", [5.0, float("nan"), float("-inf"), 10**400, "x"])
def test_a_teacher_that_dreams_up_scores(setup: Any, value: Any) -> None:
    server, scorer = setup

    def edit(answer: Any) -> Any:
        for name, row in (("input_token_logprobs", 1), ("input_top_logprobs", 1)):
            entry = answer["meta_info"].get(name, [None, [[0]]])[row]
            (entry if name == "input_token_logprobs" else entry[0])[0] = value
        return answer

    server.edit = edit
    for call in (lambda: scorer.logprobs([ROWS[0]], [PLACES[0]]), lambda: scorer.topk([ROWS[0]], [PLACES[0]], 2)):
        with pytest.raises(BadAnswer, match=r"scoring row \d+: "):
            call()


def test_a_teacher_that_dies_in_the_middle_of_a_step(setup: Any) -> None:
    """The rows that it had answered stay, the others are asked for again; a step has all of its scores or none."""
    server, scorer = setup
    whole = scorer.logprobs(ROWS, PLACES)
    server.asked.clear()
    gone = lambda path, body: (0, None) if path == "/generate" and 1 < len(server.of(path)) < 5 else None  # noqa: E731
    server.orders.append(gone)
    for mine, again in zip(whole, scorer.logprobs(ROWS, PLACES), strict=True):
        np.testing.assert_array_equal(mine, again)
    assert len(server.of("/generate")) > len([row for row in PLACES if len(row)])
    server.orders[:] = [lambda path, body: (0, None) if path == "/generate" else None]
    fleet = Fleet(urls=[server.url], settings=ClientLimits(backoff=0.01, deadline=0.2)).open()
    with pytest.raises(ServerDown, match=r"scoring row \d+: .*\(tried \d+ times\)"):
        ServerScorer(fleet=fleet, vocabulary=VOCABULARY).logprobs(ROWS, PLACES)
    fleet.close()


def test_too_few_log_probabilities(setup: Any) -> None:
    server, scorer = setup

    def shorter(name: str) -> Any:
        def edit(answer: Any) -> Any:
            answer["meta_info"][name].pop()
            return answer

        return edit

    server.edit = shorter("input_token_logprobs")
    with pytest.raises(BadAnswer, match="3 log-probabilities came for 4 ids"):
        scorer.logprobs([ROWS[0]], [PLACES[0]])
    server.edit = shorter("input_top_logprobs")
    with pytest.raises(BadAnswer, match="0 of 2 log-probabilities came for position 4"):
        scorer.topk([ROWS[0]], [PLACES[0]], 2)


def test_a_teacher_that_changes_is_refused(setup: Any) -> None:
    server, scorer = setup
    server.weights = "other"
    with pytest.raises(WrongWeights, match="'other'"):
        scorer.logprobs([ROWS[1]], [PLACES[1]])


def test_rows_are_read_by_hand() -> None:
    given_rows = [[None, 7, None], [-0.5, 2, None]]
    top = [None, [[-0.1, 4, None], [-2.5, 9, None]]]
    meta = {"input_token_logprobs": given_rows, "input_top_logprobs": top, "weight_version": "w"}
    ask = fake.score_of([3, 7, 2], 1, [2], top=2)
    scores, weights = SglangDialect().read_scores({"meta_info": meta}, ask)
    assert np.isnan(scores[0])
    assert (float(scores[1]), weights) == (-0.5, "w")
    best, logp = SglangDialect().read_top({"meta_info": meta}, ask)
    assert best.tolist() == [[4, 9]]
    np.testing.assert_allclose(logp, [[-0.1, -2.5]], rtol=1e-6)
    with pytest.raises(BadAnswer, match="here: row 1 is of id 2; 5 was asked for"):
        SglangDialect().read_scores({"meta_info": meta}, fake.score_of([3, 7, 5], 1, [2]))
