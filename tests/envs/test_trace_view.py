"""`turngym trace view`: an index that agrees with the episodes it points at, and the server over it."""

from __future__ import annotations

import http.client
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import running

from turngym.agents.evaluation.scores import EpisodeOutcome
from turngym.agents.serving import DrainingServer, page_front
from turngym.core.episode import Episode, Status, TopK, Turn
from turngym.core.task import Task, Verdict
from turngym.core.trace import TraceError, TraceWriter, episode_to_json
from turngym.scripts.main import main
from turngym.scripts.trace import open_runs
from turngym.scripts.trace_pages import Query, TraceIndex, create_app, index_trace

TRICKY = 'a "quoted" {"index":0,"verdict":"malformed"} \u2713 \n line'


def episode(number: int, *, sample: int = 0, turns: int = 1, **more: Any) -> Episode:
    verdict = Verdict.INADMISSIBLE if number % 2 else Verdict.OK
    made = [
        Turn(index=t, observation=TRICKY, admissible=None, response=TRICKY, action="look", verdict=verdict, reward=0.0)
        for t in range(turns)
    ]
    category = "heat" if number < 2 else "cool"
    task = Task(env_id="e-v0", task_id=f"Tasks/{number}", sha256="0" * 64, split="eval", category=category)
    plain: dict[str, Any] = {"status": Status.COMPLETED, "success": True, "episode_return": 1.0, "score": 0.5}
    return Episode(
        task=task,
        seed=-3,
        sample=sample,
        group=0,
        segments=(),
        turns=tuple(made),
        meta={"note": TRICKY},
        **plain | more,
    )


def scored() -> Episode:
    """Two ids: the teacher knows the first and not the second; the judge was of two minds."""
    turn = Turn(
        index=0,
        observation="o",
        admissible=None,
        response="r",
        action="a",
        verdict=Verdict.OK,
        reward=0.0,
        prompt_span=(0, 1),
        response_span=(1, 3),
        logprobs=np.array([-0.5, -1.0], np.float32),
        teacher=TopK(ids=np.array([[9, 7], [9, 5]], np.int32), logp=np.array([[-2, -1.5], [-1, -2]], np.float32)),
        judge_scores=(1.0, -1.0, -1.0),
    )
    return replace(episode(7), turns=(turn,), segments=(np.array([1, 7, 8], np.int32),))


@pytest.fixture
def episodes() -> list[Episode]:
    lost = {"success": False, "status": Status.TRUNCATED_TURNS, "episode_return": 0.0}
    broken = {"success": False, "episode_return": -1e18, "score": 0.0, "status": Status.ERROR_ENV}
    return [
        episode(0, turns=3),
        episode(1, turns=2, **lost),
        episode(0, sample=1, turns=5, **lost),
        episode(2, turns=0, **broken),
        episode(3, turns=4, episode_return=0.25),
        scored(),
    ]


@pytest.fixture
def path(episodes: list[Episode], tmp_path: Path) -> Path:
    """The episodes, with a blank line, a line that is no episode and a line of another writer among them."""
    out = tmp_path / "run.jsonl"
    with TraceWriter(out) as writer:
        for item in episodes[:2]:
            writer.write(item)
    unsealed = episode_to_json(episodes[2]).rpartition(',"crc"')[0] + "}"
    other = unsealed.replace('{"schema":1,', '{ "schema": 1, ')
    with out.open("a") as file:
        file.write(f'\n{{"schema":1,"task":\n{other}\n')
    with TraceWriter(out) as writer:
        for item in episodes[3:]:
            writer.write(item)
    return out


@pytest.fixture
def index(path: Path) -> TraceIndex:
    return index_trace(path)


def test_the_index_says_what_the_episodes_say(index: TraceIndex, episodes: list[Episode]) -> None:
    assert (len(index), index.skipped) == (6, 1)
    for place, item in enumerate(episodes):
        assert episode_to_json(index.episodes[place]) == episode_to_json(item)
        assert index.outcomes[place] == EpisodeOutcome.of(item)


@pytest.mark.parametrize(("was", "odd"), [('"score":0.5', '"score":"x"'), ('"sample":0', f'"sample":{2**70}')])
def test_a_line_without_a_checksum_is_read_as_a_whole(was: str, odd: str, tmp_path: Path) -> None:
    unsealed = episode_to_json(episode(0)).rpartition(',"crc"')[0] + "}\n"
    assert was in unsealed
    (tmp_path / "t.jsonl").write_text(unsealed + unsealed.replace(was, odd))
    index = index_trace(tmp_path / "t.jsonl")
    assert (len(index), index.skipped) == (1, 1)


def test_a_torn_last_line_is_skipped(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])
    assert (len(index_trace(path)), index_trace(path).skipped) == (5, 2)


@pytest.mark.parametrize(
    ("query", "places"),
    [
        (Query(descending=True), [5, 4, 3, 2, 1, 0]),
        (Query(outcome="lost"), [1, 2]),
        (Query(status="truncated_turns", category="heat"), [1, 2]),
        (Query(verdict="inadmissible"), [1, 4]),
        (Query(text="tasks/0"), [0, 2]),
        (Query(sort="ret", outcome="won"), [4, 0, 5]),
        (Query(sort="invalid", descending=True, outcome="won"), [4, 5, 0]),
    ],
)
def test_filters_and_orders(index: TraceIndex, query: Query, places: list[int]) -> None:
    assert index.select(query) == places


def test_an_error_is_an_outcome_of_its_own(index: TraceIndex) -> None:
    assert [index.row(place)[5] for place in range(len(index))] == ["won", "lost", "lost", "error", "won", "won"]


def test_attempts_at_a_task(index: TraceIndex) -> None:
    assert index.attempts("Tasks/0") == [0, 2]
    assert (index.find("Tasks/0", 1), index.find("Tasks/0", 9), index.find("Tasks/8", 0)) == (2, 0, None)
    assert index.advantage(0) == pytest.approx(0.5 / (np.sqrt(0.5) + 1e-6))
    assert index.advantage(4) is None


def test_pages_and_episodes_over_http(index: TraceIndex, episodes: list[Episode]) -> None:
    client = create_app({"a": index, "b": index}).test_client()
    assert [run["name"] for run in client.get("/api/runs").json] == ["a", "b"]
    found = client.get("/api/rows?sort=turns&descending=1&start=1&count=2&at=4").json
    assert (found["total"], found["won"], found["where"]) == (6, 3, 1)
    assert [row[0] for row in found["rows"]] == [4, 0]
    assert found["rows"][0] == [4, "Tasks/3", 0, "cool", "completed", "won", 4, 0.25, 4]
    assert client.get("/api/rows?count=1&start=3").json["rows"][0][7] == -1e18
    shown = client.get("/api/episode?run=1&at=5").json
    # id, log p, text, log p - log q
    assert shown["turns"][0]["tokens"] == [[7, -0.5, None, 1.0], [8, -1.0, None, None]]
    assert shown["turns"][0]["advantage"] == -1.0, "the judge's majority"
    pair = client.get("/api/episode?run=1&task=Tasks/0&sample=1").json
    assert (pair["at"], pair["turns"][0]["observation"], len(pair["attempts"])) == (2, TRICKY, 2)
    assert pair["turns"][0]["advantage"] == pytest.approx(-0.5 / (np.sqrt(0.5) + 1e-6))
    for missing in ("/api/episode?at=6", "/api/episode?at=-1", "/api/episode?task=Tasks/8", "/api/rows?run=2"):
        assert client.get(missing).status_code == 404, missing
    page = client.get("/")
    assert b"connect-src 'self'" in page.data
    assert TRICKY.encode() not in page.data


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("127.0.0.1", 200), ("evil.example:8321", 403)])
def test_only_this_machine_may_ask(index: TraceIndex, host: str, status: int) -> None:
    server = DrainingServer(page_front(create_app({"a": index}), threads=4))
    with running(server):
        client = http.client.HTTPConnection(server.host, server.port, timeout=20)
        client.request("GET", "/api/runs", headers={"Host": host})
        assert client.getresponse().status == status
        client.close()


def test_a_file_that_changed_meanwhile(index: TraceIndex, path: Path) -> None:
    path.write_bytes(b"x" * 4000)
    with pytest.raises(TraceError, match="has changed since"):
        index.episodes[0]
    answer = create_app({"a": index}).test_client().get("/api/episode?at=0")
    assert (answer.status_code, "has changed" in answer.text) == (500, True)


def test_a_newer_schema_wants_an_upgrade(tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"schema":99}\n')
    with pytest.raises(TraceError, match="line 1: schema version 99"):
        index_trace(tmp_path / "new.jsonl")


def test_what_is_wrong_is_said_in_one_line(path: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "view", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no trace file" in capsys.readouterr().err
    assert main(["trace", "view", str(path), str(path)]) == 2
    assert "two files are called 'run'" in capsys.readouterr().err
    assert main(["trace", "view"]) == 2
    assert "FILES must be given" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    assert main(["trace", "view", str(tmp_path / "other.jsonl")]) == 2
    assert "is no trace: none of its 1 lines is an episode" in capsys.readouterr().err
    assert list(open_runs((f"x={path}",))) == ["x"]
    assert "skipped 1 lines" in capsys.readouterr().err
