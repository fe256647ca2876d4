"""Options of `turngym study turnopd`, and how much each cell trains by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from turngym.agents.worlds import WORLDS
from turngym.envs.core.errors import TurngymError


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Which cells are run, how much, and where."""

    out: Path = Path("runs/study")
    """Folder of the cells and, under tables/, of the report; several processes and machines may share it."""
    worlds: tuple[str, ...] = tuple(WORLDS)
    """Embedded worlds."""
    methods: tuple[str, ...] = ("main", "ablation", "sweep", "fixed", "family")
    """Rows, by name (opd, tcod, turnopd, depth-only, ...) or by group: main, ablation, sweep, fixed, family."""
    base: bool = True
    """OPD comes along, which all others are compared with; --no-base where its cells are in another --data file."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every method is run with each of them."""
    steps: int = 100
    """Training steps K_total of every cell."""
    episodes: int | None = None
    """Episodes per training step, if not the world's."""
    max_turns: int | None = None
    """Full depth, if not the worlds'."""
    student: Path | None = None
    """Folder of another student than the world's; needs one world."""
    teacher: Path | None = None
    """Folder of another teacher than the world's; needs one world."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 4
    """Episodes per task and evaluation: Avg@n."""
    evaluations: int = 10
    """Evaluations after the one before step 1, evenly spaced; the last is after the last step."""
    parallel: int = 2
    """Cells at a time in this process, one thread each."""
    short: bool = False
    """A form that ends in minutes: one seed, the main methods and partial probes, few steps, tasks and samples. Shows
    that the machinery works, and nothing else."""
    run: bool = True
    """Run cells; --no-run only writes the tables of those that are done."""
    data: tuple[Path, ...] = ()
    """study.json (or study.json.gz) of one or several earlier studies: make tables of all their cells, run nothing."""

    def __post_init__(self) -> None:
        for name in ("steps", "tasks", "samples", "evaluations", "parallel"):
            if getattr(self, name) < 1:
                raise TurngymError(f"--{name} is {getattr(self, name)}; valid: at least 1")
        if self.steps % self.evaluations:
            raise TurngymError(
                f"--steps {self.steps} cannot be cut into {self.evaluations} equal parts (--evaluations)"
            )
        if not self.worlds or not self.seeds:
            raise TurngymError("a study needs at least one of --worlds and one of --seeds")
        if (self.student or self.teacher) and len(self.worlds) != 1:
            raise TurngymError("--student and --teacher belong to one world: give --worlds one name")


SHORT = StudyOptions(
    short=True,
    methods=("main", "partial"),
    seeds=(0,),
    steps=12,
    episodes=24,
    tasks=24,
    samples=1,
    evaluations=4,
)
"""What --short means; what is given beside it counts."""


def shortened(options: StudyOptions) -> StudyOptions:
    """`options` with those of `SHORT` in place of what was left at its default."""
    default = StudyOptions()
    changed = {
        name: getattr(SHORT, name)
        for name in ("methods", "seeds", "steps", "episodes", "tasks", "samples", "evaluations")
        if getattr(options, name) == getattr(default, name)
    }
    return replace(options, **changed) if options.short else options
