"""ServerPolicy against a server that speaks the protocol: what is sent, what comes back, and everything that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake

from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers import fleet as retry
from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.policy import ServerPolicy
from turngym.agents.servers.server_connection import (
    BadAnswer,
    ClientLimits,
    ServerDown,
    ServerError,
    ServerTimeout,
    WrongWeights,
    seed_of,
)
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure

FakeServer, END, VOCABULARY, draw = fake.FakeServer, fake.END, fake.VOCABULARY, fake.draw

QUICK, ask, Words = fake.QUICK, fake.ask, fake.Words


@pytest.fixture
def server() -> Iterator[Any]:
    with FakeServer() as one:
        yield one


@pytest.fixture
def connect() -> Iterator[Any]:
    """`connect(server, ...)` gives a policy; its connections are closed after the test."""
    fleets = []

    def make(*servers: Any, settings: ClientLimits = QUICK, **more: Any) -> ServerPolicy:
        fleets.append(Fleet(urls=[one.url for one in servers], settings=settings).open())
        return ServerPolicy(fleets[-1], vocabulary=VOCABULARY, **more)

    yield make
    for fleet in fleets:
        fleet.close()


def by_hand(prompt: list[int], most: int, seed: int, temperature: float = 1.0, weights: str = "default") -> Any:
    """Ids and log-probabilities that the fake server draws when nothing disturbs it."""
    ids: list[int] = []
    logps: list[float] = []
    while len(ids) < most and (not ids or ids[-1] != END):
        token, logp = draw(prompt + ids, weights, temperature, seed)
        ids.append(token)
        logps.append(logp)
    return ids, np.array(logps, np.float32)


LONG = next(n for n in range(10_000) if len(by_hand([5, 6], 50, seed_of((n,)))[0]) == 50)
"""A random stream with which the fake server draws 50 ids without an end."""


def failure(policy: ServerPolicy, *requests: GenerateRequest) -> Any:
    with pytest.raises(PartialFailure) as caught:
        policy.generate(requests)
    return caught.value.results


def test_ids_and_log_probabilities_are_the_servers(server: Any, connect: Any) -> None:
    stream = (3, 1, 4)
    (found,) = connect(server).generate([ask(5, 6, 7, most=8, stream=stream, temperature=0.7)])
    ids, logps = by_hand([5, 6, 7], 8, seed_of(stream), 0.7)
    assert found.ids.tolist() == ids
    assert found.ids.dtype == np.int32
    np.testing.assert_array_equal(found.logprobs, logps)
    assert found.finish == ("stop" if ids[-1] == END else "length")
    assert (found.policy_version, found.version_spans) == (0, ())


def test_what_is_sent(server: Any, connect: Any) -> None:
    connect(server).generate([ask(5, 6, most=4, temperature=0.5, stop_ids=(9, 2), stop_text=("xy",), stream=(7, 1))])
    (body,) = server.of("/generate")
    params = body["sampling_params"]
    assert body["input_ids"] == [5, 6]
    assert body["return_logprob"] is True
    assert params["sampling_seed"] == seed_of((7, 1))
    assert (params["temperature"], params["max_new_tokens"]) == (0.5, 4)
    assert (params["stop_token_ids"], params["stop"]) == ([9, 2], ["xy"])
    assert (params["top_p"], params["top_k"], params["repetition_penalty"]) == (1.0, -1, 1.0)


def test_seeds_are_of_the_stream_alone() -> None:
    assert (seed_of((0,)), seed_of((1, 2, 3))) == (7896617691693857887, 6498626229777268288)

    assert len({seed_of((1, 2, turn)) for turn in range(100)}) == 100
    assert all(0 <= seed_of((turn,)) < 2**63 for turn in range(100))
    with pytest.raises(ServerError, match="negative"):
        seed_of((1, -2))


def test_a_batch_is_sent_at_once_and_answered_in_order(server: Any, connect: Any) -> None:
    server.token_seconds = 0.005
    requests = [ask(5, 6 + n, stream=(n,), session=str(n)) for n in range(12)]
    together = connect(server, settings=ClientLimits(parallel=4)).generate(requests)
    assert 1 < server.most <= 4
    for n, found in enumerate(together):
        assert found.ids.tolist() == by_hand([5, 6 + n], 6, seed_of((n,)))[0]


def test_a_full_context_is_no_request(server: Any, connect: Any) -> None:
    policy = connect(server)
    assert policy.max_length == 64
    full, last, long = policy.generate(
        [ask(*[5] * 60, session="f"), ask(*[5] * 59, most=90, session="l", stream=(2,)), ask(*[5] * 70, session="g")]
    )
    assert (len(full.ids), full.finish) == (0, "length")
    assert (len(long.ids), long.finish) == (0, "length")
    assert server.of("/generate")[0]["sampling_params"]["max_new_tokens"] == 5
    assert len(server.of("/generate")) == 1
    assert 1 <= len(last.ids) <= 5


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(5, VOCABULARY), f"ids 0..{VOCABULARY - 1}"),
        (ask(5, -1), "-1"),
        (ask(), "at least one id"),
        (ask(5, temperature=-1.0), "temperature -1.0"),
        (ask(5, most=0), "max_new_tokens 0"),
        (ask(5, stop_text=("",)), "empty string"),
    ],
)
def test_a_request_without_sense_never_leaves(server: Any, connect: Any, request_: Any, words: str) -> None:
    with pytest.raises(ServerError, match=words) as caught:
        connect(server).generate([ask(5), request_])
    assert "request 1 (session 'a')" in str(caught.value)
    assert not server.of("/generate")


@pytest.mark.parametrize("error", ["unknown field `max_tokens`", {"message": "unknown field `max_tokens`"}])
def test_what_a_server_refuses_is_said_in_its_words(server: Any, connect: Any, error: Any) -> None:
    server.orders.append(lambda path, body: (400, {"error": error}) if path == "/generate" else None)
    with pytest.raises(ServerError, match=r"status 400: unknown field `max_tokens`$"):
        connect(server).generate([ask(5)])
    assert len(server.of("/generate")) == 1


def test_a_server_that_dies_and_comes_back_is_waited_for(server: Any, connect: Any) -> None:
    policy = connect(server)
    replies = iter([(0, None), (503, {"error": "starting"}), (500, None)])
    server.orders.append(lambda path, body: next(replies, None) if path == "/generate" else None)
    (found,) = policy.generate([ask(5, 6, stream=(8,))])
    assert found.ids.tolist() == by_hand([5, 6], 6, seed_of((8,)))[0]
    assert len(server.of("/generate")) == 4


def test_a_server_that_stays_away_fails_what_was_asked_of_it(server: Any, connect: Any) -> None:
    policy = connect(server)
    server.orders.append(lambda path, body: (0, None) if body and body.get("input_ids") == [7] else None)

    def clock() -> float:
        return 0.0 if sum(body["input_ids"] == [7] for body in server.of("/generate")) < 3 else 1e6

    policy.fleet.endpoint_for("good").connection.clock = clock
    good, bad = failure(policy, ask(5, session="good"), ask(7, session="bad"))
    assert isinstance(good, Generation)
    assert isinstance(bad, ServerDown)
    assert "session 'bad'" in str(bad)
    assert "(tried 3 times)" in str(bad)
    assert isinstance(bad, ConnectionError)


def test_a_server_that_hangs_is_told_to_stop_and_its_state_is_said(
    server: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "ABORT_SECONDS", 0.2)
    policy = connect(server, settings=ClientLimits(deadline=0.2, backoff=0.02))

    def hang(path: str, body: Any) -> Any:
        if path == "/generate":
            server.hung.wait(30)
        return None

    server.orders.append(hang)
    (error,) = failure(policy, ask(5))
    assert isinstance(error, ServerTimeout)
    assert "/ready says that it is up" in str(error)
    assert server.of("/abort_request")[0]["rid"] == server.of("/generate")[0]["rid"]


def test_at_the_deadline_what_was_drawn_is_kept(server: Any, connect: Any) -> None:
    server.token_seconds = 0.1
    policy = connect(server, settings=ClientLimits(deadline=0.4))
    (found,) = policy.generate([ask(5, 6, most=50, stream=(LONG,))])
    ids, logps = by_hand([5, 6], 50, seed_of((LONG,)))
    assert found.finish == "aborted"
    assert len(found.ids) < len(ids)
    assert found.ids.tolist() == ids[: len(found.ids)]
    np.testing.assert_array_equal(found.logprobs, logps[: len(found.ids)])


def interrupt_first(server: Any, count: int) -> None:
    """Make the server break off its first response after `count` ids."""

    def edit(answer: Any) -> Any:
        if len(server.of("/generate")) == 1:
            meta = answer["meta_info"]
            answer["output_ids"] = answer["output_ids"][:count]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:count]
            meta["weight_versions"][0]["end"] = count
            meta["finish_reason"] = {"type": "abort", "message": "Abort"}
        return answer

    server.edit = edit


def test_a_response_that_the_server_broke_off_goes_on(server: Any, connect: Any) -> None:
    """The rest is asked for, and the whole is what an undisturbed server draws."""
    interrupt_first(server, 3)
    (found,) = connect(server).generate([ask(5, 6, most=9, stream=(3,))])
    ids, logps = by_hand([5, 6], 9, seed_of((3,)))
    assert len(ids) > 3
    first, second = server.of("/generate")
    assert second["input_ids"] == [5, 6, *ids[:3]]
    assert second["sampling_params"]["max_new_tokens"] == 6
    assert first["rid"] != second["rid"]
    assert found.ids.tolist() == ids
    np.testing.assert_array_equal(found.logprobs, logps)


def test_a_stop_text_across_the_break_is_found(server: Any, connect: Any) -> None:
    ids, _ = by_hand([5, 6], 9, seed_of((3,)))
    text = Words().decode(ids)
    across = text[2:4]
    assert across not in text[:3]
    interrupt_first(server, 3)
    asked = ask(5, 6, most=9, stream=(3,), stop_text=(across,))
    (found,) = connect(server, stops=StopText(Words())).generate([asked])
    assert (found.ids.tolist(), found.finish) == (ids[:4], "stop")
    assert len(found.logprobs) == 4
    server.asked.clear()
    (found,) = connect(server).generate([asked])
    assert (found.ids.tolist(), found.finish) == (ids[:3], "aborted")


def test_weights_that_change_in_between_are_written_down(server: Any, connect: Any) -> None:
    policy = connect(server)
    versions = policy.fleet.versions
    versions.announce("new", 7)
    server.token_seconds = 0.01

    def change(answer: Any) -> Any:
        rows = [("default", 0, 2), ("new", 2, len(answer["output_ids"]))]
        spans = [{"version": name, "start": start, "end": end} for name, start, end in rows]
        answer["meta_info"]["weight_versions"] = spans
        return answer

    server.edit = change
    (found,) = policy.generate([ask(5, 6, stream=(3,))])
    assert found.policy_version == 0
    assert found.version_spans == ((0, 0, 2), (7, 2, len(found.ids)))
    server.edit, server.weights = (lambda answer: answer), "new"
    versions.settle("new")
    (found,) = policy.generate([ask(5, 6, stream=(3,))])
    assert (found.policy_version, found.version_spans) == (7, ())
    assert policy.policy_version == 7


def test_a_server_with_other_weights_is_refused(server: Any, connect: Any) -> None:
    policy = connect(server, settings=ClientLimits(deadline=5.0))
    server.weights = "other"
    (error,) = failure(policy, ask(5))
    assert isinstance(error, WrongWeights)
    assert "'other'" in str(error)
    assert "'default'" in str(error)
    assert len(server.of("/generate")) == 1


def test_a_server_with_other_weights_gets_its_own_again(server: Any, connect: Any) -> None:
    policy = connect(server)
    policy.fleet.versions.add("turngym-x", 4)
    repaired = []

    def repair(url: str) -> None:
        repaired.append(url)
        server.weights = "turngym-x"

    policy.fleet.repair = repair
    found = policy.generate([ask(5, session=str(n)) for n in range(5)])
    assert [one.policy_version for one in found] == [4] * 5
    assert set(repaired) == {server.url}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda meta: meta["output_token_logprobs"].pop(), "both must be of one length"),
        (lambda meta: meta["output_token_logprobs"][1].__setitem__(1, 39), "its log-probability is of id"),
        (lambda meta: meta["weight_versions"][0].update(start=1), "do not cover"),
        (lambda meta: meta["output_token_logprobs"][0].__setitem__(0, float("nan")), "must be finite"),
        (lambda meta: meta["output_token_logprobs"][0].__setitem__(0, 10**400), "such a server: OverflowError"),
        (lambda meta: meta.update(cached_tokens="many"), "such a server: ValueError"),
        (lambda meta: meta.update(finish_reason=None), "finish_reason is None"),
    ],
)
def test_an_answer_that_does_not_add_up_is_none(server: Any, connect: Any, damage: Any, words: str) -> None:
    def edit(answer: Any) -> Any:
        damage(answer["meta_info"])
        return answer

    server.edit = edit
    (error,) = failure(connect(server), ask(5, 6, stream=(3,)))
    assert isinstance(error, BadAnswer)
    assert words in str(error)
    assert "session 'a'" in str(error)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (VOCABULARY, "id 40; the vocabulary has ids 0..39"),
        (-5, "id -5; the vocabulary has ids 0..39"),
        (2**40, "such a server: OverflowError"),
    ],
)
def test_an_id_that_the_model_lacks_is_not_played(server: Any, connect: Any, token: int, words: str) -> None:
    def edit(answer: Any) -> Any:
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = token
        return answer

    server.edit = edit
    (error,) = failure(connect(server), ask(5, 6, stream=(3,)))
    assert isinstance(error, BadAnswer)
    assert words in str(error)


def test_rounding_above_zero_is_zero(server: Any, connect: Any) -> None:
    def edit(answer: Any) -> Any:
        answer["meta_info"]["output_token_logprobs"][0][0] = 1e-7
        return answer

    server.edit = edit
    (found,) = connect(server).generate([ask(5, 6, stream=(3,))])
    assert found.logprobs[0] == 0.0


def test_greedy_is_greedy_at_temperature_one(server: Any, connect: Any) -> None:
    (found,) = connect(server).generate([ask(5, 6, temperature=0.0)])
    ids, logps = by_hand([5, 6], 6, 0, 0.0)
    assert found.ids.tolist() == ids
    np.testing.assert_array_equal(found.logprobs, logps)


def test_ids_that_are_not_scored_are_not_drawn(server: Any, connect: Any) -> None:
    """A head has more rows than its teacher's: the rest is as if there were no others, whatever else is asked."""
    every, few = connect(server), connect(server, vocab_size=15)
    asked = ask(5, 6, 7, most=30, stream=(4,), temperature=0.7)
    (whole,), (found,) = (one.generate([asked]) for one in (every, few))
    assert whole.ids.max() >= 15 > found.ids.max()
    row = [5, 6, 7, *found.ids.tolist()]
    for place, (one, logp) in enumerate(zip(found.ids, found.logprobs, strict=True), 3):
        among = fake.tempered(server.logp(row[:place], "default")[:15], 0.7)
        np.testing.assert_allclose(logp, among[one], rtol=1e-5)
    # one that does not know what it is asked is seen
    server.check = lambda kind, body: body.get("sampling_params", {}).pop("logit_bias", None)
    (answer,) = failure(few, asked)
    assert isinstance(answer, BadAnswer)
