"""One student in three environments in one run: shares, whose teacher scores what, panels, and a run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scorers import Slope
from thread_ranks import in_ranks
from tiny_runs import break_off, save_tiny, untimed

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.protocols import EvalPoint
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.scripts import train
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.distributed import SharedEvaluation
from turngym.trainers.run import build_trainer
from turngym.trainers.scorer import load_student
from turngym.trainers.several_envs import (
    ENVIRONMENT,
    EachPanel,
    FurtherEnv,
    RoutedTeachers,
    SeveralSources,
    further_env,
    shared_groups,
)
from turngym.trainers.targets import SampledAdvantage, TeacherTopK

torch.set_num_threads(1)
Make = Callable[..., Episode]
ALSO = ("turngym/WebShop-v0,share=0.5,split=train", "turngym/Search-v0,share=0.5,split=train")


def test_shares_are_whole_groups() -> None:
    assert shared_groups([1.0, 1.0, 1.0], 8) == [3, 2, 3]
    assert shared_groups([2.0, 1.0, 1.0], 8) == [4, 2, 2]
    assert shared_groups([1.0, 0.25], 5) == [4, 1]
    with pytest.raises(SettingsError, match="without one"):
        shared_groups([1.0, 0.1], 4)


def test_what_an_environment_says_of_itself() -> None:
    found = further_env("p:turngym/WebShop-v0,share=2,split=s,panel=p,data=d,teacher=t/u,env.topk=1,env.config=tiny")
    assert found == FurtherEnv(
        env="p:turngym/WebShop-v0",
        share=2.0,
        split="s",
        panel="p",
        data="d",
        teacher=Path("t/u"),
        make={"topk": 1, "config": "tiny"},
    )
    assert found.name == "WebShop-v0"
    for wrong, why in (
        ("a/b,shares=2", "shares"),
        ("a/b,share=0", "above 0"),
        ("a/b,split", "no setting with a value"),
        ("a/b,env.topk", "'env.topk' is no setting with a value"),
        ("a/b,env.=1", "'env.' is no setting with a value"),
        ("", "no environment"),
        ("a/b,share=1,share=3", "share is given 2 times"),
        ("a/b,env.topk=1,env.topk=2", "env.topk is given 2 times"),
    ):
        with pytest.raises(SettingsError, match=why):
            further_env(wrong)


def test_groups_of_two_environments_never_meet(make_episode: Make) -> None:
    asked: list[tuple[str, int, int, int]] = []

    def source(name: str, first: int) -> Any:
        def collect(request: RolloutRequest) -> list[Episode]:
            asked.append((name, request.episodes, request.plan.short_episodes, request.plan.leave_loops))
            before = first * (request.episodes // request.group)
            return [make_episode([([1], [2])], number=n, group=before + n // 2) for n in range(request.episodes)]

        return collect

    plan = PlayPlan(short_episodes=4, short_turns=1, leave_loops=8)
    request = RolloutRequest(step=1, episodes=8, max_turns=2, group=2, plan=plan)
    # in its first round a step numbers groups from 0, in the second from their number on
    for later in (0, 1):
        found = SeveralSources(sources={"": source("a", later), "B": source("b", later)}, shares=[1.0, 3.0])(request)
        assert [e.group - 4 * later for e in found] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [e.meta.get(ENVIRONMENT) for e in found] == [None] * 2 + ["B"] * 6
    assert asked == [("a", 2, 1, 2), ("b", 6, 3, 6)] * 2


def test_each_row_is_scored_by_its_environments_teacher(make_episode: Make) -> None:
    played = [make_episode([([1, 2], [10, 11]), ([3], [12])], number=0), make_episode([([5], [20])], number=1)]
    played += [make_episode([([5, 6], [30, 31])], number=2)]
    marked = [played[0], _in(played[1], "B"), _in(played[2], "C")]
    own, b = Slope(-0.1), Slope(-0.2, first=5)
    scorers: Any = Scorers(student=Slope(0.0), teacher=own)
    routed = RoutedTeachers(target_fn=SampledAdvantage(), teachers={"B": b})  # type: ignore[dict-item]
    # an environment without a teacher of its own has the run's
    found = routed(pack(marked), marked, scorers).advantage_N
    np.testing.assert_allclose(found, [-1.0, -1.1, -1.2, -4.0, -3.0, -3.1], rtol=1e-6)
    assert [len(rows) for rows, _ in own.asked + b.asked] == [2, 1]
    top = RoutedTeachers(target_fn=TeacherTopK(2), teachers={"B": b})(pack(marked), marked, scorers)  # type: ignore[dict-item]
    assert top.topk_ids_NK is not None
    assert top.topk_ids_NK.tolist() == [[2, 3], [3, 4], [5, 6], [6, 7], [2, 3], [3, 4]]


def _in(episode: Episode, world: str) -> Episode:
    return replace(episode, meta={ENVIRONMENT: world})


class Panel:
    """An evaluation that notes what it is asked."""

    def __init__(self, avg: float) -> None:
        self.avg = avg
        self.asked: list[object] = []

    def __call__(self, step: int) -> EvalPoint:
        self.asked.append("whole")
        return self.finish(step)

    def gather(self, step: int) -> None:
        self.asked.append("gather")

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        self.asked.append(share)

    def finish(self, step: int) -> EvalPoint:
        return EvalPoint(avg=self.avg, low=0.0, high=1.0, extra={"turns": float(step)})


@pytest.mark.parametrize(("processes", "asked"), [(1, ["whole"]), (2, ["gather", (0, 2), (1, 2)])])
def test_each_panel_has_its_numbers_and_is_divided(processes: int, asked: list[object]) -> None:
    panels = Panel(0.25), Panel(0.75)
    each = EachPanel(first=panels[0], others={"B": panels[1]})
    points = [each(3)]
    if processes > 1:
        panels[0].asked, panels[1].asked = [], []
        points = in_ranks(processes, lambda ranks: SharedEvaluation(evaluate=each, ranks=ranks, model=None)(3))
    for point in points:
        assert point.avg == 0.25
        assert point.extra == {"turns": 3.0, "B/avg": 0.75, "B/low": 0.0, "B/high": 1.0, "B/turns": 3.0}
    for panel in panels:
        assert [panel.asked[0], *sorted(panel.asked[1:])] == asked


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and two teachers that read and write single bytes: one vocabulary for all three environments."""
    folder, words = tmp_path_factory.mktemp("models"), ("<action>", "</action>", "Do the task.")
    for seed, name in enumerate(("student", "one", "two")):
        save_tiny(folder / name, seed=seed, words=words, width=16, length=16384, new_tokens=2)
    return folder


def trainer(models: Path, out: Path, *more: str, also: tuple[str, ...] = ALSO) -> Any:
    words = ["--algorithm", "opd", "--student", str(models / "student"), "--teacher", str(models / "one")]
    words += ["--out", str(out), "--episodes", "4", "--max-turns", "2", "--steps", "3", "--eval-every", "0"]
    words += ["--tracker", "none", "--threads", "1", "--device", "cpu", "--checkpoint-every", "1"]
    words += ["--optimizer.lr", "0.01", "--also", *also]
    return build_trainer(train.resolved([*words, *more]).spec)


def weights(made: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in made.model.state_dict().values()])


@pytest.mark.long
def test_one_student_in_three_environments_resumes_to_the_same_numbers(models: Path, tmp_path: Path) -> None:
    also = (f"{ALSO[0]},teacher={models / 'two'}", ALSO[1])
    whole = trainer(models, tmp_path / "whole", also=also)
    (name,) = whole.algorithm.target_fn.teachers
    assert name == "WebShop-v0"
    two, routed = load_student(models / "two", "float32", "cpu")[0], whole.algorithm.target_fn.teachers[name].model
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in routed.state_dict().items())
    seen: list[str] = []
    source = whole.source

    def watched(request: RolloutRequest) -> list[Episode]:
        found: list[Episode] = source(request)
        seen.extend(episode.task.env_id for episode in found)
        return found

    whole.source = watched
    whole.train()
    assert [name.rpartition("/")[2] for name in seen] == ["ALFWorld-v0", "ALFWorld-v0", "WebShop-v0", "Search-v0"] * 3
    stopped = trainer(models, tmp_path / "stopped", also=also)
    break_off(stopped, 3)
    with pytest.raises(Exception, match=r"Search-v0\.play\.env_kwargs"):
        trainer(models, tmp_path / "stopped", "--resume", also=(also[0], f"{ALSO[1]},env.topk=1")).train(resume=True)
    again = trainer(models, tmp_path / "stopped", "--resume", also=also)
    again.train(resume=True)
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    assert torch.equal(weights(again), weights(whole))
    # another teacher of one environment alone is another run, and is refused for this one
    other = trainer(models, tmp_path / "other")
    other.train()
    assert not torch.equal(weights(other), weights(whole))
    with pytest.raises(Exception, match=r"WebShop-v0\.teacher"):
        trainer(models, tmp_path / "stopped", "--resume").train(resume=True)


@pytest.mark.parametrize(
    ("also", "more", "why"),
    [
        (("turngym/ALFWorld-v0",), (), "each environment may stand there once"),
        (ALSO, ("--staleness", "1"), "--staleness plays a single environment"),
        (("turngym/Search-v0,panel=x",), (), "name that of --env"),
        (ALSO, ("--episodes", "2"), "without one"),
    ],
)
def test_what_cannot_be_played_together(models: Path, tmp_path: Path, also: Any, more: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        trainer(models, tmp_path / "run", *more, also=also)


def test_the_order_of_arguments_makes_no_other_run() -> None:
    """Whoever resumes may name them in another order, in a process that hashes names otherwise."""
    config = train.resolved(["opd", "--student", "s", "--teacher", "t", "--out", "o"]).spec
    words = [f"env.{name}={number}" for number, name in enumerate(("topk", "config", "b", "a", "e", "d"))]
    said = [
        further_env(",".join(["turngym/Search-v0", *order])).played(config).play.env_kwargs
        for order in (words, words[::-1])
    ]
    assert said[0] == said[1]
    assert said[0] | {"a": 3, "b": 2, "config": 1, "d": 5, "e": 4, "topk": 0} == said[0]


def test_an_environment_has_its_own_arguments(models: Path, tmp_path: Path) -> None:
    also = ("turngym/Search-v0,env.config=tiny,env.topk=1",)
    made = trainer(models, tmp_path, "--env-kwargs", '{"config": "small"}', also=also)
    played = made.source(RolloutRequest(step=1, episodes=4, max_turns=2, temperature=1.0))
    tasks = [episode.task.task_id.partition("/")[2] for episode in played]
    assert [task.startswith("small/train/") for task in tasks] == [True, True, False, False]
    assert [task.startswith("tiny-train") for task in tasks] == [False, False, True, True]
