"""The proxy over real HTTP, with the official client and without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flask", reason="the proxy needs turngym[serve]")
pytest.importorskip("waitress", reason="the proxy needs turngym[serve]")
httpx = pytest.importorskip("httpx", reason="these tests speak HTTP")

import proxy_tools as tools  # noqa: E402
from malformed import MALFORMED  # noqa: E402
from proxy_http import Served  # noqa: E402

from turngym.agents.proxy.app import create_app  # noqa: E402
from turngym.agents.serving import DrainingServer  # noqa: E402
from turngym.envs.core.errors import TurngymError  # noqa: E402
from turngym.scripts.serve_proxy import proxy_front  # noqa: E402

user, until = tools.user, tools.until
KEY = "sécret"
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
    health = served.health()
    assert health["turns"] == {"main": 1, "side": 0}
    assert health["sessions"] == {"open": 1, "ended": 0}
    done = served.http.post("/sessions/done", json={"session_id": "a", "messages": [user("bye")]})
    assert done.json() == {"object": "session", "turns": 1}
    assert served.bench.episodes[0].final_observation == "bye"


@pytest.mark.parametrize(
    ("status", "body", "param", "code"),
    [
        (400, {"messages": []}, "messages", None),
        (400, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None),
        (400, {"messages": [user("<|im_end|>")]}, "messages[0].content", "control_token"),
        (400, {"messages": [user("x" * 5000)]}, "messages", "context_length_exceeded"),
        (404, {"messages": [user("x")], "model": "gpt-9"}, "model", "model_not_found"),
    ],
)
def test_errors_are_worded_as_openai_words_them(
    serve: Callable[..., Served], status: int, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = serve().post(**body)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


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


@pytest.mark.parametrize("form", MALFORMED)
def test_bodies_that_are_no_json(serve: Callable[..., Served], form: str) -> None:
    served = serve()
    for path in ("/chat/completions", "/sessions/done"):
        answer = served.http.post(path, content=MALFORMED[form], headers=JSON)
        assert answer.status_code == 400
        assert "\n" not in answer.json()["error"]["message"]
    assert served.health()["turns"] == {"main": 0, "side": 0}


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://elsewhere.example"}, {"Origin": "null"}, {"Host": "rebound.example"}, {"Host": ""}]
)
def test_a_page_elsewhere_makes_no_turn(serve: Callable[..., Served], headers: dict[str, str]) -> None:
    served = serve()
    answer = served.post({"X-Session-Id": "a", **headers}, messages=[user("hello")])
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "invalid_request_error")
    assert served.health()["turns"] == {"main": 0, "side": 0}
    own = served.server.url.removesuffix("/v1")
    assert served.post({"X-Session-Id": "a", "Origin": own}, messages=[user("hello")]).status_code == 200


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", "Basic sécret", "Bearer sécret2", "sécret"])
def test_a_wrong_key(serve: Callable[..., Served], given: str | None) -> None:
    served = serve(key=KEY)
    headers = {} if given is None else {"Authorization": given.encode()}
    answer = PLAIN.get(served.server.url + "/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert served.http.get("/models").status_code == 200
    assert served.health()["status"] == "ok"


def test_back_pressure(serve: Callable[..., Served]) -> None:
    served = serve(max_waiting=1)
    served.bench.policy.gate.clear()
    held = threading.Thread(target=lambda: served.post(messages=[user("x")]))
    held.start()
    until(lambda: served.bench.service.counts["underway"] == 1)
    with httpx.Client(base_url=served.server.url, verify=False) as other:
        answer = other.post("/chat/completions", json={"messages": [user("y")]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert served.health()["turned_away"] == 1
    served.bench.policy.gate.set()
    held.join(20)


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
    served.thread.join(20)
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
CALL = 'Let me look. <tool_call>\n{"name": "look", "arguments": {"at": "shelf"}}\n</tool_call>'


class TestOfficialClient:
    """The `openai` package, as agents use it."""

    @pytest.fixture
    def client(self, serve: Callable[..., Served]) -> Iterator[tuple[Any, Served]]:
        openai = pytest.importorskip("openai", reason="the official client is not installed")
        served = serve(key="k", name="tiny")
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


def test_what_is_not_served_says_what_is(serve: Callable[..., Served]) -> None:
    served = serve()
    said = served.http.post("/responses", json={"input": "hi"}).json()["error"]
    assert said["code"] == "unsupported_endpoint"
    assert "does not have the Responses API; send messages to POST /v1/chat/completions" in said["message"]
