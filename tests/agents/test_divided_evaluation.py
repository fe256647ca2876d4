"""An evaluation that the processes of a run divide: the same result, each episode once, also after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_world import in_world

from turngym.agents.evaluation.evaluate import PanelEvaluation
from turngym.agents.evaluation.play_panel import gather_shares, share_trace
from turngym.agents.playing.rollout import rollout
from turngym.agents.playing.scripted import RandomAgent
from turngym.envs.core.errors import EnvBackendError
from turngym.envs.core.protocols import EvalPoint
from turngym.envs.core.trace import TraceWriter, read_trace
from turngym.envs.panels import Panel, collect_tasks, make_panel
from turngym.trainers.distributed import SharedEvaluation
from turngym.trainers.world import DistributedError

SAMPLES, TASKS = 3, 5


class Learner:
    """A player that needs no model."""

    settings = SimpleNamespace(system=None)

    def agent(self, temperature: float) -> RandomAgent:
        return RandomAgent()


@pytest.fixture
def evaluation(make_doors: Any, tmp_path: Path) -> PanelEvaluation:
    tasks = collect_tasks(make_doors()(), [f"doors/{n}" for n in range(1, TASKS + 1)])
    panel: Panel = make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)
    how: dict[str, Any] = {"make_env": make_doors(), "samples": SAMPLES, "slots": 2}
    return PanelEvaluation(panel=panel, player=Learner(), folder=tmp_path / "eval", **how)  # type: ignore[arg-type]


def divided(evaluation: Any, size: int, step: int = 0) -> list[Any]:
    """What every process of a world of threads gets."""
    return in_world(size, lambda world: SharedEvaluation(evaluate=evaluation, world=world, model=None)(step))


def played(trace: Path) -> Counter[tuple[str, int]]:
    return Counter((episode.task.task_id, episode.sample) for episode in read_trace(trace)[0])


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
    seen: list[int] = []

    def counting(jobs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(jobs))
        return rollout(jobs, *args, **kwargs)

    divided(replace(evaluation, play=counting), 4)
    assert sorted(seen) == [0, 3, 4, 4, 4]  # the last is the end, where nothing is left to play


def test_shares_of_a_stopped_run_are_not_played_again(evaluation: PanelEvaluation, tmp_path: Path) -> None:
    """Killed with some of it in the trace and some in shares, one line torn; it goes on in fewer processes."""
    whole = replace(evaluation, folder=tmp_path / "whole")(0)
    episodes = read_trace(tmp_path / "whole" / "step_000000.jsonl")[0]
    trace = evaluation.folder / "step_000000.jsonl"
    torn = share_trace(trace, 3)
    evaluation.folder.mkdir()
    for path, part in ((trace, episodes[:4]), (share_trace(trace, 0), episodes[3:6]), (torn, episodes[6:9])):
        with TraceWriter(path) as writer:
            for episode in part:
                writer.write(episode)
    torn.write_bytes(torn.read_bytes()[:-40])
    seen: list[int] = []

    def counting(jobs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(jobs))
        return rollout(jobs, *args, **kwargs)

    assert divided(replace(evaluation, play=counting), 2) == [whole] * 2
    assert sorted(seen) == [0, 3, 4]  # 15 episodes, of which 8 were whole
    assert set(played(trace).values()) == {1}
    gather_shares(trace)
    assert len(read_trace(trace)[0]) == SAMPLES * TASKS


def test_an_error_in_a_share_counts_as_one(evaluation: PanelEvaluation, make_doors: Any) -> None:
    """The end does not play it again, a later call does: as in one process."""
    calls: list[str] = []

    def broken() -> Any:
        env = make_doors()()
        apply = env.base._apply

        def fails(action: str) -> Any:
            if env.base._task.endswith("doors/4"):
                calls.append(action)
                raise EnvBackendError("no answer")
            return apply(action)

        env.base._apply = fails
        return env

    first = divided(replace(evaluation, make_env=broken), 2)
    assert isinstance(first[0], EvalPoint), first
    assert first[0].extra["errors"] == SAMPLES
    assert len(calls) == SAMPLES
    assert divided(evaluation, 2)[0].extra["errors"] == 0


def test_a_process_that_fails_ends_all(evaluation: PanelEvaluation) -> None:
    class Failing(PanelEvaluation):
        def play_share(self, step: int, share: tuple[int, int]) -> None:
            if share[0] == 1:
                raise OSError("no room")

    parts = {name: getattr(evaluation, name) for name in PanelEvaluation.__dataclass_fields__}
    zero, one = divided(Failing(**parts), 2)
    assert isinstance(one, OSError)
    assert isinstance(zero, DistributedError)
    assert "process 1 of 2 failed, so all stop: OSError: no room" in str(zero)


def test_what_cannot_be_divided_is_played_once() -> None:
    ranks: list[int] = []

    def whole(world: Any) -> Callable[[int], EvalPoint]:
        def evaluate(step: int) -> EvalPoint:
            ranks.append(world.rank)
            return EvalPoint(avg=step / 10, low=0.0, high=1.0)

        return evaluate

    found = in_world(3, lambda world: SharedEvaluation(evaluate=whole(world), world=world, model=None)(5).avg)
    assert (found, ranks) == ([0.5] * 3, [0])
