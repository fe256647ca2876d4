"""Streamed answers: events while the engine draws, over real HTTP, with the official client and without it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flask", reason="the proxy needs turngym[serve]")
pytest.importorskip("waitress", reason="the proxy needs turngym[serve]")
httpx = pytest.importorskip("httpx", reason="these tests speak HTTP")

import proxy_tools as tools  # noqa: E402
from proxy_http import Served  # noqa: E402

user, until = tools.user, tools.until
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.fixture
def serve(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(**options: Any) -> Served:
        options = {"max_waiting": 8, "policy": tools.StreamingEcho} | options
        made.append(Served(tools.Bench(make_tokenizer(), tmp_path, **options)))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def text_of(event: Any) -> str:
    return event["choices"][0]["delta"].get("content") or ""


def letters(events: Iterator[Any], count: int) -> str:
    """The next `count` letters, however many events they come in."""
    text = ""
    while len(text) < count:
        text += text_of(next(events))
    return text


def test_text_comes_while_the_engine_is_still_drawing(serve: Callable[..., Served]) -> None:
    served = serve()
    served.policy.answer = lambda request: "né 😀!"
    served.policy.paced = True
    events = served.events()
    assert next(events)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for ids, text in ((1, "n"), (2, "é"), (1, " "), (4, "😀")):  # one id is one byte
        served.policy.step(ids)
        assert text_of(next(events)) == text
        assert not served.service.counts["side"]  # the engine waits for the next step: nothing is finished
    served.policy.step(2)
    rest = list(events)
    assert [text_of(event) for event in rest[:-2]] == ["!"]
    assert rest[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert rest[-1] == "[DONE]"
    assert served.service.counts["side"] == 1


def test_usage_and_the_form_of_events(serve: Callable[..., Served]) -> None:
    served = serve(name="tiny")
    found = list(served.events(stream_options={"include_usage": True}, logprobs=True))
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 9
    assert all(event["usage"] is None for event in found[:-2])
    assert {event["object"] for event in found[:-1]} == {"chat.completion.chunk"}
    assert {event["model"] for event in found[:-1]} == {"tiny"}
    assert len({(event["id"], event["created"]) for event in found[:-1]}) == 1
    assert [event["choices"][0]["finish_reason"] for event in found[:-2]] == [None] * (len(found) - 3) + ["stop"]
    assert "".join(map(text_of, found[:-2])) == "answer 1"
    scored = [event["choices"][0]["logprobs"] for event in found[:-2]]
    rows = [row for some in scored if some is not None for row in some["content"]]
    assert "".join(row["token"] for row in rows) == "answer 1<|im_end|>"
    assert [row["logprob"] for row in rows] == [-(n + 1) / 8 for n in range(9)]
    assert "usage" not in next(served.events())


def test_a_call_comes_when_it_is_complete_and_its_tags_never_do(serve: Callable[..., Served]) -> None:
    served = serve()
    served.policy.answer = lambda request: f"Look: {CALL} or not"
    served.policy.paced = True
    events = served.events(tools=[LOOK])
    next(events)
    served.policy.step(5)
    assert letters(events, 5) == "Look:"
    served.policy.step(1 + len(CALL.encode()))
    opening, arguments = next(events)["choices"][0]["delta"], next(events)["choices"][0]["delta"]
    assert not served.service.counts["side"]
    (call,) = opening["tool_calls"]
    assert (call["index"], call["type"], call["function"]) == (0, "function", {"name": "look", "arguments": ""})
    assert call["id"].startswith("call_")
    assert arguments == {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": "é"}'}}]}
    served.policy.flow()
    rest = list(events)
    assert "".join(map(text_of, rest[:-2])) == "  or not"
    assert rest[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_stop_texts_are_not_streamed(serve: Callable[..., Served]) -> None:
    served = serve()
    served.policy.answer = lambda request: "one STOP"
    assert "".join(map(text_of, list(served.events(stop=["STOP"]))[:-1])) == "one "


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_the_drawing_and_is_counted(serve: Callable[..., Served], stream: bool) -> None:
    served = serve()
    served.policy.answer = lambda request: "a long answer " * 10 if served.policy.asked == 1 else "fine"
    served.policy.paced = True
    body = json.dumps({"messages": [user("x")], "session_id": "a", "stream": stream}).encode()
    sent = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{sent}\r\n\r\n".encode()
    with socket.create_connection((served.server.host, served.server.port)) as raw:
        raw.settimeout(20)
        raw.sendall(head + body)
        served.policy.step(3)
        if stream:
            seen = b""
            while b'"content": "a' not in seen:
                seen += (more := raw.recv(4096))
                assert more
        else:
            until(lambda: served.policy.drawn == 3)

    def gone() -> bool:
        served.policy.step(1)
        return served.service.engine.aborted == 1

    until(gone)
    assert served.policy.drawn < 141  # 140 letters and the end: it was given up before
    until(lambda: served.service.counts["underway"] == 0)
    assert served.service.health()["disconnected"] == 1
    assert served.service.health()["engine"]["aborted"] == 1
    assert served.service.health()["turns"] == {"main": 0, "side": 0}
    served.policy.flow()
    answer = served.http.post("/chat/completions", json={"messages": [user("x")], "session_id": "a"})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert served.service.health()["turns"] == {"main": 1, "side": 0}


def failing_in_company(served: Served, after: int) -> tuple[str, list[Any]]:
    """The first `after` letters of a stream whose batch of two fails then, and the events after them."""
    served.policy.paced = True
    served.service.engine.pause()
    one = served.events(messages=[user("one")], session_id="one")
    other = threading.Thread(target=lambda: list(served.events(messages=[user("two")], session_id="two")))
    next(one)
    other.start()
    until(lambda: served.service.engine.waiting == 2)
    served.policy.fail_after = after
    served.service.engine.resume()
    served.policy.step(after)
    head = letters(one, after)
    served.policy.flow()
    tail = list(one)
    other.join(20)
    return head, tail


def test_an_engine_that_fails_in_company_goes_on_where_the_stream_was(serve: Callable[..., Served]) -> None:
    served = serve()
    served.policy.answer = lambda request: f"for {request.session}"
    head, tail = failing_in_company(served, 3)
    (name,) = {request.session for request in served.policy.requests if request.session.endswith("-1/0")}
    assert head + "".join(map(text_of, tail[:-1])) == f"for {name}"
    assert served.service.counts["streams_torn"] == 0


def test_a_stream_that_cannot_be_continued_ends_with_an_error(serve: Callable[..., Served]) -> None:
    served = serve()
    served.policy.answer = lambda request: f"answer {served.policy.asked} of many"
    head, tail = failing_in_company(served, 9)
    assert head.startswith("answer ")
    assert tail[-1]["error"]["message"] == "the engine had to begin again and answered otherwise"
    assert served.service.health()["streams_torn"] >= 1


@pytest.mark.parametrize("policy", [tools.EchoPolicy, tools.StreamingEcho])
def test_an_engine_that_fails_ends_the_stream_with_an_error(serve: Callable[..., Served], policy: Any) -> None:
    served = serve(policy=policy)

    def fail(request: Any) -> str:
        raise RuntimeError("broken")

    served.policy.answer = fail
    found = list(served.events())
    assert found[-1]["error"]["message"] == "the engine failed: RuntimeError: broken"
    assert served.service.counts["underway"] == 0


def test_an_engine_that_does_not_stream(serve: Callable[..., Served]) -> None:
    served = serve(policy=tools.EchoPolicy)
    found = list(served.events())
    assert "".join(map(text_of, found[:-1])) == "answer 1"
    assert found[-1] == "[DONE]"
    assert served.service.health()["engine"]["streams"] is False


def test_ids_that_come_move_the_deadline(serve: Callable[..., Served]) -> None:
    served = serve(deadline=5.0)
    served.policy.paced = True
    events = served.events()
    next(events)
    for _ in range(3):
        served.bench.now += 4
        served.policy.step(1)
        next(events)
    served.bench.now += 6
    assert list(events)[-1]["error"]["message"] == "the request waited too long for the engine"
    served.policy.flow()
    until(lambda: served.service.counts["underway"] == 0)
    assert served.service.health()["timed_out"] == 1


class TestOfficialClient:
    @pytest.fixture
    def client(self, serve: Callable[..., Served]) -> Iterator[tuple[Any, Served]]:
        openai = pytest.importorskip("openai", reason="the official client is not installed")
        served = serve(name="tiny")
        plain = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(base_url=served.server.url, api_key="k", max_retries=0, http_client=plain) as client:
            yield client, served

    def test_its_helper_builds_the_same_message(self, client: tuple[Any, Served]) -> None:
        api, served = client
        served.policy.answer = lambda request: f"Let me look. {CALL}{CALL}"
        with api.chat.completions.stream(model="tiny", messages=[user("x")], tools=[LOOK], seed=3) as stream:
            built = stream.get_final_completion().choices[0]
        whole = api.chat.completions.create(model="tiny", messages=[user("x")], tools=[LOOK], seed=3).choices[0]
        assert (built.finish_reason, built.message.content) == ("tool_calls", "Let me look.")
        assert built.message.content == whole.message.content
        for streamed, call in zip(built.message.tool_calls, whole.message.tool_calls, strict=True):
            assert streamed.function.name == call.function.name == "look"
            assert json.loads(streamed.function.arguments) == {"at": "é"}
