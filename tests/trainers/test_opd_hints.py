"""OPD with hindsight hints: the two losses, and a run. Its targets: `test_judge_targets`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import judged as tools
import numpy as np
import pytest
import torch
import toy_run as toy

from turngym.envs.core.episode import Episode
from turngym.envs.core.protocols import RolloutRequest
from turngym.trainers.algorithm import Tokens
from turngym.trainers.algorithms import opd_hints
from turngym.trainers.config import ConfigError, DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.judged import JudgedCollect
from turngym.trainers.metrics import known_metric, read_metrics
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)
Make = Callable[..., Episode]
RUN = RunConfig(steps=4, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tensorboard=False)
DISTILL = DistillConfig(top_k=8)


def test_where_a_response_may_be_cut() -> None:
    for wrong in (1.0, 0.0009, -0.1, math.nan):
        with pytest.raises(ConfigError, match=rf"reject_below is {wrong}; valid: 0, or 0\.001 to below 1"):
            opd_hints.OpdHintsConfig(reject_below=wrong)


def test_both_losses_hold_the_policy_to_its_start() -> None:
    logp = torch.tensor([math.log(0.25)], requires_grad=True)
    tokens = Tokens(
        logp_n=logp,
        sampled_logp_n=logp,
        behavior_logp_n=logp.detach(),
        topk_logp_nK=torch.tensor([[math.log(0.5), math.log(0.25)]]),
        teacher_logp_nK=torch.tensor([[math.log(0.25), math.log(0.5)]]),
        advantage_n=torch.tensor([2.0]),
        reference_logp_n=torch.tensor([math.log(0.5)]),
        off_policy_n=torch.zeros(1, dtype=torch.bool),
        entropy_n=torch.full((1,), 0.7),
    )
    held = 0.02 * (2 - 1 - math.log(2))
    sampled = opd_hints.build(opd_hints.OpdHintsConfig(), DISTILL, RUN)
    assert sampled.token_loss(tokens).loss_n.tolist() == pytest.approx([-2.0 + held])
    # bins 0.5 0.25 0.25 against 0.25 0.5 0.25
    topk = opd_hints.build(opd_hints.OpdHintsConfig(form="topk"), DISTILL, RUN)
    losses = topk.token_loss(tokens)
    assert losses.loss_n.tolist() == pytest.approx([0.25 * math.log(2) + held], abs=1e-6)
    assert losses.diagnostics["kl_reference"].tolist() == pytest.approx([1 - math.log(2)])
    free = opd_hints.build(opd_hints.OpdHintsConfig(form="topk", kl_coef=0.0), DISTILL, RUN, teacher=True)
    assert free.needs_teacher
    assert not free.needs_reference
    assert opd_hints.build(opd_hints.OpdHintsConfig(kl_coef=0.0), DISTILL, RUN).needs_reference


def whispered(episodes: Sequence[Episode]) -> list[Episode]:
    """Prompts with the last two ids of the observation said once more, as if somebody had pointed at them."""
    found = []
    for episode in episodes:
        turns = [
            turn if turn.hint is None else replace(turn, hint_prompt_ids=np.repeat(episode.prompt_ids(turn), 2)[-9:])
            for turn in episode.turns
        ]
        found.append(replace(episode, turns=tuple(turns)))
    return found


def trainer(out: Path, form: Any, teacher: bool) -> Trainer:
    student = toy.tiny(1)
    votes = ("[HINT_START]look at the last two[HINT_END]\\boxed{1}",)
    judge = tools.Says(lambda request: votes if request.turn % 2 == 0 else ("\\boxed{-1}",))
    return Trainer(
        model=student,
        algorithm=opd_hints.build(opd_hints.OpdHintsConfig(form=form), DISTILL, RUN, teacher=teacher),
        collect=JudgedCollect(collect=toy.Sampled(student), judge=judge, kind="hint", enhance=whispered),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        teacher=LocalScorer(model=toy.tiny(2, 4.0)) if teacher else None,
        reference=LocalScorer(model=toy.tiny(1)),
    )


@pytest.mark.parametrize(("form", "teacher"), [("sampled", False), ("topk", True)])
def test_a_stopped_run_resumes_to_the_same_rows(tmp_path: Path, form: str, teacher: bool) -> None:
    trainer(tmp_path / "whole", form, teacher).train()
    stopped = trainer(tmp_path / "stopped", form, teacher)
    source = stopped.collect

    def interrupted(request: RolloutRequest) -> list[Episode]:
        if request.step == 3:
            raise KeyboardInterrupt
        return source(request)

    stopped.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
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
