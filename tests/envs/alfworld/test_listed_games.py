"""Which real games are tasks: those that alfworld's own loader takes, wherever `alfworld-download` put them."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import alfworld_house as houses
import pytest

from turngym.core.errors import TaskError
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.game import KEYS, load_game
from turngym.envs.alfworld.games import RealGames, find_root
from turngym.envs.alfworld.pddl import GameError, GameUnsupported

house = houses.house
TASK = "pick_and_place_simple-Mug-None-Fridge-1"


def write(root: Path, name: str, data: Any, split: str = "train") -> Path:
    path = root / split / name / "game.tw-pddl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def listed(root: Path) -> list[str]:
    return [task_id.removeprefix("train/") for task_id in RealGames(root, "train").task_ids]


def test_games_that_alfworld_leaves_out_are_no_tasks(tmp_path: Path) -> None:
    sound = house()
    without = {key: value for key, value in sound.items() if key != "solvable"}
    write(tmp_path, f"{TASK}/sound", sound)
    # a long walkthrough puts `solvable` far from the end of the file
    write(tmp_path, f"{TASK}/far", sound | {"walkthrough": ["look"] * 10_000})
    write(tmp_path, f"{TASK}/spaced", json.dumps(sound, indent=4).replace('"solvable": true', '"solvable"  :\n true'))
    # before they are solved, the games of `alfworld-generate` say null
    write(tmp_path, f"{TASK}/false", sound | {"solvable": False, "walkthrough": None})
    write(tmp_path, f"{TASK}/null", sound | {"solvable": None, "walkthrough": None})
    write(tmp_path, f"{TASK}/missing", without)
    write(tmp_path, f"{TASK}/text", without | {"walkthrough": ['"solvable": true', '"solvable": true']})
    write(tmp_path, f"{TASK}/last", json.dumps(without | {"solvable": True})[:-1] + ', "solvable": false}')
    write(tmp_path, "pick_and_place_with_movable_recep-Pen-Bowl-Desk-308/t", sound)
    write(tmp_path, "pick_and_place_simple-AppleSliced-None-Fridge-1/t", sound)
    (tmp_path / "train" / TASK / "empty").mkdir()
    (tmp_path / "train" / "file").write_text("")
    assert listed(tmp_path) == [f"{TASK}/far", f"{TASK}/sound", f"{TASK}/spaced"]
    env = ALFWorldEnv(split="train", data=tmp_path)
    with pytest.raises(TaskError, match="unknown task"):
        env.reset(options={"task": f"train/{TASK}/false"})
    # only what lies below the split counts, not the folders above it
    write(tmp_path / "movable", f"{TASK}/sound", sound)
    assert listed(tmp_path / "movable") == [f"{TASK}/sound"]


def test_a_split_without_a_playable_game_says_why(tmp_path: Path) -> None:
    write(tmp_path, f"{TASK}/false", house() | {"solvable": False})
    write(tmp_path, f"{TASK}Sliced/sound", house())
    with pytest.raises(TaskError, match="1 do not, and 1 have movable receptacles"):
        RealGames(tmp_path, "train")


def test_the_list_is_as_the_files_are(tmp_path: Path) -> None:
    first = write(tmp_path, f"{TASK}/a", house())
    assert listed(tmp_path) == [f"{TASK}/a"]
    write(tmp_path, f"{TASK}/b", house())
    assert listed(tmp_path) == [f"{TASK}/a", f"{TASK}/b"]
    # in place, as `alfworld-generate` writes it
    first.write_text(json.dumps(house() | {"solvable": None}), encoding="utf-8")
    assert listed(tmp_path) == [f"{TASK}/b"]
    first.write_text(json.dumps(house()), encoding="utf-8")
    (tmp_path / "train" / TASK / "b" / "game.tw-pddl").unlink()
    assert listed(tmp_path) == [f"{TASK}/a"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f"{TASK}/a", house())
    real = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith(TASK):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(TaskError, match=rf"{TASK} cannot be read: Permission denied"):
        RealGames(tmp_path, "train")


def test_an_edited_game_is_another_task(tmp_path: Path) -> None:
    path = write(tmp_path, f"{TASK}/a", house())
    env = ALFWorldEnv(split="train", data=tmp_path)
    first = env.reset()[1]["task_sha"]
    times = path.stat()
    path.write_text(path.read_text().replace("some mug on fridge", "some mug in fridge"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    observation, info = env.reset()
    assert "in fridge" in observation
    assert info["task_sha"] != first


def test_games_without_a_variable_lie_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TaskError, match=r"~/\.cache/alfworld, where none are now"):
        find_root()
    write(tmp_path / ".cache" / "alfworld" / "json_2.1.1", f"{TASK}/a", house())
    assert find_root() == tmp_path / ".cache" / "alfworld" / "json_2.1.1"
    env = ALFWorldEnv(split="train")
    assert env.reset()[1]["task_id"] == f"train/{TASK}/a"
    # what is named comes first, and is not replaced by what is found
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "other"))
    with pytest.raises(TaskError, match=r"\$ALFWORLD_DATA is .*other.*has no ALFWorld games"):
        find_root()
    write(tmp_path / "mine", f"{TASK}/a", house())
    assert find_root("~/mine") == tmp_path / "mine"


class Written(str):
    """A value as it stands in the file."""


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, math.nan, math.inf, "", "x", "true", "\ud800", "a\0b"),
    *([], [None], [1], ["look"], ["\ud800"], [["a"]], {}, {"a": 1}),
    *map(Written, ("[" * 900 + "]" * 900, "[" * 100_000, "9" * 5000, "tru", '"\\ud800"')),
]


@pytest.mark.parametrize("key", [*KEYS, "walkthrough", "solvable", "task_type", "something else"])
def test_every_kind_of_value_under_every_key_is_played_or_refused(tmp_path: Path, key: str) -> None:
    for value in VALUES:
        fields = house() | {key: value}
        text = ", ".join(
            f"{json.dumps(name)}: {field if isinstance(field, Written) else json.dumps(field)}"
            for name, field in fields.items()
        )
        path = write(tmp_path, f"{TASK}/a", f"{{{text}}}")
        try:
            env = ALFWorldEnv(split="train", data=tmp_path)
        except TaskError:
            assert key == "solvable"
            assert not value
            continue
        error = refusal(env)
        if error is not None:
            assert str(path) in error
            assert "\n" not in error
            assert len(error) < len(str(path)) + 500


def refusal(env: ALFWorldEnv) -> str | None:
    """Why the first game is refused; None where it is played."""
    try:
        observation, _ = env.reset()
    except GameError as error:
        return str(error)
    assert observation.encode()
    assert env.step("look")[0].encode()
    return None


def test_a_game_file_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, f"{TASK}/a", house() | {"something else": "x" * (1 << 24)})
    with pytest.raises(GameError, match="more than 16,777,216 bytes"):
        load_game(path)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ('{"list_empty": [null]}', "a block of rules must map names to lists of objects"),
        ('{"list_empty": ["text"]}', "a block of rules must map names to lists of objects"),
        ('{"list_empty": [{"rhs": ' + "9" * 5000 + "}]}", "a block of rules is not JSON"),
        ("[" * 100_000, "it is nested too deep"),
    ],
)
def test_grammars_with_rules_of_another_kind(block: str, said: str) -> None:
    data = house()
    data["grammar"] += f'\ngrammar :: """\n{block}\n""";\n'
    with pytest.raises(GameError, match=said):
        load_game(data)


# --- games of alfworld's own generator, whose domain and grammar are those of its package


def test_games_with_the_domain_of_the_package_are_played() -> None:
    ours, theirs = (NativeEngine(load_game(data)) for data in (house(), houses.by_the_package(house())))
    assert ours.reset() == theirs.reset()
    for command in (
        "help",
        "go to countertop 1",
        "take spoon 1 from countertop 1",
        "go to sinkbasin 1",
        "clean spoon 1 with sinkbasin 1",
        "examine spoon 1",
    ):
        assert command in theirs.admissible()
        assert ours.step(command) == theirs.step(command)
        assert ours.admissible() == theirs.admissible()
    assert ours.game.sha256 != theirs.game.sha256


def test_a_sink_that_is_no_basin_does_not_clean_there() -> None:
    ours, theirs = house(), houses.by_the_package(house())
    for data in (ours, theirs):
        data["pddl_problem"] = data["pddl_problem"].replace("SinkBasinType", "SinkType")
    assert load_game(ours)
    with pytest.raises(GameUnsupported, match="a sink that is no basin"):
        load_game(theirs)
