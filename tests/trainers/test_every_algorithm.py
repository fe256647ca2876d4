"""`turngym train` takes every algorithm to every registered environment: live, resumed, and from trace files."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
import torch
from late import late
from metric_columns import known_metric
from tiny_runs import save_tiny, with_file

import turngym.envs
from turngym.agents.rollout_sources import SharedEnv
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.trace import TraceWriter, read_episodes
from turngym.scripts import train
from turngym.trainers.algorithm_spec import BUILT_IN
from turngym.trainers.metrics import read_metrics
from turngym.trainers.recorded_source import RecordedSource
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)
ENVS = [name for name in sorted(gym.registry) if name.startswith(f"{turngym.envs.__name__.split('.')[0]}/")]
SPLIT = {"turngym/ALFWorld-v0": "generated"}
TEACHER = ("--teacher", "MODEL")
TEXT = ("--lm-loss.files", __file__, "--lm-loss.documents", "1", "lm_loss.max_length = 16")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "opd": TEACHER,
    "turnopd": TEACHER,
    "loopstop": TEACHER,
    "tcod": TEACHER,
    "grpo": ("--grpo.n", "2", "--grpo.no-filter-groups"),
    "gigpo": ("--gigpo.n", "2"),
    "rloo": ("--rloo.n", "2"),
    "reinforce++": (),
    "ppo": (),
    "luffy": ("--luffy.n", "2", "luffy.filter_groups = false"),
    "prm-rl": (),
    "opd-hints": (),
    "prm-opd": (),
    "guided-opd": TEACHER,
    "atod": (*TEACHER, "--atod.n", "2"),
    "sage-opd": TEACHER,
    "sod": (*TEACHER, "--sod.n", "2"),
    "grpo-opd": (*TEACHER, "--grpo-opd.n", "2"),
    "sdar": ("--sdar.n", "2"),
    "rlsd": ("--rlsd.n", "2"),
    "skill-sd": ("--skill-sd.n", "2"),
    "opid": ("--opid.n", "2", "--judge", "episode"),
    "agent-opsd": ("--agent-opsd.n", "2"),
    "grpo-kd": (*TEACHER, "--grpo-kd.n", "2"),
    "grpo-minillm": (*TEACHER, "--grpo-kd.n", "2", *TEXT),
    "ppo-kd": TEACHER,
    "ppo-minillm": (*TEACHER, *TEXT),
}


TEMPERATURES = (0.3, 3.0)


class Recorded(NamedTuple):
    env: str
    played: Path
    shown: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that reads and writes single bytes: student and teacher of every environment."""
    words = ("<action>", "</action>", "Do the task.")
    return save_tiny(tmp_path_factory.mktemp("model"), words=words, width=16, length=16384, new_tokens=2)


@cache
def held_open(env: str) -> Any:
    """A shop is generated once for all tests as long as one environment has it open."""
    return gym.make(env, split=SPLIT.get(env, "train"))


@pytest.fixture(scope="module", params=late(ENVS, ENVS[0], mark=pytest.mark.nightly))
def recorded(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two attempts of the untrained policy at one task, each at a temperature of its own, and what an expert did."""
    folder, _ = tmp_path_factory.mktemp("traces"), held_open(request.param)
    for name in ("grpo", "sft"):
        made = build_trainer(train.resolved(command(model, folder / "run", name, request.param)).spec)
        asked = RolloutRequest(step=1, episodes=2, max_turns=2, group=made.algorithm.group)
        with TraceWriter(folder / f"{name}.jsonl") as writer:
            for place, temperature in enumerate(TEMPERATURES):
                writer.write(made.source(replace(asked, temperature=temperature))[place])
    return Recorded(env=request.param, played=folder / "grpo.jsonl", shown=folder / "sft.jsonl")


def command(model: Path, out: Path, algorithm: str, env: str, *more: str) -> list[str]:
    given = [str(model) if word == "MODEL" else word for word in ALGORITHMS[algorithm]]
    given = with_file(out.parent, given)
    words = ["--algorithm", algorithm, "--student", str(model), "--out", str(out), *given, "--env", env]
    words += ["--split", SPLIT.get(env, "train"), "--episodes", "2", "--tracker", "none"]
    if algorithm != "sft" or "--traces" not in more:  # which has no use for turns that nobody plays
        words += ["--max-turns", "2"]
    return [*words, "--threads", "1", "--device", "cpu", "--eval-every", "0", "--steps", "1", *more]


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == "train"]


def test_every_algorithm_is_here() -> None:
    assert set(ALGORITHMS) == set(BUILT_IN)
    assert len(ENVS) == 3


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [
        # there test_options_read trains all of them
        *((name, ENVS[0]) for name in ("turnopd", "ppo", "luffy", "opid")),
        *(pytest.param(name, ENVS[1], marks=pytest.mark.long) for name in ALGORITHMS),
        *(pytest.param(name, ENVS[2], marks=pytest.mark.nightly) for name in ALGORITHMS),
    ],
)
def test_an_algorithm_trains_in_an_environment_and_resumes(
    model: Path, tmp_path: Path, algorithm: str, env: str
) -> None:
    out, _ = tmp_path / "run", held_open(env)
    trainer = build_trainer(train.resolved(command(model, out, algorithm, env)).spec)
    trainer.train()
    (row,) = rows(out)
    assert all(known_metric(name) for name in row)
    assert row["episodes"] == 2
    assert row["episodes_failed"] == 0
    assert row["tokens"] > 0
    assert row["loss"] is not None
    again = build_trainer(train.resolved(command(model, out, algorithm, env, "--resume")).spec)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    again.train(resume=True)
    assert rows(out) == [row]  # nothing is left to do, and the weights are those of the checkpoint
    assert all(torch.equal(value, before[name]) for name, value in again.model.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_trains_on_trace_files(model: Path, tmp_path: Path, recorded: Recorded, algorithm: str) -> None:
    trace = recorded.shown if algorithm == "sft" else recorded.played
    words = command(model, tmp_path / "run", algorithm, recorded.env, "--traces", str(trace))
    trainer = build_trainer(train.resolved(words).spec)
    source = trainer.source.source if trainer.algorithm.judge else trainer.source
    assert isinstance(source, RecordedSource)
    trainer.train()
    (row,) = rows(tmp_path / "run")
    assert (row["episodes"], row["episodes_failed"]) == (2, 0)
    assert row["tokens"] > 0
    if algorithm != "sft":
        # the student is still the policy that was recorded, and the run's own temperature is neither of the two
        assert row["gap_max"] < 1e-4


def test_temperatures_that_nobody_recorded_are_the_runs(model: Path, tmp_path: Path, recorded: Recorded) -> None:
    path, gaps = tmp_path / "bare.jsonl", []
    with TraceWriter(path) as writer:
        writer.write(replace(read_episodes(recorded.played)[0], meta={}))
    for number, temperature in enumerate((TEMPERATURES[0], 1.0)):
        more = ("--traces", str(path), "--episodes", "1", "--temperature", str(temperature))
        build_trainer(train.resolved(command(model, tmp_path / f"{number}", "opd", recorded.env, *more)).spec).train()
        gaps.append(rows(tmp_path / f"{number}")[0]["gap_max"])
    assert gaps[0] < 1e-4 < 1e-2 < gaps[1]


def test_a_room_stays_open_as_long_as_it_is_held() -> None:
    closed: list[str] = []

    class Env:
        def close(self) -> None:
            closed.append("closed")

    room = SharedEnv(Env)
    assert isinstance(room.env, Env)
    assert not closed
    del room
    gc.collect()
    assert closed == ["closed"]


def test_what_only_an_environment_can_give(model: Path, tmp_path: Path, recorded: Recorded) -> None:
    words = command(model, tmp_path / "run", "tcod", recorded.env, "--traces", str(recorded.played))
    with pytest.raises(TurngymError, match="begins with an expert's turns plays them"):
        build_trainer(train.resolved([*words, "--tcod.direction", "b2f"]).spec).train()
    words = command(model, tmp_path / "run", "grpo-kd", recorded.env, "--traces", str(recorded.played))
    words += with_file(tmp_path, ["grpo_kd.teacher_mix = 0.2"])
    with pytest.raises(TurngymError, match="a way of playing"):
        build_trainer(train.resolved(words).spec)
