"""`--workers auto`: where it pays, and that what it chose is what plays."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alfworld_jobs import EXPERT, SPEC, jobs, untimed

from turngym.agents import evaluate, load_world, play_episodes
from turngym.agents.executor import worker_count as automatic
from turngym.agents.executor import workers as open_workers
from turngym.agents.executor.errors import UnsendableError
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.worker_count import (
    AnyWorkers,
    AutoWorkers,
    InProcess,
    LocalProcesses,
    PlayWorkload,
    WorkerCount,
    choose_workers,
)
from turngym.agents.model_agent import ModelPlayer
from turngym.agents.models import load_policy
from turngym.agents.playing.env_maker import probe
from turngym.agents.playing.rollout import rollout
from turngym.core import cpu_cores
from turngym.core.cpu_cores import available_cores
from turngym.core.errors import TurngymError


def sized(parameters: int, device: str = "cpu") -> Any:
    return SimpleNamespace(parameters=lambda: iter([torch.empty(parameters, device=device)]))


TINY = sized(1000)


@pytest.mark.parametrize(
    ("playing", "have", "workers", "reason"),
    [
        (PlayWorkload(episodes=6400, model=TINY), 2, 2, "2 cores, 6400 episodes"),
        (PlayWorkload(episodes=2000, model=TINY), 3, 3, "3 cores, 2000 episodes"),
        (PlayWorkload(episodes=6400, model=TINY), 64, 4, "64 cores, 6400 episodes"),
        (PlayWorkload(episodes=1999, model=TINY), 2, 0, "1999 episodes"),
        (PlayWorkload(episodes=6400, model=TINY), 1, 0, "one core"),
        (PlayWorkload(episodes=6400, model=TINY, ahead=True), 2, 0, "it plays ahead"),
        (PlayWorkload(episodes=6400, model=sized(64_000_001, "meta")), 2, 0, "the model is on meta"),
        (PlayWorkload(episodes=6400), 2, 0, "no model of its own plays"),
    ],
)
def test_where_workers_pay(playing: PlayWorkload, have: int, workers: int, reason: str) -> None:
    assert choose_workers(playing, have) == WorkerCount(workers=workers, reason=reason)


def test_a_large_model_plays_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "PARAMETERS", 999)
    assert choose_workers(PlayWorkload(episodes=6400, model=TINY), 2).workers == 0
    monkeypatch.setattr(automatic, "PARAMETERS", 1000)
    assert choose_workers(PlayWorkload(episodes=6400, model=TINY), 2).workers == 2


def test_cores_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu_cores, "QUOTAS", (quota, tmp_path / "cpu.cfs_quota_us"))
    assert available_cores({}) == 6
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores({}) == 6
    (tmp_path / "cpu.cfs_quota_us").write_text("300000\n")
    assert available_cores({}) == 3
    quota.write_text("max 100000\n")
    assert available_cores({}) == 6
    quota.write_text("350000 100000\n")
    assert available_cores({}) == 4
    assert available_cores({"TURNGYM_CORES": "2"}) == 2
    for text in ("two", "-1", "9" * 5000):
        with pytest.raises(TurngymError, match="TURNGYM_CORES is"):
            available_cores({"TURNGYM_CORES": text})
    assert available_cores({"LOCAL_WORLD_SIZE": "2"}) == 2
    assert available_cores({"LOCAL_WORLD_SIZE": "2", "TURNGYM_CORES": "1"}) == 1


def test_only_a_local_engine_is_played_faster() -> None:
    world = load_world("alfworld")
    model, tokenizer = load_policy(world.checkpoint("student"), "cpu")
    tool = probe(world.env_id, {"split": "generated"}).tool
    engine = ModelPlayer.of(model, tokenizer, world.chat, tool).engine
    assert PlayWorkload.of(engine, 5) == PlayWorkload(episodes=5, model=model)
    assert PlayWorkload.of(None, 5) == PlayWorkload(episodes=5)
    assert PlayWorkload.of(object(), 5) == PlayWorkload(episodes=5)


def test_what_was_chosen_plays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    playing = PlayWorkload(episodes=6400, model=TINY)
    monkeypatch.setattr(automatic, "available_cores", lambda: 2)
    with open_workers.open_workers(AutoWorkers(), playing) as play:
        assert isinstance(play, ParallelRollout)
        assert play.playing == (0, 0)
        assert play.fixed_shares
    assert capsys.readouterr().err == (
        "episodes are played by 2 workers (2 cores, 6400 episodes); --workers 0: by this process\n"
    )
    with open_workers.open_workers(LocalProcesses(processes=3), playing) as play:
        assert isinstance(play, ParallelRollout)
        assert play.playing == (0, 0, 0)
        assert not play.fixed_shares
    for here in (InProcess(), AutoWorkers()):
        with open_workers.open_workers(here, playing if here == InProcess() else None) as play:
            assert play.func is rollout  # type: ignore[attr-defined]
    monkeypatch.setattr(automatic, "available_cores", lambda: 1)
    with open_workers.open_workers(AutoWorkers(), playing) as play:
        assert play.func is rollout  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


def test_what_cannot_be_sent_is_played_here_unless_workers_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(automatic, "available_cores", lambda: 2)
    lock = threading.Lock()
    make_env = lambda: (lock.locked(), SPEC())[1]  # noqa: E731
    with open_workers.open_workers(AutoWorkers(), PlayWorkload(episodes=6400, model=TINY)) as play:
        capsys.readouterr()
        play.prepare(SimpleNamespace())  # type: ignore[attr-defined]
        for _ in range(2):
            assert untimed(play(jobs(2), make_env, EXPERT)) == untimed(rollout(jobs(2), SPEC, EXPERT))
        assert play.workers.pids == ()  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert said.count("episodes are played by this process: this cannot be sent to workers: cannot pickle") == 1
    with (
        open_workers.open_workers(LocalProcesses(processes=2)) as play,
        pytest.raises(UnsendableError, match="cannot be sent to workers: cannot pickle"),
    ):
        play(jobs(2), make_env, EXPERT)


def test_verbs_tell_it_what_they_play(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, bool]] = []

    def opened(options: AnyWorkers, playing: PlayWorkload) -> Any:
        told.append((playing.episodes, playing.model is not None))
        return open_workers.open_workers(InProcess())

    for module in (evaluate, play_episodes):
        monkeypatch.setattr(sys.modules[module.__module__], "open_workers", opened)
    world = load_world("alfworld")
    student = f"model:{world.checkpoint('student')}"
    plain: dict[str, Any] = {"progress": False, "samples": 2}
    evaluate(world.panel, student, limit=1, max_turns=1, verify=False, **plain)
    evaluate(world.panel, "expert", limit=3, max_turns=1, verify=False, **plain)
    play_episodes(world.env_id, "expert", tasks=2, env_kwargs={"split": "generated", "max_turns": 1}, **plain)
    assert told == [(2, True), (6, False), (4, False)]
