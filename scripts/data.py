"""Get the original benchmarks' data, and say where they are looked for.

Examples:
    turngym data list
    turngym data get alfworld
    turngym data get webshop --mirror https://example.org/webshop
    turngym data verify alfworld
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.data_sets import DATA_SETS, data_set, get
from turngym.core.setting import Positional
from turngym.core.spec import Spec
from turngym.core.strict_json import json_object
from turngym.envs.panels import list_panels, load_panel
from turngym.scripts.options import run_verb
from turngym.scripts.panel import verify

Name = Positional[str]


class Get(Spec):
    """Fetch a data set (alfworld, webshop, search) into the folder where everything looks for it."""

    name: Name
    """alfworld, webshop or search."""
    out: Path | None = None
    """Another folder; then name it as --data, or in the data set's variable."""
    mirror: str | None = None
    """Address below which the files lie under their names, in the place of the published ones."""
    sha256: str = "{}"
    """Hashes that files must have, as JSON: '{"FILE": "HASH"}'."""


class List(Spec):
    """List the data sets, and whether they are here."""


class Where(Spec):
    """Print the folder in which a data set is looked for."""

    name: Name
    """alfworld, webshop or search."""


class Verify(Spec):
    """Compare a data set, task by task, with the panels that hold its hashes; status 1 if any differs."""

    name: Name
    """alfworld, webshop or search."""
    data: Path | None = None
    """Its folder; by default where it is looked for."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym data` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {Get: _get, List: _list, Where: _where, Verify: _verify}
    return run_verb(verbs, argv, prog="turngym data", about=__doc__)


def _get(command: Get) -> int:
    hashes = {name: str(value) for name, value in json_object("--sha256", command.sha256).items()}
    folder = get(command.name, out=command.out, mirror=command.mirror, sha256=hashes)
    print(f"{command.name} is in {folder}; `turngym data verify {command.name}` compares it with the panels")
    return 0


def _list(command: List) -> int:
    for name, data in DATA_SETS.items():
        folder = data.folder()
        where = "here" if folder.is_dir() and any(folder.iterdir()) else f"not here: turngym data get {name}"
        print(f"{name:<10} {data.about}\n{'':<10} {folder} (${data.variable}), {where}")
    return 0


def _where(command: Where) -> int:
    print(data_set(command.name).folder())
    return 0


def _verify(command: Verify) -> int:
    data = data_set(command.name)
    folder = data.folder(command.data)
    panels = [*data.panels]
    if command.name == "search":
        panels = [str(folder / f"{name}.json") for name in list_panels(folder)]
    if not panels:
        print(f"{folder} holds no panel; `turngym data get {command.name}` writes them")
        return 1
    return max(verify(load_panel(name), data=folder) for name in panels)
