"""Evaluation: Avg@n over a panel, resume, and refusal of anything that is not the panel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.evaluation.play_panel import evaluate_tasks
from turngym.agents.evaluation.scores import EvaluationError, behavior_table, success_table
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.envs.core.errors import EnvBackendError, TaskError
from turngym.envs.core.tables import markdown
from turngym.envs.core.task import Task
from turngym.envs.core.trace import read_trace
from turngym.envs.panels import collect_tasks, make_panel


@pytest.fixture
def tasks(make_doors: Any) -> tuple[Task, ...]:
    return collect_tasks(make_doors()(), [f"doors/{n}" for n in (1, 2, 3, 4)])


def rows(episodes: Any) -> list[tuple[Any, ...]]:
    return [(e.task, e.sample, e.group, e.seed, e.status, e.turns) for e in episodes]


def test_expert_and_random_on_a_panel(make_doors: Any, tasks: Any) -> None:
    panel = make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)
    best = evaluate_tasks(panel, make_doors(), ExpertAgent(), samples=2, temperature=None)
    assert (best.scores.overall.avg.mean, best.scores.invalid_rate, best.scores.turns) == (1.0, 0.0, 2.5)
    assert best.to_json()["panel"] == "doors-v1"
    assert [(e.task.task_id, e.sample) for e in best.episodes[3:5]] == [("doors/4", 0), ("doors/1", 1)]
    lost = evaluate_tasks(panel, make_doors(max_turns=1), RandomAgent(), samples=4, slots=3)
    assert [row.name for row in lost.scores.categories] == ["even", "odd"]
    assert lost.scores.categories[0].avg.mean == 0.0
    assert lost.scores.truncated["truncated_turns"] > 0.7


def test_an_interrupted_evaluation_goes_on_to_the_same_result(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    whole = evaluate_tasks(tasks, make_doors(), RandomAgent(), samples=3, trace=tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    again = evaluate_tasks(tasks, make_doors(), RandomAgent(), samples=3, trace=cut)
    assert (again.resumed, len(again.problems)) == (5, 1)
    assert rows(again.episodes) == rows(whole.episodes)
    assert replace(again.scores) == whole.scores
    idle = evaluate_tasks(tasks, make_doors(), RandomAgent(), samples=3, trace=cut)
    assert (idle.resumed, idle.scores) == (12, whole.scores)
    assert len(cut.read_bytes().splitlines()) == 13


def test_a_trace_of_something_else_is_refused_and_left_alone(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    evaluate_tasks(tasks, make_doors(), RandomAgent(), samples=1, trace=trace)
    before = trace.read_bytes()
    with pytest.raises(EvaluationError, match="played with seed 0, this evaluation has 1"):
        evaluate_tasks(tasks, make_doors(), RandomAgent(), samples=1, trace=trace, seed=1)
    with pytest.raises(EvaluationError, match="played with agent 'random', this evaluation has 'expert'"):
        evaluate_tasks(tasks, make_doors(), ExpertAgent(), samples=1, trace=trace)
    other = [replace(task, sha256="0" * 64) for task in tasks]
    with pytest.raises(EvaluationError, match="the panel says 0000"):
        evaluate_tasks(other, make_doors(), RandomAgent(), samples=1, trace=trace)
    assert trace.read_bytes() == before
    with pytest.raises(TaskError, match=r"but 0000.* is asked for"):
        evaluate_tasks(other, make_doors(), RandomAgent(), samples=1)
    with pytest.raises(EvaluationError, match="0 tasks with 4 samples each"):
        evaluate_tasks([], make_doors(), RandomAgent())


def test_episodes_that_ended_in_an_error_are_played_again(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    make = make_doors()

    def flaky() -> Any:
        env = make()
        env.base._apply = broken
        return env

    def broken(action: str) -> Any:
        raise EnvBackendError("no answer")

    with pytest.raises(Exception, match="none of 4 episodes ended without an error"):
        evaluate_tasks(tasks, flaky, ExpertAgent(), samples=1, trace=trace)
    healed = evaluate_tasks(tasks, make, ExpertAgent(), samples=1, trace=trace)
    assert (healed.resumed, healed.scores.errors, healed.scores.overall.avg.mean) == (0, 0, 1.0)
    assert len(read_trace(trace)[0]) == 8


def test_tables_say_what_was_scored(make_doors: Any, tasks: Any) -> None:
    jobs = [Job(task_id=task.task_id, sample=n) for task in tasks for n in range(4)]
    assert len(rollout(jobs, make_doors(), RandomAgent())) == 16
    scores = evaluate_tasks(tasks, make_doors(), ExpertAgent(), samples=4).scores
    text = markdown(success_table({"expert": scores}))
    assert text.split("\n") == [
        "| run | even | odd | Avg@4 [95 %] | pass@4 [95 %] | tasks |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| expert | 100.0 | 100.0 | 100.0 [39.8, 100.0] | 100.0 [39.8, 100.0] | 4 |",
    ]
    assert "| expert | 2.5 | 2.5 | 0.0 | 0.0 | 0.0 | 0.0 | 100.0 | 1.000 | 0 |" in markdown(
        behavior_table({"expert": scores})
    )


def test_different_numbers_of_samples_are_different_columns(make_doors: Any, tasks: Any) -> None:
    four = evaluate_tasks(tasks, make_doors(), ExpertAgent(), samples=4).scores
    one = evaluate_tasks(tasks, make_doors(), ExpertAgent(), samples=1).scores
    assert markdown(success_table({"four": four, "one": one})).split("\n") == [
        "| run | even | odd | Avg@4 [95 %] | Avg@1 [95 %] | pass@4 [95 %] | pass@1 [95 %] | tasks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| four | 100.0 | 100.0 | 100.0 [39.8, 100.0] | - | 100.0 [39.8, 100.0] | - | 4 |",
        "| one | 100.0 | 100.0 | - | 100.0 [39.8, 100.0] | - | 100.0 [39.8, 100.0] | 4 |",
    ]
