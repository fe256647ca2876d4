"""Evaluation: Avg@n over a panel, resume, refusal of what is not the panel, and shares of several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import breaking
from thread_ranks import in_ranks
from toy_evaluation import toy_evaluation

from turngym.agents.evaluation.open_play import record_of
from turngym.agents.evaluation.play_panel import PanelEvaluation, gather_shares, share_trace
from turngym.agents.evaluation.scores import EvaluationError, behavior_table, success_table
from turngym.agents.playing.rollout import rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.core.errors import TaskError
from turngym.core.protocols import EvalPoint
from turngym.core.tables import markdown
from turngym.core.task import Task
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.panels import collect_tasks, make_panel
from turngym.trainers.distributed import SharedEvaluation
from turngym.trainers.ranks import DistributedError


@pytest.fixture
def tasks(make_doors: Any) -> tuple[Task, ...]:
    return collect_tasks(make_doors()(), [f"doors/{n}" for n in (1, 2, 3, 4)])


def rows(episodes: Any) -> list[tuple[Any, ...]]:
    return [(e.task, e.sample, e.group, e.seed, e.status, e.turns) for e in episodes]


def test_expert_and_random_on_a_panel(make_doors: Any, tasks: Any) -> None:
    panel = make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)
    best = toy_evaluation(panel, make_doors(), ExpertAgent(), samples=2).run()
    assert (best.scores.overall.avg.mean, best.scores.invalid_rate, best.scores.turns) == (1.0, 0.0, 2.5)
    assert best.to_json()["spec"]["play"]["tasks"]["panel"] == "doors-v1"
    assert [(e.task.task_id, e.sample) for e in best.episodes[3:5]] == [("doors/4", 0), ("doors/1", 1)]
    lost = toy_evaluation(panel, make_doors(max_turns=1), RandomAgent(), samples=4, slots=3).run()
    assert [row.name for row in lost.scores.categories] == ["even", "odd"]
    assert lost.scores.categories[0].avg.mean == 0.0
    assert lost.scores.truncated["truncated_turns"] > 0.7


def test_an_interrupted_evaluation_goes_on_to_the_same_result(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    whole = toy_evaluation(tasks, make_doors(), RandomAgent(), samples=3, trace=tmp_path / "whole.jsonl").run()
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:6]) + lines[6][:40])
    again = toy_evaluation(tasks, make_doors(), RandomAgent(), samples=3, trace=cut).run()
    assert (again.resumed, len(again.problems)) == (5, 1)
    assert rows(again.episodes) == rows(whole.episodes)
    assert replace(again.scores) == whole.scores
    idle = toy_evaluation(tasks, make_doors(), RandomAgent(), samples=3, trace=cut).run()
    assert (idle.resumed, idle.scores) == (12, whole.scores)
    # settings, 12 episodes, and the torn line
    assert len(cut.read_bytes().splitlines()) == 14


def test_a_trace_of_something_else_is_refused_and_left_alone(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    toy_evaluation(tasks, make_doors(), RandomAgent(), samples=2, trace=trace).run()
    before = trace.read_bytes()
    # fewer samples would leave some of the trace out
    with pytest.raises(EvaluationError, match=r"play\.samples 2, this evaluation has 1"):
        toy_evaluation(tasks, make_doors(), RandomAgent(), samples=1, trace=trace).run()
    with pytest.raises(EvaluationError, match=r"played with play\.seed 0, this evaluation has 1"):
        toy_evaluation(tasks, make_doors(), RandomAgent(), samples=2, trace=trace, seed=1).run()
    with pytest.raises(EvaluationError, match=r"agent\.name 'random', this evaluation has 'expert'"):
        toy_evaluation(tasks, make_doors(), ExpertAgent(), samples=2, trace=trace).run()
    other = [replace(task, sha256="0" * 64) for task in tasks]
    with pytest.raises(EvaluationError, match="the panel says 0000"):
        toy_evaluation(other, make_doors(), RandomAgent(), samples=2, trace=trace).run()
    assert trace.read_bytes() == before
    # a sample that this evaluation does not have
    extra = next(one for one in read_trace(trace)[0] if one.sample == 1)
    with TraceWriter(trace) as writer:
        writer.write(replace(extra, sample=2))
    with pytest.raises(
        EvaluationError, match=rf"\({extra.task.task_id} sample 2\): it is no episode of this evaluation"
    ):
        toy_evaluation(tasks, make_doors(), RandomAgent(), samples=2, trace=trace).run()
    with pytest.raises(TaskError, match=r"but 0000.* is asked for"):
        toy_evaluation(other, make_doors(), RandomAgent(), samples=1).run()


def test_episodes_that_ended_in_an_error_are_played_again(make_doors: Any, tasks: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    make = make_doors()
    with pytest.raises(Exception, match="all 4 episodes failed; the first: no answer"):
        toy_evaluation(tasks, breaking(make, lambda env: True), ExpertAgent(), samples=1, trace=trace).run()
    healed = toy_evaluation(tasks, make, ExpertAgent(), samples=1, trace=trace).run()
    assert (healed.resumed, healed.scores.errors, healed.scores.overall.avg.mean) == (0, 0, 1.0)
    assert len(read_trace(trace)[0]) == 8


def test_tables_say_what_was_scored(make_doors: Any, tasks: Any) -> None:
    scores = toy_evaluation(tasks, make_doors(), ExpertAgent(), samples=4).run().scores
    text = markdown(success_table({"expert": scores}))
    assert text.split("\n") == [
        "| run | even | odd | Avg@4 [95 %] | pass@4 [95 %] | pass^4 [95 %] | tasks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| expert | 100.0 | 100.0 | 100.0 [39.8, 100.0] | 100.0 [39.8, 100.0] | 100.0 [39.8, 100.0] | 4 |",
    ]
    assert "| expert | 2.5 | 2.5 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 100.0 | 1.000 | 0 |" in markdown(
        behavior_table({"expert": scores})
    )


def test_different_numbers_of_samples_are_different_columns(make_doors: Any, tasks: Any) -> None:
    four = toy_evaluation(tasks, make_doors(), ExpertAgent(), samples=4).run().scores
    one = toy_evaluation(tasks, make_doors(), ExpertAgent(), samples=1).run().scores
    assert markdown(success_table({"four": four, "one": one})).split("\n") == [
        "| run | even | odd | Avg@4 [95 %] | Avg@1 [95 %] | pass@4 [95 %] | pass@1 [95 %] | pass^4 [95 %] | tasks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| four | 100.0 | 100.0 | 100.0 [39.8, 100.0] | - | 100.0 [39.8, 100.0] | - | 100.0 [39.8, 100.0] | 4 |",
        "| one | 100.0 | 100.0 | - | 100.0 [39.8, 100.0] | - | 100.0 [39.8, 100.0] | - | 4 |",
    ]


SAMPLES, TASKS = 3, 5


@pytest.fixture
def evaluation(make_doors: Any, tmp_path: Path) -> PanelEvaluation:
    tasks = collect_tasks(make_doors()(), [f"doors/{n}" for n in range(1, TASKS + 1)])
    panel = make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)
    whole = toy_evaluation(panel, make_doors(), RandomAgent(), samples=SAMPLES, slots=2)
    return PanelEvaluation(whole, tmp_path / "eval")


def changed(one: PanelEvaluation, **more: Any) -> PanelEvaluation:
    return replace(one, evaluation=replace(one.evaluation, **more))


def divided(evaluation: Any, size: int, step: int = 0) -> list[Any]:
    """What every process of a world of threads gets."""
    return in_ranks(size, lambda ranks: SharedEvaluation(evaluate=evaluation, ranks=ranks, model=None)(step))


def played(trace: Path) -> Counter[tuple[str, int]]:
    return Counter((episode.task.task_id, episode.sample) for episode in read_trace(trace)[0])


def counted() -> tuple[list[int], Callable[..., Any]]:
    """How many jobs each call of the second was given, and a `rollout` that notes it."""
    seen: list[int] = []

    def counting(jobs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(jobs))
        return rollout(jobs, *args, **kwargs)

    return seen, counting


@pytest.mark.parametrize("size", [1, 2, 4, 17])
def test_shares_together_are_the_whole(evaluation: PanelEvaluation, tmp_path: Path, size: int) -> None:
    whole = replace(evaluation, folder=tmp_path / "whole")(0)
    assert divided(evaluation, size) == [whole] * size
    assert [path.name for path in evaluation.folder.iterdir() if path.suffix == ".jsonl"] == ["step_000000.jsonl"]
    trace = evaluation.folder / "step_000000.jsonl"
    assert set(played(trace).values()) == {1}
    turns = [
        {(e.task.task_id, e.sample): e.turns for e in read_trace(t)[0]}
        for t in (trace, tmp_path / "whole" / trace.name)
    ]
    assert turns[0] == turns[1]


def test_each_process_plays_its_share_and_no_more(evaluation: PanelEvaluation) -> None:
    seen, counting = counted()
    divided(changed(evaluation, play=counting), 4)
    assert sorted(seen) == [0, 3, 4, 4, 4]  # the last is the end, where nothing is left to play


def test_shares_of_a_stopped_run_are_not_played_again(evaluation: PanelEvaluation, tmp_path: Path) -> None:
    """Killed with some of it in the trace and some in shares, one line torn; it goes on in fewer processes."""
    whole = replace(evaluation, folder=tmp_path / "whole")(0)
    episodes = read_trace(tmp_path / "whole" / "step_000000.jsonl")[0]
    trace = evaluation.folder / "step_000000.jsonl"
    torn = share_trace(trace, 3)
    evaluation.folder.mkdir()
    for path, part in ((trace, episodes[:4]), (share_trace(trace, 0), episodes[3:6]), (torn, episodes[6:9])):
        with TraceWriter(path, record_of(evaluation.evaluation.spec)) as writer:
            for episode in part:
                writer.write(episode)
    torn.write_bytes(torn.read_bytes()[:-40])
    seen, counting = counted()
    assert divided(changed(evaluation, play=counting), 2) == [whole] * 2
    assert sorted(seen) == [0, 3, 4]  # 15 episodes, of which 8 were whole
    assert set(played(trace).values()) == {1}
    gather_shares(trace)
    assert len(read_trace(trace)[0]) == SAMPLES * TASKS


def test_an_error_in_a_share_counts_as_one(evaluation: PanelEvaluation, make_doors: Any) -> None:
    """The end does not play it again, a later call does: as in one process."""
    calls: list[str] = []

    def at_four(env: Any) -> bool:
        calls.append(env.task.task_id)
        return bool(env.task.task_id == "doors/4")

    first = divided(changed(evaluation, make_env=breaking(make_doors(), at_four)), 2)
    assert isinstance(first[0], EvalPoint), first
    assert first[0].extra["errors"] == SAMPLES
    assert calls.count("doors/4") == SAMPLES
    assert divided(evaluation, 2)[0].extra["errors"] == 0


def test_a_process_that_fails_ends_all(evaluation: PanelEvaluation) -> None:
    class Failing(PanelEvaluation):
        def play_share(self, step: int, share: tuple[int, int]) -> None:
            if share[0] == 1:
                raise OSError("no room")

    zero, one = divided(Failing(evaluation.evaluation, evaluation.folder), 2)
    assert isinstance(one, OSError)
    assert isinstance(zero, DistributedError)
    assert "process 1 of 2 failed, so all stop: OSError: no room" in str(zero)


def test_what_cannot_be_divided_is_played_once() -> None:
    played_by: list[int] = []

    def whole(ranks: Any) -> Callable[[int], EvalPoint]:
        def evaluate(step: int) -> EvalPoint:
            played_by.append(ranks.rank)
            return EvalPoint(avg=step / 10, low=0.0, high=1.0)

        return evaluate

    found = in_ranks(3, lambda ranks: SharedEvaluation(evaluate=whole(ranks), ranks=ranks, model=None)(5).avg)
    assert (found, played_by) == ([0.5] * 3, [0])
