"""Houses held out from training, and generated games as files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from turngym.core.errors import TaskError, TurngymError
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.games import export_games
from turngym.envs.alfworld.generate import SMALL_UNSEEN, unseen
from turngym.envs.alfworld.priors import FULL, SMALL
from turngym.envs.panels import load_panel, verify_panel
from turngym.envs.testing import expect
from turngym.scripts import panel as verb

PANEL = "alfworld-generated-unseen"


def resets(**options: object) -> dict[str, str]:
    env = ALFWorldEnv(**options)  # type: ignore[arg-type]
    return {task_id: env.reset(options={"task": task_id})[0] for task_id in list(env.task_ids())[:100]}


def test_no_reset_text_can_be_one_of_training() -> None:
    """For any training game, listed or not: each text names a receptacle and a target that training cannot have."""
    trained = {name.lower() for name, _ in SMALL.receptacle_caps or ()}
    targets = {name.lower() for name in SMALL.object_types or ()}
    texts = resets(split="generated_unseen")
    assert len(texts) == 100
    for text in texts.values():
        room, task = text.split("Your task is to: ")
        seen = set(re.findall(r"a ([a-z]+) \d+", room))
        assert seen - trained, f"every receptacle is one of training: {room}"
        words = set(re.findall("[a-z]+", task)) - {"desklamp"}
        assert not words & targets, f"the target is one of training: {task}"
    assert not set(texts.values()) & set(resets().values())


def test_training_has_nothing_of_what_is_held_out() -> None:
    """The other direction, from the games themselves: what the generator draws for training stays inside its types."""
    held = {name.lower() for name, _ in SMALL_UNSEEN.receptacle_caps or ()} - {
        name.lower() for name, _ in SMALL.receptacle_caps or ()
    }
    for text in resets().values():
        seen = set(re.findall(r"a ([a-z]+) \d+", text))
        assert len(seen) > 2
        assert not held & seen


def test_trained_receptacles_never_fill_a_house() -> None:
    trained = dict(SMALL.receptacle_caps or ())
    shared = sum(most for name, most in SMALL_UNSEEN.receptacle_caps or () if name in trained)
    assert shared < SMALL_UNSEEN.receptacles[0]
    assert not set(SMALL_UNSEEN.rooms) & set(SMALL.rooms)
    assert set(SMALL_UNSEEN.object_types or ()) & set(SMALL.object_types or ()) == {"DeskLamp"}


def test_the_panel_is_the_split() -> None:
    panel = load_panel(PANEL)
    env = panel.make_env()
    assert list(panel.task_ids) == list(env.get_wrapper_attr("task_ids")())
    assert verify_panel(replace(panel, tasks=panel.tasks[::10]), env) == []
    assert {task.split for task in panel.tasks} == {"generated_unseen"}


def test_what_has_nothing_held_out_says_so() -> None:
    assert unseen(SMALL) is SMALL_UNSEEN
    with pytest.raises(TaskError, match="held out from it, only from: 'small'"):
        ALFWorldEnv(split="generated_unseen", config=FULL)
    with pytest.raises(TaskError, match="is for evaluation"):
        ALFWorldEnv(split="generated_unseen", domain_randomization=True)
    with pytest.raises(TaskError, match="Did you mean 'generated_unseen'"):
        ALFWorldEnv(split="generated_unsen")


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({}, "train"),
        ({"part": "eval", "config": "full"}, "valid_seen"),
        ({"split": "generated_unseen"}, "valid_unseen"),
    ],
)
def test_exported_games_are_the_same_games(tmp_path: Path, options: dict[str, str], split: str) -> None:
    made = ALFWorldEnv(**options)  # type: ignore[arg-type]
    ids = list(made.task_ids())[:8]
    paths = export_games(made.source, ids, tmp_path)
    before = [path.read_bytes() for path in paths]
    assert export_games(made.source, ids, tmp_path) == paths
    assert [path.read_bytes() for path in paths] == before
    read = ALFWorldEnv(split=split, data=tmp_path)
    assert len(read.task_ids()) == 8
    for task_id, path in zip(ids, paths, strict=True):
        found = str(path.parent.relative_to(tmp_path / "json_2.1.1"))
        first, again = (env.reset(options={"task": name}) for env, name in ((made, task_id), (read, found)))
        assert first[0] == again[0]
        for key in ("task_sha", "category", "admissible_actions"):
            assert first[1][key] == again[1][key]
        assert json.loads(path.with_name("traj_data.json").read_text())["task_id"] == task_id
    paths[0].write_text("{}")
    with pytest.raises(TaskError, match="exists with other content"):
        export_games(made.source, ids, tmp_path)


@pytest.mark.long
def test_textworld_loads_and_plays_exported_games(tmp_path: Path) -> None:
    pytest.importorskip("alfworld")
    from differential import Play, compare

    from turngym.envs.alfworld.game import read_game_file
    from turngym.envs.alfworld.textworld import acquire, release

    reference = acquire()
    try:
        made = ALFWorldEnv(split="generated_unseen")
        paths = export_games(made.source, list(made.task_ids())[:4], tmp_path)
        for number, path in enumerate(paths):
            reference.load(path)
            assert reference.reset() == made.reset(options={"task": made.task_ids()[number]})[0]
            for script in ("walkthrough", "wander"):
                play = Play(task_id=str(path), script=script, seed=number, shuffle=None, steps=10)
                found = compare(reference, read_game_file(path), play)
                assert found.mismatches == ()
                assert found.won or script == "wander"
    finally:
        release(reference)


def test_alfworlds_own_loader_finds_exported_games(tmp_path: Path) -> None:
    module = pytest.importorskip("alfworld.agents.environment.alfred_tw_env")
    made = ALFWorldEnv(split="generated_unseen")
    paths = export_games(made.source, list(made.task_ids())[:3], tmp_path)
    loader = object.__new__(module.AlfredTWEnv)
    loader.train_eval = "eval_out_of_distribution"
    loader.config = {
        "dataset": {"eval_ood_data_path": str(tmp_path / "json_2.1.1" / "valid_unseen"), "num_eval_games": -1},
        "env": {"task_types": [1, 2, 3, 4, 5, 6]},
    }
    loader.collect_game_files()
    assert sorted(loader.game_files) == sorted(map(str, paths))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.main(["export-games", PANEL, "--out", str(tmp_path), "--limit", "3"]) == 0
    assert "3 games in" in capsys.readouterr().out
    assert len(list(tmp_path.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl"))) == 3
    assert (
        verb.main(["export-games", "--env-kwargs", '{"config": "full"}', "--out", str(tmp_path), "--limit", "2"]) == 0
    )
    assert len(list(tmp_path.glob("json_2.1.1/train/*/*/game.tw-pddl"))) == 2
    for words, says in (
        (["search-quickstart"], "its tasks are of turngym/Search-v0"),
        ([PANEL, "--env-kwargs", '{"config": "full"}'], "needs the games of the environment (no panel)"),
        ([PANEL, "--limit", "0"], "--limit is "),
    ):
        assert says in expect(TurngymError, verb.main, ["export-games", *words, "--out", str(tmp_path)])


def test_real_games_are_files_already(tmp_path: Path) -> None:
    made = ALFWorldEnv()
    export_games(made.source, [made.task_ids()[0]], tmp_path)
    real = ALFWorldEnv(split="train", data=tmp_path)
    with pytest.raises(TaskError, match="its games are files already"):
        export_games(real.source, real.task_ids(), tmp_path / "again")
