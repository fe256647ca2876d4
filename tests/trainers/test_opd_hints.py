"""OPD with hindsight hints: the two losses, and a run. Its targets: `test_judge_targets`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import judged as tools
import pytest
import torch
import toy_run as toy
from metric_columns import known_metric
from tiny_runs import break_off

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import opd_hints
from turngym.trainers.judged_episodes import JudgedSource
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)
Make = Callable[..., Episode]
RUN = RunConfig(steps=4, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tracker=None)
DISTILL = DistillConfig(top_k=8)


def test_where_a_response_may_be_cut() -> None:
    with pytest.raises(SettingsError, match=r"reject_below is 0\.0009;"):
        opd_hints.build(opd_hints.OpdHintsConfig(reject_below=0.0009), BuildContext())


def test_who_teaches_and_who_is_stayed_near() -> None:
    def needs(kl_coef: float, other: bool, **more: Any) -> tuple[bool, bool]:
        config = opd_hints.OpdHintsConfig(kl_coef=kl_coef, **more)
        made = opd_hints.build(config, BuildContext(has_teacher=other))
        return made.needs_teacher, made.needs_reference

    assert needs(0.0, False, reader="live") == (False, False)
    assert needs(0.1, False, reader="live") == (False, True)
    with pytest.raises(SettingsError, match="reader is live, and --teacher"):
        needs(0.0, True, reader="live")

    # without a teacher the initial policy teaches
    assert [needs(*given) for given in ((0.0, True), (0.1, True), (0.0, False))] == [
        (True, False),
        (True, True),
        (False, True),
    ]


def trainer(out: Path, form: Any, teacher: bool) -> Trainer:
    student, context = toy.tiny(1), BuildContext(run=RUN, distill=DISTILL, has_teacher=teacher)
    votes = ("[HINT_START]look at the last two[HINT_END]\\boxed{1}",)
    judge = tools.Says(lambda request: votes if request.turn % 2 == 0 else ("\\boxed{-1}",))
    return Trainer(
        model=student,
        algorithm=opd_hints.build(opd_hints.OpdHintsConfig(form=form), context),
        source=JudgedSource(source=toy.Sampled(student), judge=judge, kind="hint", enhance=tools.whispered),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        teacher=LocalScorer(model=toy.tiny(2, 4.0)) if teacher else None,
        reference=LocalScorer(model=toy.tiny(1)),
    )


@pytest.mark.long
@pytest.mark.parametrize(("form", "teacher"), [("sampled", False), ("topk", True)])
def test_a_stopped_run_resumes_to_the_same_rows(tmp_path: Path, form: str, teacher: bool) -> None:
    trainer(tmp_path / "whole", form, teacher).train()
    stopped = trainer(tmp_path / "stopped", form, teacher)
    break_off(stopped, 3)
    trainer(tmp_path / "stopped", form, teacher).train(resume=True)
    clock = ("time/", "tokens_per_s")
    whole, again = (
        [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(tmp_path / name)]
        for name in ("whole", "stopped")
    )
    assert again == whole
    assert all(known_metric(name) for row in whole for name in row)
    assert all(row["judge/hints"] == 21 and row["judge/hints_refused"] == 0 for row in whole)
    assert all(row["judge/turns_masked"] == 24 for row in whole)
