"""Options of `turngym bench learn`, and how much each run trains by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.learn.recipes import MUST_RISE, setup_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnBench:
    """What is trained, and on what it is measured."""

    out: Path = Path("runs/learn")
    """Folder of the runs, report.md, learn.png and learn.json."""
    env: str = "alfworld"
    """Embedded world: alfworld, webshop or search."""
    algorithms: tuple[str, ...] = ()
    """Rows of the table (default: all); what they are compared with comes along."""
    seeds: int = 3
    """Runs per row: seeds 0, 1, ...; twice as many of the rows that must rise, whose intervals decide."""
    steps: int | None = None
    """Training steps of every run (default: 24, in the search world 36)."""
    episodes: int | None = None
    """Episodes per training step; whole groups of 8 (default: 64, in the search world 256)."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 4
    """Episodes per task and evaluation: Avg@n."""
    evaluations: int = 2
    """Evaluations after the one before step 1, evenly spaced; the last is after the last step."""
    parallel: int = 2
    """Runs at a time, one thread each."""
    report: bool = True
    """Write the report; --no-report only trains."""

    def seeds_of(self, row: str) -> range:
        """The seeds of a row of the table."""
        return range(self.seeds * (2 if row in MUST_RISE else 1))

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "episodes", "tasks", "samples", "evaluations", "parallel"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise TurngymError(f"--{name} is {value}; valid: at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much every run trains, and how often it is evaluated."""

    steps: int
    episodes: int
    """Per step."""
    every: int
    """Steps between evaluations."""


def size_of(options: LearnBench, world: EmbeddedWorld) -> Size:
    """What the user says, or else what the world needs. Raises TurngymError if evaluations cannot be evenly spaced."""
    setup = setup_of(world.name)
    steps = options.steps or setup.steps
    if steps % options.evaluations:
        raise TurngymError(f"--steps {steps} cannot be cut into {options.evaluations} equal parts (--evaluations)")
    return Size(steps=steps, episodes=options.episodes or setup.episodes, every=steps // options.evaluations)
