"""Measuring priors: counts of two small games by hand, and the shipped table from the real train games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure_priors import dump, main, measure

PROBLEM = """(define (problem x) (:objects) (:init
 (receptacleType Cabinet_bar_1 CabinetType) (receptacleType Cabinet_bar_2 CabinetType)
 (receptacleType Fridge_bar_1 FridgeType) (openable Cabinet_bar_1) (openable Fridge_bar_1)
 (receptacleAtLocation Cabinet_bar_1 loc_1) (receptacleAtLocation Cabinet_bar_2 loc_1)
 (receptacleAtLocation Fridge_bar_1 loc_2) (canContain CabinetType MugType) (canContain FridgeType MugType)
 (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType) (objectType Window_bar_1 WindowType)
 (pickupable Mug_bar_1) (pickupable Mug_bar_2) (pickupable Egg_bar_9_bar_EggCracked) (coolable Mug_bar_1)
 (isCool Mug_bar_1) (inReceptacle Mug_bar_1 Fridge_bar_1) (inReceptacle Mug_bar_2 Cabinet_bar_2)
) (:goal (and)))"""


def write_game(folder: Path, scene: int, sentence: str) -> None:
    trial = folder / "train" / f"pick_and_place_simple-Mug-None-Cabinet-{scene}" / "trial_1"
    trial.mkdir(parents=True)
    grammar = f'"rhs": "Your task is to: {sentence}"'
    (trial / "game.tw-pddl").write_text(json.dumps({"pddl_problem": PROBLEM, "grammar": grammar}), encoding="utf-8")


def test_counts_of_two_games(tmp_path: Path) -> None:
    write_game(tmp_path, 3, "put a mug in cabinet.")
    write_game(tmp_path, 312, "put some mug on cabinet.")
    table = measure(tmp_path / "train")
    assert table["games"] == 2
    assert table["rooms"] == {"bedroom": 1, "kitchen": 1}
    assert table["scenes"]["kitchen"] == [[{"Cabinet": 2, "Fridge": 1}, 1]]
    assert table["opened"] == {"Cabinet": [2, 4], "Fridge": [2, 2]}
    assert table["shared"] == {room: [[["Cabinet", "Cabinet"], 1]] for room in ("bedroom", "kitchen")}
    assert table["number"]["bedroom"] == {"Mug": {"2": 1}}
    assert table["placed"]["kitchen"] == {"Mug": {"Cabinet": 1, "Fridge": 1}}
    assert table["sentences"]["pick_and_place_simple"] == {"put a {o} in {r}": 1, "put some {o} on {r}": 1}
    assert table["tasks"] == [["pick_and_place_simple", room, "Mug", "Cabinet", 1] for room in ("bedroom", "kitchen")]
    assert table["cool_in_fridge"] == [2, 2]
    assert table["flags"]["pickupable"] == ["Mug"]
    assert json.loads(dump(table)) == table


def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_game(tmp_path / "json_2.1.1", 3, "put a mug in cabinet.")
    assert main(["--data", str(tmp_path), "--out", str(tmp_path / "priors.json")]) == 0
    assert json.loads((tmp_path / "priors.json").read_text(encoding="utf-8"))["games"] == 1
    assert capsys.readouterr().out.startswith("1 games measured; ")


def test_a_folder_without_games_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure(tmp_path)


@pytest.mark.long
def test_the_shipped_table_is_what_the_train_games_give(alfworld_data: Path) -> None:
    shipped = Path(__file__).parents[2] / "envs" / "alfworld" / "data" / "priors.json"
    assert dump(measure(alfworld_data / "train")) == shipped.read_text(encoding="utf-8")
