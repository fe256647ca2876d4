"""Clients of `turngym serve proxy` train the tiny policy: sessions of the official client become a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proxy_run
import pytest
import torch
from proxy_run import options, play

from turngym.agents.judges.judge_settings import KeywordJudge, UrlJudge
from turngym.agents.proxy.turn_records import read_records
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.trace import read_trace
from turngym.scripts import trace
from turngym.scripts.serve_proxy import serve
from turngym.trainers.checkpoint import latest_checkpoint, list_checkpoints, read_state
from turngym.trainers.live.judging import make_session_judge
from turngym.trainers.live.run import _algorithm, build
from turngym.trainers.metrics import read_metrics
from turngym.trainers.token_losses import TruncatedImportance


@pytest.fixture
def run() -> Iterator[Any]:
    made: list[proxy_run.Running] = []

    def start(config: Any) -> proxy_run.Running:
        made.append(proxy_run.Running(config))
        return made[-1]

    yield start
    for one in made:
        one.stop_if_running()


def test_the_loss_of_sessions_has_a_dual_clip(tmp_path: Path) -> None:
    for more, bound in (({}, 3.0), ({"dual_clip": 0.0}, None)):
        loss: Any = _algorithm(options(tmp_path, **more), None).token_loss
        assert loss.dual_clip == bound


def test_staleness_reaches_the_loss_and_the_buffer(tmp_path: Path) -> None:
    config = options(tmp_path, staleness=3, importance_cap=1.5, order="newest")
    service, training = build(config)
    assert training is not None
    loss: Any = training.algorithm.token_loss
    assert isinstance(loss, TruncatedImportance)
    assert (loss.cap, loss.loss.dual_clip) == (1.5, 3.0)
    assert training.algorithm.settings["staleness"] == 3
    assert (training.source._staleness, training.source._newest_first) == (3, True)
    assert training.trainer.algorithm is training.algorithm
    training.stop()
    service.close()
    with pytest.raises(SettingsError, match=r"staleness is -1; .*at least 0"):
        options(tmp_path, staleness=-1)


def test_plain_http_trains_and_a_restart_goes_on(run: Any, tmp_path: Path) -> None:
    served = run(options(tmp_path))
    before = {name: value.clone() for name, value in served.training.trainer.model.state_dict().items()}
    play(served.ask, sessions=2, turns=4)
    served.until_step(1)
    assert any(
        not torch.equal(value, before[name]) for name, value in served.training.trainer.model.state_dict().items()
    )
    assert served.ask([{"role": "user", "content": "Are you new?"}], "next")["role"] == "assistant"
    served.stop()
    (row,) = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert (row["episodes"], row["judge/votes"], row["judge/votes_failed"]) == (2, 6, 0)
    assert row["gap_max"] < 1e-4  # what the engine said is what the trainer computes
    episodes, problems = read_trace(tmp_path / "sessions.jsonl")
    assert not problems
    assert [len(episode.segments) for episode in episodes] == [1, 1]
    assert [turn.policy_version for turn in episodes[0].turns] == [0, 0, 0, 0]
    assert episodes[0].turns[3].judge_scores is None

    again = run(options(tmp_path))
    assert len(again.service.sessions) == 1
    assert again.health()["training"]["ready_turns"] == 0
    play(again.ask, sessions=2, turns=4, first=2)
    again.until_step(2)
    again.stop()
    assert read_state(latest_checkpoint(tmp_path))["step"] == 2
    assert {
        turn.policy_version for episode in read_trace(tmp_path / "sessions.jsonl")[0][2:] for turn in episode.turns
    } == {1}


def test_the_official_client_trains_by_hints(run: Any, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the official client is not installed")
    served = run(options(tmp_path, algorithm="opd-hints", batch_turns=4))
    plain = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=served.server.url, api_key="none", http_client=plain) as client:
        for number in range(2):
            messages: list[Any] = [{"role": "user", "content": "You are in the middle of a room."}]
            for turn in range(3):
                done = "1" if turn == 2 else "0"
                headers = {"X-Session-Id": f"s{number}", "X-Session-Done": done}
                found = client.chat.completions.create(model="tiny", messages=messages, extra_headers=headers)
                messages += [found.choices[0].message, {"role": "user", "content": "Nothing happens."}]
    served.until_step(1)
    served.stop()
    (row,) = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert row["judge/hints"] == 4
    hinted = [turn for turn in read_trace(tmp_path / "sessions.jsonl")[0][0].turns if turn.hint is not None]
    assert [turn.hint for turn in hinted] == ["What you are about to do leads to this: Nothing happens."] * 2
    assert all(turn.hint_prompt_ids is not None for turn in hinted)


def test_scores_and_hints_are_learned_from_together(run: Any, tmp_path: Path) -> None:
    served = run(options(tmp_path, algorithm="prm-opd", batch_turns=4))
    says = ["Nothing happens.", "Thank you, that is perfect.", "Nothing happens."]
    for number in range(2):
        messages: list[Any] = [{"role": "user", "content": "You are in the middle of a room."}]
        for turn in range(3):
            reply = served.ask(messages, f"s{number}", session_done=turn == 2)
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": says[turn]}]
    served.until_step(1)
    served.stop()
    (row,) = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    # of three turns the last has no next state, the second has a score and no hint
    assert (row["judge/hints"], row["judge/votes"], row["judge/score"]) == (2, 4, 0.0)
    turns = read_trace(tmp_path / "sessions.jsonl")[0][0].turns
    assert [turn.judge_scores for turn in turns] == [(-1.0,), (1.0,), None]
    assert [turn.hint_prompt_ids is None for turn in turns] == [False, True, True]


def test_thumbs_are_learned_from_and_every_turn_has_a_fate(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = run(options(tmp_path, batch_turns=4))
    for number in range(2):
        messages: list[Any] = [{"role": "user", "content": "You are in the middle of a room."}]
        for turn in range(3):
            reply = served.ask(messages, f"s{number}")
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "Thank you."}]
            body = {"session_id": f"s{number}", "turn": turn, "score": -1}
            # of the last turn nobody says anything, and it has no next state
            if turn < 2:
                assert served.http.post("/feedback", json=body).json()["status"] == "counted"
        served.http.post("/sessions/done", json={"session_id": f"s{number}"})
    served.until_step(1)
    late = served.http.post("/feedback", json={"session_id": "s0", "turn": 0, "score": 1}).json()
    health = served.health()
    metrics = served.http.get(served.server.url.removesuffix("/v1") + "/metrics").text
    served.stop()
    assert late["status"] == "late"
    # the judge, who reads thanks, was asked nothing
    (row,) = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert (row["judge/score"], row["judge/votes"]) == (-1.0, 4)
    assert health["left_out"] == {"no next state": 2}
    assert health["feedback_counted"] == 4
    assert health["training"]["versions_behind_max"] == 0
    assert 0 <= health["training"]["age_s_mean"] <= health["training"]["age_s_max"] < 300
    assert 'turngym_left_out{name="no next state"} 2\n' in metrics
    capsys.readouterr()
    assert trace.main(["records", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step 1: 4 turns of 2 sessions, at most 0 updates behind and ")
    ends = ["6 main turns of 2 sessions, 0 side turns", "     4 trained on", "     2 left out: no next state"]
    assert said[1:4] == ends
    # the thumb that came late is there too
    assert said[4] == "     1 thumbs up, 3 down"


def test_the_tiny_policy_streams_what_it_would_have_said_at_once(run: Any, tmp_path: Path) -> None:
    served = run(options(tmp_path, None))
    body = {"messages": [{"role": "user", "content": "You are in the middle of a room."}], "seed": 3}
    plain = served.http.post("/chat/completions", json=body).json()
    with served.http.stream("POST", "/chat/completions", json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == plain["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert served.health()["engine"]["streams"] is True


def test_recording_only_honors_the_temperature(run: Any, tmp_path: Path) -> None:
    served = run(options(tmp_path, None))
    texts = {
        served.ask([{"role": "user", "content": "You are in the middle of a room."}], f"s{n}", temperature=0)["content"]
        for n in range(3)
    }
    assert len(texts) == 1
    served.stop()
    assert not list_checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"host": "0.0.0.0"}, "set a key in TURNGYM_PROXY_KEY"),
        ({"batch_turns": 0}, r"batch_turns is 0; .*at least 1"),
        ({"algorithm": "opd"}, "name its folder with --teacher"),
        ({"importance_cap": 1.5}, ": staleness must be given"),
        ({"policy_server": "http://127.0.0.1:9", "swap_wait": 1.0}, r"swap_wait is 1\.0; it needs a model"),
        ({"algorithm": None, "judge": "words"}, "there is no setting 'judge'"),
    ],
)
def test_what_cannot_be_served(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(TurngymError, match=text):
        serve(options(tmp_path, **more))


@pytest.mark.long
def test_it_says_that_it_loads_and_ctrl_c_does_not_reach_the_engine_while_it_is_imported(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group: the engine's process would print a traceback over the server's own line."""
    command = [sys.executable, "-m", "turngym.scripts", "serve", "proxy", "--student", str(proxy_run.STUDENT)]
    command += ["--out", str(tmp_path), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"loading {proxy_run.STUDENT}\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (importing := [pid for pid in children.read_text().split() if imports_torch(pid)]):
            time.sleep(0.01)
        os.kill(int(importing[0]), signal.SIGINT)
        assert process.stdout.readline().startswith("ready: ")
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith("stopped; everything accepted was answered\n")
    assert process.returncode == 0


def imports_torch(pid: str) -> bool:
    try:
        return "libtorch_python" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("name", ["proxy_prm_rl.sh", "proxy_opd_hints.sh"])
def test_launch_scripts(tmp_path: Path, name: str) -> None:
    """Their options exist (a `turngym` that only reads them stands in for the server)."""
    from turngym.scripts import serve_proxy as proxy

    stub = tmp_path / "turngym"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STUDENT": "models/s", "RESULTS": str(tmp_path / "results")}
    script = proxy_run.ROOT / "scripts" / "launch" / name
    url = "http://127.0.0.1:9/v1"
    for named, judge in (
        ({}, KeywordJudge()),
        ({"JUDGE": url}, UrlJudge(url=url, judge_votes=3, judge_temperature=0.6)),
    ):
        command = [str(script), "--port", "0"]
        found = subprocess.run(command, env=env | named, capture_output=True, text=True, check=True)
        words = found.stdout.splitlines()
        assert words[:2] == ["serve", "proxy"]
        config: Any = proxy.parse(words[2:])
        assert (config.batch_turns, config.part("judge"), config.port) == (16, judge, 0)
    assert (tmp_path / "results").is_dir()
    del env["STUDENT"]
    refused = subprocess.run([str(script)], env=env, capture_output=True, text=True, check=False)
    assert "STUDENT" in refused.stderr


def test_turns_are_judged_while_their_session_goes_on(run: Any, tmp_path: Path) -> None:
    served = run(options(tmp_path))
    messages: list[Any] = []
    for said in ("You are in a room.", "Nothing happens.", "Thanks."):
        messages.append({"role": "user", "content": said})
        messages.append(served.ask(messages, "a"))
    for _ in range(500):
        if served.health()["training"].get("turns_judged") == 2:
            break
        threading.Event().wait(0.01)
    served.stop()
    votes = [one for one in read_records(tmp_path) if one["kind"] == "judged"]
    assert [(one["turn"], one["votes"][0][-10:]) for one in votes] == [(0, "\\boxed{-1}"), (1, " \\boxed{1}")]
    assert len({one["session"] for one in votes}) == 1


def test_the_options_of_a_judge_behind_a_url(tmp_path: Path) -> None:
    judge = {"judge_parallel": 12, "judge_timeout": 7.5, "judge_tries": 2, "judge_votes": 4}
    config = options(tmp_path, judge="http://127.0.0.1:9/v1", **judge)
    made = make_session_judge(config, _algorithm(config, None), None, 64)  # type: ignore[arg-type]
    assert made is not None
    asks: Any = made.judge
    client = asks._client
    assert (client.parallel, client.deadline, client.retries, asks.options.judge_votes) == (12, 7.5, 1, 4)
    assert (made.workers, made.batch) == (3, 1)  # 3 turns with 4 votes each are 12 votes at a time
    words = make_session_judge(options(tmp_path), _algorithm(config, None), None, 64)  # type: ignore[arg-type]
    assert words is not None
    assert (words.workers, words.batch) == (1, 16)
    both = options(tmp_path, "prm-opd", judge="http://127.0.0.1:9/v1", **judge)
    asked = make_session_judge(both, _algorithm(both, None), None, 64)  # type: ignore[arg-type]
    assert asked is not None
    # two questions with 4 votes each about one turn are 8 of 12
    assert (asked.workers, asked.batch, asked.kind) == (1, 1, "both")
    assert asked.enhance is not None
