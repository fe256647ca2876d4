"""Conversations without a name are told apart by their history; nobody's turn is left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import proxy_tools as tools
import pytest

from turngym.agents.proxy.sessions import HistoryMatch
from turngym.agents.proxy.turn_records import ChatMessage

user = tools.user


@pytest.fixture
def make(make_bench: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: make_bench(**{"unnamed": "match"} | options)


def goes_on(bench: Any, messages: list[Any], text: str, **fields: Any) -> list[Any]:
    messages = [*messages, user(text)]
    return [*messages, bench.ask(messages, None, **fields).reply]


def depths(bench: Any) -> list[list[str]]:
    """What was said in each session that is open, oldest first."""
    return [[turn.observation for turn in session.turns] for session in bench.service.sessions.all()]


def test_the_same_history_continued_is_the_same_session(make: Any) -> None:
    bench = make()
    ann, bob = goes_on(bench, [], "I am Ann"), goes_on(bench, [], "I am Bob")
    ann, bob = goes_on(bench, ann, "one"), goes_on(bench, bob, "two")
    ann = goes_on(bench, ann, "three")
    assert depths(bench) == [["I am Ann", "one", "three"], ["I am Bob", "two"]]
    assert bench.service.health()["turns"] == {"main": 5, "side": 0}
    assert len({request.session for request in bench.policy.requests}) == 2  # the engine keeps what it has of each


def test_an_answer_may_come_back_with_the_stop_text_that_was_cut_off(make: Any) -> None:
    bench = make()
    bench.policy.answer = lambda request: "<a>go</a>"
    first = bench.ask([user("look")], None, stop=["</a>", "STOP"])
    assert first.reply.content == "<a>go"
    said = [user("look"), {"role": "assistant", "content": "<a>go</a>"}, user("then?")]
    second = bench.ask(said, None, stop=["</a>", "STOP"])
    assert (second.kept, second.opens) == (2, False)
    # without its end the answer goes on as well; with one that the request does not name it is another answer
    third = bench.ask([*said, second.reply, user("and now?")], None, stop=["</a>"])
    assert (third.kept, third.opens) == (4, False)
    other = bench.ask([*said, second.reply, user("and now?"), {"role": "assistant", "content": "<a>go</a>"}, user("?")])
    assert (other.kept, other.opens) == (0, True)
    assert depths(bench)[0] == ["look", "then?", "and now?"]


def test_two_that_said_the_same_are_not_mixed(make: Any) -> None:
    bench = make()
    bench.policy.answer = lambda request: "hi"
    first, second = goes_on(bench, [], "hello"), goes_on(bench, [], "hello")
    assert depths(bench) == [["hello"], ["hello"]]
    goes_on(bench, first, "a")
    goes_on(bench, second, "b")
    # who goes on first has the session; the other one begins a new one with what was said as its prompt
    assert [turns[-1] for turns in depths(bench)] == ["a", "hello", "[user]\nhello\n\n[assistant]\nhi\n\n[user]\nb"]


def test_users_keep_their_conversations_apart(make: Any) -> None:
    bench = make()
    bench.policy.answer = lambda request: "hi"
    ann = goes_on(bench, [], "hello", user="ann")
    bob = goes_on(bench, [], "hello", user="bob")
    goes_on(bench, bob, "b", user="bob")
    goes_on(bench, ann, "a", user="ann")
    assert depths(bench) == [["hello", "a"], ["hello", "b"]]
    assert "ann" not in bench.service.recorder.path.read_text()


def test_another_request_for_an_answer_begins_a_session(make: Any) -> None:
    bench = make()
    messages = goes_on(bench, [], "hello")
    bench.ask(messages[:1], None)
    assert depths(bench) == [["hello"], ["hello"]]


def test_a_history_is_known_after_a_restart_and_not_after_its_end(make: Any) -> None:
    first = make(idle=60.0)
    messages = goes_on(first, goes_on(first, [], "hello", user="ann"), "more", user="ann")
    first.service.close()
    second = make(idle=60.0)
    messages = goes_on(second, messages, "and more", user="ann")
    assert depths(second) == [["hello", "more", "and more"]]
    second.now += 100
    assert second.service.sweep() == 1
    goes_on(second, messages, "late", user="ann")
    assert [len(turns) for turns in depths(second)] == [1]
    (session,) = second.service.sessions.all()
    assert session.name != second.episodes[0].task.task_id[:32]


def test_whoever_names_no_session_is_counted_and_named_once(make: Any) -> None:
    bench = make()
    said: list[str] = []
    bench.service.tally.notice = said.append
    for _ in range(3):
        bench.ask([user("x")], None)
    bench.ask([user("x")], "named")
    assert bench.service.health()["unnamed"] == {"a client without a name": 3}
    assert said == [
        "'a client without a name' names no session; its conversations are told apart by their history. X-Session-Id "
        "names them exactly"
    ]
    bench.ask([user("x")], None, turn_type="side")
    assert bench.service.health()["turns"] == {"main": 4, "side": 1}


def test_side_is_said_too(make: Any) -> None:
    bench = make(unnamed="side")
    said: list[str] = []
    bench.service.tally.notice = said.append
    bench.ask([user("x")], None)
    assert bench.service.health()["turns"] == {"main": 0, "side": 1}
    assert "answered and not trained on" in said[0]


def test_their_temperature_and_seed_are_honored(make: Any) -> None:
    bench = make(temperature=1.0, seed=3)
    messages = goes_on(bench, [], "x", temperature=0.25)
    goes_on(bench, messages, "y", seed=9)
    bench.service.sessions.all()[0].last_used -= 10_000
    bench.service.sweep()
    assert [request.sampling.temperature for request in bench.policy.requests] == [0.25, 1.0]
    assert bench.policy.requests[1].stream == (9, 0, 0)
    assert [turn.excluded for turn in bench.episodes[0].turns] == ["sampled at temperature 0.25", None]


def test_the_longest_history_wins_and_the_first_to_say_it_keeps_it() -> None:
    def said(*texts: str) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=text) for text in texts]

    match = HistoryMatch()
    match.note("short", "", said("a", "b"))
    match.note("long", "", said("a", "b", "c", "d"))
    match.note("late", "", said("a", "b"))
    assert match.find("", said("a", "b", "c", "d", "e")) == "long"
    assert match.find("", said("a", "b", "x")) == "short"
    assert match.find("", said("a", "b")) is None
    assert match.find("else", said("a", "b", "x")) is None
    match.forget("late")
    assert match.find("", said("a", "b", "x")) == "short"
    match.note("short", "", said("a", "b", "y", "z"))
    assert match.find("", said("a", "b", "x")) is None
