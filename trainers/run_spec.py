"""A run's settings as they are resolved: what its checkpoints hold, and what a run that goes on must share.

`RunFolder` compares them: what a setting names by its content (`content_hashes.of_run`), and all by what a difference
means (`turngym.agents.meaning`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.play_panel import PanelEvaluation
from turngym.agents.play_spec import game_of
from turngym.core.spec import to_table
from turngym.trainers.several_envs import FurtherEnv
from turngym.trainers.student_player import RunEnv
from turngym.trainers.train_config import TrainConfig


def spec_of_run(
    config: TrainConfig,
    envs: Mapping[str, RunEnv],
    further: Sequence[FurtherEnv],
    panels: Mapping[str, PanelEvaluation],
) -> dict[str, Any]:
    """The settings of a run as a table, with what its environments, its student's folder and its panels say.

    `envs` and `panels` go by the names of environments; the run's own is "", `further` are those of --also.
    """

    def settings_in(name: str) -> dict[str, Any]:
        student, panel = envs[name].student, panels.get(name)
        return {
            "play": to_table(student.game),
            "chat": to_table(student.chat),
            "evaluation": None if panel is None else _evaluation(panel),
        }

    also = {
        item.name: {"share": item.share, "teacher": None if item.teacher is None else str(item.teacher)}
        | settings_in(item.name)
        for item in further
    }
    own = settings_in("")
    return {**to_table(config), **own, "play": {**own["play"], "also": also}}


def _evaluation(panel: PanelEvaluation) -> dict[str, Any]:
    """The settings that evaluations of one curve share."""
    spec = panel.evaluation.spec
    game = game_of(spec)
    # a name and no file: its hash says what is in it
    tasks = {**game["tasks"], "panel": Path(game["tasks"]["panel"]).stem}
    return {**game, "tasks": tasks, "scoring": spec.play.scoring}
