"""Which learning rates suit which models: what ships, is recorded or published suits; what does not is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import command, save_tiny

from turngym.agents import load_world
from turngym.scripts import train
from turngym.trainers.learning_rate import lr_that_suits, unmoved_loss, unsuited_lr
from turngym.trainers.run_config import OptimizerConfig

torch.set_num_threads(1)
TINY, SMOLLM2, QWEN = 1_000_000, 135_000_000, 1_700_000_000


@pytest.mark.parametrize(
    ("lr", "parameters", "adapters"),
    [
        (2e-4, TINY, False),
        (3e-3, TINY, False),
        (1e-4, SMOLLM2, False),
        (1e-3, SMOLLM2, True),
        (5e-4, SMOLLM2, True),
        (OptimizerConfig().lr, QWEN, False),
        (1e-5, QWEN, True),
        (1e-6, 8 * 10**9, False),
        (0.0, TINY, False),
    ],
)
def test_what_is_in_use_suits(lr: float, parameters: int, adapters: bool) -> None:
    assert unsuited_lr(lr, parameters, adapters=adapters) == ""


@pytest.mark.parametrize(
    ("lr", "parameters", "adapters", "said"),
    [
        (1e-6, TINY, False, "--optimizer.lr is 1e-06: too small, as a rule, for all weights of a model of 1 million"),
        (1e-3, QWEN, False, "too large, as a rule, for all weights of a model of 1.7e+03 million"),
        (1e-6, SMOLLM2, True, "too small, as a rule, for the adapters of a model of 135 million"),
        (1e-3, SMOLLM2, False, "too large"),
    ],
)
def test_what_does_not_suit_is_said(lr: float, parameters: int, adapters: bool, said: str) -> None:
    assert said in unsuited_lr(lr, parameters, adapters=adapters)
    low, high = lr_that_suits(parameters, adapters=adapters)
    assert f"{low:.0e} to {high:.0e} suit it" in unsuited_lr(lr, parameters, adapters=adapters)


@pytest.mark.parametrize(
    ("parameters", "adapters", "least", "greatest"),
    [
        (1, False, 1e-4, 1e-2),
        (TINY, False, 1e-4, 1e-2),
        (8 * TINY, False, 2.5e-5, 2.5e-3),
        (1000 * TINY, False, 1e-6, 1e-4),
        (8 * TINY, True, 2.5e-4, 2.5e-2),
    ],
)
def test_the_rates_that_suit(parameters: int, adapters: bool, least: float, greatest: float) -> None:
    """1e-2 up to a million parameters, then parameters ** (-2 / 3): four times less for eight times as many."""
    assert lr_that_suits(parameters, adapters=adapters) == pytest.approx((least, greatest), rel=1e-9)


@pytest.mark.parametrize(("lr", "suits"), [(0.995e-4, True), (0.98e-4, False), (1.005e-2, True), (1.02e-2, False)])
def test_a_rate_on_the_border_suits(lr: float, suits: bool) -> None:
    assert (unsuited_lr(lr, TINY) == "") == suits


def test_the_whole_sentence() -> None:
    assert unsuited_lr(1e-6, 27 * TINY) == (
        "--optimizer.lr is 1e-06: too small, as a rule, for all weights of a model of 27 million parameters; "
        "1e-05 to 1e-03 suit it, adapters (--lora.rank) ten times as much"
    )
    assert unsuited_lr(1.0, 27 * TINY, adapters=True) == (
        "--optimizer.lr is 1: too large, as a rule, for the adapters of a model of 27 million parameters; "
        "1e-04 to 1e-02 suit it"
    )


def test_recipes_of_the_worlds_suit_their_models() -> None:
    world = load_world("alfworld")
    for algorithm in ("opd", "turnopd", "grpo", "prm-rl"):
        assert unsuited_lr(world.settings(algorithm)["optimizer"]["lr"], TINY) == ""


def test_a_run_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "student")
    words = ("--steps", "1", "--eval-every", "0")
    train.main(command(tmp_path, tmp_path / "low", "grpo", *words, "--grpo.n", "2"))
    assert capsys.readouterr().err.count("--optimizer.lr is 1e-06: too small") == 1
    words = (*words, "--grpo.n", "2", "--optimizer.lr", "1e-3")
    train.main(command(tmp_path, tmp_path / "right", "grpo", *words))
    assert "--optimizer.lr" not in capsys.readouterr().err
    train.main(command(tmp_path, tmp_path / "late", "grpo", *words, "--optimizer.lr-warmup", "9"))
    assert capsys.readouterr().err.count("--optimizer.lr-warmup is 9: the run ends before that, after step 1") == 1


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([1.86, 1.83, 1.78, 1.74], True),
        ([1.0] * 10 + [0.91] * 2, True),
        ([1.86, 1.2, 0.6, 0.28], False),
        ([1.86, 1.74, 1.70], False),  # too few to tell
        ([-0.2, -0.1, 0.1, 0.2], False),
        ([0.014, 0.1, 0.2, 0.4], False),
        ([1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 0.7, 0.7], False),
        ([2.0, 2.0, *[9.0] * 6, 1.0, 3.0], True),  # by means over a fifth
    ],
)
def test_a_loss_that_hardly_moves_is_said(losses: list[float], said: bool) -> None:
    assert bool(unmoved_loss(losses, 1e-6)) == said
    if said:
        assert f"{losses[0]:.3g} at the first of {len(losses)} steps" in unmoved_loss(losses, 1e-6)
        assert "--optimizer.lr, which is 1e-06" in unmoved_loss(losses, 1e-6)
