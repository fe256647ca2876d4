"""`turngym train --staleness` and `--workers` on generated games: the same numbers wherever episodes are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import break_off, untimed

from turngym.agents.executor import worker_count as automatic
from turngym.agents.executor.errors import ExecutorError
from turngym.agents.executor.workers import CancellableRollout
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.settings import read_toml
from turngym.core.trace import read_episodes
from turngym.scripts import train
from turngym.trainers.rollout_order import AsyncRollout
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)


def command(models: Path, out: Path, *more: str) -> list[str]:
    rest = ("--checkpoint-every", "1", "--optimizer.lr", "1e-2", "--eval-every", "0", *more)
    return tiny_runs.command(models, out, "opd", "--steps", "3", "--episodes", "6", *rest)


def close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    names = (
        "step",
        "loss",
        "grad_norm",
        "success",
        "tokens",
        "entropy",
        "staleness_mean",
        "gap_mean",
        "importance/ratio",
    )
    for name in (name for name in names if name in theirs[0]):  # the ratio is a number of runs that play ahead
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-3, abs=1e-4), name


@pytest.mark.long
def test_workers_and_threads_play_ahead_to_the_same_numbers(models: Path, tmp_path: Path) -> None:
    train.main(command(models, tmp_path / "thread", "--staleness", "1"))
    train.main(command(models, tmp_path / "process", "--staleness", "1", "--workers", "1"))
    close(untimed(tmp_path / "process"), untimed(tmp_path / "thread"))
    assert [row["staleness_max"] for row in untimed(tmp_path / "thread")] == [0, 1, 1]
    train.main(command(models, tmp_path / "plain"))
    assert untimed(tmp_path / "plain")[0]["loss"] == pytest.approx(untimed(tmp_path / "thread")[0]["loss"])
    assert [row["staleness_max"] for row in untimed(tmp_path / "plain")] == [0, 0, 0]


@pytest.mark.long
def test_workers_that_nobody_asked_for_play_the_same_episodes_and_a_run_goes_on_without(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids(run: Path) -> list[Any]:
        traces = [run / "rollouts" / f"step_{step:06d}.jsonl" for step in (1, 2, 3)]
        return [[part.tolist() for part in episode.segments] for trace in traces for episode in read_episodes(trace)]

    kept = ("--keep-rollouts", "3")
    train.main(command(models, tmp_path / "here", *kept))  # auto: so few episodes are played here
    assert read_toml(tmp_path / "here" / "config.toml")["workers"]["kind"] == "auto"
    assert 'players = "this process (' in (tmp_path / "here" / "config.toml").read_text()
    monkeypatch.setattr(automatic, "EPISODES", 12)  # those of two steps
    monkeypatch.setattr(automatic, "available_cores", lambda: 2)
    there = tmp_path / "there"
    train.main(command(models, there, *kept, "--steps", "2"))
    assert "episodes are played by 2 workers" in capsys.readouterr().err
    assert 'players = "2 workers (2 cores, 12 episodes)"' in (there / "config.toml").read_text()
    train.main(command(models, there, *kept, "--resume", "--workers", "0"))
    assert ids(there) == ids(tmp_path / "here")
    assert [row["step"] for row in untimed(there)] == [1, 2, 3]
    close(untimed(there), untimed(tmp_path / "here"))


def test_a_stopped_run_that_played_ahead_resumes_to_the_same_rows(models: Path, tmp_path: Path) -> None:
    train.main(command(models, tmp_path / "whole", "--staleness", "1"))
    options = command(models, tmp_path / "stopped", "--staleness", "1")
    made = build_trainer(train.resolved(options).spec)
    assert isinstance(made.order, AsyncRollout)
    break_off(made, 2)
    train.main([*options, "--resume"])
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    with pytest.raises(TurngymError, match=r"method\.staleness\.staleness: checkpoint 1, now 2"):
        train.main([*command(models, tmp_path / "stopped", "--staleness", "2"), "--resume"])


def test_ctrl_c_breaks_off_what_is_played_ahead(models: Path, tmp_path: Path) -> None:
    made = build_trainer(train.resolved(command(models, tmp_path / "run", "--staleness", "1", "--steps", "2")).spec)

    class Interrupted:
        def topk(self, *args: Any) -> Any:
            raise KeyboardInterrupt  # while the episodes of step 2 are played

    made.teacher = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        made.train()


def test_a_rollout_in_this_process_can_be_broken_off(models: Path, tmp_path: Path) -> None:
    made = build_trainer(train.resolved(command(models, tmp_path / "run", "--staleness", "1")).spec)
    play = made.source.play  # type: ignore[attr-defined]
    assert isinstance(play, CancellableRollout)
    play.cancel()
    with pytest.raises(ExecutorError, match="cancelled"):
        made.source(RolloutRequest(step=1, episodes=2, max_turns=2))
