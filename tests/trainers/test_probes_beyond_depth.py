"""Where the environment plays on beyond H_max, a student that never gets there is measured, and so is the regime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import save_tiny

from turngym.trainers.algorithms.turnopd import effective_depth
from turngym.trainers.diagnostics.depth_regime import full_depth_rows, turn_sums
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run import train

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights: they never solve anything, and each is another."""
    names = ("student", "teacher")
    return {name: save_tiny(tmp_path_factory.mktemp(name), seed=seed) for seed, name in enumerate(names)}


def played(models: dict[str, Path], out: Path, **depth: Any) -> list[dict[str, Any]]:
    train(
        "turnopd",
        **models,
        out=out,
        steps=5,
        episodes=8,
        max_turns=9,
        eval_every=0,
        device="cpu",
        threads=1,
        tracker=None,
        env_kwargs={"on_invalid": "noop", "config": "small"},
        turnopd={"depth": {"h_max": 6, "h_min": 1, "warmup": 2, **depth}},
    )
    return [row for row in read_metrics(out) if row["kind"] == "train"]


def test_a_probe_whose_cap_cuts_every_episode_measures(models: dict[str, Path], tmp_path: Path) -> None:
    rows = played(models, tmp_path / "run")
    assert [row["success"] for row in rows] == [0.0] * 5
    first = rows[0]
    # the environment allows 9 turns: all eight were stopped at 6 by the probe, and all count
    assert (first["depth/cap"], first["depth/probe"], first["truncated"]) == (6, 1, 1.0)
    assert first["turn/survivors"] == [8] * 6
    sums = turn_sums(full_depth_rows(rows[:1]))
    h_eff = effective_depth(sums.kl_T / sums.tokens_T, sums.survivors_T)
    assert first["depth/h_eff"] == h_eff
    assert first["depth/hbar"] == pytest.approx(0.7 * 6 + 0.3 * h_eff)
    # at full depth what was cut has failed; below it nobody knows
    assert first["turn/tokens_failure"] == first["turn/tokens"]
    assert sum(rows[2]["turn/tokens_failure"]) < sum(rows[2]["turn/tokens"])
    assert [row["weight/alpha"] for row in rows] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_partial_probe_measures_its_share(models: dict[str, Path], tmp_path: Path) -> None:
    rows = played(models, tmp_path / "run", probe_share=0.25, rho=0.0)
    # the first probe's cap is full depth for all; then six of eight stop at the cap that it led to
    assert rows[0]["turn/survivors"] == [8] * 6
    cap = round(rows[0]["depth/hbar"]) + 1
    assert cap < 6
    assert rows[1]["depth/cap"] == 6
    assert rows[1]["turn/survivors"] == [8] * cap + [2] * (6 - cap)
    assert rows[1]["depth/probe"] == 1
