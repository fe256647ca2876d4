"""What users say of turns: which turn they mean, and that it is written down."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import proxy_tools as tools
import pytest

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.api_errors import ApiError
from turngym.agents.proxy.app import create_app
from turngym.agents.proxy.sessions import Feedback, HeardFeedback, ProxySession, session_name
from turngym.agents.proxy.turn_records import read_records

user = tools.user
UP, DOWN = Feedback(score=1), Feedback(score=-1, text="it was the other drawer")


class Heard:
    """A service that notes what it tells of feedback."""

    def __init__(self, bench: Any) -> None:
        self.told: list[Any] = []
        self.bench, self.service = bench, bench.service
        self.service.heard.tell = self.tell

    def tell(self, place: Any, *what: Any) -> Any:
        self.told.append((*place, *what))
        return "counted"

    def written(self) -> list[tuple[int, int, str]]:
        found = [record for record in read_records(self.service.recorder.path.parent) if record["kind"] == "feedback"]
        return [(record["turn"], record["score"], record["text"]) for record in found]


@pytest.fixture
def start(make_bench: Callable[..., Any]) -> Callable[..., Heard]:
    return lambda **options: Heard(make_bench(**options))


def test_a_turn_is_named_by_its_number_or_its_answer(start: Any) -> None:
    served = start()
    asked = served.bench.begin([user("hello")], "s")
    served.bench.ask([user("hello"), asked.wait(20).reply, user("more")], "s")
    served.bench.ask([user("something else")], "s")
    key = served.bench.service.sessions.all()[0].key
    assert served.service.feedback(UP, session_id="s", turn=1) == "counted"
    assert served.service.feedback(DOWN, session_id="s") == "counted"
    assert served.service.feedback(DOWN, answer=asked.answer_id) == "counted"
    assert served.told == [(key, 1, UP, True), (key, 2, DOWN, True), (key, 0, DOWN, True)]
    assert served.written() == [(1, 1, ""), (2, -1, DOWN.text), (0, -1, DOWN.text)]
    assert served.service.health()["feedback_counted"] == 3


def test_the_same_again_is_written_once_and_another_takes_its_place(start: Any) -> None:
    served = start()
    served.bench.talk("s", 1)
    for said in (UP, UP, DOWN):
        assert served.service.feedback(said, session_id="s", turn=0) == "counted"
    assert served.written() == [(0, 1, ""), (0, -1, DOWN.text)]
    assert [what[2] for what in served.told] == [UP, UP, DOWN]


def test_turns_count_through_the_parts_of_a_session_and_after_its_end(start: Any) -> None:
    served = start(session_turns=2)
    served.bench.talk("s", 5)
    served.service.end("s")
    for turn in range(5):
        served.service.feedback(UP, session_id="s", turn=turn)
    keys = [episode.task.task_id for episode in served.bench.episodes]
    assert len(keys) == 3
    assert [what[:2] for what in served.told] == [(keys[turn // 2], turn % 2) for turn in range(5)]
    assert not any(what[3] for what in served.told)
    # a session of the same name counts from its own start
    served.bench.talk("s", 1, first="again")
    served.service.feedback(UP, session_id="s", turn=0)
    assert served.told[-1][0] not in keys
    with pytest.raises(ApiError, match="the session has turns 0 to 0"):
        served.service.feedback(UP, session_id="s", turn=1)


def test_an_answer_that_is_asked_for_again_has_nothing_said_of_it(start: Any) -> None:
    served = start()
    first = served.bench.begin([user("hello")], "s")
    first.wait(20)
    served.service.feedback(UP, session_id="s")
    second = served.bench.begin([user("hello")], "s")
    second.wait(20)
    key = served.bench.service.sessions.all()[0].key
    assert served.told[-1] == (key, 0, None, True)
    # its own id does not name the answer that took its place
    assert served.service.feedback(DOWN, answer=first.answer_id) == "late"
    with pytest.raises(ApiError, match="there was no main turn"):
        served.service.feedback(DOWN, answer=first.answer_id, client="another")
    assert len(served.told) == 2
    assert served.service.feedback(UP, answer=second.answer_id) == "counted"
    served.bench.begin([user("hello")], "s").wait(20)
    served.service.close()
    again = start()
    assert again.service.feedback_before == {}


def test_what_was_said_survives_a_restart(start: Any) -> None:
    served = start()
    served.bench.talk("open", 2)
    served.bench.talk("done", 2)
    served.service.end("done")
    for name in ("open", "done"):
        served.service.feedback(DOWN, session_id=name, turn=1)
    served.service.close()
    again = start()
    assert set(again.service.feedback_before.values()) == {DOWN}
    assert {turn for _, turn in again.service.feedback_before} == {1}
    assert len(again.service.feedback_before) == 2
    again.service.feedback(DOWN, session_id="done", turn=1)
    again.service.feedback(UP, session_id="open", turn=0)
    assert [(what[1], what[3]) for what in again.told] == [(1, False), (0, True)]
    assert len(again.written()) == 3  # what was known before is not written again


def test_who_asks_wrongly_is_told_what(start: Any) -> None:
    served = start()
    served.bench.talk("s", 1)
    client = create_app(served.service, keys=ClientKeys({"": "k"})).test_client()
    key = {"Authorization": "Bearer k"}
    assert client.post("/v1/feedback", json={"score": 1, "session_id": "s"}).status_code == 401
    assert client.post("/v1/feedback", data="{}", headers=key).status_code == 415
    for body, param, words in [
        ({"session_id": "s"}, "score", "it must be 1 \\(good\\) or -1 \\(bad\\)"),
        ({"score": True, "session_id": "s"}, "score", "it must be 1"),
        ({"score": 1}, "session_id", "which turn"),
        ({"score": 1, "session_id": "s", "turn": -1}, "turn", "a whole number from 0"),
        ({"score": 1, "answer": "x", "turn": 0}, "turn", "leave turn out"),
        ({"score": 1, "answer": 5}, "answer", "id of an answer"),
        ({"score": 1, "session_id": "s", "text": 5}, "text", "at most 4000"),
        ({"score": 1, "session_id": "s", "text": "x" * 4001}, "text", "at most 4000"),
        ({"scroe": 1, "session_id": "s"}, "scroe", "Did you mean 'score'"),
    ]:
        found = client.post("/v1/feedback", json=body, headers=key)
        assert (found.status_code, found.json["error"]["param"]) == (400, param), body
        assert re.search(words, found.json["error"]["message"]), found.json
    for body, words in [
        ({"score": 1, "session_id": "nobody"}, "no session of this name"),
        ({"score": 1, "session_id": "s", "turn": 1}, "turns 0 to 0"),
        ({"score": 1, "answer": "chatcmpl-0-1"}, "no main turn"),
    ]:
        found = client.post("/v1/feedback", json=body, headers=key)
        assert found.status_code == 404
        assert words in found.json["error"]["message"]
    assert not served.told
    good = client.post("/v1/feedback", json={"score": -1, "turn": 0}, headers={**key, "X-Session-Id": "s"})
    assert good.json == {"object": "feedback", "score": -1, "status": "counted"}
    served.service.drain()
    assert client.post("/v1/feedback", json={"score": 1, "session_id": "s"}, headers=key).status_code == 503


def test_no_client_makes_the_server_forget_what_is_anothers() -> None:
    heard = HeardFeedback(limit=2)

    def turn(client: str, number: int) -> None:
        name = session_name(client, f"s{number}")
        session = ProxySession(key=f"{name}-{number}", name=name, last_used=0.0)
        session.turns.append(None)  # type: ignore[arg-type]
        heard.note(session, f"{client}{number}")

    for client, numbers in (("ann", [0]), ("bob", range(5))):
        for number in numbers:
            turn(client, number)
    assert heard.place("ann", "s0", None, None) == (f"{session_name('ann', 's0')}-0", 0)
    assert heard.place("ann", None, None, "ann0") == (f"{session_name('ann', 's0')}-0", 0)
    assert heard.place("bob", "s4", None, None) is not None
    for client, session, answer in (("bob", "s0", None), ("bob", None, "bob0"), ("bob", None, "ann0")):
        with pytest.raises(ApiError):
            heard.place(client, session, None, answer)


def test_no_two_clients_share_the_name_of_a_session() -> None:
    # names of clients that share the first 8 letters of their hash
    first, other = "c3446", "c32019"
    assert session_name(first, "s") != session_name(other, "s")
    assert {len(session_name(name, "s")) for name in (first, other)} == {32}
