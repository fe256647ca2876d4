"""Options of the quickstart, and the plan that they make with a world's own choices filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turngym.agents.models import require_model
from turngym.agents.worlds import load_world
from turngym.agents.worlds.world import EmbeddedWorld
from turngym.envs.core import TurngymError
from turngym.envs.panels import load_panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """The whole path on one machine: play, distill turn by turn, evaluate."""

    env: str = "alfworld"
    """Embedded world: alfworld, alfworld-loops, webshop, search or search-loops."""
    out: Path | None = None
    """Folder for everything that is written; by default runs/quickstart, for another world runs/quickstart-NAME."""
    steps: int | None = None
    """Training steps of each method, if not the world's."""
    student: Path | None = None
    """Folder of the model to train, if not the one that comes with turngym."""
    teacher: Path | None = None
    """Folder of the model to learn from, if not the one that comes with turngym."""
    panel: str | None = None
    """Tasks of the evaluations, never trained on, if not the world's."""
    split: str | None = None
    """Split to train on, if not the world's; `train` takes the real games of $ALFWORLD_DATA."""
    samples: int = 4
    """Episodes per task of the evaluations before and after."""
    limit: int | None = None
    """Evaluate on the first so many tasks only."""
    methods: tuple[str, ...] = ("opd", "turnopd")
    """Algorithms to compare."""
    seed: int = 0
    """Fixes tasks and sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options with the world's own choices filled in."""

    world: EmbeddedWorld
    out: Path
    steps: int
    student: Path
    teacher: Path
    panel: str
    split: str
    samples: int
    limit: int | None
    methods: tuple[str, ...]
    seed: int

    @classmethod
    def of(cls, options: Quickstart) -> Plan:
        world = load_world(options.env)
        suffix = "" if world.name == "alfworld" else f"-{world.name}"
        return cls(
            world=world,
            out=options.out or Path(f"runs/quickstart{suffix}"),
            steps=world.distill.steps if options.steps is None else options.steps,
            student=options.student or world.checkpoint("student"),
            teacher=options.teacher or world.checkpoint("teacher"),
            panel=options.panel or world.panel,
            split=options.split or world.split,
            samples=options.samples,
            limit=options.limit,
            methods=options.methods,
            seed=options.seed,
        )

    @property
    def episodes(self) -> int:
        """Of one evaluation before or after training."""
        return len(load_panel(self.panel).tasks[: self.limit]) * self.samples

    def check(self) -> None:
        """Raises TurngymError for a panel or model that is not there: before anything runs."""
        load_panel(self.panel)
        for model in (self.teacher, self.student):
            require_model(model)

    def trained(self, method: str) -> Path:
        """The newest model of a method."""
        folder = self.out / method
        found = max(folder.glob("checkpoints/step_*/model"), default=None)
        if found is None:
            raise TurngymError(f"no checkpoint in {folder}: remove the folder and run quickstart again")
        return found
