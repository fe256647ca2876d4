"""The reference policy, replaced by the student every so many steps: when, by what, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy_run as toy
from late import late
from tiny_runs import untimed

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import grpo
from turngym.trainers.lora import LoraConfig, add_adapters
from turngym.trainers.ranks import SINGLE, Ranks
from turngym.trainers.run_config import OptimizerConfig, Renewed, RunConfig
from turngym.trainers.scorer import LocalScorer, reference_refresh
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)


def trainer(out: Path, every: int, steps: int = 5, rate: float = 1.0) -> Trainer:
    run = RunConfig(
        steps=steps,
        episodes=12,
        max_turns=6,
        eval_every=0,
        checkpoint_every=1,
        tracker=None,
        reference=Renewed(reference_every=every, reference_rate=rate) if every else None,
    )
    made = toy.trainer(out, steps=steps)
    initial = toy.tiny(0)
    initial.load_state_dict(made.model.state_dict())
    return replace(
        made,
        run=run,
        algorithm=grpo.build(grpo.GrpoConfig(n=4, filter_groups=False, kl_coef=0.1), BuildContext(run=run)),
        optimizer=OptimizerConfig(lr=1e-2),
        reference=LocalScorer(model=initial),
        evaluate=None,
        teacher=None,
    )


def test_a_step_after_the_reference_became_the_student_has_no_divergence(tmp_path: Path) -> None:
    trainer(tmp_path / "kept", 0).train()
    kept = [row["kl_reference"] for row in untimed(tmp_path / "kept")]
    assert kept[0] == pytest.approx(0.0, abs=1e-6)
    assert all(value > 1e-5 for value in kept[1:])
    told: list[int] = []
    made = replace(trainer(tmp_path / "run", 2), on_update=told.append)
    made.train()
    found = [row["kl_reference"] for row in untimed(tmp_path / "run")]
    # replaced after steps 2 and 4: steps 1, 3 and 5 begin at the reference
    assert [value < 1e-6 for value in found] == [True, False, True, False, True]
    assert found[:2] == kept[:2]
    assert told == [1, 2, 3, 4, 5]


def test_a_moving_average_by_hand() -> None:
    student, reference = toy.tiny(2), toy.tiny(3).to(torch.bfloat16)
    refresh = reference_refresh(
        Renewed(reference_every=1, reference_rate=0.25), LocalScorer(model=reference), student, SINGLE
    )
    assert refresh is not None
    first, name = reference.state_dict(), "model.norm.weight"
    before = first[name].float().clone()
    with torch.no_grad():
        student.state_dict()[name].add_(0.002)
    for step in (1, 2):
        refresh.after(step)
    # 7/16 of the way; each move alone would be lost in bfloat16, whose next number after 1 is 1.0078
    wanted = before + (1 - 0.75**2) * (student.state_dict()[name] - before)
    assert refresh._average is not None
    torch.testing.assert_close(refresh._average[name], wanted)
    torch.testing.assert_close(reference.state_dict()[name].float(), wanted, rtol=0, atol=0.004)


def test_the_rate_of_a_run_reaches_its_reference(tmp_path: Path) -> None:
    trainer(tmp_path / "run", 1, steps=2, rate=0.25).train()
    trainer(tmp_path / "whole", 1, steps=2).train()
    # a quarter of the way to the student stays at a distance from it
    assert untimed(tmp_path / "whole")[1]["kl_reference"] < 1e-6 < untimed(tmp_path / "run")[1]["kl_reference"]


@pytest.mark.parametrize(("stopped", "every", "rate"), late([(3, 2, 1.0), (3, 1, 0.25)], (3, 1, 0.25)))
def test_a_resumed_run_has_the_same_reference(tmp_path: Path, stopped: int, every: int, rate: float) -> None:
    trainer(tmp_path / "whole", every, rate=rate).train()
    made = trainer(tmp_path / "run", every, rate=rate)
    source = made.source

    def interrupted(request: RolloutRequest) -> list[Episode]:
        if request.step == stopped + 1:
            raise KeyboardInterrupt
        return source(request)

    with pytest.raises(KeyboardInterrupt):
        replace(made, source=interrupted).train()
    trainer(tmp_path / "run", every, rate=rate).train(resume=True)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


def test_what_cannot_be_had_is_said() -> None:
    scorer, student = LocalScorer(model=toy.tiny(1)), toy.tiny(2)
    assert reference_refresh(None, None, student, SINGLE) is None
    assert reference_refresh(None, scorer, student, SINGLE) is None
    with pytest.raises(SettingsError, match="reference_every is 3, but"):
        reference_refresh(Renewed(reference_every=3), None, student, SINGLE)
    with pytest.raises(SettingsError, match="with 2 training processes"):
        reference_refresh(Renewed(reference_every=3), scorer, student, Ranks(size=2))


def test_adapters_are_merged_into_the_reference() -> None:
    student, reference = toy.tiny(2), toy.tiny(3)
    add_adapters(student, LoraConfig(rank=2), base="toy", seed=0)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    refresh = reference_refresh(Renewed(reference_every=1), LocalScorer(model=reference), student, SINGLE)
    assert refresh is not None
    refresh.after(1)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(reference(ids).logits, student(ids).logits, rtol=1e-4, atol=1e-5)
