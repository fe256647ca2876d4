"""Binary PRM-RL: weights, the loss, and a run that resumes to the same numbers. Its targets: `test_judge_targets`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import judged as tools
import pytest
import torch
import toy_run as toy
from metric_columns import known_metric
from tiny_runs import break_off, untimed

from turngym.core.episode import Episode
from turngym.core.protocols import JudgeRequest
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import prm_rl
from turngym.trainers.judged_episodes import JudgedSource
from turngym.trainers.run_config import OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)
Make = Callable[..., Episode]
RUN = RunConfig(steps=6, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tracker=None)
NOBODY: Any = None


def parity(request: JudgeRequest) -> tuple[str | None, ...]:
    """Good if the response begins with an even id; every fifth turn's judge fails, some votes are rubbish."""
    assert request.episode is not None
    first = int(request.episode.response_ids(request.episode.turns[request.turn])[0])
    return (None,) * 3 if first % 5 == 0 else (*tools.boxed(1 if first % 2 == 0 else -1) * 2, "rubbish")


def trainer(out: Path, **config: Any) -> Trainer:
    student = toy.tiny(1)
    return Trainer(
        model=student,
        algorithm=prm_rl.build(prm_rl.PrmRlConfig(**config), BuildContext(run=RUN)),
        source=JudgedSource(source=toy.Sampled(student), judge=tools.Says(parity)),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        reference=LocalScorer(model=toy.tiny(1)),
    )


@pytest.mark.long
def test_it_learns_what_the_judge_likes_and_resumes_to_the_same_rows(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").train()
    stopped = trainer(tmp_path / "stopped")
    break_off(stopped, 4)
    trainer(tmp_path / "stopped").train(resume=True)
    whole = untimed(tmp_path / "whole")
    assert untimed(tmp_path / "stopped") == whole
    assert whole[-1]["judge/score"] > whole[0]["judge/score"] + 0.2
    assert all(known_metric(name) for row in whole for name in row)
    assert all(row["judge/votes_failed"] > 0 and row["judge/votes_unread"] > 0 for row in whole)
    assert all(row["judge/turns_masked"] >= 12 for row in whole)
    assert whole[0]["gap_max"] < 1e-4


def test_a_step_without_anything_to_train_on_is_counted(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", mask_neutral=True)
    made.source.judge = tools.Says(lambda request: tools.boxed(0))  # type: ignore[attr-defined]
    made.train()
    assert [(row["episodes"], row["judge/score"], row["judge/turns_masked"]) for row in untimed(tmp_path / "run")] == [
        (0, 0.0, 45)
    ] * RUN.steps
