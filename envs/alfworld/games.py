"""Generated games as the files of `alfworld-download`: for TextWorld, for alfworld's own loader, for other engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, get_args, overload

from turngym.envs.alfworld.game import GAME_FILE, ROOT_FOLDER, Game, GameFolder, load_game, read_game_file
from turngym.envs.alfworld.generate import SPLIT as UNSEEN
from turngym.envs.alfworld.generate import generate, parse_task_id
from turngym.envs.alfworld.priors import GeneratorConfig, Part
from turngym.envs.core.errors import TaskError

# A split as a source of games: real ones from folders, generated ones from their configuration.

CATEGORIES = {
    "pick_and_place_simple": "place",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
"""Row of the result tables by task type."""


class GameSource(Protocol):
    """Where an environment gets its games from."""

    split: str
    task_ids: Sequence[str]

    def data(self, task_id: str) -> dict[str, Any]:
        """The content of the game file."""

    def game(self, task_id: str) -> Game:
        """The game, ready for the native engine."""

    def category(self, task_id: str) -> str | None:
        """Row of the result tables, if the source knows it without reading the goal."""


class RealGames:
    """Games of `alfworld-download`, read when they are asked for."""

    def __init__(self, folder: GameFolder) -> None:
        self.split = folder.split
        self.folder = folder
        self.task_ids = folder.task_ids

    def data(self, task_id: str) -> dict[str, Any]:
        return read_game_file(self.folder.path(task_id))

    def game(self, task_id: str) -> Game:
        return load_game(self.folder.path(task_id))

    def category(self, task_id: str) -> str | None:
        """From the folder name, `<task type>-<object>-<...>`; traj_data.json is not needed."""
        return CATEGORIES.get(task_id.split("/")[1].split("-")[0])


class GeneratedGames:
    """Games made from a configuration when they are asked for; the 256 last used are kept."""

    def __init__(self, config: GeneratorConfig, part: Part, split: str = "generated") -> None:
        if part not in get_args(Part):
            raise TaskError(f"part is {part!r}; generated games have the parts {' and '.join(get_args(Part))}")
        self.split = split
        self.config = config
        self.task_ids: Sequence[str] = GeneratedIds(config, part)

    def data(self, task_id: str) -> dict[str, Any]:
        return dict(self.game(task_id).data)

    def game(self, task_id: str) -> Game:
        _, part, number = parse_task_id(task_id)
        return _generated(self.config, part, number)

    def category(self, task_id: str) -> str | None:
        return CATEGORIES[self.game(task_id).data["task_type"]]


class GeneratedIds(Sequence[str]):
    """`generated/<config>/<part>/0` and so on, unlisted numbers and the other part included in `in`, not in `len`."""

    def __init__(self, config: GeneratorConfig, part: Part) -> None:
        self._name = config.name
        self._part = part
        self._size = config.size(part)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._size))]
        number = range(self._size)[index]
        return f"generated/{self._name}/{self._part}/{number}"

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(self._size))

    def __contains__(self, task_id: object) -> bool:
        try:
            name, part, number = parse_task_id(str(task_id))
        except TaskError:
            return False
        # `007` is parsed as a number, but is no id
        return name == self._name and task_id == f"generated/{name}/{part}/{number}"


@lru_cache(maxsize=256)
def _generated(config: GeneratorConfig, part: Part, number: int) -> Game:
    data = generate(config, part, number)
    return Game(data, source=f"generated/{config.name}/{part}/{number}")


FOLDERS = {"train": "train", "eval": "valid_seen", UNSEEN: "valid_unseen"}
"""Where a game goes by its part; houses that training never shows are alfworld's evaluation out of distribution."""


def export_games(source: GameSource, task_ids: Iterable[str], out: str | Path) -> list[Path]:
    """Write the games of `source` below `out`, as `json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`; the files' paths.

    Beside each stands the `traj_data.json` without which alfworld's loader passes a game by; it holds the task type
    alone.

    Raises:
        TaskError: the games are not generated ones, an id is unknown, or a file of that name has another content.
    """
    if not isinstance(source, GeneratedGames):
        raise TaskError(f"split {source.split!r}: its games are files already; generated games can be exported")
    root = Path(out).expanduser() / ROOT_FOLDER
    written = []
    for task_id in task_ids:
        if task_id not in source.task_ids:
            raise TaskError(f"unknown task {task_id!r}; ids are such as {source.task_ids[0]!r}")
        config, part, number = parse_task_id(task_id)
        data = source.data(task_id)
        split = FOLDERS[UNSEEN if source.split == UNSEEN else part]
        trial = root / split / f"{data['task_type']}-{config}-{part}-{number}" / f"trial_T{number}"
        trial.mkdir(parents=True, exist_ok=True)
        _write(trial / GAME_FILE, json.dumps(data, ensure_ascii=False))
        _write(trial / "traj_data.json", json.dumps({"task_type": data["task_type"], "task_id": task_id}))
        written.append(trial / GAME_FILE)
    return written


def _write(path: Path, text: str) -> None:
    if path.exists():
        if path.read_text(encoding="utf-8") != text:
            raise TaskError(f"{path} exists with other content; give another folder")
        return
    # whole or not at all: half a game would look like a damaged one
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)
