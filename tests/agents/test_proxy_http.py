"""The proxy over real HTTP, with the official client and without it; answers whole and streamed."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import proxy_tools as tools
import pytest
from proxy_http import Served

from turngym.agents.proxy.app import create_app
from turngym.agents.serving import DrainingServer
from turngym.core.errors import TurngymError
from turngym.scripts.serve_proxy import proxy_front

user, until = tools.user, tools.until
JSON = {"Content-Type": "application/json"}
PLAIN = httpx.Client(verify=False, timeout=20)  # without certificates, which take a client most of its time to load


@pytest.fixture
def serve(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(key: str | None = None, **options: Any) -> Served:
        options.setdefault("max_waiting", 8)  # a thread each
        made.append(Served(tools.Bench(make_tokenizer(), tmp_path, **options), key))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def test_plain_http(serve: Callable[..., Served]) -> None:
    served = serve(name="tiny")
    answer = served.post({"X-Session-Id": "a"}, model="tiny", messages=[user("hello")], logprobs=True)
    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "answer 1"
    assert choice["finish_reason"] == "stop"
    tokens = choice["logprobs"]["content"]
    assert "".join(row["token"] for row in tokens) == "answer 1<|im_end|>"
    assert [row["logprob"] for row in tokens] == [-(n + 1) / 8 for n in range(9)]
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 9
    models = served.http.get("/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert served.http.get("/models/tiny").json() == models["data"][0]
    other = served.http.get("/models/org/tiny")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    health = served.health()
    assert health["turns"] == {"main": 1, "side": 0}
    assert health["sessions"] == {"open": 1, "ended": 0}
    done = served.http.post("/sessions/done", json={"session_id": "a", "messages": [user("bye")]})
    assert done.json() == {"object": "session", "turns": 1}
    assert served.bench.episodes[0].final_observation == "bye"


def test_http_that_is_no_request(serve: Callable[..., Served]) -> None:
    served = serve(max_body=1000)
    for answer, status in (
        (served.http.get("/nothing"), 404),
        (served.http.post("/responses", json={"input": "hi"}), 404),
        (served.http.get("/chat/completions"), 405),
        (served.http.post("/chat/completions", content=b"{", headers=JSON), 400),
        (served.http.post("/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415),
        (served.http.post("/chat/completions", content=b"{}"), 415),
        (served.http.post("/chat/completions", content=b"x" * 2000), 413),
        (served.http.post("/sessions/done", json={}), 400),
        (served.http.get("/models", headers={"X-Long": "x" * 100_000}), 431),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    said = served.http.post("/responses", json={"input": "hi"}).json()["error"]
    assert said["code"] == "unsupported_endpoint"
    assert "does not have the Responses API; send messages to POST /v1/chat/completions" in said["message"]


def test_a_body_that_is_no_object(serve: Callable[..., Served]) -> None:
    served = serve()
    for path in ("/chat/completions", "/sessions/done"):
        answer = served.http.post(path, content=b"[]", headers=JSON)
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "the body is a list" in answer.json()["error"]["message"]


def test_a_page_elsewhere_makes_no_turn(serve: Callable[..., Served]) -> None:
    served = serve()
    answer = served.post({"X-Session-Id": "a", "Origin": "https://elsewhere.example"}, messages=[user("hello")])
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "invalid_request_error")
    assert served.health()["turns"] == {"main": 0, "side": 0}
    own = served.server.url.removesuffix("/v1")
    assert served.post({"X-Session-Id": "a", "Origin": own}, messages=[user("hello")]).status_code == 200


def test_back_pressure(serve: Callable[..., Served]) -> None:
    served = serve(max_waiting=1)
    served.bench.policy.gate.clear()
    held = threading.Thread(target=lambda: served.post(messages=[user("x")]))
    held.start()
    until(lambda: served.bench.service.counts["underway"] == 1)
    with httpx.Client(base_url=served.server.url, verify=False) as other:
        answer = other.post("/chat/completions", json={"messages": [user("y")]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert served.health()["turned_away"] == 1
    served.bench.policy.gate.set()
    held.join(20)
    assert served.post(messages=[user("y")]).status_code == 200
    assert served.bench.service.counts["underway"] == 0


def test_stopping_answers_what_was_accepted(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.policy.gate.clear()
    answers: list[Any] = []

    def ask(session: str) -> None:
        body = {"messages": [user("x")], "session_id": session}
        answers.append(PLAIN.post(served.server.url + "/chat/completions", json=body))

    clients = [threading.Thread(target=ask, args=(f"s{n}",)) for n in range(4)]
    for client in clients:
        client.start()
    until(lambda: served.bench.service.counts["underway"] == 4)
    served.server.stop()
    until(lambda: served.bench.service.stopping)
    served.bench.policy.gate.set()
    for client in clients:
        client.join(20)
    served.site.thread.join(20)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert served.server.drained
    lines = served.bench.service.recorder.path.read_text().splitlines()
    assert sum('"kind":"turn"' in line for line in lines) == 4


def test_a_port_that_is_taken(serve: Callable[..., Served], make_tokenizer: Any, tmp_path: Path) -> None:
    served = serve()
    bench = tools.Bench(make_tokenizer(), tmp_path / "other")
    with pytest.raises(TurngymError, match="choose a free port"):
        DrainingServer(proxy_front(create_app(bench.service)), port=served.server.port)
    bench.service.close()


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
SEES = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
CALL = 'Let me look. <tool_call>\n{"name": "look", "arguments": {"at": "shelf"}}\n</tool_call>'


class TestOfficialClient:
    """The `openai` package, as agents use it."""

    @pytest.fixture
    def client(self, serve: Callable[..., Served]) -> Iterator[tuple[Any, Served]]:
        openai = pytest.importorskip("openai", reason="the official client is not installed")
        served = serve(key="k", name="tiny", policy=tools.StreamingEcho)
        plain = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(base_url=served.server.url, api_key="k", max_retries=0, http_client=plain) as client:
            yield client, served

    def test_a_tool_loop(self, client: tuple[Any, Served]) -> None:
        api, served = client
        served.bench.policy.answer = lambda request: CALL if served.bench.policy.asked == 1 else "There is a book."
        create = api.with_options(default_headers={"X-Session-Id": "loop"}).chat.completions.create
        messages: list[Any] = [{"role": "developer", "content": "Use tools."}, user("What is on the shelf?")]
        first = create(model="tiny", messages=messages, tools=[LOOK])
        (call,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"at": "shelf"}
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "a book"}]
        second = create(model="tiny", messages=messages, tools=[LOOK], extra_headers={"X-Session-Done": "1"})
        assert second.choices[0].message.content == "There is a book."
        assert second.choices[0].message.tool_calls is None
        (episode,) = served.bench.episodes
        assert (len(episode.segments), episode.depth) == (1, 2)
        assert episode.turns[1].observation == "a book"

    def test_its_errors(self, client: tuple[Any, Served]) -> None:
        import openai

        api, served = client
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            api.chat.completions.create(model="other", messages=[user("x")])
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            api.chat.completions.create(model="tiny", messages=[])
        served.bench.service.stopping = True
        with pytest.raises(openai.InternalServerError) as caught:
            api.chat.completions.create(model="tiny", messages=[user("x")])
        assert caught.value.response.headers["Retry-After"] == "5"
        served.bench.service.stopping = False
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()
        assert [model.id for model in api.models.list()] == ["tiny"]

    def test_its_helper_builds_the_same_message(self, client: tuple[Any, Served]) -> None:
        api, served = client
        served.policy.answer = lambda request: f"Let me look. {SEES}{SEES}"
        with api.chat.completions.stream(model="tiny", messages=[user("x")], tools=[LOOK], seed=3) as stream:
            built = stream.get_final_completion().choices[0]
        whole = api.chat.completions.create(model="tiny", messages=[user("x")], tools=[LOOK], seed=3).choices[0]
        assert (built.finish_reason, built.message.content) == ("tool_calls", "Let me look.")
        assert built.message.content == whole.message.content
        for streamed, call in zip(built.message.tool_calls, whole.message.tool_calls, strict=True):
            assert streamed.function.name == call.function.name == "look"
            assert json.loads(streamed.function.arguments) == {"at": "é"}


@pytest.fixture
def serve_stream(serve: Callable[..., Served]) -> Callable[..., Served]:
    """A server whose engine streams."""
    return lambda **options: serve(**{"policy": tools.StreamingEcho} | options)


def text_of(event: Any) -> str:
    return event["choices"][0]["delta"].get("content") or ""


def letters(events: Iterator[Any], count: int) -> str:
    """The next `count` letters, however many events they come in."""
    text = ""
    while len(text) < count:
        text += text_of(next(events))
    return text


def test_text_comes_while_the_engine_is_still_drawing(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream()
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


def test_usage_and_the_form_of_events(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream(name="tiny")
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


def test_a_call_comes_when_it_is_complete_and_its_tags_never_do(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream()
    served.policy.answer = lambda request: f"Look: {SEES} or not"
    served.policy.paced = True
    events = served.events(tools=[LOOK])
    next(events)
    served.policy.step(5)
    assert letters(events, 5) == "Look:"
    served.policy.step(1 + len(SEES.encode()))
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


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_the_drawing_and_is_counted(
    serve_stream: Callable[..., Served], stream: bool
) -> None:
    served = serve_stream()
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


def test_an_engine_that_fails_in_company_goes_on_where_the_stream_was(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream()
    served.policy.answer = lambda request: f"for {request.session}"
    head, tail = failing_in_company(served, 3)
    (name,) = {request.session for request in served.policy.requests if request.session.endswith("-1/0")}
    assert head + "".join(map(text_of, tail[:-1])) == f"for {name}"
    assert served.service.counts["streams_torn"] == 0


def test_a_stream_that_cannot_be_continued_ends_with_an_error(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream()
    served.policy.answer = lambda request: f"answer {served.policy.asked} of many"
    head, tail = failing_in_company(served, 9)
    assert head.startswith("answer ")
    assert tail[-1]["error"]["message"] == "the engine had to begin again and answered otherwise"
    assert served.service.health()["streams_torn"] >= 1


@pytest.mark.parametrize("policy", [tools.EchoPolicy, tools.StreamingEcho])
def test_an_engine_that_fails_ends_the_stream_with_an_error(serve_stream: Callable[..., Served], policy: Any) -> None:
    served = serve_stream(policy=policy)

    def fail(request: Any) -> str:
        raise RuntimeError("broken")

    served.policy.answer = fail
    found = list(served.events())
    assert found[-1]["error"]["message"] == "the engine failed: RuntimeError: broken"
    assert served.service.counts["underway"] == 0


def test_a_turn_that_cannot_be_written_ends_the_stream_with_an_error(
    serve_stream: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_stream()
    for error, said in (
        (OSError(errno.ENOSPC, "full"), "no room is left for records; ask again later"),
        (ValueError("what nobody expects"), "internal error: ValueError"),
    ):

        def fail(record: Any, error: Exception = error) -> float:
            raise error

        monkeypatch.setattr(served.service.recorder, "write", fail)
        assert list(served.events())[-1]["error"]["message"] == said
        assert served.service.counts["underway"] == 0


def test_an_engine_that_does_not_stream(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream(policy=tools.EchoPolicy)
    found = list(served.events())
    assert "".join(map(text_of, found[:-1])) == "answer 1"
    assert found[-1] == "[DONE]"
    assert served.service.health()["engine"]["streams"] is False


def test_ids_that_come_move_the_deadline(serve_stream: Callable[..., Served]) -> None:
    served = serve_stream(deadline=5.0)
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
