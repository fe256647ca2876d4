"""Binary PRM-RL: weights, the loss, and a run that resumes to the same numbers. Its targets: `test_judge_targets`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import judged as tools
import pytest
import torch
import toy_run as toy

from turngym.envs.core.episode import Episode
from turngym.envs.core.protocols import JudgeRequest, RolloutRequest
from turngym.trainers.algorithm import Tokens
from turngym.trainers.algorithms import prm_rl
from turngym.trainers.batch import pack
from turngym.trainers.config import OptimizerConfig, RunConfig
from turngym.trainers.judged import JudgedCollect, judge_episodes
from turngym.trainers.metrics import known_metric, read_metrics
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.train_loop import Trainer

torch.set_num_threads(1)
Make = Callable[..., Episode]
RUN = RunConfig(steps=6, episodes=12, max_turns=6, eval_every=0, checkpoint_every=2, tensorboard=False)
NOBODY: Any = None


@pytest.fixture
def two(make_episode: Make) -> list[Episode]:
    """A: turns of 2, 1 and 3 tokens, the last without a next state. B: one turn of 2 tokens, its only one."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])], number=0)
    b = make_episode([([5, 6], [20, 21])], number=1)
    return [tools.with_texts(a, ["a", "b", "c"]), tools.with_texts(b, ["d"])]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("turn_mean", [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6]),
        ("trajectory", [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]),
        ("token_mean", [1 / 5] * 5),
    ],
)
def test_weights_of_what_is_left_sum_to_one(two: list[Episode], weight: Any, expected: list[float]) -> None:
    judged, _ = judge_episodes(two, tools.Says(lambda request: tools.boxed(1)), "score")
    algorithm = prm_rl.build(prm_rl.PrmRlConfig(weight=weight), RUN)
    assert algorithm.select is not None
    weight_N = algorithm.weight(pack(algorithm.select(judged)), step=1, total_steps=6)
    assert weight_N.tolist() == pytest.approx(expected)
    assert weight_N.sum() == pytest.approx(1.0)


def test_the_loss_by_hand() -> None:
    """Ratios 1.5 (above 1.28), 0.5 (below 0.8) and 1; the reference lies log 2 above the third."""
    logp = torch.tensor([math.log(0.75), math.log(0.25), math.log(0.25)], requires_grad=True)
    tokens = Tokens(
        logp_n=logp,
        sampled_logp_n=logp,
        behavior_logp_n=torch.tensor([math.log(0.5), math.log(0.5), math.log(0.25)]),
        advantage_n=torch.tensor([1.0, -1.0, 0.0]),
        reference_logp_n=torch.tensor([math.log(0.75), math.log(0.25), math.log(0.5)]),
        off_policy_n=torch.zeros(3, dtype=torch.bool),
        entropy_n=torch.full((3,), 0.7),
    )
    algorithm = prm_rl.build(prm_rl.PrmRlConfig(), RUN)
    losses = algorithm.token_loss(tokens)
    assert losses.loss_n.tolist() == pytest.approx([-1.28, 0.8, 0.02 * (2 - 1 - math.log(2))], abs=1e-6)
    losses.loss_n.sum().backward()
    # both clips stop the gradient; KL k3: -(exp(d) - 1) * 0.02
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, -0.02], abs=1e-6)
    assert losses.diagnostics["clipped"].tolist() == [1.0, 1.0, 0.0]
    assert algorithm.needs_reference
    assert not algorithm.needs_teacher
    assert not prm_rl.build(prm_rl.PrmRlConfig(kl_coef=0.0), RUN).needs_reference


def parity(request: JudgeRequest) -> tuple[str | None, ...]:
    """Good if the response begins with an even id; every fifth turn's judge fails, some votes are rubbish."""
    assert request.episode is not None
    first = int(request.episode.response_ids(request.episode.turns[request.turn])[0])
    return (None,) * 3 if first % 5 == 0 else (*tools.boxed(1 if first % 2 == 0 else -1) * 2, "rubbish")


def trainer(out: Path, **config: Any) -> Trainer:
    student = toy.tiny(1)
    return Trainer(
        model=student,
        algorithm=prm_rl.build(prm_rl.PrmRlConfig(**config), RUN),
        collect=JudgedCollect(collect=toy.Sampled(student), judge=tools.Says(parity)),
        out=out,
        run=RUN,
        optimizer=OptimizerConfig(lr=3e-3),
        reference=LocalScorer(model=toy.tiny(1)),
    )


def rows(run: Path) -> list[dict[str, Any]]:
    clock = ("time/", "tokens_per_s")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(run)]


def test_it_learns_what_the_judge_likes_and_resumes_to_the_same_rows(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").train()
    stopped = trainer(tmp_path / "stopped")
    source = stopped.collect

    def interrupted(request: RolloutRequest) -> list[Episode]:
        if request.step == 4:
            raise KeyboardInterrupt
        return source(request)

    stopped.collect = interrupted
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "stopped").train(resume=True)
    whole = rows(tmp_path / "whole")
    assert rows(tmp_path / "stopped") == whole
    assert whole[-1]["judge/score"] > whole[0]["judge/score"] + 0.2
    assert all(known_metric(name) for row in whole for name in row)
    assert all(row["judge/votes_failed"] > 0 and row["judge/votes_unread"] > 0 for row in whole)
    assert all(row["judge/turns_masked"] >= 12 for row in whole)
    assert whole[0]["gap_max"] < 1e-4


def test_a_step_without_anything_to_train_on_is_counted(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", mask_neutral=True)
    made.collect.judge = tools.Says(lambda request: tools.boxed(0))  # type: ignore[attr-defined]
    made.train()
    assert [(row["episodes"], row["judge/score"], row["judge/turns_masked"]) for row in rows(tmp_path / "run")] == [
        (0, 0.0, 45)
    ] * RUN.steps
