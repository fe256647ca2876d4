"""The two loops that README sends a reader to first run, compute what the trainer computes, and learn."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_run as toy

from turngym.agents import evaluate
from turngym.core import RolloutRequest
from turngym.trainers import LocalScorer, pack
from turngym.trainers.targets import label_logprobs

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def panel_success(output: str, when: str) -> float:
    found = re.search(rf"^{when}: ([\d.]+) \[", output, re.MULTILINE)
    assert found, output
    return float(found[1])


@pytest.mark.parametrize("name", ["opd", "grpo"])
def test_an_example_scores_tokens_as_the_trainer_does(name: str) -> None:
    model = toy.tiny(1)
    episodes = toy.Sampled(model)(RolloutRequest(step=1, episodes=6, max_turns=6, temperature=1.0))
    # rows of different lengths, so that the example has something to pad
    assert len({len(one.segments[0]) for one in episodes}) > 1
    batch = pack(episodes)
    logp_of = runpy.run_path(str(EXAMPLES / f"{name}.py"))["logp_of"]
    with torch.no_grad():
        logp = logp_of(model, batch)
    if logp.ndim == 2:
        assert torch.allclose(logp.exp().sum(-1), torch.ones(len(logp)), atol=1e-5)
        logp = logp.gather(-1, torch.from_numpy(batch.label_N)[:, None])[:, 0]
    assert np.allclose(logp.numpy(), label_logprobs(LocalScorer(model=model), batch, "student"), atol=1e-5)
    assert np.allclose(logp.numpy(), batch.behavior_logp_N, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size"), [("opd", ("--episodes", "4")), ("grpo", ("--tasks", "2", "--attempts", "4"))]
)
def test_an_example_leaves_a_model_that_plays(tmp_path: Path, name: str, size: tuple[str, ...]) -> None:
    said = run(name, "--steps", "1", *size, "--limit", "2", "--out", str(tmp_path / "model"))
    assert panel_success(said, "after") >= 0.0
    assert evaluate("alfworld-quickstart", f"model:{tmp_path / 'model'}", samples=1, limit=1, progress=False)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "steps", "gain"), [("opd", 60, 15.0), ("grpo", 24, 5.0)])
def test_an_example_learns_what_turngym_train_learns(tmp_path: Path, name: str, steps: int, gain: float) -> None:
    """`turngym train` gains 34 points in 100 steps (opd) and 11 [6, 16] in 24 (grpo: docs/research/learn.md)."""
    said = run(name, "--steps", str(steps), "--out", str(tmp_path / "model"))
    assert panel_success(said, "after") - panel_success(said, "before") > gain
