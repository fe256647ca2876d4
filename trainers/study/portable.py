"""The settings of a cell as they are on every machine: models and texts by name, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turngym.agents.meaning import meaning
from turngym.agents.worlds.worlds import model_folders
from turngym.core.nested import at, put
from turngym.core.resolve import merged

PATHS = ("models.student", "method.teacher.teacher", "method.lm_loss.files", "agent.folder")
"""Settings that name models and texts."""


def with_paths(settings: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """`settings` with the paths of models and of texts as `name_of` names them: they lie elsewhere on another
    machine."""
    renamed = merged([settings])
    for path in PATHS:
        value = at(renamed, path)
        if isinstance(value, str):
            put(renamed, path, name_of(value))
        elif isinstance(value, list | tuple):
            put(renamed, path, [name_of(str(item)) for item in value])
    return renamed


def portable(settings: Mapping[str, Any], cells: Path) -> dict[str, Any]:
    """`settings`, with names in the place of the folders of models that come along or were made in the folder `cells`,
    and of texts that were made beside it.

    Records are published, and a machine's folders concern nobody.
    """

    def name_of(text: str) -> str:
        path = Path(text).absolute()
        roots = (*model_folders(), cells.absolute(), cells.absolute().parent)
        root = next((candidate for candidate in roots if path.is_relative_to(candidate)), None)
        return text if root is None else path.relative_to(root).as_posix()

    return with_paths(settings, name_of)


def last_names(path: object) -> str:
    """The last two names of a path, which are the same on every machine; for a checkpoint its run's name as well."""
    parts = Path(str(path)).parts
    is_checkpoint = parts[-3:-2] == ("checkpoints",) and parts[-1] == "model"
    return "/".join(parts[-4 if is_checkpoint else -2 :])


def counts(path: str) -> bool:
    """Whether cells that differ in a setting are no seeds of one method."""
    # a record knows a model by its folder alone
    return path in PATHS or meaning(path) != "cost"
