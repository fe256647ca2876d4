"""A run that learns from scores and hints together; what it computes is in `test_prm_opd`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import judged as tools
import pytest
import torch
import toy_run as toy
from metric_columns import known_metric

from turngym.agents.judges.judges import BothQuestions
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import prm_opd
from turngym.trainers.judged_episodes import JudgedSource
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)
RUN = RunConfig(steps=2, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tracker=None)
DISTILL = DistillConfig(top_k=8)


def run(out: Path, form: Any, **weights: float) -> list[dict[str, Any]]:
    """Even turns get a hint, odd ones a score."""
    student = toy.tiny(1)
    says = {
        "score": lambda turn: ("\\boxed{1}",) if turn % 2 else ("\\boxed{0}",),
        "hint": lambda turn: ("\\boxed{-1}",) if turn % 2 else ("[HINT_START]look at these two[HINT_END]\\boxed{1}",),
    }
    judge = tools.Says(lambda request: says[request.kind](request.turn))
    Trainer(
        model=student,
        algorithm=prm_opd.build(prm_opd.PrmOpdConfig(form=form, **weights), BuildContext(run=RUN, distill=DISTILL)),
        source=JudgedSource(
            source=toy.Sampled(student), judge=BothQuestions(one=judge), kind="both", enhance=tools.whispered
        ),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        reference=LocalScorer(model=toy.tiny(1)),
    ).train()
    return read_metrics(out)


@pytest.mark.long
@pytest.mark.parametrize("form", ["sampled", "topk"])
def test_a_run_learns_from_both(tmp_path: Path, form: str) -> None:
    rows = run(tmp_path / "both", form)
    assert all(known_metric(name) for row in rows for name in row)
    # every turn counts: half of them by their hint, half by their score
    assert all(row["judge/turns_masked"] < row["judge/hints"] for row in rows)
    assert all(row["judge/hints"] == 21 and row["judge/votes_unread"] == 0 for row in rows)
    scores = run(tmp_path / "scores", form, w_hint=0.0)
    hints = run(tmp_path / "hints", form, w_reward=0.0)
    assert len({round(found[0]["grad_norm"], 6) for found in (rows, scores, hints)}) == 3
