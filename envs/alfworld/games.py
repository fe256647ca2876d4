"""Where games come from: real ones from the folders of `alfworld-download`, generated ones from a configuration.

`export_games` writes generated games as the files of `alfworld-download`, for TextWorld, alfworld's own loader and
other engines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from turngym.core.errors import TaskError, checked_choice
from turngym.core.rows import stat_stamp
from turngym.core.sequences import LazySequence
from turngym.core.user_files import user_path
from turngym.core.whole_files import atomic_write
from turngym.envs.alfworld.game import Game, load_game, read_game_file
from turngym.envs.alfworld.generate import UNSEEN, generate, parse_task_id
from turngym.envs.alfworld.pddl import GameError
from turngym.envs.alfworld.priors import CATEGORIES, GeneratorConfig, Part

SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
"""Splits of real games; `valid_unseen` is alfworld's `eval_out_of_distribution`."""
VARIABLE = "ALFWORLD_DATA"
ROOT_FOLDER = "json_2.1.1"
DEFAULT_FOLDER = "~/.cache/alfworld"
"""Where `alfworld-download` puts games, and alfworld looks for them, unless the variable is set."""
GAME_FILE = "game.tw-pddl"


class RealGames:
    """Games of `alfworld-download`, read when they are asked for. Ids are `<split>/<task>/<trial>`, sorted."""

    def __init__(self, root: Path, split: str) -> None:
        """`root` holds the split folders. Raises TaskError where it has no games of `split`."""
        folder = root / split
        if not folder.is_dir():
            raise TaskError(f"{root} has no folder {split!r}; it was not downloaded or not unpacked")
        self.root = root
        self.split = split
        try:
            self.task_ids: Sequence[str] = _listed(root, split)
        except OSError as error:
            raise TaskError(f"{error.filename} cannot be read: {error.strerror}") from error

    def data(self, task_id: str) -> dict[str, Any]:
        """The content of the game file."""
        return read_game_file(self.root / task_id / GAME_FILE)

    def game(self, task_id: str) -> Game:
        """The game, ready for the native engine."""
        return load_game(self.root / task_id / GAME_FILE)

    def category(self, task_id: str) -> str | None:
        """Row of the result tables, from the folder name `<task type>-<object>-<...>`; None for other names."""
        return CATEGORIES.get(task_id.split("/")[1].split("-")[0])


def _listed(root: Path, split: str) -> tuple[str, ...]:
    """The playable games of a split, sorted, as the files are now: 3,553 of them take 40 ms once each was read."""
    ids, unsolved, unsupported = [], 0, 0
    with os.scandir(root / split) as tasks:
        for task in tasks:
            if not task.is_dir():
                continue
            with os.scandir(task.path) as trials:
                for trial in trials:
                    path = os.path.join(trial.path, GAME_FILE)
                    try:
                        stat = os.stat(path)
                    except OSError:
                        continue
                    task_id = f"{split}/{task.name}/{trial.name}"
                    if any(word in task_id for word in _UNSUPPORTED):
                        unsupported += 1
                    elif _is_solvable(path, stat_stamp(stat)):
                        ids.append(task_id)
                    else:
                        unsolved += 1
    if not ids:
        raise TaskError(
            f"{root / split} has no games to play: expected <task>/<trial>/{GAME_FILE} below it that say "
            f'"solvable": true; {unsolved} do not, and {unsupported} have movable receptacles or sliced objects'
        )
    return tuple(sorted(ids))


_UNSUPPORTED = ("movable", "Sliced")
"""Folders that alfworld's own loader passes by."""
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*(\w*)')
_TAIL = 1 << 14
"""Bytes at the end of a game file in which `solvable` is looked for before the whole file is read."""


@lru_cache(maxsize=1 << 13)
def _is_solvable(path: str, _stamp: tuple[int, ...]) -> bool:
    """False for a game that says of itself that it is not solvable, or does not say that it is.

    alfworld's own loader passes such games by; `alfworld-generate` writes null, then true or false once it has tried.
    A damaged file counts as a game, so that its task is refused by name.
    """
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL))
        if set(_SOLVABLE.findall(file.read(_TAIL))) == {b"true"}:
            return True
    try:
        return bool(read_game_file(path).get("solvable"))
    except GameError:
        return True


def find_root(data: str | Path | None = None) -> Path:
    """The folder with the split folders, with or without `json_2.1.1` at its end.

    It is `data`, else `$ALFWORLD_DATA`, else where `alfworld-download` puts games without that variable.
    Raises TaskError that says how to get the games.
    """
    named = data if data is not None else os.environ.get(VARIABLE)
    root = user_path(named or DEFAULT_FOLDER)
    for folder in (root / ROOT_FOLDER, root):
        if any((folder / split).is_dir() for split in SPLITS):
            return folder
    if not named:
        raise TaskError(
            f"real ALFWorld games need data: set {VARIABLE}, or pass data=; `turngym data get alfworld` (or "
            f"alfworld's own alfworld-download) fetches the games into {DEFAULT_FOLDER}, where none are now. "
            "split='generated' needs no data"
        )
    source = "data=" if data is not None else f"${VARIABLE}"
    raise TaskError(
        f"{source} is {str(root)!r}, which has no ALFWorld games: expected "
        f"{ROOT_FOLDER}/{SPLITS[0]}/<task>/<trial>/{GAME_FILE} below it, as `turngym data get alfworld` makes them"
    )


class GeneratedGames:
    """Games made from a configuration when they are asked for; the 256 last used are kept."""

    def __init__(self, config: GeneratorConfig, part: Part, split: str = "generated") -> None:
        checked_choice("part", part, get_args(Part), TaskError)
        self.split = split
        self.config = config
        self.task_ids: Sequence[str] = GeneratedIds(config, part)

    def data(self, task_id: str) -> dict[str, Any]:
        return dict(self.game(task_id).data)

    def game(self, task_id: str) -> Game:
        return _generated(self.config, *parse_task_id(task_id)[1:])

    def category(self, task_id: str) -> str | None:
        return CATEGORIES[self.game(task_id).data["task_type"]]


GameSource = RealGames | GeneratedGames
"""Where an environment gets its games from."""


class GeneratedIds(LazySequence[str]):
    """`generated/<config>/<part>/0` and so on, unlisted numbers and the other part included in `in`, not in `len`."""

    def __init__(self, config: GeneratorConfig, part: Part) -> None:
        self._name = config.name
        self._part = part
        self._size = config.size(part)

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> str:
        return f"generated/{self._name}/{self._part}/{index}"

    def __contains__(self, task_id: object) -> bool:
        try:
            name, part, number = parse_task_id(str(task_id))
        except TaskError:
            return False
        # `007` is parsed as a number, but is no id
        return name == self._name and task_id == f"generated/{name}/{part}/{number}"


@lru_cache(maxsize=256)
def _generated(config: GeneratorConfig, part: Part, number: int) -> Game:
    return Game(generate(config, part, number), source=f"generated/{config.name}/{part}/{number}")


FOLDERS = {"train": "train", "eval": "valid_seen", UNSEEN: "valid_unseen"}
"""Where a game goes by its part; unseen houses are alfworld's evaluation out of distribution."""


def export_games(source: GameSource, task_ids: Iterable[str], out: str | Path) -> list[Path]:
    """Write the games of `source` below `out`, as `json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`; the files' paths.

    Beside each stands the `traj_data.json` without which alfworld's loader passes a game by; it holds the task type
    alone.

    Raises:
        TaskError: the games are not generated ones, an id is unknown, or a file of that name has another content.
    """
    if not isinstance(source, GeneratedGames):
        raise TaskError(f"split {source.split!r}: its games are files already; generated games can be exported")
    root = user_path(out) / ROOT_FOLDER
    written = []
    for task_id in task_ids:
        if task_id not in source.task_ids:
            raise TaskError(f"unknown task {task_id!r}; ids are such as {source.task_ids[0]!r}")
        config, part, number = parse_task_id(task_id)
        data = source.data(task_id)
        split = FOLDERS[UNSEEN if source.split == UNSEEN else part]
        trial = root / split / f"{data['task_type']}-{config}-{part}-{number}" / f"trial_T{number}"
        trial.mkdir(parents=True, exist_ok=True)
        kind = json.dumps({"task_type": data["task_type"], "task_id": task_id})
        for name, text in ((GAME_FILE, json.dumps(data, ensure_ascii=False)), ("traj_data.json", kind)):
            path = trial / name
            if not path.exists():
                # whole or not at all: half a game would look like a damaged one
                with atomic_write(path) as file:
                    file.write(text)
            elif path.read_bytes() != text.encode("utf-8"):
                raise TaskError(f"{path} exists with other content; give another folder")
        written.append(trial / GAME_FILE)
    return written
