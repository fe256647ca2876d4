"""`vf-eval turngym-alfworld` in a process of its own, with the model on a local server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_server import Recorded, chat_server
from evaluator_commands import on_panel, vf_eval

pytest.importorskip("verifiers.v1", reason="needs the extra turngym[verifiers]")

from turngym.core.trace import read_trace

PANEL = "alfworld-quickstart"
SPREAD = False  # of `-n 6` verifiers takes the first


def test_the_command_scores_as_turngym_eval_does(
    played: SimpleNamespace, tmp_path: Path, assert_same_episodes: Callable[..., None]
) -> None:
    with chat_server(played.recorded) as (url, requests):
        rows = vf_eval(tmp_path, url, *on_panel(tmp_path, PANEL), "-n", "6", "--sampling.temperature", "0.85")
    assert {request["temperature"] for request in requests} == {0.85}
    assert_same_episodes(tmp_path / "trace.jsonl", played.result)
    ours = {episode.task.task_id: episode for episode in played.result.episodes}
    assert len(rows) == len(ours)
    for row in rows:
        assert (row["ok"], row["errors"]) == (True, [])
        (theirs,) = row["traces"]
        episode = ours[row["task"]["data"]["id"]]
        assert row["task"]["data"]["sha256"] == episode.task.sha256
        assert theirs["rewards"]["success"]["score"] == float(episode.success)
        assert theirs["metrics"] == {
            "score": episode.score,
            "turns": episode.depth,
            "invalid": sum(not turn.verdict.valid for turn in episode.turns),
        }
        assert theirs["info"]["turngym"]["status"] == episode.status.value


def test_attempts_are_numbered(played: SimpleNamespace, tmp_path: Path) -> None:
    with chat_server(played.recorded) as (url, _):
        vf_eval(tmp_path, url, *on_panel(tmp_path, PANEL), "-n", "2", "-r", "2")
    episodes, _ = read_trace(tmp_path / "trace.jsonl")
    first = [task.task_id for task in played.result.episodes[:2] for task in (task.task,)]
    assert sorted((e.task.task_id, e.sample) for e in episodes) == sorted((t, n) for t in first for n in (0, 1))
    assert {e.meta["agent"] for e in episodes} == {"verifiers expert"}


def test_a_model_that_fails_is_an_error_and_no_reward(tmp_path: Path) -> None:
    with chat_server(Recorded([])) as (url, _):
        (row,) = vf_eval(tmp_path, url, *on_panel(tmp_path, PANEL), "-n", "1")
    assert not row["ok"]
    assert not row["traces"][0]["rewards"]
    assert read_trace(tmp_path / "trace.jsonl")[0][0].status.value == "error_engine"


def test_a_limit_of_verifiers_cuts_the_episode(played: SimpleNamespace, tmp_path: Path) -> None:
    with chat_server(played.recorded) as (url, _):
        (row,) = vf_eval(tmp_path, url, *on_panel(tmp_path, PANEL), "-n", "1", "--env.player.max-turns", "1")
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert (episode.status.value, episode.depth) == ("truncated_depth", 1)
    assert row["traces"][0]["rewards"]["success"]["score"] == 0.0


@pytest.mark.parametrize("name", ["alfworld", "webshop", "search"])
def test_every_benchmark_is_an_environment_of_verifiers(name: str) -> None:
    from verifiers.v1.utils.loaders import default_harness_id, environment_class, taskset_class, taskset_config_type

    ident = f"turngym-{name}"
    config = taskset_config_type(ident)(id=ident, panel=f"{name}-quickstart")
    tasks = list(taskset_class(ident)(config))
    assert len(tasks) == 100
    assert len({task.data.sha256 for task in tasks}) == 100
    assert environment_class(ident).__name__.endswith("Env")
    assert default_harness_id(ident) == ident
    assert taskset_config_type(ident)().panel != config.panel
