"""Who owns what: a client neither sees, changes nor crowds out what another one has opened."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proxy_tools as tools
import pytest

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.api_errors import ApiError
from turngym.agents.proxy.app import create_app
from turngym.core.errors import TurngymError

user, until = tools.user, tools.until
KEYS = ClientKeys({"ann": "a" * 16, "bob": "b" * 16})


class Office:
    """The application over a bench, asked by one client or another."""

    def __init__(self, bench: Any) -> None:
        self.bench, self.web = bench, create_app(bench.service, keys=KEYS).test_client()

    def post(self, client: str, path: str, **body: Any) -> Any:
        return self.web.post(f"/v1{path}", json=body, headers={"Authorization": f"Bearer {KEYS.keys[client]}"})

    def chat(self, client: str, text: str, **more: Any) -> Any:
        found = self.post(client, "/chat/completions", messages=[user(text)], **more)
        assert found.status_code == 200, found.json
        return found.json

    def said(self) -> list[list[str]]:
        return [[turn.observation for turn in session.turns] for session in self.bench.service.sessions.all()]


@pytest.fixture
def office(make_bench: Callable[..., Any]) -> Callable[..., Office]:
    return lambda **options: Office(make_bench(share=KEYS.share, **{"unnamed": "match"} | options))


def test_a_session_is_its_clients_own(office: Any) -> None:
    both = office()
    both.chat("ann", "hello", session_id="s")
    both.chat("bob", "mine", session_id="s")
    assert both.said() == [["hello"], ["mine"]]
    assert both.post("bob", "/sessions/done", session_id="s").json["turns"] == 1
    assert both.said() == [["hello"]]
    assert both.post("bob", "/sessions/done", session_id="s").json["turns"] == 0
    both.bench.service.close()


@pytest.mark.parametrize("path", ["/healthz", "/metrics"])
@pytest.mark.parametrize("key", [None, "bob"])
def test_names_that_a_client_has_chosen_are_shown_to_nobody_else(office: Any, path: str, key: str | None) -> None:
    both = office()
    head = {"Authorization": f"Bearer {KEYS.keys['ann']}", "User-Agent": "ann-internal-tool/7"}
    asked = {"messages": [user("hello")], "project_codename": 1}
    assert both.web.post("/v1/chat/completions", json=asked, headers=head).status_code == 200
    service = both.bench.service.health()
    assert (service["ignored"], list(service["unnamed"])) == ({"project_codename": 1}, ["ann-internal-tool/7"])
    said = both.web.get(path, headers={} if key is None else {"Authorization": f"Bearer {KEYS.keys[key]}"}).text
    assert "ann-internal-tool" not in said
    assert "project_codename" not in said
    # how many there are is no name
    if path == "/healthz":
        assert (json.loads(said)["unnamed"], json.loads(said)["ignored"]) == (1, 1)
    elif key is not None:
        assert "turngym_unnamed 1\n" in said


def test_a_mind_is_changed_a_few_times_only(office: Any) -> None:
    both = office()
    both.chat("ann", "hello", session_id="s")
    said = [both.post("ann", "/feedback", session_id="s", score=-1, text=f"no {n}").status_code for n in range(30)]
    assert (said.count(200), said.count(429)) == (20, 10)
    assert both.bench.service.health()["underway"] == 0


def test_a_history_is_its_clients_own(office: Any) -> None:
    both = office()
    both.bench.policy.answer = lambda request: "hi"
    history = [user("hello"), {"role": "assistant", "content": "hi"}, user("more")]
    both.chat("ann", "hello")
    both.post("bob", "/chat/completions", messages=history)
    both.post("ann", "/chat/completions", messages=history)
    assert [len(turns) for turns in both.said()] == [2, 1]


@pytest.mark.parametrize("name", ["1", "unnamed/1", "/1"])
def test_no_name_leads_to_a_session_without_one(make_bench: Callable[..., Any], name: str) -> None:
    bench = make_bench(unnamed="match")
    bench.ask([user("whose")], None)
    bench.ask([user("another")], name)
    assert [len(session.turns) for session in bench.service.sessions.all()] == [1, 1]


def test_ids_of_answers_cannot_be_guessed_and_are_the_clients_own(office: Any) -> None:
    both = office()
    ids = [both.chat(client, "hello", session_id="s")["id"] for client in ("ann", "ann", "bob")]
    assert len({*ids}) == 3
    # 96 random bits: no two share more than by chance
    assert all(len(one) == len("chatcmpl-") + 24 for one in ids)
    assert len({one[:16] for one in ids}) == 3
    for client, answer, status in (("bob", ids[1], 404), ("ann", ids[1], 200), ("ann", ids[2], 404)):
        assert both.post(client, "/feedback", score=1, answer=answer).status_code == status
    for client, turn, status in (("bob", 1, 404), ("ann", 0, 200)):
        assert both.post(client, "/feedback", score=1, session_id="s", turn=turn).status_code == status


def test_a_client_has_its_share_of_the_requests(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_waiting=4, share=KEYS.share)
    bench.policy.gate.clear()
    taken = [bench.begin([user("x")], f"s{n}", client="ann") for n in range(2)]
    with pytest.raises(ApiError, match="2 requests of this client are under way") as caught:
        bench.begin([user("x")], "s2", client="ann")
    assert caught.value.status == 429
    taken += [bench.begin([user("x")], f"s{n}", client="bob") for n in range(2)]
    bench.policy.gate.set()
    assert all(one.wait(20) is not None for one in taken)
    assert bench.ask([user("x")], "s2", client="ann").reply.content


def test_a_client_makes_room_with_sessions_of_its_own(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_sessions=4, share=KEYS.share)
    bench.ask([user("bob's")], "b", client="bob")
    for number in range(5):
        bench.now += 1
        bench.ask([user(f"ann's {number}")], f"a{number}", client="ann")
    found = [session.turns[0].observation for session in bench.service.sessions.all()]
    assert found == ["bob's", "ann's 3", "ann's 4"]


def test_a_restart_knows_whose_session_it_is(make_bench: Callable[..., Any]) -> None:
    first = make_bench(max_sessions=2, share=KEYS.share)
    reply = first.ask([user("hello")], "s", client="ann").reply
    first.service.close()
    second = make_bench(max_sessions=2, share=KEYS.share)
    second.ask([user("mine")], "s", client="bob")
    second.ask([user("hello"), reply, user("more")], "s", client="ann", session_done=True)
    assert [turn.observation for turn in second.episodes[0].turns] == ["hello", "more"]


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    (folder / "keys").write_text(text)
    (folder / "keys").chmod(mode)
    return folder / "keys"


def test_keys_of_clients_are_read(tmp_path: Path) -> None:
    keys = ClientKeys.of("shared", key_file(tmp_path, "ann  0123456789abcdef\r\n\nbob 0123456789abcdeg\n"))
    assert keys.client_of("Bearer 0123456789abcdef") == "ann"
    assert keys.client_of("bearer 0123456789abcdeg") == "bob"
    # as WSGI reads bytes that are no key
    assert keys.client_of("bearer 0123456789abcdeé".encode().decode("latin-1")) is None
    assert [keys.client_of(said) for said in ("", "Bearer shared", "Basic 0123456789abcdef")] == [None] * 3
    assert (keys.share(9), keys.share(1)) == (4, 1)
    # who is taken out with a # is no client any more, whatever stands behind it
    gone = ClientKeys.of(None, key_file(tmp_path, "#bob 0123456789abcdeg\n# 0123456789abcdeh\nann 0123456789abcdef\n"))
    assert [*gone.keys] == ["ann"]
    assert ClientKeys.of("shared", None).client_of("Bearer shared") == ""
    assert ClientKeys.of(None, None).client_of("") == ""


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("ann short\n", 0o600, "at least 16 characters"),
        ("ann 0123456789abcdef more\n", 0o600, "line 1: it must be a name and a key"),
        ("ann 0123456789abcdef\nbob 0123456789abcdef\n", 0o600, "line 2: its name or its key is there already"),
        ("// 0123456789abcdef\n", 0o600, "line 1: it must be a name and a key"),
        ("ann 0123456789abcdefé\n", 0o600, "line 1 holds no key"),
        ("\n", 0o600, "names no client"),
        ("ann 0123456789abcdef\n", 0o640, "chmod 600"),
    ],
)
def test_files_of_keys_that_do_not_do(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(TurngymError, match=says) as caught:
        ClientKeys.of(None, key_file(tmp_path, text, mode))
    assert "0123456789abcdef" not in str(caught.value)


def test_a_table_of_names_that_clients_choose_does_not_grow(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.service.tally.note_ignored([f"field {number}" + "x" * 100 for number in range(150)])
    ignored = bench.service.health()["ignored"]
    assert (len(ignored), ignored["others"], max(map(len, ignored))) == (101, 50, 60)


# A refused request costs little, and nobody waits for another one's text.


def lengths_tokenized(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are tokenized from now on."""
    found, encode = list[int](), bench.renderer._encode
    monkeypatch.setattr(bench.renderer, "_encode", lambda text: found.append(len(text)) or encode(text))
    return found


def test_a_prompt_that_cannot_fit_is_refused_by_its_characters(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(max_context=64, unnamed="match")
    bench.ask([user("hi")], "a")
    tokenized = lengths_tokenized(bench, monkeypatch)
    longest = 64 * bench.renderer.longest_token
    call = {"function": {"name": "f", "arguments": "x" * longest}}
    tool = {"type": "function", "function": {"name": "f", "description": "x" * longest}}
    for messages, more in (
        ([user("x" * (longest + 1))], {}),
        ([user("x" * longest), user("y")], {}),
        ([{"role": "assistant", "tool_calls": [call]}], {}),
        ([user("x")], {"tools": [tool]}),
    ):
        with pytest.raises(ApiError, match=f"64 tokens, which are {longest} at most") as caught:
            bench.ask(messages, None, **more)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert tokenized == []
    assert bench.service.counts["underway"] == 0


def test_a_refused_prompt_takes_three_times_its_bytes_at_most(make_bench: Callable[..., Any], tmp_path: Path) -> None:
    bench = make_bench(max_context=64)
    client = create_app(bench.service).test_client()
    path = tmp_path / "body"
    path.write_text(json.dumps({"messages": [user("x" * (4 << 20))]}))
    size = path.stat().st_size
    with path.open("rb") as body:
        tracemalloc.start()
        found = client.post(
            "/v1/chat/completions", input_stream=body, content_length=size, content_type="application/json"
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "which are" in found.json["error"]["message"]
    # the bytes while they become text, then the text and its value
    assert peak < 2.2 * size


def test_what_is_far_too_long_is_not_tokenized_to_its_end(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(max_context=1000)
    monkeypatch.setattr(bench.renderer, "longest_token", 1000)
    tokenized = lengths_tokenized(bench, monkeypatch)
    with pytest.raises(ApiError, match=r"more than 2000 tokens; .* 1000") as caught:
        bench.ask([user("x" * 500_000)], "a")
    assert caught.value.code == "context_length_exceeded"
    assert tokenized == [20_000]


def test_a_short_prompt_does_not_wait_for_a_long_one(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_context=50_000)
    bench.ask([user("x" * 21_000)], "long")
    assert len(bench.policy.requests[0].prompt_ids) > 21_000
    # another long text is being tokenized
    with bench.renderer._long_lock:
        assert bench.ask([user("hi")], "short").reply.content == "answer 2"
