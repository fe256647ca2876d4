"""Tasks drawn as the published harness draws them, by its rules written a second time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.agents.evaluation.compare import compare_recorded, rescore
from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS, evaluate
from turngym.agents.evaluation.packed import packed
from turngym.agents.evaluation.published_tasks import published_tasks
from turngym.agents.evaluation.scores import EvaluationError, ScoreError
from turngym.agents.evaluation.statistics import clustered
from turngym.agents.play_spec import Published, Whole
from turngym.agents.resolve_play import resolve_play
from turngym.core.errors import SettingsError
from turngym.envs.panels import load_panel
from turngym.envs.webshop.env import WebShopEnv
from turngym.scripts.main import main

HOUSES = "alfworld-quickstart"


def test_words_of_sampling() -> None:
    def sampling(text: str) -> Any:
        return resolve_play(
            [("test", {"panel": HOUSES, "sampling": text})], usual=EVAL_DEFAULTS
        ).spec.play.tasks.sampling  # type: ignore[union-attr]

    known = [sampling(text) for text in ("panel", "published", "published:140")]
    assert known == [Whole(), Published(harness=128), Published(harness=140)]
    for text in ("publishd", "published:", "published:0", "published:-3", "published:99999", "panel:3"):
        with pytest.raises(SettingsError) as caught:
            sampling(text)
        assert "sampling" in str(caught.value) or "harness" in str(caught.value)


def test_every_alfworld_worker_goes_through_its_own_shuffle() -> None:
    panel = load_panel(HOUSES)
    drawn = [task.task_id for task in published_tasks(panel, None, workers=7, validations=3, seed=5)]
    for worker in range(7):
        # as TextWorld's loader: a shuffle by the seed, then one game at each reset
        games, rng = list(panel.task_ids), np.random.RandomState(5 + 1000 + worker)
        rng.shuffle(games)
        assert drawn[worker::7] == games[:3]
    first = [task.task_id for task in published_tasks(panel, None, workers=128, validations=1, seed=0)]
    more = [task.task_id for task in published_tasks(panel, None, workers=140, validations=1, seed=0)]
    assert more[:128] == first
    assert len(set(first)) < 128


def test_alfworld_shuffles_again_once_all_games_were_played() -> None:
    panel = load_panel(HOUSES)
    count = len(panel.tasks)
    drawn = [task.task_id for task in published_tasks(panel, None, workers=1, validations=2 * count, seed=0)]
    assert set(drawn[:count]) == set(drawn[count:]) == set(panel.task_ids)
    games, rng = list(panel.task_ids), np.random.RandomState(1000)
    rng.shuffle(games)
    assert drawn[:count] == games
    rng.shuffle(games)
    assert drawn[count:] == games


def test_webshop_workers_have_their_own_order_and_caps() -> None:
    panel = load_panel("webshop-generated-eval")
    env = panel.make_env()
    drawn = published_tasks(panel, env, workers=5, validations=2, seed=3)
    shop = env.unwrapped.shop  # type: ignore[attr-defined]
    numbers = np.random.RandomState(1003)
    others = {worker: WebShopEnv(price_seed=1003 + worker) for worker in (0, 4)}  # to open one takes half a second
    for validation in range(2):
        for worker, chosen in enumerate(numbers.choice(range(500), size=5, replace=False)):
            goals = np.argsort(shop.goals.order).tolist()
            random.Random(1003 + worker).shuffle(goals)
            task = drawn[5 * validation + worker]
            assert task.task_id == f"{shop.profile.name}/{goals[chosen]}@{1003 + worker}"
            # the same goal in a shop that was opened with that seed
            if other := others.get(worker):
                seen, _ = other.reset(options={"task": f"{shop.profile.name}/{goals[chosen]}"})
                mine, _ = env.reset(options={"task": task.task_id})
                assert mine == seen
                assert env.unwrapped.goal == other.goal
    for one in (env, *others.values()):
        one.close()


def test_a_goal_with_a_seed_is_a_task_of_its_own() -> None:
    env = WebShopEnv()
    name, own = env.shop.profile.name, env.shop.price_seed
    tasks = []
    for task_id in (f"{name}/7", f"{name}/7@{own}", f"{name}/7@1000", f"{name}/7@1001", f"{name}/7"):
        env.reset(options={"task": task_id})
        assert env.task.task_id == task_id
        tasks.append(env.task.sha256)
    assert tasks[0] == tasks[-1]
    assert len(set(tasks)) == 4
    for wrong in (f"{name}/7@", f"{name}/7@01", f"{name}/@7", f"{name}/7@1@2", f"{name}/7@x", "other/7@1"):
        assert wrong not in env.task_ids()
    env.close()


def test_a_number_is_the_mean_over_draws(tmp_path: Path) -> None:
    settings = {"noise": 0.9, "max_turns": 12, "sampling": "published:60", "samples": 2, "progress": False}
    result = evaluate(HOUSES, "expert", out=tmp_path, **settings)  # type: ignore[arg-type]
    assert len(result.outcomes) == 120
    assert result.missing == 0
    assert len({one.task.task_id for one in result.outcomes}) < 120
    won = sum(one.success for one in result.outcomes)
    assert result.scores.overall.avg.mean == pytest.approx(won / 120)
    assert 0 < won < 120
    # draws of one game say no more than one game can
    games, wins = [one.task.task_id for one in result.outcomes], [float(one.success) for one in result.outcomes]
    avg, alone = result.scores.overall.avg, clustered(wins)
    assert avg == replace(clustered(wins, clusters=games), tasks=len({*games}))
    assert avg.low < alone.low
    assert sum(row.avg.tasks for row in result.scores.categories) == avg.tasks
    assert sum(row.episodes for row in result.scores.categories) == 120
    assert "120 draws" in result.title
    assert "published:60" in result.title
    assert "tasks drawn as by 60 workers of verl-agent" in result.departs.line
    # read again, resumed, and in another number of slots
    again = rescore(tmp_path)
    assert (again.scores, again.title, again.missing) == (result.scores, result.title, 0)
    assert evaluate(HOUSES, "expert", out=tmp_path, **settings).resumed == 120  # type: ignore[arg-type]
    other = evaluate(HOUSES, "expert", slots=3, **settings)  # type: ignore[arg-type]
    assert [one.success for one in other.outcomes] == [one.success for one in result.outcomes]
    with pytest.raises(EvaluationError, match="its tasks are draws, not the panel's"):
        packed(tmp_path)
    # a killed one lacks the rest
    lines = (tmp_path / "trace.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "trace.jsonl").write_text("".join(lines[:-20]))
    assert rescore(tmp_path).missing == 20
    assert evaluate(HOUSES, "expert", out=tmp_path, **settings).scores == result.scores  # type: ignore[arg-type]
    with pytest.raises(EvaluationError, match="sampling"):
        evaluate(HOUSES, "expert", out=tmp_path, **{**settings, "sampling": "panel"})  # type: ignore[arg-type]


def test_what_departs_under_a_preset() -> None:
    ways = {}
    for sampling in ("panel", "published", "published:140"):
        settings = {"preset": "verl-agent", "sampling": sampling, "progress": False}
        ways[sampling] = evaluate(HOUSES, "expert", **settings).departs.line  # type: ignore[arg-type, union-attr]
    assert "128 draws" in ways["panel"]
    assert "workers (128)" not in ways["panel"]
    assert "128 draws" not in ways["published"]
    assert "file system" in ways["published"]
    assert "140 workers (128)" in ways["published:140"]
    assert "workers (128)" not in ways["published"]


def test_draws_and_panels_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--panel", HOUSES, "--agent", "expert", "--samples", "1"]
    assert main([*command, "--out", str(tmp_path / "a"), "--sampling", "published:60"]) == 0
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    with pytest.raises(ScoreError, match="sampling"):
        compare_recorded(tmp_path / "a", tmp_path / "b")
    assert main([*command, "--sampling", "published", "--limit", "3"]) == 2
    assert "limit is a setting of play.tasks.sampling = part" in capsys.readouterr().err


def test_search_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--panel", "search-quickstart", "--agent", "expert", "--sampling", "published"]) == 2
    assert "in order; leave it out" in capsys.readouterr().err


def test_a_rollout_says_what_departs(capsys: pytest.CaptureFixture[str]) -> None:
    """As an evaluation does; what it plays is never a panel."""
    assert main(["rollout", "--tasks", "1", "--agent", "expert"]) == 0
    assert (
        "Not as the original: on_invalid reject (noop); generated tasks; tasks of no panel" in capsys.readouterr().out
    )
    assert main(["rollout", "--tasks", "1", "--agent", "expert", "--preset", "verl-agent", "--depth", "2"]) == 0
    said = capsys.readouterr().out
    assert "Not as the original (verl-agent): episodes end after 2 turns; generated tasks" in said
    assert "on_invalid" not in said
    words = ["rollout", "--tasks", "1", "--agent", "expert", "--preset", "verl-agent", "--max-turns", "9"]
    assert main([*words, "--samples", "2"]) == 0
    assert "max_turns 9 (50); 2 samples a task (1)" in capsys.readouterr().out
