"""The panels of a place: made where they are missing, never of tasks that the other one holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from turngym.envs.panels import assert_disjoint, load_panel, panel_of_env, write_panel
from turngym.scripts.bench.scenarios.scenario import Place

Use = Literal["chosen", "reported"]


def panel_path(folder: Path, place: Place, use: Use) -> Path:
    """Where the manifest of a panel is."""
    return folder / f"{place.name}-{use}-v1.json"


def write_panels(folder: Path, place: Place) -> None:
    """Write both panels of `place` to `folder`, unless they are there.

    Raises PanelError if they share a task, by id or by content, or if one is there with other content.
    """
    if panel_path(folder, place, "chosen").exists() and panel_path(folder, place, "reported").exists():
        return
    make, env_id = place.panel_make(), place.opened().env_id
    chosen = panel_of_env(f"{place.name}-chosen", env_id, make_kwargs=make, task_ids=place.chosen)
    reported = panel_of_env(f"{place.name}-reported", env_id, make_kwargs=make, task_ids=place.reported)
    assert_disjoint(chosen.tasks, reported.tasks)
    for panel in (chosen, reported):
        load_panel(str(write_panel(panel, folder)))
