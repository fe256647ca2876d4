"""Playing ahead: the schedule of versions, exactness with and without it, resumption, and the corrected loss."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run as toy
from late import late
from metric_columns import SOME
from tiny_runs import untimed

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm import DepthPlan
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import grpo
from turngym.trainers.rollout_order import AsyncRollout, Planned, WeightSnapshot, frozen_copy, truncated
from turngym.trainers.run_config import Ahead, OptimizerConfig, RunConfig
from turngym.trainers.train_config import train_config
from turngym.trainers.train_loop import Trainer, TrainLoop

torch.set_num_threads(1)


class Played:
    """The toy's rollouts by a snapshot; every turn says whose weights drew it, and `log` which batch was played."""

    def __init__(self, student: Any) -> None:
        self.version = -1
        self.log: list[tuple[int, int, int]] = []
        model = frozen_copy(student)
        self._collect = toy.Sampled(model)
        self.snapshot = WeightSnapshot(student, model, lambda version: setattr(self, "version", version))

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        self.log.append((request.step, self.version, request.max_turns))
        played = self._collect(request)
        return [replace(e, turns=tuple(replace(t, policy_version=self.version) for t in e.turns)) for e in played]


def stale(out: Path, staleness: int, steps: int = 8, **changes: Any) -> tuple[Trainer, Played]:
    made = toy.trainer(out, steps=steps, **changes)
    played = Played(made.model)
    algorithm = truncated(made.algorithm, Ahead(staleness=staleness) if staleness else None)
    order = AsyncRollout(staleness=staleness, last=steps, snapshot=played.snapshot)
    return replace(made, algorithm=algorithm, source=played, order=order), played


@pytest.mark.long
def test_no_staleness_is_the_ordinary_run(tmp_path: Path) -> None:
    toy.trainer(tmp_path / "plain", steps=4).train()
    made, _ = stale(tmp_path / "ahead", 0, steps=4)
    made.train()
    ignored = {"staleness_mean", "staleness_max"}  # the toy's own source does not number its versions
    rows = [
        [{k: v for k, v in row.items() if k not in ignored} for row in untimed(tmp_path / n)]
        for n in ("plain", "ahead")
    ]
    assert rows[0] == rows[1]
    assert [row["staleness_max"] for row in untimed(tmp_path / "ahead", "train")] == [0, 0, 0, 0]
    assert truncated(made.algorithm, None) is made.algorithm


@pytest.mark.parametrize("staleness", late([1, 3], 1))
def test_batches_are_played_by_the_student_of_so_many_steps_before(tmp_path: Path, staleness: int) -> None:
    made, played = stale(tmp_path / "run", staleness)
    made.train()
    assert [(step, version) for step, version, _ in played.log] == [
        (step, max(0, step - 1 - staleness)) for step in range(1, 9)
    ]
    rows = untimed(tmp_path / "run", "train")
    lags = [min(step - 1, staleness) for step in range(1, 9)]
    assert [row["staleness_mean"] for row in rows] == [row["staleness_max"] for row in rows] == lags
    # the depth of a batch was planned when it was begun, and the step that learns from it goes by that plan
    assert [cap for _, _, cap in played.log] == [row["depth/cap"] for row in rows]
    assert rows[0]["gap_max"] < 1e-4 < rows[-1]["gap_max"]
    assert {"importance/ratio", "importance/truncated"} <= set(rows[0]) & SOME
    assert rows[0]["importance/truncated"] == 0.0
    assert all(0.0 < row["importance/ratio"] <= 2.0 for row in rows)


@pytest.mark.long
def test_the_numbers_do_not_depend_on_timing(tmp_path: Path) -> None:
    one, _ = stale(tmp_path / "one", 2, steps=5)
    one.train()
    two, played = stale(tmp_path / "two", 2, steps=5)
    go = threading.Event()
    inner = played._collect
    played._collect = lambda request: (go.wait(0.02 * request.step), inner(request))[1]
    two.train()
    assert untimed(tmp_path / "two") == untimed(tmp_path / "one")


def test_a_stopped_run_plays_what_was_under_way_again(tmp_path: Path) -> None:
    whole, _ = stale(tmp_path / "whole", 2)
    whole.train()
    stopped, played = stale(tmp_path / "stopped", 2)

    def broken(request: RolloutRequest) -> list[Episode]:
        if request.step == 6:
            raise KeyboardInterrupt
        return played(request)

    with pytest.raises(KeyboardInterrupt):
        replace(stopped, source=broken).train()
    again, replayed = stale(tmp_path / "stopped", 2)
    again.train(resume=True)
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    assert [(step, version) for step, version, _ in replayed.log] == [(6, 3), (7, 4), (8, 5)]
    with pytest.raises(Exception, match=r"algorithm\.staleness: checkpoint 2, now 1"):
        stale(tmp_path / "stopped", 1)[0].train(resume=True)


@pytest.mark.long
def test_an_interrupt_between_playing_and_learning_loses_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = stale(tmp_path / "whole", 1, steps=4)
    whole.train()
    stopped, _ = stale(tmp_path / "stopped", 1, steps=4)
    collect = TrainLoop._collect

    def interrupted(loop: TrainLoop) -> Any:
        handed = collect(loop)
        if loop.state.step == 2:
            raise KeyboardInterrupt
        return handed

    monkeypatch.setattr(TrainLoop, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    monkeypatch.undo()
    again, replayed = stale(tmp_path / "stopped", 1, steps=4)
    again.train(resume=True)
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    assert [step for step, _, _ in replayed.log] == [3, 4]


def test_an_interrupt_before_a_batch_is_noted_breaks_it_off(tmp_path: Path) -> None:
    made, _ = stale(tmp_path / "run", 1)
    order: Any = made.order
    stop, begun = threading.Event(), threading.Event()
    order.cancel = stop.set
    submit = order._player.submit

    def interrupted(*given: Any) -> Any:
        submit(*given)
        assert begun.wait(60)
        raise KeyboardInterrupt

    def playing(request: RolloutRequest) -> list[Episode]:
        begun.set()
        assert stop.wait(60), "close waited for the batch"
        return []

    order._player.submit = interrupted
    plan, request = DepthPlan(cap=6, probe=True), RolloutRequest(step=1, episodes=12, max_turns=6, temperature=1.0)
    with pytest.raises(KeyboardInterrupt):
        order(1, lambda step: Planned(plan=plan, request=request), playing)
    order.close()
    assert stop.is_set()


def test_a_failed_batch_stops_the_run_and_what_is_played_is_broken_off(tmp_path: Path) -> None:
    made, played = stale(tmp_path / "run", 1)
    stop = threading.Event()

    def failing(request: RolloutRequest) -> list[Episode]:
        if request.step == 2:
            raise ValueError("no such house")
        if request.step == 3:
            assert stop.wait(60), "close did not break off what was being played"
        return played(request)

    assert isinstance(made.order, AsyncRollout)
    made.order.cancel = stop.set
    with pytest.raises(ValueError, match="no such house"):
        replace(made, source=failing).train()


def test_policy_gradients_learn_from_an_older_policy(tmp_path: Path) -> None:
    run = RunConfig(steps=3, episodes=12, max_turns=6, eval_every=0, checkpoint_every=0, tracker=None)
    algorithm = grpo.build(grpo.GrpoConfig(n=4, filter_groups=False), BuildContext(run=run))
    made, _ = stale(tmp_path / "run", 1, steps=3)
    algorithm = truncated(algorithm, Ahead(staleness=1, importance_cap=1.0))
    order = AsyncRollout(staleness=1, last=3, snapshot=made.order.snapshot)
    optimizer = OptimizerConfig(lr=1e-2)
    replace(made, run=run, algorithm=algorithm, order=order, optimizer=optimizer, evaluate=None, teacher=None).train()
    rows = untimed(tmp_path / "run", "train")
    assert rows[0]["importance/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows[2]["importance/truncated"] > 0.1
    assert rows[2]["importance/ratio"] < 1.0


def test_settings_outside_their_range() -> None:
    for given in ({"staleness": -1}, {"staleness": 1, "importance_cap": 0.5}):
        with pytest.raises(SettingsError, match=[*given][-1]):
            train_config("grpo", {"student": "s", "out": "o", **given}, "test")
