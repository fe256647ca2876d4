"""A real OpenEnv server and its generic clients, over WebSocket on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from malformed import MALFORMED
from servers import running

from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.resolve_play import OneGame, resolve_game
from turngym.agents.serving_asgi import AsgiServer
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.tools import tool_call
from turngym.trainers.adapters import openenv as adapter
from turngym.trainers.adapters.token_session import Trajectory

SEED = 3


@pytest.fixture(scope="module")
def url(sessions: SessionPool) -> Iterator[str]:
    """Where a server on our sessions listens."""
    pytest.importorskip("openenv", reason="needs the extra turngym[openenv]")
    with running(AsgiServer(adapter.app(sessions), extra="openenv")) as address:
        yield address


def client(url: str) -> Any:
    from openenv.core import GenericEnvClient

    return GenericEnvClient(base_url=url, connect_timeout_s=60, message_timeout_s=120).sync()


def test_clients_play_the_recorded_episodes_at_the_same_time(
    url: str, recorded: list[Episode], replay: Any, assert_same: Callable[..., None]
) -> None:
    """Two clients, one turn each in turn: their episodes stay apart, and both end as they were recorded."""
    one, other = recorded[0], recorded[3]
    with client(url) as first, client(url) as second:
        seats = [(first, one), (second, other)]
        results = [seat.reset(seed=SEED, task_id=e.task.task_id, sample=e.sample) for seat, e in seats]
        ids = [list(result.observation["observation_ids"]) for result in results]
        assert results[0].observation["messages"][0]["content"] == one.system
        assert results[0].observation["admissible"] == list(one.turns[0].admissible or ())
        for _ in range(40):
            for place, (seat, episode) in enumerate(seats):
                if results[place].done:
                    continue
                said = replay.after(f"{episode.task.task_id}:{episode.sample}", ids[place])
                answer = {"response_ids": said.ids.tolist(), "logprobs": said.logprobs.tolist()}
                results[place] = seat.step(answer)
                ids[place] += [*answer["response_ids"], *results[place].observation["observation_ids"]]
        assert first.state()["step_count"] == one.depth
    for result, (_, episode) in zip(results, seats, strict=True):
        assert result.done
        assert result.reward == episode.turns[-1].reward
        assert result.observation["status"] == episode.status.value
        assert_same(Trajectory.of(episode), result.observation["trajectory"])


def test_a_client_may_answer_with_text_or_with_the_action_alone(url: str, recorded: list[Episode]) -> None:
    episode = recorded[0]
    with client(url) as seat:
        for key, texts in (
            ("response", [turn.response for turn in episode.turns]),
            ("action", [turn.action for turn in episode.turns]),
        ):
            result = seat.reset(seed=SEED, task_id=episode.task.task_id, sample=episode.sample)
            for turn, text in zip(episode.turns, texts, strict=True):
                result = seat.step({key: text})
                assert result.observation["verdict"] == turn.verdict.value
            assert result.done
            assert result.observation["success"] == episode.success
            assert result.observation["trajectory"]["logprobs"] is None


def test_what_a_client_does_wrong_is_told_to_it(url: str, recorded: list[Episode]) -> None:
    with client(url) as seat:
        with pytest.raises(RuntimeError, match=r"step\(\) was called before reset"):
            seat.step({"response": "look"})
        with pytest.raises(RuntimeError, match="unknown task 'nowhere'"):
            seat.reset(task_id="nowhere")
        assert not seat.reset(task_id=recorded[0].task.task_id).done


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ({}, "exactly one of response, response_ids, action; this one has none"),
        ({"response": "x", "action": "look"}, r"this one has \['response', 'action'\]"),
        ({"response_ids": [5, 6], "logprobs": [-1.0]}, "1 log-probabilities came with 2 response ids"),
        ({"response_ids": [2**31]}, "response_ids must be from 0"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(
    sessions: SessionPool, action: dict[str, Any], complaint: str
) -> None:
    session = sessions.open(sessions.task_ids()[0])
    with pytest.raises(TurngymError, match=complaint):
        adapter.act(session, action)
    session.close()


@pytest.mark.parametrize("path", ["/reset", "/step"])
def test_malformed_bodies_are_the_clients_fault(sessions: SessionPool, path: str) -> None:
    """In the application itself, for those who serve it with a server of their own; `raise` would show a traceback."""
    pytest.importorskip("openenv", reason="needs the extra turngym[openenv]")
    testclient = pytest.importorskip("starlette.testclient")
    client = testclient.TestClient(adapter.app(sessions), raise_server_exceptions=True)
    for form, body in MALFORMED.items():
        if body or path == "/step":
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 422), form
            assert "\n" not in answer.text, form
    for fields in (
        {"task_id": ["x"]},
        {"task_id": "nowhere"},
        {"sample": -1},
        {"sample": "1"},
        {"seed": 2**63},
        {"seed": -1},
        {"seed": True, "sample": True},
    ):
        answer = client.post("/reset", json=fields)
        assert answer.status_code in (400, 422), fields
    assert client.post("/step", json={"action": {"response_ids": [1], "nothing": 1}}).status_code == 422
    assert client.post("/step", json={"action": {"response": "look"}}).json() == {
        "error": "step() was called before reset()"
    }
    assert client.post("/reset", json={"seed": 1, "sample": 2, "self": 1}).status_code == 200


def test_the_example_of_the_documentation(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    source = text[text.index("from openenv.core import GenericEnvClient") :].partition("```")[0]
    assert "http://127.0.0.1:8000" in source
    exec(compile(source.replace("http://127.0.0.1:8000", url), "docs/adapters.md", "exec"), {})
    assert capsys.readouterr().out.strip().endswith("0.0 False ok")


def test_the_verb_opens_what_it_was_asked_for(student: Any) -> None:
    from turngym.scripts.serve_openenv import open_sessions

    def game(**asked: Any) -> OneGame:
        return resolve_game([("test", asked)]).spec

    house = game(split="generated", env_kwargs={"config": "small"})
    opened = open_sessions(house, str(student.folder))
    assert opened.open(opened.task_ids()[0]).request is not None
    plain = open_sessions(house, None)
    assert plain.open(plain.task_ids()[0]).request is None
    with pytest.raises(TurngymError, match="there is no folder /nowhere with a tokenizer"):
        open_sessions(house, "/nowhere")
    with pytest.raises(TurngymError, match="takes no argument 'temperature'"):
        open_sessions(game(env_kwargs={"temperature": 0}), None)


def test_a_client_is_given_the_tools_and_answers_with_a_call() -> None:
    pytest.importorskip("openenv", reason="needs the extra turngym[openenv]")
    pool = SessionPool.of("turngym.scripts.examples.oven:example/Oven-v0", None, ChatSettings(channel="tool"))
    with running(AsgiServer(adapter.app(pool), extra="openenv")) as address, client(address) as seat:
        assert seat.reset(task_id="cake/200/fan").observation["tools"] == pool.tool.schemas()
        assert seat.step({"action": tool_call("heat", degrees="200")}).observation["verdict"] == "inadmissible"
        seat.step({"action": tool_call("heat", degrees=200, fan=True)})
        assert seat.step({"action": tool_call("bake", dish="cake")}).observation["success"]
