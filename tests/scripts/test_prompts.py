"""Tasks of all three environments as rows for verl's trainers: what a policy reads first, and which task it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from late import late

from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.envs.panels import load_panel
from turngym.scripts.main import main

KEYS = ["data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name", "task_id", "seed"]


def exported(out: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["panel", "export-prompts", *words, "--out", str(out)]) == 0
    rows: list[dict[str, Any]] = parquet.read_table(out).to_pylist()
    return rows


@pytest.mark.parametrize("panel", ["alfworld-quickstart", "webshop-quickstart", "search-quickstart"])
def test_a_panel_of_each_environment(panel: str, tmp_path: Path) -> None:
    tasks = load_panel(panel).tasks[:3]
    rows = exported(tmp_path / "rows.parquet", panel, "--form", "tasks", "--limit", "3")
    assert [list(row) for row in rows] == [KEYS] * 3
    for index, (row, task) in enumerate(zip(rows, tasks, strict=True)):
        assert (row["task_id"], row["data_source"], row["ability"]) == (task.task_id, task.env_id, task.category)
        assert (row["agent_name"], row["seed"]) == ("turngym", 0)
        assert row["reward_model"] == {"style": "rule", "ground_truth": task.task_id}
        assert row["extra_info"] == {
            "split": task.split,
            "index": index,
            "task_id": task.task_id,
            "task_sha": task.sha256,
            "category": task.category,
        }


@pytest.mark.parametrize(
    ("env", "kwargs"),
    late(
        [
            ("turngym/ALFWorld-v0", {"split": "generated", "config": "small"}),
            ("turngym/WebShop-v0", {"profile": "embedded-small", "split": "train"}),
            ("turngym/Search-v0", {"source": "world", "config": "tiny", "split": "train"}),
        ],
        "turngym/ALFWorld-v0",
    ),
)
def test_prompts_are_what_a_rollout_reads_first(env: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    words = ["--env", env, "--env-kwargs", json.dumps(kwargs), "--form", "tasks", "--limit", "2", "--seed", "5"]
    rows = exported(tmp_path / "rows.parquet", *words)
    jobs = [Job(task_id=row["task_id"], seed=row["seed"]) for row in rows]
    played = rollout(jobs, env_maker(env, **kwargs, channel="text"), ExpertAgent(), max_turns=1)
    for row, episode in zip(rows, played, strict=True):
        assert row["seed"] == 5
        assert row["prompt"] == [
            {"role": "system", "content": episode.system},
            {"role": "user", "content": episode.turns[0].observation},
        ]
        assert "<" in episode.system


def test_the_tool_channel_is_described_otherwise(tmp_path: Path) -> None:
    words = ["webshop-quickstart", "--limit", "1"]
    text = exported(tmp_path / "text.parquet", *words)
    tool = exported(tmp_path / "tool.parquet", *words, "--channel", "tool")
    assert text[0]["prompt"][0]["content"] != tool[0]["prompt"][0]["content"]
    assert text[0]["prompt"][1] == tool[0]["prompt"][1]


def test_questions_keep_the_form_of_search_r1_unless_asked(tmp_path: Path) -> None:
    (row,) = exported(tmp_path / "rows.parquet", "search-quickstart", "--limit", "1")
    assert {"golden_answers", "gold_ids"} < set(row)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a panel, or --env"),
        (["search-quickstart", "--env", "turngym/Search-v0"], "a panel or --env, not both"),
        (["webshop-quickstart", "--form", "search-r1"], "only questions of turngym/Search-v0 have it"),
        (["webshop-quickstart", "--limit", "-1"], "--limit is "),
    ],
)
def test_what_cannot_be_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["panel", "export-prompts", *words, "--out", str(tmp_path / "x.parquet")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.parquet").write_text("mine")
    assert main(["panel", "export-prompts", "webshop-quickstart", "--out", str(tmp_path / "x.parquet")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "x.parquet").read_text() == "mine"
