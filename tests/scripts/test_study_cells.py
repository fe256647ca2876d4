"""Cells of a study: their commands, their locks, and who runs what when several work on one folder."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import locked_file
from turngym.scripts import jobs as running
from turngym.scripts import train
from turngym.scripts.main import main
from turngym.scripts.study import grid
from turngym.scripts.study.grid import Cell, run_cells
from turngym.scripts.study.settings import StudyOptions, chosen_methods, fixed_depths, methods, shortened
from turngym.scripts.study.turnopd import cells_of
from turngym.trainers.algorithm import FixedDepth
from turngym.trainers.algorithms.tcod import Curriculum
from turngym.trainers.algorithms.turnopd import AdaptiveDepth
from turngym.trainers.run import build_algorithm
from turngym.trainers.token_weights import Blend, Static, TurnLevel


def built(cell: Cell) -> Any:
    """The algorithm that a cell's command trains with."""
    return build_algorithm(train.parse([*cell.words, "--out", str(cell.folder)]))


def test_every_row_trains_what_it_says(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("webshop",), seeds=(5,))
    found = {cell.method: built(cell) for cell in cells_of(options)}
    depth: dict[str, Any] = {name: algorithm.depth for name, algorithm in found.items()}
    weight: dict[str, Any] = {name: algorithm.weight for name, algorithm in found.items()}
    assert depth["opd"] == FixedDepth(h_max=12)
    assert depth["tcod"] == Curriculum(schedule=depth["tcod"].schedule, h_max=depth["tcod"].h_max)
    # the shop's own schedule
    assert (depth["tcod"].schedule.eta, depth["tcod"].schedule.k_max) == (4, 15)
    assert depth["turnopd"] == AdaptiveDepth(replace(depth["turnopd"].config, h_max=12, p=0.8, probe_share=1.0))
    assert isinstance(weight["turnopd"], Blend)
    assert (depth["depth-only"], isinstance(weight["depth-only"], Static)) == (depth["turnopd"], True)
    assert (depth["blend-only"], isinstance(weight["blend-only"], Blend)) == (FixedDepth(h_max=12), True)
    assert (depth["hard-turn"], isinstance(weight["hard-turn"], TurnLevel)) == (depth["turnopd"], True)
    assert depth["partial"].config.probe_share == 0.25
    for p in (0.4, 0.6):
        assert (depth[f"p{p}-success"].config.p, depth[f"p{p}-success"].config.use_success) == (p, True)
    for p in (0.4, 0.6, 0.8):
        assert (depth[f"p{p}-all"].config.p, depth[f"p{p}-all"].config.use_success) == (p, False)
    for turns in fixed_depths(12):
        plans = [depth[f"fixed-{turns}"].plan(depth[f"fixed-{turns}"].start(), step) for step in (1, 5, 8)]
        assert [plan.cap for plan in plans] == [turns] * 3
        assert isinstance(weight[f"fixed-{turns}"], Static)
    assert fixed_depths(12) == [2, 3, 6, 9]
    for name in ("guided-opd", "atod", "sage-opd", "grpo-opd"):
        assert found[name].name == name
        assert options.episodes is None or options.episodes % found[name].group == 0
        assert depth[name] == FixedDepth(h_max=12)


def test_what_a_cell_is_told(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("alfworld",), seeds=(3,), methods=("opd",), steps=40, evaluations=4)
    (cell,) = cells_of(replace(options, episodes=9, max_turns=17, tasks=7, samples=2, student=Path("S")))
    words = dict(zip(cell.words[::2], cell.words[1::2], strict=False))
    assert (words["--steps"], words["--seed"], words["--student"]) == ("40", "3", "S")
    assert (words["--eval-every"], words["--eval-samples"], words["--eval-limit"]) == ("10", "2", "7")
    assert (words["--episodes"], words["--max-turns"], words["--optimizer.lr-warmup"]) == ("9", "17", "8")
    assert words["--panel"] == "alfworld-quickstart"
    assert cell.words.count("--eval-every") == cell.words.count("--episodes") == 1
    assert cell.record == tmp_path / "cells" / "alfworld" / "opd-seed3" / "cell.json"


def test_averaged_weights_need_a_checkpoint_after_each_of_the_last_evaluations(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("alfworld",), seeds=(0,), methods=("opd",), steps=40, evaluations=8)
    (plain,), (cell,) = cells_of(options), cells_of(replace(options, average=True))
    assert "--keep-checkpoints" not in plain.words
    said = {name: cell.words[cell.words.index(name) + 1] for name in ("--checkpoint-every", "--keep-checkpoints")}
    assert said == {"--checkpoint-every": "5", "--keep-checkpoints": "4"}
    with pytest.raises(TurngymError, match="--average needs four checkpoints, and --evaluations 2 makes fewer"):
        replace(options, evaluations=2, average=True)


@pytest.mark.parametrize(
    ("world", "rate", "turns"),
    [
        ("alfworld-loops", 1e-3, "48"),
        ("webshop-loops", 2e-5, "30"),
        ("search-loops", 1e-4, "30"),
        ("search-chains", 1e-4, "30"),
    ],
)
def test_a_cell_learns_at_its_worlds_rate(world: str, rate: float, turns: str, tmp_path: Path) -> None:
    (cell,) = cells_of(StudyOptions(out=tmp_path, worlds=(world,), seeds=(0,), methods=("opd",)))
    words = dict(zip(cell.words[::2], cell.words[1::2], strict=False))
    assert (float(words["--optimizer.lr"]), words["--max-turns"], words["--panel"]) == (rate, turns, world)


def test_who_learns_from_the_reward_has_no_teacher_and_a_rate_of_its_own(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("alfworld",), seeds=(0,), methods=("main", "reward"))
    found = {cell.method: train.parse([*cell.words, "--out", "x"]) for cell in cells_of(options)}
    assert {name: one.optimizer.lr for name, one in found.items()} == {
        **dict.fromkeys(("opd", "tcod", "turnopd"), 1e-3),
        **dict.fromkeys(("grpo", "gigpo"), 2e-4),
    }
    assert [name for name, one in found.items() if one.models.teacher is None] == ["grpo", "gigpo"]
    assert len({(one.run.steps, one.run.episodes, one.models.student) for one in found.values()}) == 1


def test_rows_by_name_and_group() -> None:
    assert [row.name for row in chosen_methods(("turnopd",), 24)] == ["opd", "turnopd"]
    assert [row.name for row in chosen_methods(("main", "fixed-5"), 24)] == ["opd", "tcod", "turnopd", "fixed-5"]
    assert len(chosen_methods(("main", "reward", "ablation", "sweep", "fixed", "family"), 24)) == len(methods(24)) == 23
    assert [row.name for row in chosen_methods(("main", "reward"), 24)] == ["opd", "tcod", "turnopd", "grpo", "gigpo"]
    assert [row.name for row in chosen_methods(("fixed-5",), 24, base=False)] == ["fixed-5"]
    with pytest.raises(TurngymError, match=r"--methods 'turnop'.*Did you mean 'turnopd'"):
        chosen_methods(("turnop",), 24)
    with pytest.raises(TurngymError, match="--methods 'fixed-0'"):
        chosen_methods(("fixed-0",), 24)


def test_the_first_seed_of_the_main_methods_comes_first(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("alfworld", "search"), methods=("tcod", "partial"), seeds=(0, 4))
    assert [cell.name for cell in cells_of(options)][:7] == [
        *("alfworld/opd/seed0", "alfworld/tcod/seed0", "search/opd/seed0", "search/tcod/seed0"),
        *("alfworld/partial/seed0", "search/partial/seed0", "alfworld/opd/seed4"),
    ]


def test_opd_comes_along_unless_it_is_told_not_to(tmp_path: Path) -> None:
    options = StudyOptions(out=tmp_path, worlds=("alfworld",), methods=("partial",), seeds=(4,))
    assert [cell.name for cell in cells_of(options)] == ["alfworld/opd/seed4", "alfworld/partial/seed4"]
    assert [cell.name for cell in cells_of(replace(options, base=False))] == ["alfworld/partial/seed4"]


def test_short_leaves_alone_what_was_said() -> None:
    short = shortened(StudyOptions(short=True, seeds=(7, 8), worlds=("search",)))
    assert (short.seeds, short.worlds, short.methods, short.steps) == ((7, 8), ("search",), ("main", "partial"), 12)
    assert shortened(StudyOptions(steps=40)).steps == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "7"], "--steps 7 cannot be cut into 10 equal parts"),
        (["--parallel", "0"], "--parallel is 0"),
        (["--student", "S"], "--student and --teacher belong to one world"),
        (["--methods", "nothing"], "--methods 'nothing'"),
        (["--worlds", "alfword"], "the embedded worlds are"),
        (["--no-run"], "no cell in .* is done"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "turnopd", "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(said, error)


def test_cells_are_run_once_and_those_of_somebody_else_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cells_of(StudyOptions(out=tmp_path, worlds=("alfworld",), methods=("turnopd",), seeds=(0, 1)))
    started: list[str] = []

    def launch(job: Any, cores: int) -> subprocess.Popen[bytes]:
        """A process that makes the files of a finished run."""
        started.append(job.name)
        row = json.dumps({"step": job.steps, "kind": "eval"})
        code = 'mkdir -p "$1"; echo "$3" > "$2/metrics.jsonl"'
        return subprocess.Popen(["sh", "-ec", code, "sh", str(job.model), str(job.folder), row])

    monkeypatch.setattr(running, "launch", launch)
    monkeypatch.setattr(grid, "make_record", lambda cell: cell.method)
    monkeypatch.setattr(grid, "to_json", lambda record: record)
    with locked_file(cells[1].folder):
        run_cells(cells, 2, poll=0.01)
        assert [cell.finished for cell in cells] == [True, False, True, True]
    run_cells(cells, 2, poll=0.01)
    assert all(cell.finished for cell in cells)
    assert sorted(started) == sorted(cell.name for cell in cells)
    assert not [path for cell in cells for path in cell.folder.parent.glob(".*.lock")]
