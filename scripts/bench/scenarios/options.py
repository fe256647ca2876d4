"""Options of `turngym bench scenarios`, and how much each run trains by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.learn.options import Size
from turngym.scripts.bench.learn.words import Measured
from turngym.scripts.bench.scenarios.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenariosBench:
    """Which scenarios are trained, and on what they are measured."""

    out: Path = Path("runs/scenarios")
    """Folder of the runs, panels, texts, report.md, scenarios.png and scenarios.json."""
    scenarios: tuple[str, ...] = ()
    """Which of them (default: all): luffy, prm-rl, hints, grpo-kd, text, ppo-kd."""
    seeds: int = 3
    """Runs per arm: seeds 1, 2, ... Settings were chosen on seed 0."""
    chosen: bool = False
    """Play what settings were chosen on instead: seed 0 and the other panel."""
    tasks: int = 100
    """Tasks of the panel that are evaluated on."""
    samples: int = 2
    """Episodes per task and evaluation: Avg@n."""
    short: bool = False
    """One seed, two steps of few episodes and few tasks: to see that everything works, not what comes of it."""
    run: bool = True
    """Train what is missing; --no-run reports what is there."""
    parallel: int = 1
    """Runs at a time, one thread each."""

    def __post_init__(self) -> None:
        for name in ("seeds", "tasks", "samples", "parallel"):
            if (value := getattr(self, name)) < 1:
                raise TurngymError(f"--{name} is {value}; valid: at least 1")

    @property
    def seeds_played(self) -> range:
        """Seed 0 has chosen the settings, so it is never reported."""
        if self.chosen:
            return range(1)
        return range(1, 2 if self.short else 1 + self.seeds)

    @property
    def measured(self) -> Measured:
        return Measured(tasks=2, samples=1) if self.short else Measured(tasks=self.tasks, samples=self.samples)

    def size(self, scenario: Scenario) -> Size:
        """How much a run of `scenario` trains; it is evaluated before and after."""
        steps, episodes = (2, 8) if self.short else (scenario.steps, scenario.episodes)
        return Size(steps=steps, episodes=episodes, every=steps)
