"""Conversations without a name are told apart by their history; nobody's turn is left out in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import proxy_tools as tools
import pytest
from servers import until

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
    """Which of them goes on cannot be told, so that neither is joined with it; that is said once, and counted."""
    bench = make()
    said: list[str] = []
    bench.service.tally.notice = said.append
    bench.policy.answer = lambda request: "hi"
    first, second = goes_on(bench, [], "hello"), goes_on(bench, [], "hello")
    assert depths(bench) == [["hello"], ["hello"]]
    second, first = goes_on(bench, second, "b"), goes_on(bench, first, "a")
    begun = "[user]\nhello\n\n[assistant]\nhi\n\n[user]\n"
    assert depths(bench) == [["hello"], ["hello"], [f"{begun}b"], [f"{begun}a"]]
    # from here on they differ
    goes_on(bench, first, "a2")
    goes_on(bench, second, "b2")
    assert depths(bench)[2:] == [[f"{begun}b", "b2"], [f"{begun}a", "a2"]]
    assert bench.service.health()["not_told_apart"] == 2
    assert len([line for line in said if "word for word" in line]) == 1


def test_a_branch_is_not_joined_to_another_clients_conversation(make: Any) -> None:
    """Ann asks again from her first answer, which is also where Bob stands."""
    bench = make()
    bench.policy.answer = lambda request: "hi"
    ann = goes_on(bench, [], "hello")
    goes_on(bench, ann, "one")
    goes_on(bench, [], "hello")
    goes_on(bench, ann, "another one")
    assert [turns[-1] for turns in depths(bench)][:2] == ["one", "hello"]
    # where nobody else has said the same, a branch begins a session as well
    carol = goes_on(bench, [], "good day")
    goes_on(bench, carol, "x")
    goes_on(bench, carol, "y")
    assert [len(turns) for turns in depths(bench)][-2:] == [2, 1]
    assert bench.service.health()["not_told_apart"] == 1


def thoughtful(bench: Any, *thoughts: str) -> Any:
    """The policy thinks one thought after the other, and says the same after each."""
    said = iter(thoughts)
    bench.policy.answer = lambda request: f"<think>\n{next(said)}\n</think>\n\nhi"
    return bench


@pytest.mark.parametrize("shown", ["hi", " hi\n"])
def test_thoughts_that_a_client_leaves_out(make: Any, shown: str) -> None:
    bench = thoughtful(make(), *"abc")
    messages: list[Any] = []
    for turn in range(3):
        reply = bench.ask([*messages, user(f"turn {turn}")], None).reply
        assert "</think>" in reply.content
        messages += [user(f"turn {turn}"), {"role": "assistant", "content": shown}]
    assert depths(bench) == [["turn 0", "turn 1", "turn 2"]]
    # after a restart as well
    bench.service.close()
    again = thoughtful(make(), "d")
    again.ask([*messages, user("turn 3")], None)
    assert depths(again) == [["turn 0", "turn 1", "turn 2", "turn 3"]]


def test_thoughts_tell_conversations_apart_only_where_they_are_sent(make: Any) -> None:
    bench = thoughtful(make(), "Ann's", "Bob's", "c", "d", "e")
    ann, bob = (bench.ask([user("hello")], None).reply for _ in range(2))
    bench.ask([user("hello"), bob, user("b")], None)
    bench.ask([user("hello"), ann, user("a")], None)
    assert depths(bench) == [["hello", "a"], ["hello", "b"]]
    bench.ask([user("hello"), {"role": "assistant", "content": "hi"}, user("c")], None)
    assert [len(turns) for turns in depths(bench)] == [2, 2, 1]
    # a thought that nobody here had is another conversation's
    other = {"role": "assistant", "content": "<think>\nno\n</think>\n\nhi"}
    bench.service.close()
    bench = thoughtful(make(), "x", "y")
    bench.ask([user("good day")], None)
    bench.ask([user("good day"), other, user("z")], None)
    assert depths(bench)[-1] == ["[user]\ngood day\n\n[assistant]\n<think>\nno\n</think>\n\nhi\n\n[user]\nz"]


def test_calls_have_ids_that_tell_conversations_apart(make: Any) -> None:
    bench = make()
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    bench.policy.answer = lambda request: call
    offered = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ann, bob = (bench.ask([user("hello")], None, tools=offered).reply for _ in range(2))
    assert ann.tool_calls[0].id != bob.tool_calls[0].id

    def result(reply: Any, text: str) -> list[Any]:
        return [user("hello"), reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": text}]

    bench.ask(result(bob, "b"), None, tools=offered)
    bench.ask(result(ann, "a"), None, tools=offered)
    assert depths(bench) == [["hello", "a"], ["hello", "b"]]
    # a client that makes ids of its own has none that tell
    own = replace(ann, tool_calls=(replace(ann.tool_calls[0], id="own"),))
    bench.ask(result(own, "c"), None, tools=offered)
    assert len(depths(bench)) == 3


def test_examples_that_clients_share_are_nobodys_conversation(make: Any) -> None:
    bench = make()
    example = [user("2 + 2?"), {"role": "assistant", "content": "4"}]
    for text in ("a", "b", "c"):
        goes_on(bench, example, text)
    assert len(depths(bench)) == 3
    assert "not_told_apart" not in bench.service.health()


def test_requests_at_the_same_time_are_two_conversations(make: Any) -> None:
    """New ones get names of their own, and of two that go on from one answer the first has the session."""
    bench = make()
    bench.policy.gate.clear()
    begun = [bench.begin([user(text)], None) for text in ("a", "b", "a")]
    bench.policy.flow()
    replies = [inflight.wait(20).reply for inflight in begun]
    assert depths(bench) == [["a"], ["b"], ["a"]]
    history = [user("b"), replies[1]]
    found: list[Any] = []
    bench.policy.gate.clear()
    threads = [threading.Thread(target=lambda t=t: found.append(bench.ask([*history, user(t)], None))) for t in "xy"]
    for thread in threads:
        thread.start()
    until(lambda: bench.service.health()["underway"] == 2)
    bench.policy.flow()
    for thread in threads:
        thread.join(20)
    assert sorted(len(turns) for turns in depths(bench)) == [1, 1, 1, 2]
    assert not any(record.retry for record in found)


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


def test_the_longest_history_wins() -> None:
    def said(*texts: str) -> list[ChatMessage]:
        roles = ("user", "assistant")
        return [ChatMessage(role=roles[n % 2], content=text) for n, text in enumerate(texts)]

    match = HistoryMatch()
    match.note("short", "", said("a", "b"))
    assert match.find("", said("a", "b", "x")) == ("short", True)
    match.note("long", "", said("a", "b", "c", "d"))
    assert match.find("", said("a", "b", "c", "d", "e")) == ("long", True)
    assert match.find("", said("a", "b", "x")) == (None, False)
    assert match.find("", said("a", "b")) == (None, True)
    assert match.find("else", said("a", "b", "c", "d", "e")) == (None, True)
    match.forget("long")
    assert match.find("", said("a", "b", "x")) == ("short", True)
    match.note("short", "", said("a", "b", "y", "z"))
    assert match.find("", said("a", "b", "x")) == (None, True)
    match.forget("short")
    match.forget("short")
    assert not match._passing
