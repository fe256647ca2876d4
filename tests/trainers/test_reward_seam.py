"""A reward of one's own: from its name on the command line to advantages, group filters, metrics and the checkpoint."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metric_columns import known_metric
from own_rewards import thrift

from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.plugins import NamedReward, PluginError, RewardError, find_reward
from turngym.core.rollout_request import RolloutRequest
from turngym.scripts import train
from turngym.scripts.train import help_lines
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.metrics import read_metrics
from turngym.trainers.rewards import RewardedSource
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)
THRIFT = ("--reward", "own_rewards:thrift")
REQUEST = RolloutRequest(step=1, episodes=2, max_turns=3)


def command(student: Path, out: Path, algorithm: str, *more: str) -> list[str]:
    words = [algorithm, "--student", str(student), "--out", str(out), "--episodes", "4", "--max-turns", "2"]
    words += ["--env", "turngym/ALFWorld-v0", "--env-kwargs", '{"config": "small", "on_invalid": "noop"}']
    return [
        *words,
        "--steps",
        "1",
        "--eval-every",
        "0",
        "--tracker",
        "none",
        "--threads",
        "1",
        "--device",
        "cpu",
        *more,
    ]


@pytest.fixture(scope="module")
def student() -> Path:
    from turngym.agents.worlds import load_world

    return load_world("alfworld").checkpoint("student")


def test_the_reward_takes_the_place_of_the_return(make_episode: Any) -> None:
    lost = make_episode([([1], [2])], number=1, status=Status.ERROR_ENGINE)
    paid = make_episode([([1], [2]), ([3], [4])], episode_return=0.75)
    collect = RewardedSource(source=lambda request: [paid, lost], reward=find_reward("own_rewards:thrift"))
    found, failed = collect(REQUEST)
    assert found.episode_return == pytest.approx(9.8)
    assert found.meta == {"environment_return": 0.75, "reward": "own_rewards:thrift"}
    assert [turn.reward for turn in found.turns] == [0.0, 0.0]
    assert failed is lost


def test_a_reward_that_fails_or_hangs_costs_its_episode(make_episode: Any) -> None:
    forever = threading.Event()
    rewards: dict[str, Any] = {
        "task/1": lambda: forever.wait(30),
        "task/2": lambda: float("nan"),
        "task/3": lambda: sys.exit(1),
        "task/4": lambda: 0.5,
    }
    reward = NamedReward("odd", lambda episode: rewards[episode.task.task_id]())
    episodes = [make_episode([([1], [2])], number=number) for number in (1, 2, 3, 4)]
    found = RewardedSource(source=lambda request: episodes, reward=reward, timeout=1.0)(REQUEST)
    assert [one.status for one in found] == [
        *(Status.ERROR_TIMEOUT, Status.ERROR_ENV, Status.ERROR_ENV, Status.COMPLETED)
    ]
    assert found[0].meta["error"] == "--reward odd took more than 1 s"
    assert found[1].meta["error"].endswith("the answer is nan; it must be a finite number")
    assert found[2].meta["error"].startswith("SystemExit: 1 (")
    assert found[3].episode_return == 0.5
    forever.set()


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float32(1.0), np.int64(1), 1])
def test_numbers_of_any_kind_are_rewards(make_episode: Any, value: Any) -> None:
    assert NamedReward("one", lambda episode: value)(make_episode([([1], [2])])) == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("endless", "the answer is inf; it must be a finite number"),
        ("wordy", "the answer is '1'; it must be a finite number"),
        ("broken", "KeyError: 'no such key'"),
    ],
)
def test_an_answer_that_is_no_reward_is_one_clear_error(make_episode: Any, name: str, said: str) -> None:
    with pytest.raises(RewardError) as error:
        find_reward(f"own_rewards:{name}")(make_episode([([1], [2])], number=7))
    assert str(error.value) == f"--reward own_rewards:{name}: episode task/7 sample 0: {said}"


def test_names_that_are_none() -> None:
    with pytest.raises(PluginError, match="unknown reward 'thrift'"):
        find_reward("thrift")
    with pytest.raises(PluginError, match=r"has no 'thrifty'\. Did you mean 'thrift'"):
        find_reward("own_rewards:thrifty")
    with pytest.raises(PluginError, match="'own_rewards:LIMIT' is 3;"):
        find_reward("own_rewards:LIMIT")


@pytest.mark.parametrize("algorithm", ["grpo", "luffy"])
def test_the_option_reaches_advantages_filters_and_metrics(student: Path, tmp_path: Path, algorithm: str) -> None:
    """Two turns are never a success here: all returns are 0, and without the reward no group would differ."""
    out, group = tmp_path / "run", f"--{algorithm}.n"
    # luffy's first episode of a group is demonstrated, and its baseline comes from the other three
    trainer = build_trainer(train.resolved(command(student, out, algorithm, group, "4", *THRIFT)).spec)
    found = trainer.source(RolloutRequest(step=1, episodes=4, max_turns=2, group=4))
    assert [e.episode_return for e in found] == [pytest.approx(thrift(e)) for e in found]
    assert max(e.episode_return for e in found) > 9.0
    assert trainer.algorithm.select is not None
    assert len(trainer.algorithm.select(found)) == 4
    batch = pack(found)
    targets = trainer.algorithm.target_fn(batch, found, Scorers(student=None))  # type: ignore[arg-type]
    assert targets.reward is not None
    assert targets.reward.tolist() == [pytest.approx(thrift(e)) for e in found]
    trainer.train()
    (row,) = read_metrics(out)
    assert all(known_metric(name) for name in row)
    assert (row["groups/kept"], row["environment_return/mean"], row["environment_return/std"]) == (1, 0.0, 0.0)
    assert 4.0 < row["return/mean"] < 6.0
    assert row["reward/mean"] == pytest.approx(row["return/mean"])


def test_two_rewards_at_once_are_refused(student: Path, tmp_path: Path) -> None:
    words = command(student, tmp_path / "run", "grpo", "--grpo.reward", "success", *THRIFT)
    with pytest.raises(TurngymError, match=r"grpo\.reward is success"):
        build_trainer(train.resolved(words).spec)


def test_a_bad_reward_ends_the_run_in_a_line(student: Path, tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=r"all 4 episodes failed; .* own_rewards:endless"):
        train.main(command(student, tmp_path / "run", "grpo", "--grpo.n", "4", "--reward", "own_rewards:endless"))


def test_help_names_it_where_it_is_used() -> None:
    assert any("--reward" in line for line in help_lines("luffy", ""))
    assert not any(line.strip().startswith("--reward") for line in help_lines("turnopd", ""))
