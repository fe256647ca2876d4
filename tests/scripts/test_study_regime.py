"""`turngym study regime`: what a run's windows are, what its table says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from late import late

from turngym.scripts.main import main
from turngym.scripts.study import regime as verb
from turngym.trainers.diagnostics.depth_regime import (
    MAX_DEEP_MASS,
    MAX_ENTROPY_RATIO,
    MAX_KL_RATIO,
    full_depth_rows,
    measure_regime,
    turn_sums,
)
from turngym.trainers.metrics import read_metrics


def row(step: int, deep: float) -> dict[str, Any]:
    """Four episodes of three turns, one token each, whose KL in the last turn is `deep`."""
    return {
        "step": step,
        "kind": "train",
        "depth/cap": 3,
        "turn/tokens": [4, 4, 4],
        "turn/survivors": [4, 4, 4],
        "turn/kl_raw": [1.0, 1.0, deep],
        "turn/tokens_failure": [4, 4, 4],
        "turn/tokens_success": [0, 0, 0],
        "turn/kl_raw_failure": [1.0, 1.0, deep],
        "turn/kl_raw_success": [None, None, None],
        "turn/teacher_entropy_failure": [2.0, 1.0, 1.0],
    }


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return folder


def test_a_run_is_measured_early_late_and_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", [row(step, deep=0.1 if step < 4 else 0.9) for step in range(1, 7)])
    assert main(["study", "regime", "--run", f"house={run}", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    cells = "1.000 | 0.100 | 10.0 % | 4.8 % | 4.8 % | 100.0 % | 50.0 % | 100.0 % | - | 1 | - | 3 of 3"
    assert f"| house | early | 3 | {cells} |" in said
    assert "- house, late: deep / shallow KL is 90.0 %, below 60 % is wanted" in said
    assert (tmp_path / "out" / "regime.md").read_text() in said
    found = json.loads((tmp_path / "out" / "regime.json").read_text())["house"]
    assert [found[window]["kl_ratio"] for window in ("early", "late", "all")] == pytest.approx([0.1, 0.9, 0.5])
    assert found["early"]["missing"] == []


def test_a_world_with_the_signs_ends_well(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row(1, deep=0.1)])
    assert main(["study", "regime", "--run", str(run)]) == 0


def test_a_pair_is_measured_on_what_training_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def train(algorithm: str, *, out: Path, **settings: Any) -> None:
        asked.update(settings, algorithm=algorithm)
        write(out, [row(step, deep=deep) for step, deep in enumerate((0.15, 0.25, 0.35))])

    monkeypatch.setattr("turngym.trainers.train", train)
    options = verb.RegimeOptions(world=("webshop",), episodes=7, max_turns=5, seed=3, teacher=Path("mine"))
    (windows,) = verb.regimes(options).values()
    found = windows["before"]  # 0.25 -+ 4.302653 * 0.1 / sqrt(3)
    assert found.regime.kl_ratio == pytest.approx(0.25)
    assert found.intervals["kl_ratio"] == pytest.approx((0.001586, 0.498414), abs=1e-6)
    # vanilla OPD to the given depth, whose updates move nothing, in steps of six episodes
    assert (asked["algorithm"], asked["steps"], asked["optimizer"]) == ("opd", 2, {"lr": 0.0})
    assert (asked["episodes"], asked["max_turns"], asked["seed"]) == (6, 5, 3)
    assert asked["teacher"] == Path("mine")
    assert asked["student"].parts[-2:] == ("webshop", "student")
    assert asked["env"] == "turngym/WebShop-v0"


@pytest.mark.long
@pytest.mark.parametrize(
    "world",
    late(
        ("alfworld-loops", "webshop-loops", "search-loops", "search-chains"), "alfworld-loops", mark=pytest.mark.nightly
    ),
)
def test_the_shipped_pairs_with_loops_have_the_signs(world: str) -> None:
    (windows,) = verb.regimes(verb.RegimeOptions(world=(world,), seed=1)).values()
    intervals = windows["before"].intervals
    assert intervals["kl_ratio"][1] < MAX_KL_RATIO
    assert intervals["entropy_ratio"][1] < MAX_ENTROPY_RATIO
    # the household's share lies at the gate, so that the sign itself changes with the games
    assert intervals["deep_mass"][0] < MAX_DEEP_MASS
    assert windows["before"].regime.deep_mass < 0.15


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "regime"]) == 2
    assert main(["study", "regime", "--student", "a"]) == 2
    assert main(["study", "regime", "--world", "alfworld", "--world", "webshop", "--student", "a"]) == 2
    empty = write(tmp_path / "empty", [{"step": 0, "kind": "eval", "eval/avg": 0.5}])
    assert main(["study", "regime", "--run", str(empty)]) == 2
    bare = write(tmp_path / "bare", [{"step": 1, "kind": "train", "depth/cap": 3, "turn/survivors": [1]}])
    assert main(["study", "regime", "--run", str(bare)]) == 2
    said = capsys.readouterr().err
    assert "name what to measure" in said
    assert "--student and --teacher play one world" in said
    assert f"{empty}: no training step was played to full depth" in said
    assert f"{bare}: the run has no divergence from a teacher" in said


def test_the_same_numbers_from_python(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [row(1, deep=0.1), row(2, deep=0.3)])
    assert verb.regime_of_run(run)["all"].regime == measure_regime(turn_sums(full_depth_rows(read_metrics(run))))
