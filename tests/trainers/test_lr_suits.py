"""Which learning rates suit which models: what ships, is recorded or published suits; what does not is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import command, save_tiny

from turngym.agents import load_world
from turngym.scripts import train
from turngym.trainers.config import OptimizerConfig
from turngym.trainers.optimizer_step import lr_that_suits, unsuited_lr

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


def test_adapters_take_ten_times_as_much() -> None:
    for size in (TINY, SMOLLM2, QWEN):
        plain, adapted = lr_that_suits(size), lr_that_suits(size, adapters=True)
        assert adapted == pytest.approx([10 * rate for rate in plain])


def test_recipes_of_the_worlds_suit_their_models() -> None:
    world = load_world("alfworld")
    for algorithm in ("opd", "turnopd", "grpo", "prm-rl"):
        assert unsuited_lr(world.settings(algorithm)["optimizer"]["lr"], TINY) == ""


def test_a_run_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "student")
    words = ("--steps", "1", "--eval-every", "0")
    train.main(command(tmp_path, tmp_path / "low", "grpo", *words, "--grpo.n", "2"))
    assert capsys.readouterr().err.count("--optimizer.lr is 1e-06: too small") == 1
    train.main(command(tmp_path, tmp_path / "right", "grpo", *words, "--grpo.n", "2", "--optimizer.lr", "1e-3"))
    assert "--optimizer.lr" not in capsys.readouterr().err
